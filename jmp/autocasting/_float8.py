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

from jmp.autocasting._extremes import Extremes
from jmp.autocasting._registry import Params
from jmp.autocasting._steps import InFloat8
from jmp.autocasting._wide_gradients import gradient
from jmp.dtypes import FLOAT32
from jmp.sharding._axes import are_tracked, mapped_axes, varying_axes

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


class Bound(NamedTuple):
    """What is known of a product's result, or of a function of it, without reading it.

    Both are float32 numbers.
    """

    largest: Any  # no magnitude of it exceeds this
    # Zero. Who reads the result gives this a cotangent that no magnitude of the result's cotangent
    # exceeds: several readers' cotangents add up, and so do their bounds.
    zero: Any


def hold(array: Any, bound: Bound | None = None) -> Float8:
    """Returns a bfloat16 array in float8; it has no derivative."""
    return _rounded(*lax.stop_gradient((array, bound and bound.largest)), OPERANDS)


def _rounded(array: Any, largest: Any, dtype: np.dtype) -> Float8:
    """Returns an array in float8, with the scale at which its largest number is the largest there.

    All in bfloat16, and multiplied, not divided: XLA divides in float32, and would keep the array
    as it was before it was rounded to bfloat16, in twice the bytes. By these roundings the largest
    number may come out 1.01 times too large, which is rounded down again. Where a number is
    infinite or NaN the scale is, and so all of the product is NaN: no cast may hide an overflow
    from loss scaling.

    Args:
      largest: a bound of its numbers, or None: then it is read for the largest.
    """
    limit, smallest = (array.dtype.type(x) for x in (jnp.finfo(dtype).max, 2.0**-126))
    if largest is None:
        largest = _largest(array)
    else:
        largest = lax.convert_element_type(largest, array.dtype)
    scale = lax.max(largest / limit, smallest)  # its reciprocal is finite, for zeros too
    return Float8(lax.convert_element_type(array * (1 / scale), dtype), scale)


def _largest(array: Any) -> Any:
    """Returns the largest magnitude, over all devices that hold a part of the array."""
    axes = varying_axes(array) if are_tracked() else mapped_axes()
    largest = _largest_here(array)
    return lax.pmax(largest, tuple(sorted(axes))) if axes else largest


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
    bounds: Sequence[Bound | None],
    params: Params,
    form: InFloat8,
) -> tuple[Any, Bound | None]:
    """Multiplies in float8.

    Args:
      operands: half, or float32: gradients come in their dtypes.
      held: the same numbers in float8.
      bounds: of the operands, where the form has them.
      params: of the `dot_general`, for a half result.

    Returns: a half array, and its bound if the form asks for it.
    Raises: TypeError in forward mode, as far as it is seen here; otherwise JAX raises it.
    """
    product = _differentiable(list(map(jax.typeof, operands)), params, form)
    try:
        result, zero = product(*operands, [bound and bound.zero for bound in bounds], held)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(NO_DERIVATIVE.format(what="forward mode (jax.jvp, jax.jacfwd)")) from error
    summed, _ = params["dimension_numbers"]
    bound = Bound(_largest_of_product(held, summed), zero) if form.is_bounded else None
    return result, bound


def _differentiable(types: Sequence[Any], params: Params, form: InFloat8) -> Callable[..., Any]:
    """Returns a product of operands of these types, and the zero of its bound."""
    # XLA would join products that share a factor, as those of queries, keys and values, and put the
    # other factors side by side: with a scale for each part that is no float8 product. Behind a
    # barrier of its own no product shares a factor.
    apart = (0, 1) if form.is_shared else ()
    # Where the cotangent is added up, too, the second product reads it through a barrier. Then it
    # is added up where it is rounded, and moved afterwards; otherwise it is read for each.
    apart_once = apart or ((0,) if form.has_bias else ())

    def run(left: Any, right: Any, zeros: Any, held: Sequence[Float8]) -> Any:
        return lax.dot_general_p.bind(*_widened(held, apart), **params), jnp.zeros((), FLOAT32)

    def forward(left: Any, right: Any, zeros: Any, held: Sequence[Float8]) -> Any:
        result, zero = run(left, right, zeros, held)
        return (_once(result, left, right), zero), (zeros, held)

    def backward(kept: Any, cotangents: Any) -> Any:
        (zeros, held), (cotangent, largest) = kept, cotangents
        change = _rounded(cotangent, largest if form.is_bounded else None, GRADIENTS)
        pairs = [change, held[1]], [change, held[0]]
        left = gradient(types[0], 0, _widened(pairs[0], apart), params)
        right = gradient(types[1], 1, _widened(pairs[1], apart_once), params)
        bounds = [
            None if zero is None else _largest_of_product(pair, summed)
            for zero, pair, summed in zip(
                zeros, pairs, _summed_backward(types, params), strict=True
            )
        ]
        return left, right, bounds, None

    product = jax.custom_vjp(run)
    product.defvjp(forward, backward)
    return product


@jax.custom_jvp
def _once(result: Any, *operands: Any) -> Any:
    """Returns a result whose derivative is taken already."""
    return result


@_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(NO_DERIVATIVE.format(what="second derivative"))


# Bounds.


def bound_behind(bound: Bound, added: Sequence[Any], extremes: Extremes) -> Bound:
    """Returns the bound of a function of a product's result, vectors added to it before."""
    argument = bound.largest
    for array in added:
        argument += lax.convert_element_type(_largest(lax.stop_gradient(array)), FLOAT32)
    largest, at_zero, steepest = map(np.float32, extremes)
    return Bound(lax.min(at_zero + steepest * argument, largest), steepest * bound.zero)


def bound_of_product(left: Bound, right: Bound) -> Bound:
    """Returns the bound of two functions' results multiplied, number by number."""
    zero = left.zero * right.largest + right.zero * left.largest
    return Bound(left.largest * right.largest, zero)


def _largest_of_product(factors: Sequence[Float8], summed: Sequence[Sequence[int]]) -> Any:
    """Returns a bound of a product's results, given the axes that it sums over of each factor."""
    left, right = map(_largest_norm, factors, summed)
    # By 5 % larger, for roundings: of the sum, by tensor cores, to bfloat16, and of a few
    # elementwise operations.
    return np.float32(1.05) * left * right


def _largest_norm(factor: Float8, axes: Sequence[int]) -> Any:
    """Returns the largest Euclidean norm of a factor's rows, or columns, along axes."""
    # Behind a barrier: XLA would read what the numbers were before they were rounded.
    numbers = lax.optimization_barrier(factor.numbers)
    squares = lax.square(lax.convert_element_type(numbers, FLOAT32))
    norm = lax.sqrt(_largest(lax.reduce_sum(squares, tuple(axes))))
    return norm * lax.convert_element_type(factor.scale, FLOAT32)


def _summed_backward(
    types: Sequence[Any], params: Params
) -> tuple[tuple[Sequence[int], Sequence[int]], ...]:
    """Returns the axes that the left and the right operand's gradient sum over.

    Each is a product of the result's cotangent, whose axes come first, and of the other operand.
    """
    summed, batch = params["dimension_numbers"]
    left, right = (
        [axis for axis in range(len(kind.shape)) if axis not in (*sums, *shared)]
        for kind, sums, shared in zip(types, summed, batch, strict=True)
    )
    start = len(batch[0])
    middle, end = start + len(left), start + len(left) + len(right)
    return (range(middle, end), right), (range(start, middle), left)
