"""What was given for a loss scale: checked, with the way out of the usual mistakes."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax

from jmp._describe import described
from jmp._frameworks import framework_of
from jmp.loss_scaling._base import LossScale
from jmp.loss_scaling._static import StaticLossScale
from jmp.trees import is_complex, is_floating

# What other libraries call their scalers, by the name of the class.
_FOREIGN = {"DynamicScale", "GradScaler", "LossScaleOptimizer", "DynamicLossScaling"}

# How models that are no trees of parameters are differentiated, and their gradients accumulated.
_STEPS = {
    "flax.nnx": " Train by jmp.adapters.nnx.train_step(loss_fn, model, optimizer, *batch); to "
    "accumulate, give it an optimizer of transforms.mixed_precision(optax.MultiSteps(tx, 4), "
    "policy).",
    "flax.linen": " Pass the variables, and call model.apply in the loss.",
    "equinox": " Pass it to jmp.adapters.equinox.scaled_value_and_grad, which differentiates the "
    "floating arrays alone; or take them out by eqx.partition(model, eqx.is_inexact_array), and "
    "combine them in the loss.",
    "haiku": " Pass the parameters, and call network.apply in the loss.",
}


def check_loss_scale(value: object, caller: str) -> None:
    """Raises TypeError for what is no loss scale, ValueError for one that cannot be used.

    >>> check_loss_scale(StaticLossScale(8), "with_loss_scale")
    """
    if isinstance(value, StaticLossScale):
        value.check_not_zero()
    if isinstance(value, LossScale):
        return
    raise TypeError(
        f"{caller} got loss_scale={described(value)}; expected a loss scale such as "
        "jmp.torch_loss_scale(), jmp.StaticLossScale(512) or the optimizer state's `.loss_scale`."
        f"{_way_out(value)}"
    )


def check_parameters(args: Sequence[Any], argnums: int | Sequence[int], caller: str) -> None:
    """Raises TypeError for a model of a framework whose own functions must differentiate it.

    Of an nnx module JAX would differentiate the statistics too, and lose what the loss writes to
    them. Any other model may stand there if it holds floating and complex arrays alone.

    Args:
      args: the positional arguments of a call.
      argnums: those that are to be differentiated.
    """
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    for model in (args[n] for n in numbers if -len(args) <= n < len(args)):
        framework = framework_of(model)
        is_tree = framework is not None and framework != "flax.nnx"
        leaves = jax.tree.leaves(model) if is_tree else ()
        if framework is None or (is_tree and all(is_floating(x) or is_complex(x) for x in leaves)):
            continue
        raise TypeError(
            f"{caller} got {described(model)} of {framework}; expected a tree of parameters."
            f"{_STEPS.get(framework, '')}"
        )


def _way_out(value: Any) -> str:
    """Returns what was meant, as a sentence; "" where it cannot be told."""
    if value is None or value is False:
        return " To switch loss scaling off write jmp.NoOpLossScale()."
    if isinstance(value, (bool, str)):
        return " A scale that adjusts itself is jmp.torch_loss_scale()."
    if isinstance(value, (int, float)):
        return f" Did you mean jmp.StaticLossScale({described(value)})?"
    if isinstance(value, type) or inspect.isfunction(value):
        is_ours = getattr(value, "__module__", "").startswith("jmp.")
        return f" Did you mean {value.__name__}(...), called?" * is_ours
    if isinstance(getattr(value, "__self__", None), LossScale):
        return f" Did you mean the loss scale itself, without .{value.__name__}?"
    if type(value).__name__ in _FOREIGN:
        return " jmp.torch_loss_scale() takes the place of other libraries' scalers."
    if type(value).__module__.startswith("flax.nnx"):
        return " Did you mean jmp.adapters.nnx.loss_scale(optimizer)?"
    if isinstance(getattr(value, "loss_scale", None), LossScale):
        return " Did you mean its `.loss_scale`?"
    if any(base.__module__ == "flax.training.train_state" for base in type(value).__mro__):
        return _inside(value) + " jmp.adapters.linen.TrainState has it as `.loss_scale`."
    return _inside(value)


def _inside(value: Any) -> str:
    """Names the loss scale inside a state, such as that of a chain of transformations."""
    leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda x: isinstance(x, LossScale))
    for path, leaf in leaves:
        if isinstance(leaf, LossScale):
            place = jax.tree_util.keystr(path)
            return (
                f" Did you mean its `{place}`? jmp.transforms.loss_scale_state(opt_state) finds it."
            )
    if hasattr(value, "init") and hasattr(value, "update"):
        return " Did you mean the state of that optimizer: opt_state.loss_scale?"
    return ""
