"""Programs exported with symbols for sizes: what depends on a size is decided without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jmp
from jmp import diagnostics
from jmp.autocasting.targets import _cross_entropy, _weight_sums
from testbed.machines.gpus import as_if_cudnn
from testbed.models import MODELS
from tests.bits import bits
from tests.commands import in_full

pytestmark = pytest.mark.usefixtures("users_rank_promotion")

WIDTH, HEADS = 32, 4
SYMBOL = "a size of it is a symbol, and a kernel is made for one size"


def normal(seed, *shape):
    return jnp.asarray(0.3 * np.random.default_rng(seed).standard_normal(shape, np.float32))


# Attention, written in several ways: length and batch are symbols.

P = {name: normal(i, WIDTH, WIDTH) for i, name in enumerate("qkvo")}


def heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1)


def attention(x, p, change):
    q, k, v = (heads(x @ p[name]) for name in "qkv")
    weights = jax.nn.softmax(change(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.35))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["o"]


def causal(p, x):
    kept = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    return attention(x, p, lambda scores: jnp.where(kept, scores, -1e9)).sum()


def window_and_slopes(p, x):
    i = jnp.arange(x.shape[1])
    slopes = jnp.array([0.1, 0.2, 0.3, 0.4])[:, None, None]
    kept = (i[:, None] >= i) & (i[:, None] - i < 8)
    bias = jnp.where(kept, -slopes * jnp.abs(i[:, None] - i), jnp.finfo(jnp.float32).min)
    return attention(x, p, lambda scores: scores + bias).sum()


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


ATTENTIONS = (causal, window_and_slopes, of_jax)


def exported(function, params, arrays, text):
    """Exports a function with symbols for the first axes of its arrays."""
    symbols = export.symbolic_shape(text, constraints=["t >= 2"] * ("t" in text))
    sizes = [(*symbols, *x.shape[len(symbols) :]) for x in arrays]
    structs = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(sizes, arrays, strict=True)]
    return export.export(jax.jit(function))(jax.eval_shape(lambda: params), *structs)


@pytest.mark.parametrize("function", [*ATTENTIONS, sums_of_constants, symbols_for_rows])
def test_an_attention_to_be_fused_is_exported_with_a_symbol_for_its_length(function):
    fused = jmp.autocast(function, "mixed_float16", attention="fused")
    with as_if_cudnn():
        assert "?x" in exported(fused, P, [normal(9, 3, 16, WIDTH)], "b,t").mlir_module()


@pytest.mark.parametrize("function", ATTENTIONS)
def test_the_report_says_that_a_symbol_is_why_an_attention_is_plain(function):
    struct = jax.ShapeDtypeStruct(export.symbolic_shape("b,t,32"), jnp.float32)
    with as_if_cudnn():
        fused = diagnostics.precision_report(function, "mixed_float16", attention="fused")
        assert SYMBOL in str(fused(P, struct))


# Whole models: batch and length are symbols, under a gradient.


# A model, its policy in `make test`, and its symbols.
STEPS = {
    "plain_transformer": ("mixed_float16", "b,t"),
    "unet": ("mixed_bfloat16", "b"),
    "lstm": ("mixed_float8", "b,t"),
}
CASES = [
    pytest.param(name, policy, marks=[pytest.mark.full] * (policy != STEPS[name][0]))
    for name in STEPS
    for policy in ("mixed_float16", "mixed_bfloat16", "mixed_float8")
]


def step_of(name, policy, **options):
    (model,) = (model for model in MODELS if model.name == name)
    loss, params, batch = model.make(**model.small)
    return jax.value_and_grad(jmp.autocast(loss, policy, **options)), params, batch


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_a_step_is_exported_with_symbols(name, policy, small_is_float8):
    with as_if_cudnn():
        step, params, batch = step_of(name, policy, attention="fused")
        assert "?x" in exported(step, params, batch, STEPS[name][1]).mlir_module()


@pytest.mark.parametrize("name", in_full(STEPS.keys(), but=["lstm"]))
def test_an_exported_step_gives_what_it_gives_without_symbols(name, small_is_float8, monkeypatch):
    for module, limit, number in ((_cross_entropy, "LARGE", 1), (_weight_sums, "MOST_RESULTS", 0)):
        monkeypatch.setattr(module, limit, number)  # so that the plan is the same at every size
    policy, symbols = STEPS[name]
    step, params, batch = step_of(name, policy, attention="fused", recompute="all")
    got = exported(step, params, batch, symbols).call(params, *batch)
    assert bits(got) == bits(jax.jit(step)(params, *batch))
