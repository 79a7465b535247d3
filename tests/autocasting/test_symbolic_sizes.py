"""Programs exported with symbols for sizes: what depends on a size is decided without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jmp
from jmp import diagnostics
from jmp.autocasting import _weight_sums
from jmp.autocasting.targets import _cross_entropy
from testbed.machines.gpus import as_if_cudnn
from tests.bits import bits
from tests.commands import in_full
from tests.products import convolved

pytestmark = pytest.mark.usefixtures("users_rank_promotion")

WIDTH, HEADS, CLASSES = 32, 4, 40
POLICIES = ("mixed_float16", "mixed_bfloat16", "mixed_float8")
SYMBOL = "a size of it is a symbol, and a kernel is made for one size"


def normal(seed, *shape):
    return jnp.asarray(0.3 * np.random.default_rng(seed).standard_normal(shape, np.float32))


# Attention, written in several ways: length and batch are symbols.

P = {name: normal(i, WIDTH, WIDTH) for i, name in enumerate("qkvo")} | {"g": jnp.ones(WIDTH)}


def heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1)


def attention(x, p, change):
    q, k, v = (heads(x @ p[name]) for name in "qkv")
    weights = jax.nn.softmax(change(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.35))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["o"]


def causal_attention(x, p):
    length = x.shape[1]
    kept = jnp.tril(jnp.ones((length, length), bool))
    return attention(x, p, lambda scores: jnp.where(kept, scores, -1e9))


def causal(p, x):
    return causal_attention(x, p).sum()


def window_and_slopes(p, x):
    i = jnp.arange(x.shape[1])
    slopes = jnp.array([0.1, 0.2, 0.3, 0.4])[:, None, None]
    kept = (i[:, None] >= i) & (i[:, None] - i < 8)
    bias = jnp.where(kept, -slopes * jnp.abs(i[:, None] - i), jnp.finfo(jnp.float32).min)
    return attention(x, p, lambda scores: scores + bias).sum()


def relative_positions(p, x):
    i = jnp.arange(x.shape[1])
    bias = p["g"][jnp.clip(i[:, None] - i, 0, WIDTH - 1)]
    return attention(x, p, lambda scores: scores + bias).sum()


def merged_heads(p, x):
    batch, length, _ = x.shape
    merge = lambda y: heads(y).transpose(0, 2, 1, 3).reshape(batch * HEADS, length, -1)
    q, k, v = (merge(x @ p[name]) for name in "qkv")
    weights = jax.nn.softmax(q @ k.swapaxes(1, 2))
    parts = (weights @ v).reshape(batch, HEADS, length, -1).swapaxes(1, 2)
    return (parts.sum(2) @ p["o"][:8]).sum()


def of_jax(p, x):
    q = heads(x @ p["q"])
    seen = (x[..., 0] > -1)[:, None, None]
    return (jax.nn.dot_product_attention(q, q, q, mask=seen).reshape(x.shape) @ p["o"]).sum()


def sums_of_constants(p, x):
    places = jnp.cumsum(jnp.ones(x.shape[1])) * jnp.ones((x.shape[1], 2)).sum(1)
    return (jnp.tanh((x * places[:, None]) @ p["q"]) @ p["o"]).sum()


def symbols_for_rows(p, x):  # the classes of a softmax are a symbol too
    scores = x @ p["q"] @ x.swapaxes(1, 2)
    return -jnp.diagonal(jax.nn.log_softmax(scores), axis1=1, axis2=2).mean()


ATTENTIONS = (causal, window_and_slopes, relative_positions, merged_heads, of_jax)


def exported(function, arguments, text):
    """Exports a function, its last argument of the shape `text`."""
    *others, last = arguments
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), others)
    shape = export.symbolic_shape(text, constraints=["t >= 2"] * ("t" in text))
    return export.export(jax.jit(function))(*types, jax.ShapeDtypeStruct(shape, last.dtype))


@pytest.mark.parametrize("function", [*ATTENTIONS, sums_of_constants, symbols_for_rows])
def test_an_attention_to_be_fused_is_exported_with_a_symbol_for_its_length(function):
    fused = jmp.autocast(function, "mixed_float16", attention="fused")
    with as_if_cudnn():
        assert "?x" in exported(fused, (P, normal(9, 3, 16, WIDTH)), "b,t,32").mlir_module()


@pytest.mark.parametrize("function", ATTENTIONS)
def test_the_report_says_that_a_symbol_is_why_an_attention_is_plain(function):
    struct = jax.ShapeDtypeStruct(export.symbolic_shape("b,t,32"), jnp.float32)
    with as_if_cudnn():
        fused = diagnostics.precision_report(function, "mixed_float16", attention="fused")
        assert SYMBOL in str(fused(P, struct))


# Whole models: batch and length are symbols, under a gradient.


def normed(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def language_model(p, tokens):
    x = p["e"][tokens]
    x = x + causal_attention(normed(x, p["g"]), p)
    x = x + jax.nn.gelu(normed(x, p["g"]) @ p["u"] + p["b"]) @ p["d"]
    log_p = jax.nn.log_softmax(x[:, :-1] @ p["e"].T)
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()


def convolutions(p, x):
    for kernel in p["kernels"]:
        x = convolved(x, kernel)
        x = x - x.mean((0, 1, 2))
        x = jax.nn.relu(x * lax.rsqrt((x * x).mean((0, 1, 2)) + 1e-5) * p["g"])
    return (jax.nn.log_softmax(x.mean((1, 2)) @ p["head"]) ** 2).mean()


def lstm(p, x):
    def cell(carry, row):
        hidden, state = carry
        i, f, g, o = jnp.split(row @ p["x"] + hidden @ p["h"] + p["b"], 4, -1)
        state = jax.nn.sigmoid(f) * state + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(state)
        return (hidden, state), hidden

    zeros = jnp.zeros((x.shape[0], 16))
    _, hidden = lax.scan(cell, (zeros, zeros), x.swapaxes(0, 1))
    return (jax.nn.log_softmax(hidden @ p["o"]) ** 2).mean()


OF_TOKENS = P | {
    "e": normal(5, CLASSES, WIDTH),
    "u": normal(6, WIDTH, 64),
    "b": normal(7, 64),
    "d": normal(8, 64, WIDTH),
}
TOKENS = jax.random.randint(jax.random.key(0), (4, 16), 0, CLASSES)
OF_IMAGES = {
    "kernels": [normal(1, 3, 3, 3, 16), normal(2, 3, 3, 16, 16)],
    "g": jnp.ones(16),
    "head": normal(3, 16, 10),
}
OF_ROWS = {
    "x": normal(1, 8, 64),
    "h": normal(2, 16, 64),
    "b": normal(3, 64),
    "o": normal(4, 16, 10),
}
MODELS = {
    "language model": (language_model, (OF_TOKENS, TOKENS), "b,t"),
    "convolutions": (convolutions, (OF_IMAGES, normal(5, 4, 8, 8, 3)), "b,8,8,3"),
    "lstm": (lstm, (OF_ROWS, normal(5, 4, 12, 8)), "b,t,8"),
}


SAME = [("language model", POLICIES[0]), ("convolutions", POLICIES[1]), ("lstm", POLICIES[2])]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", in_full(POLICIES, but=("mixed_float16", "mixed_float8")))
def test_a_step_is_exported_with_symbols(model, policy, small_is_float8):
    function, arguments, text = MODELS[model]
    with as_if_cudnn():
        step = jax.value_and_grad(jmp.autocast(function, policy, attention="fused"))
        assert "?x" in exported(step, arguments, text).mlir_module()


@pytest.mark.parametrize(("model", "policy"), in_full(SAME, first=1))
def test_an_exported_step_gives_what_it_gives_without_symbols(
    model, policy, small_is_float8, monkeypatch
):
    for module, name, number in ((_cross_entropy, "LARGE", 1), (_weight_sums, "MOST_RESULTS", 0)):
        monkeypatch.setattr(module, name, number)  # so that the plan is the same at every size
    function, arguments, text = MODELS[model]
    options = {"attention": "fused", "recompute": "all"}
    step = jax.value_and_grad(jmp.autocast(function, policy, **options))
    got = exported(step, arguments, text).call(*arguments)
    assert bits(got) == bits(jax.jit(step)(*arguments))
