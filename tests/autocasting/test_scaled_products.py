"""Products that are scaled down afterwards do not overflow float16 before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

import jmp
from tests.products import named

ROWS, WIDTH = 8, 64
KEYS = jax.random.split(jax.random.key(0), 3)
Q, K, V = (jax.random.normal(key, (ROWS, WIDTH)) for key in KEYS)
W = jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / 8
LARGE = 68.0  # a product of two such rows is about 300,000, and 37,000 divided by 8


def over_root(q, k, v):
    return jax.nn.softmax(q @ k.T / WIDTH**0.5) @ v


def by_einsum(q, k, v):
    scores = jnp.einsum("qd,kd->qk", q, k, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(jnp.eye(ROWS) > 0, -1e9, scores / WIDTH**0.5)) @ v


def between_products(q, k, v):
    return jnp.tanh(((q @ k.T) / 256) @ v / 1e4)


def in_a_scan(q, k, v):
    return lax.scan(lambda c, _: (over_root(q, k, v), None), v, None, length=2)[0]


WAYS = (over_root, by_einsum, between_products, in_a_scan)


@pytest.mark.parametrize("way", WAYS)
def test_large_operands_do_not_overflow(way):
    # Rows point in one direction, so that all products are large.
    q, k = (LARGE * (1 + 0.01 * x) for x in (Q, K))
    lowered = jmp.autocast(way, "mixed_float16", attention="fused")
    found, exact = lowered(q, k, V), way(q, k, V)
    assert np.isfinite(found).all()
    rounded = [x.astype(jnp.float16).astype(jnp.float32) for x in (q, k, V)]
    assert np.abs(found - exact).max() < 4 * np.abs(way(*rounded) - exact).max() + 0.01
    gradients = jax.grad(lambda *args: lowered(*args).sum(), (0, 1, 2))(q, k, V)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("size", [1.0, 1e-1, 1e-3, 1e-4])
@pytest.mark.parametrize("way", WAYS)
def test_no_digit_changes_at_small_operands(way, size):
    q, k = size * Q, size * K
    found, exact = jmp.autocast(way, "mixed_float16")(q, k, V), way(q, k, V)
    assert np.abs(found - exact).max() < 2e-3


@pytest.mark.parametrize("size", [1.0, 1e-2])
def test_what_a_logarithm_reads_is_scaled_behind(size):
    logarithm = lambda q, k: jnp.log(jnp.abs(jnp.tanh(q) @ jnp.tanh(k).T) / 8)
    q, k = size * Q + size, size * K + size
    found, exact = jmp.autocast(logarithm, "mixed_float16")(q, k), logarithm(q, k)
    np.testing.assert_allclose(found, exact, atol=0.02)


unit = lambda x: x * lax.rsqrt(jnp.sum(x**2, -1, keepdims=True))


def normalised(q, k, v, size=3e5):
    """float16 does not hold these queries, and holds them scaled."""
    q, k = unit(jnp.tanh(q @ W)) * size, unit(jnp.tanh(k @ W)) * (8 / size)
    return jax.nn.softmax(q @ k.T / 8) @ v


def of_one_array(q, _, v):
    q = 8 * unit(q @ W)
    return jax.nn.softmax(jnp.einsum("qd,kd->qk", q, q) / 8) @ v


@pytest.mark.parametrize("scores", [normalised, of_one_array])
def test_an_operand_is_scaled_before_it_is_rounded(scores):
    found, exact = jmp.autocast(scores, "mixed_float16")(Q, K, V), scores(Q, K, V)
    assert np.abs(found - exact).max() < 5e-3


def test_a_layer_and_bfloat16_are_left_as_they_are():
    layer = lambda w, x: jax.nn.softmax(jnp.tanh(x @ w) @ w / 8) @ w
    w = jnp.ones((WIDTH, WIDTH))

    def factors(fun, policy, *args):
        """What products' operands are multiplied by, and what a result is divided by."""
        equations = [named(name, jmp.autocast(fun, policy), *args) for name in ("mul", "div")]
        read = [[atom for e in found for atom in e.invars[1:]] for found in equations]
        return [{float(x.val) for x in atoms if isinstance(x, Literal)} for atoms in read]

    assert factors(layer, "mixed_float16", w, Q) == [set(), {8}]
    assert factors(over_root, "mixed_bfloat16", Q, K, V) == [set(), {8}]
    assert factors(over_root, "mixed_float16", Q, K, V) == [{1 / 4, 1 / 2}, {1}]
