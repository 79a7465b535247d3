"""Programs for TPUs: the passes, and the smaller of them."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jmp.autocasting._kinds import Level
from jmp.autocasting._lowerings import as_it_is
from jmp.autocasting._numbers import Shape
from jmp.autocasting._passes import HardwareTarget, Pass, register_target
from jmp.autocasting._steps import Arithmetic, Environment, Read, Single, on_singles
from jmp.autocasting._wide_gradients import look_up_half, repeated_by_product
from jmp.autocasting.attention import fuse_attentions
from jmp.autocasting.float8 import multiply_in_float8, send_in_float8, with_bounds
from jmp.autocasting.targets._convolutions import exchange_kernels
from jmp.autocasting.targets._half_scores import softmax_of_half_scores
from jmp.autocasting.targets._one_pass import sums_in_one_pass
from jmp.autocasting.targets._pick import pick_as_sum
from jmp.autocasting.targets._rewriting import rewriting

# Biases.


@on_singles
def add_up_biases_by_products(step: Single, level: Level) -> Single:
    """Returns a step; the gradient of a bias that it reads is a product with ones.

    A product takes the matrix unit. A sum takes the vector units, which have the most to do: by
    XLA's estimate a GPT's step on a v5e takes 9 % fewer cycles with products, a scanned one 5 %, a
    ViT 8 %, an LSTM's, of 8 to 64 rows a turn, 5 to 7 %. After a convolution a sum costs little, in
    the kernel that computes the cotangent: with products a U-Net's step took 8 % more.
    """
    if not step.is_half or level.half == np.float16:  # which no TPU multiplies
        return step
    producers = [value.producer for value in step.node.inputs if value.producer]
    if any(producer.name == "conv_general_dilated" for producer in producers):
        return step
    return step._replace(reads=tuple(map(_repeated_by_product, step.reads)))


def _repeated_by_product(read: Read) -> Read:
    if read.shape is None or not _is_bias(read.value.aval, read.shape):
        return read
    return read._replace(repeat=repeated_by_product)


def _is_bias(aval: Any, shape: Shape) -> bool:
    """Returns whether what is repeated to a shape is one row, on one device."""
    is_row = aval.shape[-1:] == tuple(shape[-1:]) and all(n == 1 for n in aval.shape[:-1])
    return is_row and bool(aval.sharding.mesh.empty)


# Lookups.


class HalfLookup:
    """A lookup in a half array; see `look_up_half`."""

    def bind(self, step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
        """Returns what is looked up."""
        return look_up_half(as_it_is(step), operands)


@on_singles
def look_up_in_half(step: Single, level: Level) -> Single:
    """Returns a step; what it looks up in a half array is moved in half."""
    is_lookup = step.node.rule.looks_up and step.arithmetic is Arithmetic.ROUNDED
    first, *places = step.reads or (None,)
    if not (is_lookup and first and level.storage.is_half(first.value)):
        return step
    reads = (first._replace(dtype=level.half), *places)
    return step._replace(reads=reads, lowering=HalfLookup())


TPU = HardwareTarget(
    "tpu",
    (
        Pass("float8 products", "operands and gradients of products", multiply_in_float8),
        Pass("float8 is sent", "", send_in_float8),
        rewriting("pick as a sum", "", functools.partial(pick_as_sum, adds_fill=True)),
        rewriting("softmax of half scores", "softmaxes", softmax_of_half_scores),
        rewriting("rows in one pass", "", sums_in_one_pass),
        Pass("biases add up by products", "gradients of biases", add_up_biases_by_products),
        Pass("lookups in half", "", look_up_in_half),
        Pass(
            "kernels of convolutions that spread",
            "gradients of kernels",
            exchange_kernels,
        ),
        Pass("fused attention", "attentions and their gradients", fuse_attentions),
        Pass("float8 bounds", "the scales of float8 products", with_bounds),
    ),
)

register_target(["tpu"], TPU)
