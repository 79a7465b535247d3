"""Masks that are added to scores, and that products read, as mixtures of experts have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from jmp import diagnostics
from jmp.autocasting._lowerings import masked
from tests.commands import in_full

# Products with booleans are half, as with a mask that is cast.

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (2, 8, 16))
W = jax.random.normal(KEYS[1], (16, 16)) / 4
MASK = jax.random.bernoulli(KEYS[2], 0.3, (2, 8, 4, 3))


def dispatched(x, w, mask):
    return jnp.einsum("bsm,bsec->ebcm", jnp.tanh(x @ w), mask)


def in_a_vmap(x, w, mask):
    return jax.vmap(lambda x, mask: jnp.einsum("sm,sec->ecm", jnp.tanh(x @ w), mask))(x, mask)


def alone_in_a_scan(x, w, mask):
    turn = lambda carry, now: (carry, jnp.einsum("sm,sec->ecm", *now))
    return jax.lax.scan(turn, 0, (jnp.tanh(x @ w), mask))[1]


def on_the_left(x, w, mask):
    return jnp.einsum("bsec,bsm->ebcm", mask, jnp.tanh(x @ w))


def programs(fun):
    """The gradient of `fun` under autocast, with booleans and with what users cast themselves."""

    loss = lambda x, w, mask: jnp.sum(jnp.square(fun(x, w, mask)))
    return loss, lambda x, w, mask: loss(x, w, mask.astype(jnp.float32))


@pytest.mark.parametrize("half", in_full(["float16", "bfloat16"], first=1))
@pytest.mark.parametrize("fun", [dispatched, in_a_vmap, alone_in_a_scan, on_the_left])
def test_a_product_with_booleans_is_half_like_one_with_a_cast_mask(fun, half):
    loss, cast = programs(fun)
    report = diagnostics.precision_report(loss, f"mixed_{half}")(X, W, MASK)
    assert {row.dtype_in for row in report.rows if row.kind == "product"} == {half}
    found, expected = (
        jax.jit(jax.grad(jmp.autocast(f, f"mixed_{half}"), argnums=(0, 1)))(X, W, MASK)
        for f in (loss, cast)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_is_added_up_to_a_loss_is_no_mask():
    def loss(x, w):
        for _ in range(2):
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    program = jax.make_jaxpr(jmp.autocast(loss, "mixed_float16"))(jnp.ones((1024, 16)), W)
    assert "65504" not in str(program)


def test_a_product_with_booleans_of_which_the_user_asked_for_all_digits_stays_float32():
    def loss(x, w, mask):
        return jnp.einsum("bsm,bsec->ebcm", jnp.tanh(x @ w), mask, precision="highest").sum()

    rows = diagnostics.precision_report(loss, "mixed_bfloat16")(X, W, MASK).rows
    assert [row.dtype_in for row in rows if row.kind == "product"] == ["bfloat16", "float32"]


def test_counts_by_booleans_stay_exact():
    def counts(mask):
        return jnp.tril(jnp.ones((700, 700), bool)).astype(jnp.float32) @ mask

    mask = jnp.ones((700, 2), bool)
    np.testing.assert_array_equal(jmp.autocast(counts, "mixed_bfloat16")(mask), counts(mask))


# Masks that are added to scores. The softmax stands in a function of its own.

ROWS = jnp.linspace(-100.0, 100.0, 4 * 8 * 8).reshape(4, 8, 8)
EYE = jnp.eye(8)


@jax.checkpoint
def weigh(scores, w):
    return jax.nn.softmax(scores) @ w


ADDED = {
    "one": lambda x, w, mask: weigh(x @ w + mask, w),
    "two": lambda x, w, mask: weigh(x @ w + mask + mask, w),
    "subtracted": lambda x, w, mask: weigh(x @ w - -mask - -mask, w),
    "chosen and added": lambda x, w, mask: weigh(jnp.where(mask < 0, mask, x @ w) + mask, w),
}


@pytest.mark.parametrize("function", ADDED.values(), ids=ADDED)
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
        # A row without a key is any average: float32 keeps part of its scores, float16 none.
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


def test_what_a_mask_carried_there_stays_finite_from_ten_thousand_on():
    """A mask of -1e4 is one, as in many models; a smaller number that overflows is no mask."""
    sums = jnp.full(3, -jnp.inf, jnp.float16)
    masks = jnp.array([-1e4, -9992, jnp.nan], jnp.float16)
    np.testing.assert_array_equal(masked(sums, masks), [-65504, -np.inf, -np.inf])
    np.testing.assert_array_equal(masked(sums, masks, jnp.full(3, jnp.inf)), sums)


@pytest.mark.parametrize("t", [jnp.full((8, 8), 1e5), jnp.float32(1e5), jnp.full((1, 8), 1e5)])
def test_a_large_argument_that_is_no_mask_is_seen(t):
    loss = jmp.autocast(lambda x, w, t: jnp.sum((jnp.abs(x @ w + t) @ w) ** 2), "mixed_float16")
    value, gradient = jax.value_and_grad(loss)(ROWS[0], EYE, t)
    assert not np.isfinite(value) and not np.isfinite(gradient).all()
