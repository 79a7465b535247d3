"""Kahan summation: small updates add up, and XLA does not cancel what is added."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp import transforms

ADD = optax.identity()  # the gradient is the update


@pytest.mark.parametrize(("dtype", "error"), [(jnp.bfloat16, 0.1), (jnp.float16, 2e-3)])
def test_a_thousand_updates_below_the_spacing_add_up(dtype, error):
    """The compensation is rounded in each step: of ten updates bfloat16 may lose one."""
    tx = transforms.with_kahan_summation(ADD)
    rng = np.random.default_rng(0)
    params = jnp.asarray(1 + rng.random(256), dtype)
    each = jnp.float32(1e-4 * (1 + rng.random(256)))
    exact = np.float64(params) + 1000 * np.float64(each)

    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(each, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), length=1000)
        return params, transforms.masters(state, params)

    new, masters = run(params)
    moved = exact - np.float64(params)
    assert (np.abs(np.float64(masters) - exact) <= error * moved).all()
    spacing = float(jnp.finfo(dtype).eps) * 2
    assert (np.abs(np.float64(new) - np.float64(masters)) <= spacing / 2).all()


def test_what_a_parameter_lacks_is_there_under_jit():
    """Where it is computed by casts in bfloat16, XLA may cancel it: (a + b) - a is b."""

    def kept(a, b):
        total = (a + b).astype(jnp.bfloat16)
        return b - (total - a).astype(jnp.float32)

    a, b = jnp.ones(8, jnp.bfloat16), jnp.full(8, 1e-3, jnp.float32)
    assert (kept(a, b) == b).all()  # operation by operation nothing of b arrives
    tx = transforms.with_kahan_summation(ADD)

    @jax.jit
    def compensation(a, b):
        updates, state = tx.update(b, tx.init(a), a)
        return optax.apply_updates(a, updates), state.compensations

    params, lack = compensation(a, b)
    assert (params == 1).all()
    assert (lack == b.astype(jnp.bfloat16)).all()


def test_what_is_lacking_beyond_the_range_is_finite():
    tx = transforms.with_kahan_summation(ADD)
    params = jnp.float16([6e4, -6e4, 1.0])
    updates, state = tx.update(jnp.float32([1e6, -1e6, jnp.inf]), tx.init(params), params)
    assert jnp.isfinite(optax.apply_updates(params, updates)).all()
    assert jnp.isfinite(state.compensations).all()


def test_the_largest_numbers_of_float32_stay_finite_with_the_digits_of_both():
    """Rounded to the nearest, what bfloat16's largest number lacks would lead to an infinity."""
    tx = transforms.with_kahan_summation(ADD)
    params = jnp.ones(4, jnp.bfloat16)
    largest = float(jnp.finfo(jnp.float32).max)
    wanted = jnp.float32([largest, -largest, 3.3953e38, jnp.inf])
    params, state = transforms.set_masters(tx.init(params), params, wanted)
    masters = transforms.masters(state, params)
    exact = np.clip(np.float64(wanted), -largest, largest)
    np.testing.assert_allclose(np.float64(masters), exact, rtol=2.0**-15)
    updates, state = tx.update(-masters / 4, state, params)
    moved = transforms.masters(state, optax.apply_updates(params, updates))
    np.testing.assert_allclose(np.float64(moved), 0.75 * exact, rtol=2.0**-15)


def test_steps_across_the_whole_range_end_in_finite_numbers():
    tx = transforms.with_kahan_summation(ADD)
    largest = float(jnp.finfo(jnp.bfloat16).max)
    params = jnp.bfloat16([-largest, largest])
    state = tx.init(params)
    for _ in range(3):  # twice the way that one float32 difference can say
        updates, state = tx.update(jnp.float32([3.4e38, -3.4e38]), state, params)
        params = optax.apply_updates(params, updates)
        assert jnp.isfinite(transforms.masters(state, params)).all()
