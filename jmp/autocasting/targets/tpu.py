"""Programs for TPUs: the passes, and those too small for a file of their own."""

from collections.abc import Sequence, Set
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jmp import _jax_compat
from jmp.autocasting._facts import Shift, softmaxes_within
from jmp.autocasting._graph import Node, Value, downstream
from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import (
    bilinear,
    cast,
    repeated,
    run_with_product,
    weight_product_p,
    with_derivative,
)
from jmp.autocasting._numbers import size_of
from jmp.autocasting._passes import HardwareTarget, Pass, register_target
from jmp.autocasting._steps import Environment, Island, Read, Rewrite, Single, on
from jmp.autocasting.attention import PALLAS, fuse_attentions
from jmp.autocasting.targets._everywhere import FIRST, LAST
from jmp.dtypes import FLOAT32

# Biases.


@on(Single)
def add_up_biases_by_products(step: Single, level: Level) -> Single:
    """Returns a step; the gradient of a bias that it reads is a product with ones.

    A product takes the matrix unit. A sum takes the vector units, which have the most to do. XLA
    estimates that products save 9 % of the cycles of a GPT's step on a v5e, 5 % if it is scanned,
    8 % for a ViT, and 5 to 7 % for an LSTM with 8 to 64 rows a turn. After a convolution a sum
    costs little, in the kernel that computes the cotangent: with products a U-Net's step took 8 %
    more.
    """
    if not step.is_half or level.half == np.float16:  # which no TPU multiplies
        return step
    producers = [value.producer for value in step.node.inputs if value.producer]
    if any(producer.name == "conv_general_dilated" for producer in producers):
        return step
    reads = (x._replace(repeat=repeated_by_product) if _is_bias(x) else x for x in step.reads)
    return step._replace(reads=tuple(reads))


def _is_bias(read: Read) -> bool:
    """Returns whether a read repeats one row, on one device."""
    aval, shape = read.value.aval, read.shape
    if shape is None or not aval.sharding.mesh.empty:
        return False
    return aval.shape[-1:] == tuple(shape[-1:]) and all(n == 1 for n in aval.shape[:-1])


COLUMNS = 8


def repeated_by_product(row: Any, shape: Sequence[Any], half: np.dtype) -> Any:
    """Returns a float32 row, repeated to `shape` in half; its gradient adds up by a product.

    The product of ones and the half cotangents is their sum in float32, in a TPU's matrix unit. As
    a sum it takes vector units, which have the most to do there. The ones have eight columns, of
    which one is read: XLA makes a sum of a product with one column, and the unit has 128 anyway.
    """

    def forward(row: Any) -> list[Any]:
        return [cast(repeated(row, shape), half)]

    def derivative(_: Any, tangents: Sequence[Any]) -> list[Any]:
        ones = jnp.ones((*shape[:-1], COLUMNS), half)
        change = cast(tangents[0], FLOAT32).reshape(1, shape[-1])
        change = lax.pad(change, np.float32(0), ((0, COLUMNS - 1, 0), (0, 0, 0)))
        contracted = (((ones.ndim - 1,), (0,)), ((), ()))
        outer = lambda left, right: lax.dot_general(left, right, contracted)
        closed = jax.make_jaxpr(outer)(ones, cast(change, half))
        return [run_with_product(partial(weight_product_p.bind, weight=1), closed, [ones, change])]

    (result,) = with_derivative(forward, derivative)(row)
    return result


# Convolutions whose results have more positions than their inputs, such as transposed ones.
#
# The gradient of a kernel is a convolution of the input with the cotangent, which is larger here.
# XLA exchanges the two, and writes a reversed copy of the cotangent to memory. Here they are
# exchanged first, and only the gradient is reversed, which is as small as the kernel. By the
# compiler's estimate for a v5e a U-Net's step takes 12 % more cycles without it, and the step of a
# VAE with three transposed convolutions 20 %.


@on(Single)
def exchange_kernels(step: Single, level: Level) -> Single:
    """Returns a step; if it is a half convolution that spreads, it is lowered in that order."""
    if not (step.is_half and step.lowering is None and spreads(step.node)):
        return step
    return step._replace(lowering=convolve_spreading)


def spreads(node: Node) -> bool:
    """Returns whether a product is such a convolution, in one group.

    The gradient made here has no sharding, which explicit and manual axes of a mesh ask for.
    """
    if node.name != "conv_general_dilated":
        return False
    (image, _), (result,), numbers = node.inputs, node.outputs, node.params["dimension_numbers"]

    def positions(value: Value, axes: Sequence[int]) -> int:
        return size_of(tuple(value.aval.shape[axis] for axis in axes[2:]))

    is_larger = positions(result, numbers.out_spec) > positions(image, numbers.lhs_spec)
    in_one_group = node.params["feature_group_count"] == node.params["batch_group_count"] == 1
    is_empty = 0 in (image.size, result.size)
    return is_larger and in_one_group and not is_empty and not _jax_compat.has_named_axes(result)


def convolve_spreading(step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
    """Returns such a convolution, with a derivative of its own."""

    def forward(*operands: Any) -> list[Any]:
        return [lax.conv_general_dilated_p.bind(*operands, **step.params)]

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        changes = []
        for position, product in enumerate((lax.conv_general_dilated_p, of_kernel_p)):
            if not isinstance(tangents[position], SymbolicZero):
                factors = [tangents[i] if i == position else primals[i] for i in (0, 1)]
                changes.append(product.bind(*factors, **step.params))
        return [reduce(lax.add, changes)]

    return with_derivative(forward, derivative)(*operands)


# A convolution as a linear function of its kernel.


def _of_kernel(image: Any, kernel: Any, **params: Any) -> Any:
    return lax.conv_general_dilated_p.bind(image, kernel, **params)


def _gradient_of_image(cotangent: Any, image: Any, kernel: Any, **params: Any) -> Any:
    convolution = lambda image: _of_kernel(image, kernel, **params)
    (gradient,) = jax.linear_transpose(convolution, image.aval)(cotangent)
    return gradient


def _gradient_of_kernel(cotangent: Any, image: Any, kernel: Any, **params: Any) -> Any:
    """Returns the convolution of the cotangent with the image, in reverse.

    Position o of the result reads i of the image and k of the kernel if
    `stride * o + dilation * k == spacing * i + before`. So the image slides over the cotangent, and
    each shift of it gives a position of the kernel, the last one first.
    """
    of_image, of_kernel, of_result = params["dimension_numbers"]
    padding = []
    for *axes, stride, (before, _), spacing, dilation in zip(
        of_image[2:],
        of_kernel[2:],
        of_result[2:],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    ):
        arrays = zip((image, kernel.aval, cotangent), axes, strict=True)
        i, k, o = (array.shape[axis] - 1 for array, axis in arrays)  # the last positions
        padding.append((dilation * k - before, spacing * i + before - stride * o))
    gradient = lax.conv_general_dilated(
        cotangent,
        cast(image, cotangent.dtype),
        window_strides=params["rhs_dilation"],
        padding=padding,
        lhs_dilation=params["window_strides"],
        rhs_dilation=params["lhs_dilation"],
        dimension_numbers=lax.ConvDimensionNumbers(
            _exchanged(of_result), _exchanged(of_image), of_kernel
        ),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    return cast(lax.rev(gradient, of_kernel[2:]), kernel.aval.dtype)


def _exchanged(axes: Sequence[int]) -> tuple[int, ...]:
    first, second, *positions = axes
    return (second, first, *positions)


def _batched_convolution(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
    return jax.vmap(partial(_of_kernel, **params), axes)(*operands), 0


of_kernel_p = bilinear(
    "convolution_of_kernel",
    _of_kernel,
    (_gradient_of_image, _gradient_of_kernel),
    _batched_convolution,
)


# Softmaxes.
#
# On TPUs the scores of a softmax, less their maximum, are half. XLA for TPUs computes exponentials
# again wherever they are read, in the fusions of the products around a softmax. Nothing but half
# scores is stored, and a derivative from the half result would only add sums. If the scores less
# their maximum are half, and their masks were applied in half before, XLA computes maximum,
# difference and sums in the kernel of the product, and stores the difference in place of the
# scores. Otherwise it reads the scores twice more for them. A difference of half numbers within a
# factor of two of each other is exact. Any other difference is rounded once, by about as much as
# the scores were.

# The length of a TPU's vectors. Of rows that are no multiple of it (197 tokens of a ViT) XLA makes
# a kernel of their own, with which a step moves 9 % more bytes.
VECTOR = 128


@on(Island)
def softmax_of_half_scores(island: Island, level: Level) -> Island:
    """Rewrites masks and scales of half scores, and the difference from their maximum, for TPUs."""
    half, inside, in_half = level.half, set(island.nodes), island.written_in(level.half)
    # No TPU multiplies float16, in which a mask might not lie below all scores.
    if half == np.float16 or not island.is_recomputed:
        return island
    found = {}
    for one in softmaxes_within(level.facts.softmaxes, inside):
        exact = one.shift and _exact_steps(one.shift, island, half)
        results = downstream(one.argument, inside.__contains__)
        if one.shift is None or exact is None or in_half.isdisjoint(results):
            continue
        for node in exact:
            why = "half scores, masked or scaled by a power of two: exact in half"
            found[node] = Rewrite(why, node.inputs, partial(_run_in_half, node, half))
        length, sub = one.shift.rows.aval.shape[-1], one.shift.sub
        if isinstance(length, int) and length % VECTOR == 0:
            why = "half scores less their maximum, in half: XLA computes it behind the product"
            found[sub] = Rewrite(why, sub.inputs, partial(_difference, half))
    return island.rewritten(found)


def _exact_steps(shift: Shift, island: Island, half: np.dtype) -> list[Node] | None:
    """Returns the nodes that mask and scale half scores; None if more than a softmax reads them."""
    readers, scores = {shift.sub, shift.maxima}, shift.rows
    entering = {read.value for read in island.reads if read.dtype == half}
    leaving = {write.value for write in island.writes}
    if shift.sub.reads_float32 or not _is_maximum(shift.sub.inputs[1], shift.maxima, leaving):
        return None
    found: list[Node] = []
    while scores not in entering:
        node = scores.producer
        # Other readers of masked scores, such as a comparison, see the mask as it was written.
        is_read_here = scores not in leaving and readers.issuperset(scores.users)
        if node is None or node not in island.nodes or not is_read_here:
            return None
        varying = [v for v in node.inputs if v.is_float32 and v.constant is None]
        if node.reads_float32 or not _is_exact_in_half(node) or len(varying) != 1:
            return None
        found.append(node)
        readers, (scores,) = {node}, varying
    return found


def _is_maximum(value: Value, maxima: Node, leaving: Set[Value]) -> bool:
    """Returns whether a value is a maximum that only the softmax reads, without a gradient."""
    is_stopped = False
    while value not in leaving and len(value.users) == 1:
        node = value.producer
        if node is None or node is maxima:
            return is_stopped and node is maxima
        operands = [operand for operand in node.inputs if operand.constant != -np.inf]
        is_first = node.name == "max" and len(operands) == 1  # of -inf and the maximum
        is_stopped |= node.name == "stop_gradient"
        if not (is_first or node.rule.moves or node.name == "stop_gradient"):
            return False
        value = operands[0]
    return False


def _is_exact_in_half(node: Node) -> bool:
    """Returns whether a node masks by a constant, or scales down by a power of two.

    A softmax sees no difference if half scores are masked or scaled so. A power of two changes only
    the digits of subnormal numbers, and a rounded mask of -1e9 lies as far below all scores.
    """
    operands = node.inputs if node.name == "mul" else node.inputs[1:]
    constants = [value.constant for value in operands if value.constant is not None]
    if len(constants) != 1:
        return False
    if node.name == "select_n":
        return len(operands) == 2
    digits, exponent = np.frexp(constants[0])
    scales_down = {"mul": exponent <= 1, "div": exponent >= 1}
    return bool(abs(digits) == 0.5 and scales_down.get(node.name))


def _run_in_half(node: Node, half: Any, *operands: Any) -> Any:
    """Returns the result of `node`, in float32, computed in half."""
    limit, halves = float(jnp.finfo(half).max), []
    for value, array in zip(node.inputs, operands, strict=True):
        if value.constant is not None and value.is_float32:  # its finite numbers stay finite
            array = jnp.where(jnp.isinf(array), array, jnp.clip(array, -limit, limit))
        halves.append(jnp.asarray(array, half) if value.is_float32 else array)
    (result,) = _jax_compat.bind(node.equation.primitive, halves, node.params)
    return result.astype(FLOAT32)


def _difference(half: Any, rows: Any, shift: Any) -> Any:
    return (rows.astype(half) - shift.astype(half)).astype(FLOAT32)


# The target.

TPU = HardwareTarget(
    "tpu",
    (
        *FIRST,
        Pass("softmax of half scores", "softmaxes", softmax_of_half_scores),
        Pass("biases add up by products", "gradients of biases", add_up_biases_by_products),
        Pass("kernels of convolutions that spread", "gradients of kernels", exchange_kernels),
        Pass("fused attention", "attentions and their gradients", partial(fuse_attentions, PALLAS)),
        *LAST,
    ),
    multiplies_float16=False,
)

register_target(["tpu"], TPU)
