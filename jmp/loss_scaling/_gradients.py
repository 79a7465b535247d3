"""`scaled_value_and_grad`: differentiate a loss times its scale, report the loss itself.

Loss scales and differentiated arguments are checked; the errors name the way out of the usual
mistakes.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from jmp._messages import PrecisionWarning, check_function, described, framework_of, shape_text
from jmp.dtypes import at_least_float32, is_castable
from jmp.loss_scaling._scales import LossScale, StaticLossScale, array_if_any
from jmp.trees import is_inexact_array

P = ParamSpec("P")

# How models that are no trees of parameters are differentiated, and their gradients accumulated.
_STEPS = {
    "flax.nnx": " Train with jmp.adapters.nnx.train_step(loss_fn, model, optimizer, *batch), or "
    "pass it to jmp.adapters.nnx.scaled_value_and_grad, inside atomic_step of that module; to "
    "accumulate, give it an optimizer of transforms.mixed_precision(optax.MultiSteps(tx, 4), "
    "policy).",
    "flax.linen": " Pass the variables, and call model.apply in the loss.",
    "equinox": " Pass it to jmp.adapters.equinox.scaled_value_and_grad, which differentiates only "
    "the floating arrays; or take them out with eqx.partition(model, eqx.is_inexact_array), and "
    "combine them in the loss.",
    "haiku": " Pass the parameters, and call network.apply in the loss.",
}


class UnscaledLossWarning(PrecisionWarning):
    """A model computes in float16 and nothing scales its loss: small gradients become zero.

    The training steps of `jmp.adapters` warn of it. Take `transforms.mixed_precision` with the
    policy of the model; or, to say that no scale is wanted, `jmp.StaticLossScale(1.0)`, which still
    skips steps that are not finite, or Python's filter of warnings.

    >>> import optax, warnings
    >>> from jmp.adapters import linen
    >>> model = lambda variables, x: x @ variables["params"]
    >>> apply_fn = linen.autocast(model, "mixed_float16")
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     _ = linen.TrainState.create(apply_fn=apply_fn, params=np.eye(2), tx=optax.sgd(0.1))
    >>> caught[0].category.__name__
    'UnscaledLossWarning'
    """


def scaled_value_and_grad(
    fun: Callable[P, Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[P, tuple[Any, Any]]:
    """Like `jax.value_and_grad`, for a loss that is multiplied by a loss scale.

    The loss is cast to float32 before it is multiplied: 2**16 is infinite in float16.

    Args:
      fun: returns a real floating scalar, or `(scalar, aux)` with `has_aux`.
      loss_scale: the scale in force.
      argnums, has_aux: as in `jax.value_and_grad`.

    Returns: a function that returns `(value, gradients)` or `((value, aux), gradients)`. The value
      is unscaled and at least float32. The gradients are *still scaled*: hand them to
      `jmp.transforms.with_loss_scale`, which unscales and checks them. Do not unscale them before.

    Raises:
      TypeError: `fun` is no function, or `loss_scale` no loss scale; when called, if the loss is
        not a real floating scalar, with `has_aux` the result is no pair, or a differentiated
        argument is an nnx module or another model with leaves that are not floating.
      ValueError: a static scale of zero.

    >>> grad_fn = scaled_value_and_grad(lambda w: w * w, StaticLossScale(8))
    >>> value, scaled_gradient = grad_fn(jnp.float32(3.0))
    >>> float(value), float(scaled_gradient)
    (9.0, 48.0)
    """
    caller = "scaled_value_and_grad"
    check_function(fun, caller, f"{caller}(loss_fn, loss_scale)(*args)")
    differentiate = functools.partial(jax.value_and_grad, argnums=argnums)
    unchecked = value_and_scaled_grad(differentiate, fun, loss_scale, has_aux)

    @functools.wraps(fun)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        check_parameters(args, argnums, caller)
        return unchecked(*args, **kwargs)

    return wrapped


def value_and_scaled_grad(
    differentiate: Callable[..., Any], fun: Callable[..., Any], loss_scale: LossScale, has_aux: bool
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function of the value of `fun`, and of gradients of the value times its scale.

    Args:
      differentiate: `jax.value_and_grad`, or what a framework has in its place.
    """
    check_loss_scale(loss_scale, "scaled_value_and_grad")
    value_and_grad = differentiate(scaled_loss(fun, loss_scale, has_aux), has_aux=True)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        (_, (value, aux)), gradients = value_and_grad(*args, **kwargs)
        return ((value, aux), gradients) if has_aux else (value, gradients)

    return wrapped


def scaled_loss(
    fun: Callable[..., Any], loss_scale: LossScale, has_aux: bool
) -> Callable[..., tuple[jax.Array, tuple[jax.Array, Any]]]:
    """Returns the function to differentiate, which returns `(scaled loss, (loss, aux))`.

    Raises: TypeError, when called, if the loss is not a real floating scalar.
    """

    @functools.wraps(fun)
    def scaled(*args: Any, **kwargs: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        result = fun(*args, **kwargs)
        loss, aux = pair_of(result, "(loss, aux)") if has_aux else (result, None)
        value = _checked_loss(loss)
        return loss_scale.scale(value), (value, aux)

    return scaled


def pair_of(result: Any, expected: str) -> tuple[Any, Any]:
    """Returns both values of a result; raises TypeError if it is no pair.

    Args:
      expected: the pair, as text, such as "(loss, aux)".
    """
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        raise TypeError(
            f"The function returned {described(result)}; expected the pair {expected}, as "
            "has_aux=True or a state asks for. Without one, leave has_aux or the state out."
        )
    first, second = result
    return first, second


def _checked_loss(loss: object) -> jax.Array:
    array = array_if_any(loss)
    if array is None or array.ndim != 0 or not is_castable(array.dtype):
        got = shape_text(array) if array is not None else described(loss)
        hint = (
            " With an auxiliary output pass has_aux=True; a model's state goes through train_step "
            "of jmp.adapters, given as state=."
        )
        raise TypeError(
            f"The function returned a loss of {got}; expected a real floating scalar, such as a "
            f"mean over the batch.{hint * isinstance(loss, tuple)}"
        )
    if array.dtype == jnp.float16:
        warnings.warn(
            "The function returned a float16 loss; expected float32: it has three digits, and "
            "gradients are infinite with a loss scale of 65536 or more. Cast what the loss is "
            "computed from, such as logits.astype(jnp.float32).",
            PrecisionWarning,
            stacklevel=2,
        )
    return array.astype(at_least_float32(array.dtype))


# Checks.


def check_loss_scale(value: object, caller: str, name: str = "loss_scale") -> None:
    """Raises TypeError for a value that is no loss scale, ValueError for one that cannot be used.

    >>> check_loss_scale(StaticLossScale(8), "with_loss_scale")
    """
    if not isinstance(value, LossScale):
        raise TypeError(
            f"{caller} got {name}={described(value)}; expected a loss scale: "
            "jmp.torch_loss_scale(), which adjusts itself, jmp.StaticLossScale(512), "
            "jmp.NoOpLossScale() for none, or the one in force, "
            "jmp.transforms.loss_scale_state(opt_state).loss_scale. For an nnx.Optimizer it is "
            "jmp.adapters.nnx.loss_scale(optimizer)."
        )
    if isinstance(value, StaticLossScale) and value.loss_scale == 0:
        raise ValueError(
            "StaticLossScale(0) multiplies every gradient by zero, and unscaling divides by it; "
            "expected a positive number such as 512. To switch loss scaling off use "
            "NoOpLossScale()."
        )


def check_parameters(args: Sequence[Any], argnums: int | Sequence[int], caller: str) -> None:
    """Raises TypeError for a model of a framework whose own functions must differentiate it.

    JAX would differentiate the statistics of an nnx module too, and lose the loss's changes in
    them. Any other model may be differentiated if it holds only floating and complex arrays.

    Args:
      args: the positional arguments of a call.
      argnums: the numbers of the differentiated arguments.
    """
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    for model in (args[n] for n in numbers if -len(args) <= n < len(args)):
        framework = framework_of(model)
        is_tree = framework != "flax.nnx" and all(map(is_inexact_array, jax.tree.leaves(model)))
        if framework is not None and not is_tree:
            raise TypeError(
                f"{caller} got {described(model)} of {framework}; expected a tree of parameters."
                f"{_STEPS.get(framework, '')}"
            )
