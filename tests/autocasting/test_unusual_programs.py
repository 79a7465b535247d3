"""Programs that few people write: references, choices by platform, literal times, long chains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.ode import odeint

import jmp
from jmp.adapters import nnx as adapter
from tests.commands import in_full
from tests.errors import relative_error
from tests.products import product_dtypes

KEYS = jax.random.split(jax.random.key(3), 2)
W, X = jax.random.normal(KEYS[0], (32, 32)) / 6, jax.random.normal(KEYS[1], (8, 32))
HALVES = ("mixed_float16", "mixed_bfloat16")


# References.


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("shape", [(), (32,)], ids=["scalar", "array"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_reference_that_is_closed_over_is_read_and_written(policy, shape, transform):
    def counted(reference, wrap):
        def fun(w, x):
            y = x @ w
            reference[...] += y.sum(0) if shape else y.sum()
            return jnp.sum(y * jnp.broadcast_to(reference[...], y.shape))

        return transform(wrap(fun))

    ours, exact = (jax.new_ref(jnp.ones(shape)) for _ in range(2))
    lowered = counted(ours, lambda f: jmp.autocast(f, policy))
    plain = counted(exact, lambda f: f)
    for _ in range(2):
        np.testing.assert_allclose(lowered(W, X), plain(W, X), rtol=0.05)
    np.testing.assert_allclose(ours[...], exact[...], rtol=0.05, atol=0.05)
    assert ours[...].dtype == np.float32


@pytest.mark.parametrize("policy", HALVES)
def test_a_reference_may_keep_a_statistic_of_a_loss(policy):
    kept = jax.new_ref(jnp.float32(0))

    def loss(w, x):
        y = x @ w
        kept[...] = lax.stop_gradient(y.sum())
        return y.sum()

    gradient = jax.grad(jmp.autocast(loss, policy))(W, X)
    np.testing.assert_allclose(gradient, jax.grad(lambda w: (X @ w).sum())(W), rtol=0.02, atol=0.02)
    np.testing.assert_allclose(kept[...], (X @ W).sum(), rtol=0.05)


def test_a_model_of_nnx_may_hold_references():
    with nnx.var_defaults(ref=True):
        model = nnx.Linear(32, 8, rngs=nnx.Rngs(0))
        view = adapter.autocast(model, "mixed_float16")
        assert product_dtypes(view, X) == {"float16": 1}
        np.testing.assert_allclose(view(X), model(X), atol=0.01)


# Choices by platform.


def copied(y):
    """A kernel that only a TPU compiles."""

    def kernel(source, target):
        target[...] = source[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype))(y)


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("has_default", [True, False])
def test_a_choice_by_platform_stays_one(policy, has_default):
    def loss(w, x):
        others = {"default": jnp.tanh} if has_default else {"cpu": jnp.tanh, "cuda": jnp.exp}
        return jnp.sum(lax.platform_dependent(x @ w, tpu=copied, **others) @ w)

    lowered = jmp.autocast(loss, policy)
    assert product_dtypes(lowered, W, X) == {policy.removeprefix("mixed_"): 2}
    exact = lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w)
    np.testing.assert_allclose(lowered(W, X), exact(W, X), rtol=0.05, atol=0.1)
    assert relative_error(jax.grad(lowered)(W, X), jax.grad(exact)(W, X)) < 0.02


def test_a_choice_by_platform_takes_that_platforms_branch_when_it_is_lowered():
    def fun(w, x):
        return lax.platform_dependent(x @ w, cpu=jnp.sin, cuda=jnp.cos, default=jnp.tanh)

    traced = jax.jit(jmp.autocast(fun, "mixed_float16")).trace(W, X)
    for platform, name in (("cpu", "sine"), ("cuda", "cosine"), ("tpu", "tanh")):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        found = {each for each in ("sine", "cosine", "tanh") if f"stablehlo.{each}" in text}
        assert found == {name}


# Rules of derivatives that index what they are given.


@pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")
@pytest.mark.parametrize(
    "times", in_full({"two": ((0.0, 1.0),), "three": ((0.0, 0.5, 1.0),)}, but=("three",))
)
def test_odeint_with_literal_times_has_a_gradient(times):
    def loss(w, x):
        return odeint(lambda y, t: jnp.tanh(y @ w), x @ w, jnp.array(times))[-1].sum()

    gradient = jax.grad(jmp.autocast(loss, "mixed_float16"))(W, X)
    assert relative_error(gradient, jax.grad(loss)(W, X)) < 0.01


# Long chains: nothing may walk along them by calling itself.

CHAINS = {
    "adds an array": lambda y, i: y + X,
    "scales": lambda y, i: y * 0.5 if i % 2 else y * 2.0,
    "transposes": lambda y, i: y.T,
    "reshapes": lambda y, i: y.reshape(y.shape[::-1]),
    "joins and takes apart": lambda y, i: jnp.concatenate([y[:4], y[4:]]),
    "chooses": lambda y, i: jnp.where(y > i, y, -1.0),
    "pads": lambda y, i: jnp.pad(y, ((0, 0), (0, 1)))[:, :-1],
    "looks up": lambda y, i: y[jnp.arange(len(y))],
}
N = 2000


@pytest.mark.parametrize("name", in_full(CHAINS.keys(), but=("adds an array", "transposes")))
def test_a_chain_of_2000_operations_is_planned(name):
    def chained(y):
        for i in range(N):
            y = CHAINS[name](y, i)
        return y

    behind_a_product = lambda w, x: jax.nn.softmax(chained(x @ w)).sum()

    def before_products(w, x):
        return (jax.nn.softmax(x @ w + chained(x).reshape(x.shape)) @ w).sum()

    for fun in (behind_a_product, before_products):
        options = {"attention": "fused", "recompute": "all"}  # islands of this size too
        lowered = jmp.autocast(fun, "mixed_float16", **options)
        assert set(product_dtypes(lowered, W, X)) == {"float16"}
