"""What other libraries get wrong and this one must not; the rest stands in other test files."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp
from jmp import transforms
from jmp.adapters import linen


def test_a_static_scale_that_jit_returns_leaks_no_tracer():
    scale = jax.jit(lambda s: s.adjust(jnp.array(True)))(jmp.StaticLossScale(8.0))
    assert scale.loss_scale == 8.0
    assert jax.jit(scale.scale)(1.0) == 8.0


@pytest.mark.parametrize("scale", [jmp.StaticLossScale(2.0**15), jmp.DynamicLossScale(2.0**15)])
def test_unscaling_a_half_gradient_flushes_nothing(scale):
    smallest = jnp.array([6e-8], jnp.float16)
    np.testing.assert_allclose(scale.unscale(smallest), 2.0**-24 / 2**15)


def test_the_loss_is_reported_with_the_scale_in_force_on_growth_and_on_overflow():
    tx = transforms.with_loss_scale(optax.sgd(0.0), jmp.DynamicLossScale(4.0, period=2))
    state, scales = tx.init(jnp.float32(3.0)), []
    for bad in (False, False, True, False):
        scales.append(float(state.loss_scale.loss_scale))
        # The loss is finite on every step; on one of them the gradient is not.
        loss_fn = (lambda w: jnp.sqrt(w - 3.0) + 3.0) if bad else (lambda w: w)
        value, gradient = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)(jnp.float32(3.0))
        assert value == 3.0
        _, state = tx.update(gradient, state)
        assert bool(state.grads_finite) != bad
    assert scales == [4.0, 4.0, 8.0, 4.0]


def test_no_gradient_is_halved_on_a_growth_step():
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(4.0, period=1))
    state = tx.init(jnp.float32(0))
    for _ in range(5):
        updates, state = tx.update(state.loss_scale.scale(jnp.float32(1.0)), state)
        assert updates == -1.0


def test_the_scale_grows_on_the_very_step_that_completes_the_period():
    scale = jmp.DynamicLossScale(2.0, period=3)
    grown = [float((scale := scale.adjust(True)).loss_scale) for _ in range(6)]
    assert grown == [2, 2, 4, 4, 4, 8]


def test_a_model_that_is_dead_is_seen_and_its_scale_stays_at_the_floor():
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(8.0, min_loss_scale=0.0))
    gradients, step = jnp.full(2, jnp.nan), jax.jit(tx.update)
    state = tx.init(gradients)
    for _ in range(300):
        _, state = step(gradients, state)
    assert state.loss_scale.loss_scale == 2.0**-126
    assert state.consecutive_skips == state.skipped_steps == 300


def test_float8_metadata_is_not_divided():
    metadata = {"amax": jnp.ones(2, jnp.float8_e4m3fn), "w": jnp.ones(2)}
    unscaled = jmp.DynamicLossScale(4.0).unscale(metadata)
    assert unscaled["amax"] is metadata["amax"]
    assert unscaled["w"][0] == 0.25


def test_integer_parameters_stay_integers():
    tree = {"w": jnp.ones(2), "lookup": jnp.arange(3)}
    assert jmp.get_policy("O3").cast_to_param(tree)["lookup"] is tree["lookup"]


def test_moments_are_float32_even_where_parameters_are_half():
    for dtype in (jnp.float16, jnp.bfloat16):
        params = jnp.ones(3, dtype)
        adam, scale = optax.adam(1e-3), jmp.StaticLossScale(8.0)
        for tx in (
            transforms.mixed_precision(adam, "O2", scale),
            transforms.with_loss_scale(adam, scale),  # without masters, as the user chose
        ):
            state = tx.init(params)
            updates, state = jax.jit(tx.update)(jnp.ones(3, dtype), state, params)
            for leaf in jax.tree.leaves(state):
                assert leaf.dtype in (jnp.float32, jnp.int32, jnp.bool_)


def test_a_second_moment_does_not_stall_where_bfloat16_would():
    params = jnp.ones(1, jnp.bfloat16)
    tx = transforms.with_loss_scale(optax.scale_by_adam(), jmp.NoOpLossScale())
    state, step = tx.init(params), jax.jit(tx.update)
    for _ in range(8000):
        _, state = step(jnp.ones(1, jnp.bfloat16), state, params)
    np.testing.assert_allclose(state.inner_state.nu, 1 - 0.999**8000, rtol=1e-3)


def test_a_train_state_subclass_of_a_users_own_works():
    class MyState(linen.TrainState):
        key: jax.Array | None = None
        ema: jax.Array | None = None

    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(2.0))
    state = MyState.create(
        apply_fn=None,
        params={"w": jnp.ones(2)},
        tx=tx,
        key=jax.random.key(0),
        ema=jnp.zeros(2),
    )
    step = jax.jit(lambda s, g: s.apply_gradients(grads={"w": g}, ema=s.ema + 1))
    state = step(step(state, jnp.full(2, jnp.inf)), 2 * jnp.ones(2))
    assert state.ema[0] == 1.0 and state.step == 1
    assert state.params["w"][0] == -1.0  # the scale was halved to 1 by the skip
