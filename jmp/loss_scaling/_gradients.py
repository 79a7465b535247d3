"""`scaled_value_and_grad`: differentiate a loss times its scale, report the loss itself."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from jmp.dtypes import at_least_float32, is_castable
from jmp.loss_scaling._base import LossScale

P = ParamSpec("P")
Aux = TypeVar("Aux")


@overload
def scaled_value_and_grad(
    fun: Callable[P, Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
) -> Callable[P, tuple[jax.Array, Any]]: ...
@overload
def scaled_value_and_grad(
    fun: Callable[P, tuple[Any, Aux]],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
) -> Callable[P, tuple[tuple[jax.Array, Aux], Any]]: ...
@overload
def scaled_value_and_grad(
    fun: Callable[P, tuple[Any, Aux]],
    loss_scale: LossScale,
    argnums: int | Sequence[int],
    has_aux: Literal[True],
) -> Callable[P, tuple[tuple[jax.Array, Aux], Any]]: ...
@overload
def scaled_value_and_grad(
    fun: Callable[P, Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[P, tuple[Any, Any]]: ...
def scaled_value_and_grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad`, for gradients that must survive half precision.

    The loss is cast to float32 before it is multiplied: 2**16 is infinite in float16.

    Args:
      fun: returns a real floating scalar, or `(scalar, aux)` with `has_aux`.
      loss_scale: the scale in force.
      argnums, has_aux: as in `jax.value_and_grad`.

    Returns: a function that returns `(value, gradients)` or `((value, aux), gradients)`. The value
      is unscaled and at least float32. The gradients are *still scaled*: hand them to
      `jmp.transforms.with_loss_scale`, which unscales and checks them. Do not unscale them before.

    Raises: TypeError, when called, if the loss is not a real floating scalar.

    >>> grad_fn = scaled_value_and_grad(lambda w: w * w, StaticLossScale(8))
    >>> value, scaled_gradient = grad_fn(jnp.float32(3.0))
    >>> float(value), float(scaled_gradient)
    (9.0, 48.0)
    """
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"scaled_value_and_grad got loss_scale={loss_scale!r}; expected a loss scale such as "
            "StaticLossScale(512) or the optimizer state's `.loss_scale`."
        )

    value_and_grad = jax.value_and_grad(
        scaled_loss(fun, loss_scale, has_aux), argnums=argnums, has_aux=True
    )

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        (_, (value, aux)), gradients = value_and_grad(*args, **kwargs)
        return ((value, aux), gradients) if has_aux else (value, gradients)

    return wrapped


def scaled_loss(
    fun: Callable[..., Any], loss_scale: LossScale, has_aux: bool
) -> Callable[..., tuple[jax.Array, tuple[jax.Array, Any]]]:
    """Returns what to differentiate: a function that returns `(scaled loss, (loss, aux))`."""

    @functools.wraps(fun)
    def scaled(*args: Any, **kwargs: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        loss, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), None)
        value = _checked_loss(loss)
        return loss_scale.scale(value), (value, aux)

    return scaled


def _checked_loss(loss: object) -> jax.Array:
    try:
        array = jnp.asarray(loss)
    except (TypeError, ValueError):
        array = None
    if array is None or array.ndim != 0 or not is_castable(array.dtype):
        got = f"{array.dtype}{list(array.shape)}" if array is not None else repr(loss)
        hint = " With an auxiliary output pass has_aux=True." if isinstance(loss, tuple) else ""
        raise TypeError(
            f"scaled_value_and_grad got a loss of {got}; expected a real floating scalar, such as "
            f"a mean over the batch.{hint}"
        )
    return array.astype(at_least_float32(array.dtype))
