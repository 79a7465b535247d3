"""`with_loss_scale`, `with_master_params`, `mixed_precision`: what moves, and what must not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp
from jmp import transforms
from tests.cases import HALF


def test_consecutive_skips_count_and_restart():
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(8.0))
    state, seen = tx.init(jnp.ones(2)), []
    for bad in (True, True, False, True):
        _, state = tx.update(jnp.full(2, jnp.nan if bad else 1.0), state)
        seen.append((int(state.skipped_steps), int(state.consecutive_skips)))
    assert seen == [(1, 1), (2, 2), (2, 0), (3, 1)]


def test_no_gradient_is_halved_on_a_growth_step():
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(4.0, period=1))
    state = tx.init(jnp.float32(0))
    for _ in range(5):
        updates, state = tx.update(state.loss_scale.scale(jnp.float32(1.0)), state)
        assert updates == -1.0


def test_clipping_sees_true_gradients_of_half_precision():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = transforms.with_loss_scale(clipped, jmp.StaticLossScale(4.0))
    # Squares of 6e4 overflow float16, and 6e4 / 4 does not survive a half norm.
    updates, _ = tx.update(jnp.full(4, 6e4, jnp.float16), tx.init(jnp.zeros(4)))
    np.testing.assert_allclose(updates, -0.5, rtol=1e-6)


@pytest.mark.parametrize(
    "inner", [optax.adam, optax.adamw, optax.lamb, optax.rmsprop, optax.adagrad, optax.nadam]
)
def test_a_zero_half_gradient_is_no_nan(inner):
    params = jnp.ones(3, jnp.float16)
    tx = transforms.with_loss_scale(inner(1e-3), jmp.StaticLossScale(8.0))
    updates, state = tx.update(jnp.zeros(3, jnp.float16), tx.init(params), params)
    assert jmp.all_finite((updates, state))
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(leaf.dtype == jnp.float32 for leaf in floats)


def test_without_a_scale_nothing_is_checked_or_selected():
    tx = transforms.with_loss_scale(optax.sgd(1.0, momentum=0.9), jmp.NoOpLossScale())
    jaxpr = str(jax.make_jaxpr(tx.update)(jnp.ones(2, jnp.float16), tx.init(jnp.ones(2))))
    assert "is_finite" not in jaxpr and "select_n" not in jaxpr


@pytest.mark.parametrize("keep", [lambda tx: tx, transforms.with_master_params])
def test_gradients_that_a_line_search_is_given_again_are_unscaled_too(keep):
    return_grad = lambda u, state, params=None, *, grad: (grad, state)
    inner = optax.GradientTransformationExtraArgs(lambda params: (), return_grad)
    tx = transforms.with_loss_scale(keep(inner), jmp.StaticLossScale(8.0))
    params, grads = jnp.zeros(1), jnp.array([8.0], jnp.float16)
    updates, _ = tx.update(grads, tx.init(params), params, grad=grads)
    assert updates == 1.0 and updates.dtype == jnp.float32


@pytest.mark.parametrize("scale", [jmp.NoOpLossScale(), jmp.DynamicLossScale(8.0)])
def test_moments_of_a_half_group_without_masters_are_float32_beside_one_with(scale):
    params = {"a/b": jnp.ones(2, jnp.float16), "a": {"b": jnp.full(2, 2.0, jnp.float16)}}
    groups = {"with": transforms.with_master_params(optax.adam(1e-2)), "without": optax.adam(1e-2)}
    labels = {"a/b": "with", "a": {"b": "without"}}
    tx = transforms.with_loss_scale(optax.partition(groups, labels), scale)
    state = tx.init(params)
    gradients = jax.tree.map(lambda p: jnp.full_like(p, 1e-4), params)  # squared: 0 in float16
    for _ in range(3):
        updates, state = tx.update(state.loss_scale.scale(gradients), state, params)
        np.testing.assert_allclose(updates["a"]["b"], -0.01, rtol=2e-3)
    # Paths that read alike are told apart.
    assert transforms.masters(state, params)["a"]["b"][0] == 2


@pytest.mark.parametrize(
    ("policy", "scale", "has_masters"),
    [
        ("float32", jmp.NoOpLossScale, False),
        ("mixed_float16", jmp.DynamicLossScale, False),
        ("mixed_bfloat16", jmp.NoOpLossScale, False),
        ("O2", jmp.DynamicLossScale, True),
        ("p=bf16,c=bf16,o=f32", jmp.NoOpLossScale, True),
    ],
)
def test_mixed_precision_adds_what_the_policy_needs(policy, scale, has_masters):
    params = jmp.get_policy(policy).cast_to_param({"w": jnp.ones(2)})
    state = transforms.mixed_precision(optax.sgd(1.0), policy).init(params)
    assert type(state.loss_scale) is scale
    assert isinstance(state.inner_state, transforms.WithMasterParamsState) == has_masters
    if has_masters:
        assert state.inner_state.masters["w"].dtype == jnp.float32


def test_numbers_of_python_and_numpy_in_a_state_stay_as_they_are():
    own = {"rate": 0.5, "table": np.ones(2), "weak": jnp.asarray(0.5)}
    update = lambda updates, state, _=None: (updates, state)
    inner = optax.GradientTransformation(lambda _: own, update)
    tx = transforms.with_loss_scale(inner, jmp.StaticLossScale(1.0))
    found = tx.init({"w": jnp.ones(2)}).inner_state
    assert [type(found[name]) for name in ("rate", "table")] == [float, np.ndarray]
    assert own["weak"].weak_type and not found["weak"].weak_type


def test_a_scale_of_zero_is_refused_in_a_state_too():
    state = transforms.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(8.0)).init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"^StaticLossScale\(0\) multiplies every gradient"):
        transforms.set_loss_scale(state, jmp.StaticLossScale(0))


# What the numbers of an update rest on: what `inner` sees, and which zero a parameter keeps.


def watched(seen):
    """Gradient descent that notes the parameters it is given in `update`."""

    def update(updates, state, params):
        seen.append(params)
        return jax.tree.map(lambda g: -g, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


IN_FLOAT32 = {
    "without a scale": lambda tx: transforms.with_loss_scale(tx, jmp.NoOpLossScale()),
    "scaled": lambda tx: transforms.with_loss_scale(tx, jmp.DynamicLossScale(1.0)),
    "masters": transforms.with_master_params,
    "masters, scaled": lambda tx: transforms.mixed_precision(tx, "O2", jmp.StaticLossScale(1)),
}


@pytest.mark.parametrize("way", IN_FLOAT32)
@pytest.mark.parametrize("dtype", HALF)
def test_inner_is_given_float32_parameters_and_masters_not_what_they_are_rounded_to(dtype, way):
    # A weight decay of 1e-6 would be zero in float16.
    seen = []
    tx = IN_FLOAT32[way](watched(seen))
    params = {"half": jnp.ones(2, dtype), "full": jnp.ones(2)}
    gradients = {"half": jnp.full(2, 2.0**-14, dtype), "full": jnp.zeros(2)}
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(seen)} == {"float32"}
    if "masters" in way:
        np.testing.assert_array_equal(seen[1]["half"], np.full(2, 1 - 2.0**-14, np.float32))


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
