"""What JAX traces in newer forms under its upgrade flags."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from tests.products import product_dtypes

KEYS = jax.random.split(jax.random.key(5), 3)
W = jax.random.normal(KEYS[0], (16, 16)) / 4
X = jax.random.normal(KEYS[1], (8, 16))


@pytest.fixture
def flag(request):
    """Sets one of JAX's flags, by its name."""
    if not hasattr(jax.config, request.param):
        pytest.skip("JAX has no such flag")
    jax.config.update(request.param, True)
    yield request.param
    jax.config.update(request.param, False)


def under(name):
    return pytest.mark.parametrize("flag", [name], indirect=True)


def with_remat(w, x):
    block = jax.checkpoint(lambda x: jax.nn.gelu(x @ w) @ w)
    return jnp.sum(block(block(x)) ** 2)


@under("jax_remat3")
def test_a_newer_remat_runs_as_it_is_written_and_its_products_are_named(flag):
    lowered = jmp.autocast(with_remat, "mixed_float16")
    with pytest.warns(jmp.NoHalfProductWarning, match="4 products: inside call_hi_primitive"):
        result = jax.grad(lowered)(W, X)
    np.testing.assert_allclose(result, jax.grad(with_remat)(W, X), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="it runs no matrix products yet")
@under("jax_scan3")
def test_a_newer_scan_runs_forwards_and_its_products_are_named(flag):
    def loop(w, x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x @ w, None, length=3)[0]

    lowered = jmp.autocast(loop, "mixed_float16")
    with pytest.warns(jmp.NoHalfProductWarning, match="stay float32: 1 in Scan3. "):
        result = lowered(W, X)
    np.testing.assert_allclose(result, jax.jit(loop)(W, X), atol=0.01)


def test_a_function_that_was_traced_before_is_seen_through():
    def loss(w, x, key):
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)
        return jnp.sum(jnp.log(jax.nn.relu(x @ w) - 1))

    arguments = W, X, KEYS[2]
    traced = jax.jit(loss).trace(*arguments)  # JAX 0.12 calls it by an equation of its own
    program = lambda w: traced(w, *arguments[1:])
    assert set(product_dtypes(jmp.autocast(program, "mixed_float16"), W)) == {"float16"}
    found = jmp.diagnostics.find_nonfinite(program)(W)
    assert found.operation == "log"
    report = str(jmp.diagnostics.gradient_report(lambda w: traced(w, X, KEYS[2]))(jnp.abs(W)))
    assert "log" in report
