"""`logprob_gap`: against NumPy's float64, at the edges, and what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest

from jmp.diagnostics import logprob_gap

RNG = np.random.default_rng(0)
P = np.log(RNG.dirichlet(np.ones(50), (4, 7)).max(-1)).astype(np.float32)
Q = (P + RNG.normal(0, 0.1, P.shape)).astype(np.float32)


def gap(p, q):
    return logprob_gap(lambda p, q: p, lambda p, q: q)(jnp.asarray(p), jnp.asarray(q))


def test_the_numbers_are_those_of_float64():
    found, difference = gap(P, Q), P.astype(np.float64) - Q.astype(np.float64)
    ratios = np.exp(difference)
    assert (found.tokens, found.nonfinite) == (P.size, 0)
    np.testing.assert_allclose(found.mean, abs(difference).mean(), rtol=1e-12)
    np.testing.assert_allclose(found.maximum, abs(difference).max(), rtol=1e-12)
    np.testing.assert_allclose(found.bias, difference.mean(), rtol=1e-9)
    for share, quantile in found.quantiles.items():
        np.testing.assert_allclose(quantile, np.quantile(abs(difference), share), rtol=1e-12)
    effective = ratios.sum() ** 2 / (ratios.size * (ratios**2).sum())
    np.testing.assert_allclose(found.effective_sample_size, effective, rtol=1e-12)
    assert found.to_dict()["quantiles"] == found.quantiles


def test_what_is_not_finite_is_counted_and_what_is_impossible_in_both_is_no_gap():
    p, q = P.copy(), P.copy()
    p[0, 0] = q[0, 0] = -np.inf
    q[1, 1], p[2, 2] = -np.inf, np.nan
    found = gap(p, q)
    assert (found.tokens, found.nonfinite, found.maximum) == (P.size, 2, 0)
    assert "left out, not finite: 2 tokens" in str(found)


def test_ratios_beyond_the_range_of_floats_have_an_effective_sample_size():
    found = gap(np.float32([0, 0, 0, 0]), np.float32([-2000, 0, 0, 0]))
    assert found.effective_sample_size == 0.25


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16])
def test_half_log_probabilities_are_taken_as_they_are(half):
    rounded = jnp.asarray(P).astype(half)
    difference = P.astype(np.float64) - np.asarray(rounded).astype(np.float64)
    np.testing.assert_allclose(gap(P, rounded).mean, abs(difference).mean(), rtol=1e-12)


MISTAKES = {
    "shapes": (lambda: gap(P, Q[0]), ValueError, r"shapes \(4, 7\) and \(7,\)"),
    "tokens": (lambda: gap(P, jnp.ones((4, 7), int)), TypeError, "from a function; expected an"),
    "a pair": (
        lambda: logprob_gap(lambda p: p, lambda p: (p, p))(P),
        TypeError,
        r"lambda \*args: fun\(\*args\)\[0\]",
    ),
    "none": (lambda: gap(P[:0], Q[:0]), ValueError, "no token with finite.*, of 0"),
    "all NaN": (lambda: gap(P, P * np.nan), ValueError, "no token with finite"),
    "too early": (lambda: logprob_gap(len, len, P), TypeError, "too early"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    make, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        make()
