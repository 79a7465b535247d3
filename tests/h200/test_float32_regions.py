"""In a region that is float32 an H200 multiplies nothing in TF32, forward and backward."""

import collections
import re

import jax
import jax.numpy as jnp
from jax import lax

import jmp
from testbed.machines.hlo import kernels
from tests.products import convolved

W, X, KERNEL, IMAGE = (
    jax.ShapeDtypeStruct(shape, jnp.float32)
    for shape in ((256, 256), (512, 256), (3, 3, 64, 64), (8, 32, 32, 64))
)


MULTIPLIES = re.compile(r'custom_call_target="__cu(blas|dnn)\$')
EXACT = re.compile(r'operand_precision"?[=:]\s*[\[{]"?HIGHEST', re.IGNORECASE)


def units(program):
    """How many library calls multiply in each dtype; no product may stand elsewhere.

    XLA multiplies float32 in TF32 unless the program asks for the highest precision.
    """
    assert " dot(" not in program.text and " convolution(" not in program.text
    counts = collections.Counter()
    for kernel in kernels(program.text):
        attributes = kernel.instruction.attributes
        if MULTIPLIES.search(attributes):
            dtype = kernel.operands[0].partition("[")[0]
            counts["tf32" if dtype == "f32" and not EXACT.search(attributes) else dtype] += 1
    return counts


@jax.custom_vjp
def linear(x, w):
    return x @ w


linear.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))


def model(region):
    """Products in half, and in a region a loop, a recomputation, convolutions and batches."""

    def loss(w, kernel, x, image):
        layer = lambda x, _: (jnp.tanh(linear(x, w) @ w), None)
        x, image = jnp.tanh(x @ w), jnp.tanh(convolved(image, kernel))
        x = region(lambda x: lax.scan(layer, x, None, length=3)[0])(x)
        x = region(jax.checkpoint(lambda x: jnp.sin(x @ w)))(x)
        image = region(convolved)(image, kernel)
        scores = region(lambda x: jnp.einsum("bnd,bmd->bnm", x, x))(x.reshape(8, 64, 256))
        return x.sum() + image.sum() + jnp.exp(scores).sum()

    return jax.grad(jmp.autocast(loss, "mixed_bfloat16"), argnums=(0, 1))


def test_no_product_of_a_region_is_tf32(h200):
    found = units(h200(model(jmp.full_precision), W, KERNEL, X, IMAGE))
    assert found["tf32"] == 0
    assert found["f32"] == 15 and found["bf16"] == 4


def test_the_way_to_tf32_is_a_default_inside(h200):
    def region(function):
        return jmp.full_precision(jax.default_matmul_precision("tensorfloat32")(function))

    found = units(h200(model(region), W, KERNEL, X, IMAGE))
    assert found["f32"] == 0
    assert found["tf32"] == 15 and found["bf16"] == 4
