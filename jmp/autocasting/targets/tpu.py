"""Programs for TPUs: the passes, and the smaller of them."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jmp.autocasting._kinds import Level
from jmp.autocasting._lowerings import as_it_is
from jmp.autocasting._passes import HardwareTarget, Pass, register_target
from jmp.autocasting._steps import Arithmetic, Environment, Read, Single, on_singles
from jmp.autocasting._wide_gradients import look_up_half, repeated_by_product
from jmp.autocasting.attention import fuse_attentions
from jmp.autocasting.float8 import multiply_in_float8, send_in_float8, with_bounds
from jmp.autocasting.targets._convolutions import exchange_kernels
from jmp.autocasting.targets._one_pass import sums_in_one_pass
from jmp.autocasting.targets._pick import pick_as_sum
from jmp.autocasting.targets._rewriting import rewriting
from jmp.autocasting.targets._softmax import softmax_of_half_scores

# Biases.


@on_singles
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


# Lookups.


class HalfLookup:
    """A lookup in a half array; see `look_up_half`."""

    def bind(self, step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
        """Returns the rows that are looked up."""
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
