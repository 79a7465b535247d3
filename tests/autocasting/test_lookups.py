"""Rows that are looked up once at most have half gradients; others add up in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from tests.autocasting.plans import plan_of

X, W = jnp.ones((32, 16)), jnp.ones((16, 16))
PAIRS = np.triu_indices(16, 1)

# The function, and whether each row or number is taken once at most.
LOOKUPS = {
    "constants that differ": (lambda x: x[:, np.array([3, 1, 2])], True),
    "constants of which two are the same": (lambda x: x[:, np.array([3, 1, 3])], False),
    "negative ones": (lambda x: x[:, np.array([3, 1, -1])], True),
    "a negative one that is the same": (lambda x: x[:, np.array([3, 15, -1])], False),
    "one beyond the end": (lambda x: x[:, np.array([15, 1, 16])], False),
    "one before the beginning": (lambda x: x[:, np.array([0, 1, -17])], False),
    "a triangle": (lambda x: x[:16][PAIRS], True),
    "a triangle by jnp": (lambda x: x[:16][jnp.triu_indices(16, 1)], False),  # would be compiled
    "both triangles": (lambda x: x[:16][np.concatenate([PAIRS, PAIRS[::-1]], 1)], False),
    "a range": (lambda x: x[jnp.arange(4) * 2], True),
    "a range that is folded": (lambda x: x[jnp.arange(4) // 2], False),
    "parts of one row": (lambda x: x[np.array([1, 1]), np.array([0, 5])], True),
    "an order": (lambda x: x[jnp.argsort(x[:, 0])], True),
    "an order of experts": (lambda x: x[jnp.argsort(jnp.argmax(x, 1))], True),
    "part of an order": (lambda x: x[jnp.argsort(x[:, 0])[:16]], True),
    "an order repeated": (lambda x: x[jnp.repeat(jnp.argsort(x[:, 0])[:4], 2)], False),
    "an order broadcast": (
        lambda x: x[jnp.broadcast_to(jnp.argsort(x[:, 0])[:, None], (32, 2))[:8]],
        False,
    ),
    "a place of an order twice": (lambda x: x[jnp.argsort(x[:, 0]) // 2], False),
    "an order of more": (lambda x: x[jnp.argsort(x[:, :2].ravel())], False),
    "what was sorted": (lambda x: x[jnp.sort(jnp.argmax(x, 1))], False),
    "indices of the input": (lambda x: x[jnp.argmax(x, 1)], False),
    "windows that overlap": (
        lambda x: jax.vmap(lambda i: jax.lax.dynamic_slice(x, (i, 0), (2, 16)))(jnp.arange(3)),
        False,
    ),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_of_what_differs_is_half(name):
    look_up, is_once = LOOKUPS[name]
    plan = plan_of(lambda x: look_up(x @ W), X)
    (gather,) = (step for step in plan.steps if step.node.name == "gather")
    assert gather.is_half == is_once


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_has_the_gradient_of_what_it_looks_up(name):
    look_up, _ = LOOKUPS[name]
    values = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (32, 16)), jnp.float32)
    loss = lambda x: (look_up(x) * 3.0).sum()  # each gradient is a small integer: exact in half
    found = jax.grad(jmp.autocast(lambda x: loss(x @ jnp.eye(16)), "mixed_float16"))(values)
    np.testing.assert_array_equal(found, jax.grad(loss)(values))
