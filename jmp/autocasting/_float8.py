"""Products in float8, each operand with one scale that its largest number gives.

The program that is emitted multiplies bfloat16 numbers, each `convert(float8) * scale`: XLA makes
one cuBLASLt float8 product of that, with the scales as operands, where scales are scalars and not
both operands are e5m2. Elsewhere, as on a CPU, it computes what is written.

A product has a derivative of its own, so that what is kept for the backward pass is float8, and so
that its two products are float8 too. What it does not have is a second derivative, or one in
forward mode.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp.autocasting._casts import cast
from jmp.autocasting._registry import Params
from jmp.autocasting._wide_gradients import gradient
from jmp.sharding._axes import are_tracked, mapped_axes, varying_axes, without_reduced

OPERANDS = np.dtype(jnp.float8_e4m3fn)
# The error of a small GPT's gradient at initialisation was 0.036 with e4m3 and 0.051 with e5m2
# (0.006 in bfloat16): scaled by the largest number, gradients need digits more than range.
GRADIENTS = np.dtype(jnp.float8_e4m3fn)

NO_DERIVATIVE = (
    "autocast's float8 products have first derivatives in reverse mode alone (jax.grad, jax.vjp): "
    "the {what} was asked for. Compute what needs it in bfloat16, by "
    "jmp.autocast(fun, 'mixed_bfloat16') or a rule such as ('*', 'mixed_bfloat16')."
)


class Float8(NamedTuple):
    """Numbers in float8, and the scale that they are to be multiplied by."""

    numbers: Any
    scale: Any


def hold(array: Any, source: Any = None, is_apart: bool = False) -> Float8:
    """Returns an array in float8, rounded to bfloat16 before; it has no derivative.

    Args:
      source: what it was before it was only moved, or its type, which says along which axes its
        numbers vary. The array's own type may name more.
      is_apart: whether each device has a scale of its own.
    """
    axes = () if is_apart else _axes_of(array if source is None else source)
    fixed = without_reduced(lax.stop_gradient(array))
    return _rounded(cast(fixed, np.dtype(jnp.bfloat16)), OPERANDS, axes)


def _rounded(array: Any, dtype: np.dtype, axes: tuple[str, ...]) -> Float8:
    """Returns an array in float8, with the scale at which its largest number is the largest there.

    All in bfloat16, and multiplied, not divided: XLA divides in float32, and would keep the array
    as it was before it was rounded to bfloat16, in twice the bytes. By these roundings the largest
    number may come out 1.01 times too large, which is rounded down again. Where a number is
    infinite or NaN the scale is, and so all of the product is NaN: no cast may hide an overflow
    from loss scaling.
    """
    limit, smallest = (array.dtype.type(x) for x in (jnp.finfo(dtype).max, 2.0**-126))
    largest = _largest_here(array)
    if axes:
        largest = lax.pmax(largest, axes)
    scale = lax.max(largest / limit, smallest)  # its reciprocal is finite, for zeros too
    return Float8(lax.convert_element_type(array * (1 / scale), dtype), scale)


def as_multiplied(array: Any, dtype: np.dtype) -> Any:
    """Returns a bfloat16 array as a product reads it from float8; it has no derivative."""
    return _widened([_rounded(lax.stop_gradient(array), dtype, _axes_of(array))])[0]


def _axes_of(source: Any) -> tuple[str, ...]:
    """Returns the axes along which devices hold other numbers, as far as types say so."""
    return tuple(sorted(varying_axes(source))) if are_tracked() else mapped_axes()


@jax.custom_batching.custom_vmap
def _largest_here(array: Any) -> Any:
    return lax.reduce_max(lax.abs(array), tuple(range(array.ndim)))


@_largest_here.def_vmap
def _largest_of_all(axis_size: int, is_mapped: Sequence[bool], array: Any) -> tuple[Any, bool]:
    # One scale for all of a vmap: with a scale an example no product would be float8.
    return _largest_here(array), False


def _widened(factors: Sequence[Float8], apart: Sequence[int] = ()) -> list[Any]:
    """Returns factors in the dtype of their scales, those at the positions `apart` by a barrier."""
    found = list(factors)
    if apart:
        behind = lax.optimization_barrier([factors[i].numbers for i in apart])
        for i, numbers in zip(apart, behind, strict=True):
            found[i] = factors[i]._replace(numbers=numbers)
    return [lax.convert_element_type(x.numbers, x.scale.dtype) * x.scale for x in found]


def multiply(
    operands: Sequence[Any],
    held: Sequence[Float8],
    params: Params,
    is_shared: bool,
    is_apart: bool,
) -> list[Any]:
    """Multiplies in float8.

    Args:
      operands: half, or float32: gradients come in their dtypes.
      held: the same numbers in float8.
      params: of the `dot_general`, for a half result.
      is_shared: whether other products may read a factor. XLA would join such products, as those
        of queries, keys and values, and put the other factors side by side: with a scale for each
        part that is no float8 product. Behind a barrier of its own no product shares a factor.
      is_apart: as in `hold`, for gradients.

    Returns: one half array.
    Raises: TypeError in forward mode, as far as it is seen here; otherwise JAX raises it.
    """
    types = list(map(jax.typeof, operands))
    try:
        return [_product_of(params, types, is_shared, is_apart)(*operands, *held)]
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(NO_DERIVATIVE.format(what="forward mode (jax.jvp, jax.jacfwd)")) from error


def _product_of(
    params: Params, types: Sequence[Any], is_shared: bool, is_apart: bool
) -> Callable[..., Any]:
    """Returns a product of operands of these types, which are given in float8 as well."""
    apart = (0, 1) if is_shared else ()
    # Alone, the cotangent is read through a barrier by the second product: a GPT's step moves 1 %
    # fewer bytes in 5 % less temporary memory (two MLPs' 5 % more bytes, in as much memory).
    apart_once = apart or (0,)

    def run(left: Any, right: Any, *held: Float8) -> Any:
        return lax.dot_general_p.bind(*_widened(held, apart), **params)

    def forward(left: Any, right: Any, *held: Float8) -> Any:
        return _once(run(left, right, *held), left, right), held

    def backward(held: Sequence[Float8], cotangent: Any) -> Any:
        change = _rounded(cotangent, GRADIENTS, () if is_apart else _axes_of(cotangent))
        left = gradient(types[0], 0, _widened([change, held[1]], apart), params)
        right = gradient(types[1], 1, _widened([change, held[0]], apart_once), params)
        return left, right, None, None

    float8_product = jax.custom_vjp(run)
    float8_product.defvjp(forward, backward)
    return float8_product


@jax.custom_jvp
def _once(result: Any, *operands: Any) -> Any:
    """Returns a result whose derivative is taken already."""
    return result


@_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(NO_DERIVATIVE.format(what="second derivative"))
