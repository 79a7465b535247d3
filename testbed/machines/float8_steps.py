"""Training steps whose products are float8, and what counts those products."""

import re

import jax
import jax.numpy as jnp

import jmp
from testbed.models import gpt


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def products(program):
    """Counts the matrix products of a program: float8, and all others."""
    calls = re.findall(r'custom_call_target="(__cublas[^"]*)"', program.text)
    float8 = sum(call == "__cublas$lt$matmul$f8" for call in calls)
    return float8, len(calls) - float8


def step(loss, policy):
    grad = jax.grad(jmp.autocast(loss, policy))

    def run(params, *batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad(params, *batch))

    return run


def layer(x, w):
    return jax.nn.gelu(x @ w[0]) @ w[1]


def scanned(params, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0] ** 2)


PAIR = float32(1024, 4096), float32(4096, 1024)
X = float32(8192, 1024)


def with_head(layer, *params):
    """Returns the loss of two layers and a head, and its arguments."""

    def loss(params, x):
        *layers, head = params
        for w in layers:
            x = layer(x, w)
        return jnp.mean((x @ head) ** 2)

    return loss, (params, params, float32(1024, 1024)), X


TWO_MLPS = with_head(layer, *PAIR)


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def gated(x, w):
    gate, up, down, scale = w
    y = rms_norm(x, scale)
    return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down


def with_biases(x, w):
    up, down, a, b = w
    return x + jax.nn.gelu(x @ up + a) @ down + b


def small_gpt():
    params, batch = jax.eval_shape(lambda: gpt()[1:])
    return lambda *args: gpt()[0](*args), params, *batch


# The table of docs/float8.md, which `python -m benchmarks.run --suite programs` counts.
UP, DOWN = PAIR
FULL_SIZES = {
    "GPT, 4 layers of width 512, 8 x 512 tokens": small_gpt,
    "8 scanned MLPs 1024-4096, 8192 tokens": lambda: (
        scanned,
        (float32(8, 1024, 4096), float32(8, 4096, 1024)),
        X,
    ),
    "2 MLPs 1024-4096 and a head, 8192 tokens": lambda: TWO_MLPS,
    "the same with RMSNorm, silu and a gate, and residual sums": lambda: with_head(
        gated, UP, UP, DOWN, float32(1024)
    ),
    "the same with gelu and biases, and residual sums": lambda: with_head(
        with_biases, UP, DOWN, float32(4096), float32(1024)
    ),
}
