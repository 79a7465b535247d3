"""Flax linen: run an unmodified model in mixed precision, and train it with atomic steps.

`wrap_apply(model.apply, policy)` gives a function that is called exactly as `model.apply` is.
Inside it every module computes in the dtype its rule asks for:
  - Flax's own layers get it as their `dtype` where the model left that at None, and cast their
    parameters at each use, inside scans too, so that gradients add up in float32;
  - other modules get the parameters they declare themselves in that dtype;
  - at the border between two dtypes (a BatchNorm inside a half network) inputs are cast on entry
    and outputs on exit, so that what follows a float32 norm is half again.
Nothing is patched: modules are changed for the length of a call, on the copies that `apply` makes.

`TrainState` skips a step atomically: parameters, optimizer state, batch statistics and step count
move together or not at all. Importing this module also teaches `flax.serialization` loss scales.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.training import train_state

from jmp import transforms
from jmp.adapters import _flax_serialization
from jmp.adapters._linen_interception import Interceptor
from jmp.adapters._norms import (
    FLOAT32,
    is_norm_parameters,
    keeps_norms_float32,
    rules_for_modules,
)
from jmp.loss_scaling import LossScale, NoOpLossScale
from jmp.policy import Policy, get_policy
from jmp.rules import PolicyRules, Rule
from jmp.trees import cast_floating, cast_leaf, path_string, select_tree

T = TypeVar("T")

_flax_serialization.register()


def wrap_apply(
    apply_fn: Callable[..., Any],
    policy: str | Policy,
    rules: Sequence[Rule] | None = None,
) -> Callable[..., Any]:
    """Returns `apply_fn` computing by `policy`; call it exactly as before.

    Args:
      apply_fn: `model.apply` of an unmodified model. Parameters may be stored in float32 (O1) or in
        half but for the norms (O2, see `cast_params`).
      policy: its compute dtype is for products, its output dtype for what the call returns.
        Floating inputs of the call are cast to the compute dtype.
      rules: `(target, policy)` pairs, see `jmp.rules`. Norm layers are float32 behind them; a rule
        for a norm overrides that, and `rules=()` switches it off. Without rules a pure half policy
        (O3) keeps nothing in float32.

    Returns: a function with `apply_fn`'s signature. Updated batch statistics come back in float32
      whatever dtype they were passed in (in half under O3).

    Warns: `UnusedRuleWarning` for a rule that matched nothing; UserWarning for a layer that stays
      in float32 because the model says `dtype=jnp.float32`.

    >>> import flax.linen as nn
    >>> model = nn.Dense(3)
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 2)))
    >>> wrap_apply(model.apply, "p=f32,c=bf16,o=bf16")(variables, jnp.ones((1, 2))).dtype
    dtype(bfloat16)
    """
    policy = get_policy(policy)
    module_rules = rules_for_modules(policy, rules)
    pure_half = not keeps_norms_float32(policy, rules)
    statistics_dtype = policy.param_dtype if pure_half else FLOAT32.param_dtype

    @functools.wraps(apply_fn)
    def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
        variables = _cast_statistics(variables, statistics_dtype)
        args, kwargs = policy.cast_to_compute((args, kwargs))
        with nn.intercept_methods(Interceptor(module_rules, policy.compute_dtype)):
            result = apply_fn(variables, *args, **kwargs)
        for path, _ in _parameters_with_path(variables):  # rules may name single parameters
            module_rules.policy_for(path)
        module_rules.warn_unused()
        if kwargs.get("mutable", False) is False:
            return policy.cast_to_output(result)
        output, updated = result
        return policy.cast_to_output(output), _cast_statistics(updated, statistics_dtype)

    return wrapped


def cast_params(variables: T, policy: str | Policy, rules: Sequence[Rule] | None = None) -> T:
    """Returns `variables` as `policy` stores them: the O2 tree, half but for norms and statistics.

    Args:
      variables: what `model.init` returned, with its collections, or its "params" alone.
      policy: its param dtype is for every parameter that no rule and no norm claims.
      rules: as in `wrap_apply`. Only paths can match: variables do not know their modules' classes.
        Norms are told by their names ("scale", "bn1", "LayerNorm_0").

    Returns: the same structure; `jmp.cast_to_full` undoes it for export.

    Warns: `UnusedRuleWarning` for a rule that matched nothing.

    >>> params = {"Dense_0": {"kernel": jnp.ones((2, 2))}, "BatchNorm_0": {"scale": jnp.ones(2)}}
    >>> cast = cast_params(params, "O2")
    >>> cast["Dense_0"]["kernel"].dtype, cast["BatchNorm_0"]["scale"].dtype
    (dtype('float16'), dtype('float32'))
    """
    policy = get_policy(policy)
    norms = _norm_modules(variables) if keeps_norms_float32(policy, rules) else frozenset()
    path_rules = PolicyRules(
        rules or (),
        policy,
        fallback=lambda path, _: FLOAT32 if path.rpartition("/")[0] in norms else None,
    )
    cast = {
        path: cast_leaf(leaf, path_rules.policy_for(path).param_dtype)
        for path, leaf in _parameters_with_path(variables)
    }
    path_rules.warn_unused()
    statistics = FLOAT32 if keeps_norms_float32(policy, rules) else policy
    variables = _cast_statistics(variables, statistics.param_dtype)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: cast.get(_path_in_params(path, variables), leaf), variables
    )


class TrainState(train_state.TrainState):
    """Flax's TrainState with batch statistics, whose steps are atomic.

    Attributes, beyond those of Flax's:
      batch_stats: the model's running statistics, or None.

    >>> import flax.linen as nn, optax, jmp
    >>> model = nn.Dense(1)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    >>> tx = transforms.with_loss_scale(optax.sgd(0.1), jmp.StaticLossScale(8))
    >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    >>> bad = jax.tree.map(lambda p: p * jnp.inf, params)
    >>> int(state.apply_gradients(grads=bad).step)
    0
    """

    batch_stats: Any = None

    @classmethod
    def create(
        cls, *, apply_fn: Callable[..., Any], params: Any, tx: Any, **kwargs: Any
    ) -> "TrainState":
        """Creates a state at step 0.

        The step is an int32 array from the start: a Python 0 would compile the step twice.

        Raises: ValueError for an optimizer in an order that fails; see
          `transforms.check_optimizer_state`.
        """
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        transforms.check_optimizer_state(state.opt_state)
        return state.replace(step=jnp.zeros([], jnp.int32))

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale in force, wherever the optimizer holds it; `NoOpLossScale` if nowhere."""
        scaling = transforms.loss_scale_state(self.opt_state)
        return NoOpLossScale() if scaling is None else scaling.loss_scale

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "TrainState":
        """Returns the next state, or on overflow this one with a smaller scale.

        Args:
          grads: scaled gradients, as `jmp.scaled_value_and_grad` returns them.
          **kwargs: fields to replace, such as `batch_stats=new_statistics`. They count as part of
            the step and stay as they were if it is skipped.
        """
        new = super().apply_gradients(grads=grads, **kwargs)
        scaling = transforms.loss_scale_state(new.opt_state)
        if scaling is None or isinstance(scaling.loss_scale, NoOpLossScale):
            return new
        moved = {"step", *kwargs}
        kept = {name: getattr(self, name) for name in moved}
        stepped = {name: getattr(new, name) for name in moved}
        return new.replace(**select_tree(scaling.grads_finite, stepped, kept))


def _cast_statistics(variables: Any, dtype: np.dtype) -> Any:
    if not _has_collections(variables, "batch_stats"):
        return variables
    return type(variables)(
        {**variables, "batch_stats": cast_floating(variables["batch_stats"], dtype)}
    )


def _has_collections(variables: Any, name: str) -> bool:
    return hasattr(variables, "keys") and name in variables


def _parameters_with_path(variables: Any) -> list[tuple[str, Any]]:
    params = variables["params"] if _has_collections(variables, "params") else variables
    if not _has_collections(variables, "params") and _has_collections(variables, "batch_stats"):
        return []
    return [(path_string(p), leaf) for p, leaf in jax.tree_util.tree_leaves_with_path(params)]


def _path_in_params(path: Any, variables: Any) -> str:
    collection, _, rest = path_string(path).partition("/")
    if _has_collections(variables, "params"):
        return rest if collection == "params" else ""
    return path_string(path)


def _norm_modules(variables: Any) -> frozenset[str]:
    """Returns the paths of the modules whose parameters are those of a norm."""
    names: dict[str, list[str]] = {}
    for path, _ in _parameters_with_path(variables):
        module, _, name = path.rpartition("/")
        names.setdefault(module, []).append(name)
    return frozenset(
        module for module, own in names.items() if is_norm_parameters(module.split("/")[-1], own)
    )
