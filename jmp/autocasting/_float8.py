"""Products in float8, each operand with one scale.

The program that is emitted multiplies bfloat16 numbers, each `convert(float8) * scale`: XLA makes
one cuBLASLt float8 product of that, with the scales as operands, where scales are scalars and not
both operands are e5m2. Elsewhere, as on a CPU, it computes what is written.

A product has a derivative of its own, so that what is kept for the backward pass is float8, and so
that its two products are float8 too. What it does not have is a second derivative, or one in
forward mode.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp.autocasting._casts import cast
from jmp.autocasting._registry import Params
from jmp.autocasting._scales import (
    Bound,
    Float8,
    axes_of,
    largest_of,
    largest_of_each_product,
    largest_of_product,
    rounded,
    varying_as,
    zero_beside,
)
from jmp.autocasting._steps import InFloat8
from jmp.autocasting._wide_gradients import gradient
from jmp.sharding._axes import without_reduced

OPERANDS = np.dtype(jnp.float8_e4m3fn)
# The error of a small GPT's gradient at initialisation was 0.036 with e4m3 and 0.051 with e5m2
# (0.006 in bfloat16): scaled by the largest number, gradients need digits more than range.
GRADIENTS = np.dtype(jnp.float8_e4m3fn)

NO_DERIVATIVE = (
    "autocast's float8 products have first derivatives in reverse mode alone (jax.grad, jax.vjp): "
    "the {what} was asked for. Compute what needs it in bfloat16, by "
    "jmp.autocast(fun, 'mixed_bfloat16') or a rule such as ('*', 'mixed_bfloat16')."
)


def hold(
    array: Any, source: Any = None, bound: Bound | None = None, is_apart: bool = False
) -> Float8:
    """Returns an array in float8, rounded to bfloat16 before; it has no derivative.

    Args:
      source: what it was before it was only moved, or its type, which says along which axes its
        numbers vary. The array's own type may name more.
      bound: its own, if it is known.
      is_apart: whether each device has a scale of its own.
    """
    axes = () if is_apart else axes_of(array if source is None else source)
    half = cast(without_reduced(lax.stop_gradient(array)), np.dtype(jnp.bfloat16))
    largest = largest_of(half, axes) if bound is None else lax.stop_gradient(bound.largest)
    return rounded(half, OPERANDS, largest)


def as_multiplied(array: Any, dtype: np.dtype) -> Any:
    """Returns a bfloat16 array as a product reads it from float8; it has no derivative."""
    fixed = lax.stop_gradient(array)
    return _widened([rounded(fixed, dtype, largest_of(fixed, axes_of(fixed)))])[0]


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
    form: InFloat8,
    bounds: Sequence[Bound | None] = (None, None),
) -> tuple[Any, Bound | None]:
    """Multiplies in float8.

    Args:
      operands: half, or float32: gradients come in their dtypes.
      held: the same numbers in float8.
      params: of the `dot_general`, for a half result.
      bounds: of the operands, where the form has them.

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
    bound = Bound(largest_of_product(held, summed), zero) if form.is_bounded else None
    return result, bound


def _differentiable(types: Sequence[Any], params: Params, form: InFloat8) -> Callable[..., Any]:
    """Returns a product of operands of these types, and the zero of its bound."""
    # XLA would join products that share a factor, as those of queries, keys and values, and put the
    # other factors side by side: with a scale for each part that is no float8 product. Behind a
    # barrier of its own no product shares a factor.
    apart = (0, 1) if form.is_shared else ()
    # The second product reads the cotangent through a barrier too where that was stored before it
    # was rounded, or is added up: then it is rounded once, and devices send it in float8. Where
    # XLA can round it while it computes it, it stores it for each product in the order it wants.
    apart_once = apart or (() if form.is_bounded and not form.has_bias else (0,))

    def run(left: Any, right: Any, zeros: Any, held: Sequence[Float8]) -> Any:
        result = lax.dot_general_p.bind(*_widened(held, apart), **params)
        return result, varying_as(result, zero_beside(result))

    def forward(left: Any, right: Any, zeros: Any, held: Sequence[Float8]) -> Any:
        result, zero = run(left, right, zeros, held)
        return (_once(result, left, right), zero), (zeros, held)

    def backward(kept: Any, cotangents: Any) -> Any:
        (zeros, held), (cotangent, largest) = kept, cotangents
        if form.is_bounded:
            largest = largest_of(largest, ())  # of all examples
        else:
            largest = largest_of(cotangent, () if form.is_apart else axes_of(cotangent))
        change = rounded(cotangent, GRADIENTS, largest)
        pairs = [change, held[1]], [change, held[0]]
        left = gradient(types[0], 0, _widened(pairs[0], apart), params)
        right = gradient(types[1], 1, _widened(pairs[1], apart_once), params)
        summed = _summed_backward(types, params)
        bounds = [
            None if zero is None else varying_as(zero, largest_of_each_product(pair, axes))
            for zero, pair, axes in zip(zeros, pairs, summed, strict=True)
        ]
        return left, right, bounds, None

    product = jax.custom_vjp(run)
    product.defvjp(forward, backward)
    return product


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


@jax.custom_jvp
def _once(result: Any, *operands: Any) -> Any:
    """Returns a result whose derivative is taken already."""
    return result


@_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(NO_DERIVATIVE.format(what="second derivative"))
