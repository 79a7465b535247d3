"""Programs for TPUs: the passes, and the smaller of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp.autocasting._casts import cast, repeated
from jmp.autocasting._kinds import Level
from jmp.autocasting._lowerings import run_with_product, weight_product_p, with_derivative
from jmp.autocasting._passes import HardwareTarget, Pass, register_target
from jmp.autocasting._steps import Read, Single, on_singles
from jmp.autocasting.attention import PALLAS, fuse_attentions
from jmp.autocasting.float8 import multiply_in_float8, send_in_float8, with_bounds
from jmp.autocasting.targets._convolutions import exchange_kernels
from jmp.autocasting.targets._rewriting import rewriting
from jmp.autocasting.targets._softmax import softmax_of_half_scores
from jmp.dtypes import FLOAT32

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


TPU = HardwareTarget(
    "tpu",
    (
        Pass("float8 products", "operands and gradients of products", multiply_in_float8),
        Pass("float8 is sent", "", send_in_float8),
        rewriting("softmax of half scores", "softmaxes", softmax_of_half_scores),
        Pass("biases add up by products", "gradients of biases", add_up_biases_by_products),
        Pass(
            "kernels of convolutions that spread",
            "gradients of kernels",
            exchange_kernels,
        ),
        Pass("fused attention", "attentions and their gradients", partial(fuse_attentions, PALLAS)),
        Pass("float8 bounds", "the scales of float8 products", with_bounds),
    ),
)

register_target(["tpu"], TPU)
