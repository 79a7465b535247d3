"""Steps that other libraries get wrong, and this one must not; other files hold the rest."""

import jax
import jax.numpy as jnp
import optax

import jmp
from jmp import transforms
from jmp.adapters import linen


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


def test_a_model_that_is_dead_is_seen_and_its_scale_stays_at_the_floor():
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(8.0, min_loss_scale=0.0))
    gradients, step = jnp.full(2, jnp.nan), jax.jit(tx.update)
    state = tx.init(gradients)
    for _ in range(300):
        _, state = step(gradients, state)
    assert state.loss_scale.loss_scale == 2.0**-126
    assert state.consecutive_skips == state.skipped_steps == 300


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


def test_a_train_state_subclass_of_a_users_own_works():
    class MyState(linen.TrainState):
        key: jax.Array | None = None
        ema: jax.Array | None = None

    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(2.0))
    state = MyState.create(
        apply_fn=None, params={"w": jnp.ones(2)}, tx=tx, key=jax.random.key(0), ema=jnp.zeros(2)
    )
    step = jax.jit(lambda s, g: s.apply_gradients(grads={"w": g}, ema=s.ema + 1))
    state = step(step(state, jnp.full(2, jnp.inf)), 2 * jnp.ones(2))
    assert state.ema[0] == 1.0 and state.step == 1
    assert state.params["w"][0] == -1.0  # the scale was halved to 1 by the skip
