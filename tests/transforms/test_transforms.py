"""`with_loss_scale`, `with_master_params`, `mixed_precision`: what moves, and what must not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp
from jmp import transforms
from tests.bits import bits
from tests.cases import HALF
from tests.commands import in_full

OPTIMIZERS = {
    "adam, schedule": lambda: optax.adam(optax.linear_schedule(1e-2, 0.0, 10)),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "accumulating": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False, "z": True}),
}


def make_params():
    w = jax.random.normal(jax.random.key(0), (3, 4))
    return {"w": w, "b": jnp.linspace(-1, 1, 4), "z": jnp.array([0.0, -0.0])}


def make_gradients(step, dtype, params):
    keys = iter(jax.random.split(jax.random.key(step + 1), len(params)))
    draw = lambda p: jax.random.normal(next(keys), p.shape).astype(dtype)
    return {name: draw(param) for name, param in params.items()}


@functools.partial(jax.jit, static_argnums=0)
def apply(update, gradients, opt_state, params):
    updates, opt_state = update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@functools.cache
def scaled(optimizer):
    """Made once, so that `apply` is compiled once for all tests of an optimizer and a dtype."""
    return transforms.with_loss_scale(optimizer(), jmp.DynamicLossScale(8.0, period=2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("dtype", in_full([*HALF, jnp.float32], first=1))
@pytest.mark.parametrize("bad_step", in_full([0, 2, 4], one_of=2))
def test_a_bad_step_moves_nothing_and_the_run_goes_on_as_if_it_had_not_been(
    optimizer, dtype, bad_step
):
    tx = scaled(optimizer)
    params = make_params()
    state = tx.init(params)
    for step in range(bad_step):
        params, state = apply(tx.update, make_gradients(step, dtype, params), state, params)

    gradients = make_gradients(bad_step, dtype, params)
    backed_off = state.loss_scale.adjust(False)
    for leaf in params:
        for bad in (jnp.inf, -jnp.inf, jnp.nan):
            ruined = gradients | {leaf: gradients[leaf].at[..., -1].set(bad)}
            new_params, new_state = apply(tx.update, ruined, state, params)
            assert bits(new_params) == bits(params)
            assert bits(new_state.inner_state) == bits(state.inner_state)
            assert not new_state.grads_finite
            assert new_state.skipped_steps == new_state.consecutive_skips == 1
            assert bits(new_state.loss_scale) == bits(backed_off)

    # As a run that starts here with the parameters and the state of before, and the new scale.
    fresh = tx.init(params)._replace(inner_state=state.inner_state, loss_scale=backed_off)
    other_params = params
    for step in range(bad_step + 1, bad_step + 4):
        gradients = make_gradients(step, dtype, params)
        new_params, new_state = apply(tx.update, gradients, new_state, new_params)
        other_params, fresh = apply(tx.update, gradients, fresh, other_params)
        assert bits(new_params) == bits(other_params)
        assert bits(new_state.inner_state) == bits(fresh.inner_state)


def test_consecutive_skips_count_and_restart():
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(8.0))
    state, seen = tx.init(jnp.ones(2)), []
    for bad in (True, True, False, True):
        _, state = tx.update(jnp.full(2, jnp.nan if bad else 1.0), state)
        seen.append((int(state.skipped_steps), int(state.consecutive_skips)))
    assert seen == [(1, 1), (2, 2), (2, 0), (3, 1)]


def test_updates_are_those_of_the_plain_optimizer_on_float32_gradients():
    params, plain = make_params(), optax.adam(1e-2)
    tx = transforms.with_loss_scale(plain, jmp.DynamicLossScale(2.0**10, period=2))
    state, plain_state, plain_params = tx.init(params), plain.init(params), params
    for step in range(6):  # growth steps included
        gradients = make_gradients(step, jnp.float32, params)
        scaled = state.loss_scale.scale(gradients)
        params, state = apply(tx.update, scaled, state, params)
        plain_params, plain_state = apply(plain.update, gradients, plain_state, plain_params)
        # Scaling by powers of two is exact; the compiler may fuse the rest differently.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, plain_params)


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_one_compilation_with_donated_buffers_and_init_is_good_for_two_runs(optimizer):
    tx = transforms.with_loss_scale(optimizer(), jmp.DynamicLossScale(8.0, 0, 2))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params = make_params()
        state = tx.init(params)
        for i in range(6):
            params, state = step(params, state, make_gradients(i, jnp.float16, params))
    assert step._cache_size() == 1


def test_it_runs_in_a_scan():
    tx = transforms.with_loss_scale(optax.adam(1e-2), jmp.DynamicLossScale(8.0))
    gradients = jnp.array([[1.0, 2.0], [jnp.inf, 1.0], [3.0, 4.0]])

    def step(carry, gradient):
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), state.grads_finite

    params = jnp.ones(2)
    (_, state), finite = jax.lax.scan(step, (params, tx.init(params)), gradients)
    assert finite.tolist() == [True, False, True]
    assert state.inner_state[0].count == 2


@pytest.mark.parametrize("keep", [lambda tx: tx, transforms.with_master_params])
def test_gradients_that_a_line_search_is_given_again_are_unscaled_too(keep):
    return_grad = lambda u, state, params=None, *, grad: (grad, state)
    inner = optax.GradientTransformationExtraArgs(lambda params: (), return_grad)
    tx = transforms.with_loss_scale(keep(inner), jmp.StaticLossScale(8.0))
    params, grads = jnp.zeros(1), jnp.array([8.0], jnp.float16)
    updates, _ = tx.update(grads, tx.init(params), params, grad=grads)
    assert updates == 1.0 and updates.dtype == jnp.float32


@pytest.mark.parametrize("dtype", HALF)
def test_parameters_equal_their_rounded_masters_and_masters_equal_a_float32_run(dtype):
    spread = lambda p: (p * 2.0 ** (4 * p - 6)).astype(dtype)  # of very different magnitudes
    params = jax.tree.map(spread, make_params())
    params["norm"] = jnp.ones(4)
    tx = transforms.with_master_params(optax.adamw(3e-3))
    plain = optax.adamw(3e-3)
    full = jmp.cast_to_full(params)
    state, plain_state = tx.init(params), plain.init(full)
    for step in range(100):
        gradients = jax.tree.map(lambda p, i=step: jnp.sin(p.astype("f4") * 99 + i), full)
        params, state = apply(tx.update, gradients, state, params)
        full, plain_state = apply(plain.update, gradients, plain_state, full)
        masters = transforms.masters(state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), masters, full)
        for name, param in params.items():
            rounded = masters[name].astype(param.dtype)
            np.testing.assert_array_equal(param, rounded)
            # In bfloat16, as wide as float32, -0.0 is the one value no addition to +0.0 can give.
            assert param.dtype == jnp.bfloat16 or bits(param) == bits(rounded)
    assert isinstance(state.masters["norm"], optax.MaskedNode)


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
    params = jmp.get_policy(policy).cast_to_param(make_params())
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
