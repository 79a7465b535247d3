"""Splits under autocast."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jmp
from tests.products import equations_of

ROWS, WIDTH = 64, 256
KEYS = jax.random.split(jax.random.key(0), 4)
X, H = (jax.random.normal(key, (ROWS, 32)) for key in KEYS[:2])
W, U = (jax.random.normal(key, (32, WIDTH)) * 0.3 for key in KEYS[2:])


def test_parts_that_are_outputs_and_sums_of_parts_are_computed():
    def parts(x, h, w, u):
        left, right = lax.split(x @ w, [64] * 4, 1), lax.split(h @ u, [64] * 4, 1)
        return left[1], *(p + q for p, q in zip(left, right, strict=True))

    got = jmp.autocast(parts, "mixed_bfloat16")(X, H, W, U)
    for found, expected in zip(got, parts(X, H, W, U), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)


def test_cotangents_of_a_part_add_up_in_float32():
    """Those of a part that is read twice are rounded once, as their sum."""

    def loss(x, w):
        first, second = jnp.split(x @ w, 2, 1)
        return jnp.sum(first * jax.nn.sigmoid(first) * jnp.tanh(second))

    found = equations_of(jax.grad(jmp.autocast(loss, "mixed_bfloat16")), X, W)
    sums = {
        e.outvars[0].aval.dtype
        for e in found
        if e.primitive.name == "add_any" and e.outvars[0].aval.shape == (ROWS, WIDTH // 2)
    }
    assert sums == {jnp.dtype("float32")}


def test_a_split_in_float32_stays_in_its_island():
    def loss(w, u):
        def turn(h, x):
            first, second = jmp.full_precision(lambda y: jnp.split(y, 2, 1))(x @ w + h @ u)
            return first[:, :32] @ w[:, :32] + second[:, :32], None

        return jnp.sum(lax.scan(turn, H, jnp.stack([X, H, X, H]))[0])

    function = jmp.autocast(loss, "mixed_bfloat16", recompute="all")
    np.testing.assert_allclose(function(W, U), loss(W, U), rtol=0.05, atol=2.0)
