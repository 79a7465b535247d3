"""What autocast computes in a form of its own has its derivatives under each transformation.

The files of these forms test when a program has one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp
from tests.autocasting.attentions import attention
from tests.commands import in_full
from tests.errors import relative_error


class Form(NamedTuple):
    """A loss of parameters and inputs, and how autocast is applied to it."""

    loss: Callable[[Any, Any], Any]
    params: Any
    inputs: Any
    policy: str = "mixed_float16"
    options: dict[str, Any] = {}
    bound: float = 0.005  # of the relative error


def drawn(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def recurrent(params, x):
    """A gated network, whose weights' gradients are summed behind the loop."""

    def turn(h, x):
        gate = jax.nn.sigmoid(h @ params["w"] + params["b"])
        return gate * h + (1 - gate) * jnp.tanh(x @ params["v"]), jnp.mean(h, -1)

    h, means = lax.scan(turn, jnp.zeros(x.shape[1:]), x)
    return jnp.sum(h**2) + jnp.sum(means)


def layers(w, x):
    x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([w, w]))[0]
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def odd_attention(w, x):
    heads = (x @ w).reshape(2, 61, 2, 16)
    return jnp.sin(attention()(heads, heads, heads)).sum()


def spreading(kernel, x):
    return jnp.sum(jnp.tanh(lax.conv_transpose(x, kernel, (2,), "SAME")))


def biased(bias, x):
    return jnp.sum(jnp.tanh(x @ jnp.eye(8) + bias[None]) @ jnp.eye(8))


GATES = {"w": drawn(0, 32, 32), "v": drawn(1, 32, 32), "b": drawn(2, 1, 32)}
ON_TPUS = {"policy": "mixed_bfloat16", "options": {"platform": "tpu"}, "bound": 0.02}
FORMS = {
    "weights of few turns": Form(recurrent, GATES, 4 * drawn(3, 12, 4, 32)),
    "weights of many turns": Form(recurrent, GATES, 4 * drawn(3, 48, 4, 32)),
    "float32 gradients": Form(layers, drawn(0, 16, 16), drawn(1, 24, 16), "mixed_float16,r=f32"),
    "float32 results": Form(layers, drawn(0, 16, 16), drawn(1, 24, 16), "mixed_float16,result=f32"),
    "padded softmax": Form(
        odd_attention, drawn(0, 32, 32), 4 * drawn(1, 2, 61, 32),
        options={"platform": "gpu", "recompute": "all"}),
    "convolution that spreads": Form(spreading, drawn(0, 2, 2, 2), drawn(1, 3, 4, 2), **ON_TPUS),
    "bias": Form(biased, jnp.linspace(-1, 1, 8), drawn(0, 1024, 8), **ON_TPUS),
}  # fmt: skip


def squared_gradient(f, w, x):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jax.grad(f)(w, x)))


def stacked(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), tree)


WAYS = {
    "gradient": lambda f, w, x: jax.grad(f, (0, 1))(w, x),
    "gradient of the parameters": lambda f, w, x: jax.grad(f)(w, x),
    "gradient of the inputs": lambda f, w, x: jax.grad(f, 1)(w, x),
    "jvp": lambda f, w, x: jax.jvp(f, (w, x), (w, x)),
    "linearize": lambda f, w, x: jax.linearize(lambda w: f(w, x), w)[1](w),
    "ensemble": lambda f, w, x: jax.vmap(jax.grad(f, (0, 1)), (0, None))(stacked(w), x),
    "examples": lambda f, w, x: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(w, stacked(x)),
    "loop": lambda f, w, x: lax.map(lambda x: jax.grad(f, (0, 1))(w, x), stacked(x)),
    "remat": lambda f, w, x: jax.grad(jax.checkpoint(f), (0, 1))(w, x),
    "jvp of grad": lambda f, w, x: jax.jvp(jax.grad(f, (0, 1)), (w, x), (w, x))[1],
    "grad of grad": lambda f, w, x: jax.grad(functools.partial(squared_gradient, f), (0, 1))(w, x),
}
CASES = [pytest.param(form, way, id=f"{form}, {way}") for form in FORMS for way in WAYS]


@pytest.mark.parametrize(("form", "way"), in_full(CASES, one_of=3))
def test_derivatives_are_those_of_float32(form, way):
    loss, params, inputs, policy, options, bound = FORMS[form]
    found, expected = (
        jax.jit(functools.partial(WAYS[way], function))(params, inputs)
        for function in (jmp.autocast(loss, policy, **options), loss)
    )
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    assert relative_error(found, expected) < bound
