"""Products as the hardware multiplies them: their operations, and the sizes that it cuts up."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

# The channels of an image are what they are; cuDNN has kernels of its own for them.
IMAGE_CHANNELS = 4

Shape = tuple[int, ...]


class Product(NamedTuple):
    """What one product takes."""

    flops: int = 0  # floating-point operations, two for each multiplication and addition
    # What tensor cores cut into pieces, with names; none where other kernels run, as for a vector.
    sizes: tuple[tuple[int, str], ...] = ()


def product_of(equation: Any) -> Product:
    """Returns what a product takes; nothing is known of a primitive that is not in `PRODUCTS`."""
    name = equation.primitive.name
    if name not in PRODUCTS:
        return Product()
    left, right = (tuple(atom.aval.shape) for atom in equation.invars[:2])
    return PRODUCTS[name](equation.params, left, right, math.prod(equation.outvars[0].aval.shape))


def _dot(params: Any, left: Shape, right: Shape, results: int) -> Product:
    (left_summed, right_summed), (left_batch, right_batch) = params["dimension_numbers"]
    rows = _size_of_others(left, (*left_summed, *left_batch))
    columns = _size_of_others(right, (*right_summed, *right_batch))
    summed = math.prod(left[axis] for axis in left_summed)
    sizes = (rows, "rows"), (columns, "columns"), (summed, "summed elements")
    return Product(2 * results * summed, () if 1 in (rows, columns, summed) else sizes)


def _size_of_others(shape: Shape, axes: Shape) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in axes)


def _convolution(params: Any, left: Shape, right: Shape, results: int) -> Product:
    numbers = params["dimension_numbers"]
    outputs, inputs = (right[axis] for axis in numbers.rhs_spec[:2])
    # Zeros between the elements of a dilated input are not multiplied (strided gradients).
    divisor = max(1, outputs) * math.prod(params["lhs_dilation"])
    flops = 2 * results * math.prod(right) // divisor
    is_grouped = max(params["feature_group_count"], params["batch_group_count"]) > 1
    # The derivative with respect to a kernel exchanges batch and channels: layouts differ.
    if is_grouped or numbers.lhs_spec != numbers.out_spec:
        return Product(flops)
    channels = ((inputs, "input channels"), (outputs, "output channels"))
    return Product(flops, channels[inputs <= IMAGE_CHANNELS :])


def _ragged_dot(params: Any, left: Shape, right: Shape, results: int) -> Product:
    # Each row meets the matrix of its own group.
    return Product(2 * math.prod(left) * right[-1])


PRODUCTS: dict[str, Callable[[Any, Shape, Shape, int], Product]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
}
