"""What the numbers of an update rest on: what `inner` sees, and which zero a parameter keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp
from jmp import transforms
from tests.cases import HALF


def watched(seen):
    """Gradient descent that notes the parameters it is given in `update`."""

    def update(updates, state, params):
        seen.append(params)
        return jax.tree.map(lambda g: -g, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("scale", [jmp.NoOpLossScale(), jmp.DynamicLossScale(8.0)])
def test_inner_is_given_half_parameters_in_float32(dtype, scale):
    # A weight decay of 1e-6 would be zero in float16.
    seen = []
    tx = transforms.with_loss_scale(watched(seen), scale)
    params = jnp.ones(2, dtype)
    tx.update(params, tx.init(params), params)
    assert seen[0].dtype == jnp.float32


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: transforms.with_loss_scale(
    tx, jmp.StaticLossScale(1))])  # fmt: skip
@pytest.mark.parametrize("dtype", HALF)
def test_inner_is_given_the_masters_and_not_what_they_are_rounded_to(dtype, wrap):
    seen = []
    tx = wrap(transforms.with_master_params(watched(seen)))
    params = {"half": jnp.ones(2, dtype), "full": jnp.ones(2)}
    gradients = {"half": jnp.full(2, 2.0**-14, dtype), "full": jnp.zeros(2)}
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(seen)} == {"float32"}
    np.testing.assert_array_equal(seen[1]["half"], np.full(2, 1 - 2.0**-14, np.float32))


@pytest.mark.parametrize("dtype", HALF)
def test_a_half_leaf_of_a_frozen_group_is_its_own_master_in_float32(dtype):
    params = {"trained": jnp.ones(2, dtype), "frozen": jnp.full(2, 0.1, dtype)}
    trained = transforms.with_master_params(optax.sgd(0.1))
    groups = {"trained": trained, "frozen": optax.set_to_zero()}
    state = optax.partition(groups, {name: name for name in params}).init(params)
    masters = transforms.masters(state, params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(masters)} == {"float32"}
    np.testing.assert_array_equal(masters["frozen"], params["frozen"].astype(jnp.float32))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("masters", [False, True])
def test_zeros_keep_their_signs_in_a_step_that_is_skipped_and_in_one_that_moves_nothing(
    dtype, masters
):
    inner = optax.sgd(0.1)
    inner = transforms.with_master_params(inner) if masters else inner
    tx = transforms.with_loss_scale(inner, jmp.DynamicLossScale(8.0))
    params = jnp.array([0.0, -0.0, 1.0], dtype)
    state = tx.init(params)
    updates, state = tx.update(jnp.full(3, jnp.inf, dtype), state, params)
    assert not state.grads_finite
    assert (np.signbit(updates) & (updates == 0)).all()
    for gradient in (jnp.inf, 0.0):
        updates, state = tx.update(jnp.full(3, gradient, dtype), state, params)
        moved = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(np.signbit(moved), [False, True, False])


def test_mixed_precision_hands_on_the_axes_whose_devices_must_agree():
    tx = transforms.mixed_precision(optax.sgd(1.0), "mixed_float16", axis_name="batch")
    params = jnp.ones(2)
    state = tx.init(params)
    gradients = jnp.array([[1.0, 1.0], [1.0, jnp.inf]])
    update = jax.vmap(lambda g: tx.update(g, state, params)[1].grads_finite, axis_name="batch")
    np.testing.assert_array_equal(update(gradients), [False, False])


def test_a_zero_parameter_takes_the_sign_of_a_master_that_rounds_to_it():
    # 0.0 + -0.0 is 0.0: the update must be a number that float16 rounds to -0.0.
    tx = transforms.with_master_params(optax.sgd(1.0))
    params = jnp.array([0.0, -0.0], jnp.float16)
    gradients = jnp.array([1e-9, -1e-9], jnp.float32)
    updates, _ = tx.update(gradients, tx.init(params), params)
    np.testing.assert_array_equal(np.signbit(optax.apply_updates(params, updates)), [True, False])
