"""Products with booleans, as mixtures of experts dispatch tokens: half, as a mask that is cast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from jmp import diagnostics
from tests.commands import in_full

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (2, 8, 16))
W = jax.random.normal(KEYS[1], (16, 16)) / 4
MASK = jax.random.bernoulli(KEYS[2], 0.3, (2, 8, 4, 3))


def dispatched(x, w, mask):
    return jnp.einsum("bsm,bsec->ebcm", jnp.tanh(x @ w), mask)


def in_a_jit(x, w, mask):
    return jax.jit(dispatched)(x, w, mask)


def in_a_vmap(x, w, mask):
    return jax.vmap(lambda x, mask: jnp.einsum("sm,sec->ecm", jnp.tanh(x @ w), mask))(x, mask)


def in_a_scan(x, w, mask):
    turn = lambda carry, now: (carry, jnp.einsum("sm,sec->ecm", jnp.tanh(now[0] @ w), now[1]))
    return jax.lax.scan(turn, 0, (x, mask))[1]


def alone_in_a_scan(x, w, mask):
    turn = lambda carry, now: (carry, jnp.einsum("sm,sec->ecm", *now))
    return jax.lax.scan(turn, 0, (jnp.tanh(x @ w), mask))[1]


def in_a_remat(x, w, mask):
    return jax.checkpoint(dispatched)(x, w, mask)


def on_the_left(x, w, mask):
    return jnp.einsum("bsec,bsm->ebcm", mask, jnp.tanh(x @ w))


def programs(fun):
    """The gradient of `fun` under autocast, with booleans and with what users cast themselves."""

    def loss(x, w, mask):
        return jnp.sum(jnp.square(fun(x, w, mask)))

    return loss, lambda x, w, mask: loss(x, w, mask.astype(jnp.float32))


@pytest.mark.parametrize("half", in_full(["float16", "bfloat16"], first=1))
@pytest.mark.parametrize(
    "fun",
    [dispatched, in_a_jit, in_a_vmap, in_a_scan, alone_in_a_scan, in_a_remat, on_the_left],
)
def test_a_product_with_booleans_is_half_like_one_with_a_cast_mask(fun, half):
    loss, cast = programs(fun)
    report = diagnostics.precision_report(loss, f"mixed_{half}")(X, W, MASK)
    assert {row.dtype_in for row in report.rows if row.kind == "product"} == {half}
    found, expected = (
        jax.jit(jax.grad(jmp.autocast(f, f"mixed_{half}"), argnums=(0, 1)))(X, W, MASK)
        for f in (loss, cast)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_product_with_booleans_of_which_the_user_asked_for_all_digits_stays_float32():
    def loss(x, w, mask):
        rows = jnp.tanh(x @ w)
        return jnp.einsum("bsm,bsec->ebcm", rows, mask, precision="highest").sum()

    rows = diagnostics.precision_report(loss, "mixed_bfloat16")(X, W, MASK).rows
    assert [row.dtype_in for row in rows if row.kind == "product"] == ["bfloat16", "float32"]


def test_counts_by_booleans_stay_exact():
    def counts(mask):
        return jnp.tril(jnp.ones((700, 700), bool)).astype(jnp.float32) @ mask

    mask = jnp.ones((700, 2), bool)
    np.testing.assert_array_equal(jmp.autocast(counts, "mixed_bfloat16")(mask), counts(mask))
