"""Products in float8, each operand with one scale.

The program that is emitted multiplies bfloat16 numbers, each `convert(float8) * scale`: XLA makes
one cuBLASLt float8 product of that, with the scales as operands, if scales are scalars and not
both operands are e5m2. On other hardware, such as a CPU, it computes the program as it is written.

A product has a derivative of its own. It keeps float8 arrays for the backward pass, whose two
products are float8 too. It has no second derivative, and none in forward mode.

A scale comes from the largest number, or from a bound of it, for which the array is not read. The
bound comes from the norms of a product's factors, and the extremes of the function between it and
the next. All examples of a `vmap` share a scale, and so do all devices that hold a part of an
array. With several scales no product would be float8, and devices would compute different numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp._jax_compat import Params, varying_axes
from jmp.autocasting._lowerings import cast, gradient_of_operand
from jmp.autocasting.float8._extremes import Extremes
from jmp.dtypes import FLOAT32
from jmp.sharding._axes import are_tracked, made_varying, mapped_axes, without_reduced

# Of operands, and of gradients too: the error of a small GPT's gradient at initialisation was 0.036
# with e4m3 and 0.051 with e5m2 (0.006 in bfloat16). Scaled by the largest number, gradients need
# digits more than range.
E4M3 = np.dtype(jnp.float8_e4m3fn)

NO_DERIVATIVE = (
    "autocast's float8 products have only first derivatives in reverse mode (jax.grad, jax.vjp): "
    "the {what} was asked for. Compute what needs it in bfloat16, by "
    "jmp.autocast(fun, 'mixed_bfloat16') or a rule such as ('*', 'mixed_bfloat16')."
)


Axes = tuple[Sequence[int], Sequence[int]]  # of the two factors of a product


class ProductForm(NamedTuple):
    """How a product in float8 stands in the program around it."""

    is_shared: bool  # other products may read its factors
    is_bounded: bool = False  # its cotangent comes with a bound
    has_bias: bool = False  # its cotangent is added up for the gradient of a vector, too


class Float8(NamedTuple):
    """Numbers in float8, and the scale that they are to be multiplied by."""

    numbers: Any
    scale: Any


class Bound(NamedTuple):
    """A bound of a product's result, or of a function of it, for which it is not read.

    Both are float32 numbers.
    """

    largest: Any  # no magnitude of it exceeds this
    # Zero. A reader of the result gives it a cotangent that no magnitude of the result's cotangent
    # exceeds. The cotangents of several readers add up, and so do their bounds.
    zero: Any


# Products.


def hold(array: Any, source: Any = None, bound: Bound | None = None) -> Float8:
    """Returns an array in float8, rounded to bfloat16 before; it has no derivative.

    Args:
      source: the array before it was only moved, or its type, which says along which axes its
        numbers vary. The array's own type may name more.
      bound: its own, if it is known.
    """
    axes = axes_of(array if source is None else source)
    half = cast(without_reduced(lax.stop_gradient(array)), np.dtype(jnp.bfloat16))
    largest = largest_of(half, axes) if bound is None else lax.stop_gradient(bound.largest)
    return round_to_float8(half, largest)


def _times_scales(factors: Sequence[Float8], fenced: Sequence[int] = ()) -> list[Any]:
    """Returns factors in the dtype of their scales, those at positions `fenced` by a barrier."""
    found = list(factors)
    if fenced:
        behind = lax.optimization_barrier([factors[i].numbers for i in fenced])
        for i, numbers in zip(fenced, behind, strict=True):
            found[i] = factors[i]._replace(numbers=numbers)
    return [lax.convert_element_type(x.numbers, x.scale.dtype) * x.scale for x in found]


def multiply(
    operands: Sequence[Any],
    held: Sequence[Float8],
    params: Params,
    form: ProductForm,
    bounds: Sequence[Bound | None],
) -> tuple[Any, Bound | None]:
    """Multiplies in float8.

    Args:
      operands: half, or float32: gradients come in their dtypes.
      held: the same numbers in float8.
      params: of the `dot_general`, for a half result.
      bounds: of the operands, None for one without.

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


def _differentiable(types: Sequence[Any], params: Params, form: ProductForm) -> Callable[..., Any]:
    """Returns a product of operands of these types, and the zero of its bound."""
    # XLA would join products that share a factor, such as queries, keys and values, and put the
    # other factors side by side: with a scale for each part that is no float8 product. Behind a
    # barrier of its own no product shares a factor.
    fenced = (0, 1) if form.is_shared else ()
    # The second product reads the cotangent through a barrier too if that was stored before it was
    # rounded, or is added up: then it is rounded once, and devices send it in float8. If XLA can
    # round it while it computes it, it stores it for each product in the order it wants.
    fenced_once = fenced or (() if form.is_bounded and not form.has_bias else (0,))

    def run(left: Any, right: Any, zeros: Any, held: Sequence[Float8]) -> Any:
        result = lax.dot_general_p.bind(*_times_scales(held, fenced), **params)
        return result, varying_as(result, zero_beside(result))

    def forward(left: Any, right: Any, zeros: Any, held: Sequence[Float8]) -> Any:
        result, zero = run(left, right, zeros, held)
        return (_once(result, left, right), zero), (zeros, held)

    def backward(kept: Any, cotangents: Any) -> Any:
        (zeros, held), (cotangent, largest) = kept, cotangents
        if form.is_bounded:
            largest = largest_of(largest, ())  # of all examples
        else:
            largest = largest_of(cotangent, axes_of(cotangent))
        change = round_to_float8(cotangent, largest)
        pairs = [change, held[1]], [change, held[0]]
        left = gradient_of_operand(types[0], 0, _times_scales(pairs[0], fenced), params)
        right = gradient_of_operand(types[1], 1, _times_scales(pairs[1], fenced_once), params)
        summed = _summed_backward(types, params)
        bounds = [
            None if zero is None else varying_as(zero, largest_of_product(pair, axes, of_each=True))
            for zero, pair, axes in zip(zeros, pairs, summed, strict=True)
        ]
        return left, right, bounds, None

    product = jax.custom_vjp(run)
    product.defvjp(forward, backward)
    return product


def _summed_backward(types: Sequence[Any], params: Params) -> tuple[Axes, Axes]:
    """Returns the axes that the left and the right operand's gradient sum over.

    Each is a product of the result's cotangent, whose axes come first, and of the other operand.

    >>> types = [jax.typeof(jnp.ones(shape)) for shape in ((2, 3, 5), (2, 5, 7, 9))]
    >>> _summed_backward(types, {"dimension_numbers": (((2,), (1,)), ((0,), (0,)))})
    ((range(2, 4), [2, 3]), (range(1, 2), [1]))
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
    """Returns a result that has been differentiated once."""
    return result


@_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(NO_DERIVATIVE.format(what="second derivative"))


# Scales and bounds.


def round_to_float8(array: Any, largest: Any) -> Float8:
    """Returns an array in float8, with the scale at which a magnitude is the largest of float8.

    All is computed in bfloat16, and multiplied, not divided: XLA divides in float32, and would keep
    the array from before its rounding to bfloat16, in twice the bytes. Because of these roundings
    the largest number may come out 1.01 times too large, which is rounded down again. If a number
    is infinite or NaN, so is the largest, and all of the product is NaN: no cast may hide an
    overflow from loss scaling.

    Args:
      array: bfloat16.
      largest: what no magnitude of its numbers exceeds.
    """
    limit, smallest = (array.dtype.type(x) for x in (jnp.finfo(E4M3).max, 2.0**-126))
    # Its reciprocal is finite, for zeros too.
    scale = lax.max(cast(largest, array.dtype) / limit, smallest)
    return Float8(lax.convert_element_type(array * (1 / scale), E4M3), scale)


def axes_of(source: Any) -> tuple[str, ...]:
    """Returns the axes along which devices hold other numbers, as far as types say so."""
    return tuple(sorted(varying_axes(source))) if are_tracked() else mapped_axes()


def largest_of(array: Any, axes: tuple[str, ...], of_each: bool = False) -> Any:
    """Returns the largest magnitude over all devices along mapped axes.

    Args:
      of_each: whether each example of a `vmap` has its own, or all have one.
    """
    largest = _largest_of_each(array) if of_each else _largest_of_all(array)
    return lax.pmax(largest, axes) if axes else largest


def _largest_of_each(array: Any) -> Any:
    return lax.reduce_max(lax.abs(array), tuple(range(array.ndim)))


_largest_of_all = jax.custom_batching.custom_vmap(_largest_of_each)


@_largest_of_all.def_vmap
def _of_all_batched(axis_size: int, is_mapped: Sequence[bool], array: Any) -> tuple[Any, bool]:
    return _largest_of_all(array), False


def bound_behind(bound: Bound, added: Sequence[Any], extremes: Extremes) -> Bound:
    """Returns the bound of a function of a product's result, vectors added to it before."""
    argument = bound.largest
    for array in added:
        argument += cast(largest_of(lax.stop_gradient(array), axes_of(array)), FLOAT32)
    largest, offset, slope = map(np.float32, extremes)
    return Bound(lax.min(offset + slope * argument, largest), slope * bound.zero)


def bound_of_product(left: Bound, right: Bound) -> Bound:
    """Returns the bound of two functions' results multiplied, number by number."""
    zero = left.zero * right.largest + right.zero * left.largest
    return Bound(left.largest * right.largest, zero)


def largest_of_product(
    factors: Sequence[Float8], summed: Sequence[Sequence[int]], of_each: bool = False
) -> Any:
    """Returns a bound of a product's results: with Cauchy and Schwarz, from its factors' norms.

    Args:
      summed: the axes of each factor that the product sums over.
      of_each: as of `largest_of`. A bound's zero gets one of each example as its cotangent: if
        examples share the result that is bounded, JAX adds up their cotangents of it, and of the
        zero as well. It would take a single one if all had one bound.
    """
    norms = []
    for factor, axes in zip(factors, summed, strict=True):
        # Without a barrier XLA would read the numbers from before their rounding.
        wide = cast(lax.optimization_barrier(factor.numbers), FLOAT32)
        squares = lax.reduce_sum(lax.square(wide), tuple(axes))
        norms.append(lax.sqrt(largest_of(squares, axes_of(squares), of_each)))
    left, right = norms
    scales = [cast(factor.scale, FLOAT32) for factor in factors]
    # 5 % larger, for roundings of the sum, to bfloat16, in tensor cores, and of a few elementwise
    # operations. The smaller scale comes first, so that no finite bound overflows on the way.
    return np.float32(1.05) * left * right * lax.min(*scales) * lax.max(*scales)


def varying_as(other: Any, number: Any) -> Any:
    """Returns a number, all devices' or each one's own, as one that varies as another value does.

    If types say along which axes values vary, a product's operands and its result vary along the
    same ones. A bound, which is the same on all devices, may do so too: its cotangent must be of
    its type.
    """
    return made_varying(number, varying_axes(other))


@jax.custom_batching.custom_vmap
def zero_beside(result: Any) -> Any:
    """Returns the zero of a product's bound; a `vmap` maps it as it maps the result."""
    return jnp.zeros((), FLOAT32)


@zero_beside.def_vmap
def _zeros_beside(axis_size: int, is_mapped: Sequence[bool], result: Any) -> tuple[Any, bool]:
    return jnp.broadcast_to(zero_beside(result), (axis_size,)), True
