"""Programs for GPUs: the passes, and those too small for a file of their own.

Programs for a CPU are planned as those for GPUs, so that tests without one see the same program.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import as_it_is, cast, repeated, with_derivative, without_symbols
from jmp.autocasting._numbers import shape_of
from jmp.autocasting._passes import HardwareTarget, Pass, register_target
from jmp.autocasting._steps import Environment, Island, Read, Single, Step, on
from jmp.autocasting.attention import CUDNN, fuse_attentions
from jmp.autocasting.targets._cross_entropy import pick_as_sum, sums_in_one_pass
from jmp.autocasting.targets._everywhere import FIRST, LAST
from jmp.autocasting.targets._softmax import pad_softmaxes, softmax_from_half_result
from jmp.autocasting.targets._zeros import scatter_into_own_zeros
from jmp.dtypes import FLOAT32


@on(Island)
def keep_apart(island: Island, level: Level) -> Island:
    """Returns an island; if it is elementwise, its recomputation stands behind a barrier.

    XLA would merge the recomputation with the forward pass, and keep the float32 results. Behind
    the barrier nothing fuses. XLA keeps islands that reduce rows apart by itself. On TPUs a barrier
    always costs more than it saves, because arithmetic takes time there.
    """
    if not island.is_recomputed or any(node.rule.reduces for node in island.nodes):
        return island
    return island._replace(prevent_cse=level.context.prevent_cse)


def add_bias(
    half: np.dtype, is_bias: Sequence[bool], step: Single, operands: Sequence[Any], _: Environment
) -> list[Any]:
    """Returns a half sum with a float32 bias, which is rounded before it is repeated.

    The gradient of the bias adds up in float32.

    Args:
      is_bias: of each operand.
    """
    shape = step.node.outputs[0].aval.shape

    def add(*operands: Any) -> list[Any]:
        return as_it_is(step)([cast(operand, half) for operand in operands])

    def derivative(_: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        moving = zip(map(without_symbols, tangents), is_bias, strict=True)
        return add(*(repeated(x, shape) if bias else x for x, bias in moving))

    return with_derivative(add, derivative)(*operands)


@on(Single)
def add_biases_in_loops(step: Single, level: Level) -> Single:
    """Returns a step; it does not repeat a bias that is the same at each turn of a loop.

    JAX computes before a loop what its turns share. A repeated bias would be a whole matrix, which
    each turn reads from memory, and which no product's kernel adds.
    """
    is_bias = tuple(map(_is_the_same_bias, step.reads))
    if level.context.times == 1 or not any(is_bias) or not step.node.rule.linear:
        return step
    reads = (
        read._replace(dtype=FLOAT32, shape=None) if bias else read
        for read, bias in zip(step.reads, is_bias, strict=True)
    )
    return step._replace(reads=tuple(reads), lowering=partial(add_bias, level.half, is_bias))


def _is_the_same_bias(read: Read) -> bool:
    """Returns whether a read repeats a row that comes into a loop, the same at each turn."""
    row, source = read.value, read.value.root
    has_axes = read.shape is not None and len(read.shape) == len(shape_of(row))
    comes_in = source.origin is not source and shape_of(source) == shape_of(source.origin)  # no row
    return has_axes and not read.saturates and comes_in


@on(Single)
def reverse_rounded_kernels(step: Single, level: Level) -> Single:
    """Returns a step; if it reverses the kernel of one convolution, it reverses it in half.

    So does the derivative of a convolution, taken inside the loss. XLA calls cuDNN's derivative
    where it sees the kernel reversed. It does not see it behind a cast.
    """
    node = step.node
    if node.name != "rev" or node.region.in_float32 or node in level.facts.depths:
        return step
    (operand,), (result,) = node.inputs, node.outputs
    if len(result.users) != 1 or result in level.facts.kept:
        return step
    (reader,) = result.users
    is_kernel = reader.name == "conv_general_dilated" and reader.inputs[1] is result
    if not (result.is_float32 and is_kernel and reader.is_product):
        return step
    level.store([result], [level.half])
    return step._replace(reads=(Read(operand, level.half),), stores=(level.half,))


def read_bits(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns steps; an island widens a bfloat16 tanh, or another such function, by its bits.

    A GPU computes a bfloat16 tanh in float32, and casts it; an island casts it back. XLA takes that
    pair of casts away and stores the float32 tanh, but not where it does not see the second one.
    Without this, derivatives of gelu in the loss move 12 % more bytes.
    """
    singles = (step for step in steps if isinstance(step, Single) and step.is_half)
    bounded = {step.node.outputs[0] for step in singles if step.node.rule.bounded}

    def widened(read: Read) -> Read:
        is_cast = level.half == jnp.bfloat16 and read.value in bounded
        return read._replace(repeat=widen_bits) if is_cast else read

    return [
        step._replace(reads=tuple(map(widened, step.reads))) if isinstance(step, Island) else step
        for step in steps
    ]


def widen_bits(array: Any, _: Any, dtype: Any) -> Any:
    """Returns a bfloat16 array in float32: its bits, and 16 zeros behind them."""

    def compute(x: Any) -> list[Any]:
        bits = lax.bitcast_convert_type(x, np.uint16).astype(np.uint32) << 16
        return [lax.bitcast_convert_type(bits, jnp.float32)]

    def derivative(operands: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        return [cast(tangents[0], FLOAT32)]

    return with_derivative(compute, derivative)(array)[0]


GPU = HardwareTarget(
    "gpu",
    (
        *FIRST,
        Pass("pick as a sum", "", pick_as_sum),
        Pass("softmax from its half result", "gradients of scores", softmax_from_half_result),
        Pass("rows in one pass", "sums of exponentials", sums_in_one_pass),
        Pass("prevent_cse", "", keep_apart),
        Pass("biases are added in loops", "", add_biases_in_loops),
        Pass("zeros of their own", "", scatter_into_own_zeros),
        Pass("bfloat16 is read by its bits", "sums of cotangents", read_bits),
        Pass("kernels are rounded before they are reversed", "", reverse_rounded_kernels),
        Pass("fused attention", "attentions and their gradients", partial(fuse_attentions, CUDNN)),
        Pass("padded softmax", "sums over rows, in another order", pad_softmaxes),
        *LAST,
    ),
)

register_target(["gpu", "cpu"], GPU)
