"""Masks that are added to scores, where the softmax stands in a function of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from tests.commands import in_full

LOWEST = float(jnp.finfo(jnp.float32).min)
ROWS = jnp.linspace(-100.0, 100.0, 4 * 8 * 8).reshape(4, 8, 8)
EYE = jnp.eye(8)


@jax.checkpoint
def weigh(scores, w):
    return jax.nn.softmax(scores) @ w


def one(x, w, mask):
    return weigh(x @ w + mask, w)


def two(x, w, mask):
    return weigh(x @ w + mask + mask, w)


def subtracted(x, w, mask):
    return weigh(x @ w - -mask - -mask, w)


def chosen_and_added(x, w, mask):
    return weigh(jnp.where(mask < 0, mask, x @ w) + mask, w)


@pytest.mark.parametrize("function", [one, two, subtracted, chosen_and_added])
@pytest.mark.parametrize("fill", in_full([-4e4, -1e9], first=1))
def test_a_row_masked_wholly_by_one_or_two_added_masks_is_as_finite_as_in_float32(function, fill):
    kept = jnp.arange(8)[None] < jnp.array([8, 5, 1, 0])[:, None]  # the last example has no key
    mask = jnp.where(kept, 0.0, fill)[:, None]
    expected = jax.jit(function)(ROWS, EYE, mask)
    assert np.isfinite(expected).all()
    for policy in ("mixed_float16", "mixed_bfloat16"):
        ours = jmp.autocast(function, policy)
        got = ours(ROWS, EYE, mask)
        assert np.isfinite(got).all()
        # Of a row without a key float32 keeps part of the scores, float16 none: any average.
        np.testing.assert_allclose(got[:3], expected[:3], atol=0.1)
        _, pull_back = jax.vjp(ours, ROWS, EYE, mask)
        assert all(np.isfinite(leaf).all() for leaf in pull_back(got))


def test_an_overflow_that_no_mask_makes_is_seen():
    product = jax.checkpoint(lambda s, w: s @ w)
    function = jmp.autocast(lambda x, w, y: product(x @ w + y, w), "mixed_float16")
    large = jnp.full((4, 8, 8), 6e4)
    for sign, added in ((1, 6e4), (-1, 9e3), (-1, -jnp.inf)):
        got = function(sign * large, EYE, jnp.full((4, 1, 8), sign * abs(added)))
        assert not np.isfinite(got).any()


@pytest.mark.parametrize("t", [jnp.full((8, 8), 1e5), jnp.float32(1e5), jnp.full((1, 8), 1e5)])
def test_a_large_argument_that_is_no_mask_is_seen(t):
    loss = jmp.autocast(lambda x, w, t: jnp.sum((jnp.abs(x @ w + t) @ w) ** 2), "mixed_float16")
    value, gradient = jax.value_and_grad(loss)(ROWS[0], EYE, t)
    assert not np.isfinite(value) and not np.isfinite(gradient).all()
