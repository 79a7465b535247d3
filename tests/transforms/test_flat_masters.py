"""Masters as one flat vector: the same training, bit for bit, and a way to and from the tree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp
from jmp import transforms
from tests.commands import in_full

flat_masters = functools.partial(transforms.with_master_params, flat_master=True)


def parameters(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"kernel": (3, 5), "bias": (5,), "scalar": ()}
    return {
        name: jax.random.normal(key, shape, dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def train(tx, params, steps, bad_step=None):
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, params)
    for i in range(steps):
        gradients = jax.tree.map(lambda p, i=i: jnp.sin(p * (i + 1)) * 8, params)
        if i == bad_step:
            gradients["bias"] = gradients["bias"].at[0].set(jnp.inf)
        params, state = step(params, state, gradients)
    assert step._cache_size() == 1
    return params, state


@pytest.mark.parametrize("dtype", in_full([jnp.float16, jnp.bfloat16], first=1))
@pytest.mark.parametrize("scale", [None, jmp.StaticLossScale(8.0), jmp.DynamicLossScale(8.0)])
def test_training_is_the_same_as_with_a_tree_of_masters(dtype, scale):
    def make(masters):
        inner = masters(optax.adamw(1e-3))
        return inner if scale is None else transforms.with_loss_scale(inner, scale)

    bad_step = 3 if isinstance(scale, jmp.DynamicLossScale) else None
    params, state = train(make(transforms.with_master_params), parameters(dtype), 10, bad_step)
    flat_params, flat_state = train(make(flat_masters), parameters(dtype), 10, bad_step)
    jax.tree.map(np.testing.assert_array_equal, flat_params, params)
    masters = transforms.masters(flat_state, flat_params)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_max_ulp(a, b, 1),
        masters,
        transforms.masters(state, params),
    )
    for name, param in flat_params.items():
        np.testing.assert_array_equal(param, masters[name].astype(dtype))


def test_the_vector_and_the_tree_are_one_another_s_inverse():
    params = parameters(jnp.float16)
    state = flat_masters(optax.adam(1e-3), jnp.float32).init(params)
    assert state.masters.vector.shape == state.inner_state[0].mu.shape == (21,)
    assert state.masters.vector.dtype == state.inner_state[0].nu.dtype == jnp.float32
    tree = transforms.masters(state, params)
    jax.tree.map(lambda m, p: np.testing.assert_array_equal(m, p.astype("float32")), tree, params)
    again = transforms.FlatMasters.from_tree(params, "float32")
    np.testing.assert_array_equal(again.vector, state.masters.vector)
    assert again.paths == ("['bias']", "['kernel']", "['scalar']")


def test_every_dtype_has_a_group_of_its_own():
    params = {"half": parameters(jnp.float16), "norm": {"scale": jnp.ones(3)}}
    groups = {"half": flat_masters(optax.adam(1e-2)), "norm": optax.adam(1e-2)}
    tx = transforms.with_loss_scale(
        optax.partition(groups, {"half": "half", "norm": "norm"}), jmp.DynamicLossScale(8.0)
    )
    state = tx.init(params)
    gradients = jax.tree.map(lambda p: jnp.full(p.shape, 8.0, p.dtype), params)
    updates, state = jax.jit(tx.update)(gradients, state, params)
    new = optax.apply_updates(params, updates)
    assert new["norm"]["scale"].dtype == jnp.float32
    masters = transforms.masters(state, new)
    np.testing.assert_allclose(masters["norm"]["scale"], 0.99, rtol=1e-6)
    for name, param in params["half"].items():
        np.testing.assert_allclose(masters["half"][name], param - 0.01, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(new["half"][name], masters["half"][name].astype("float16"))
    # An infinity in one group skips both.
    gradients["norm"]["scale"] = jnp.full(3, jnp.nan)
    updates, state = jax.jit(tx.update)(gradients, state, new)
    assert state.skipped_steps == 1
    assert all(jnp.all(u == 0) for u in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    ("params", "got"),
    [
        (
            {"a": jnp.ones(2, jnp.float16), "b": {"c": jnp.ones(2)}},
            r"float16 \(a\), float32 \(b/c\)",
        ),
        (
            {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.bfloat16)},
            r"float16 \(a\), bfloat16",
        ),
        ({"a": jnp.ones(2)}, r"float32 \(a\)"),
        (
            {"a": jnp.ones(2, jnp.float16), "steps": jnp.arange(2)},
            r"float16 \(a\), int32 \(steps\)",
        ),
        ({}, "no dtype at all"),
    ],
)
def test_what_does_not_fit_one_vector_is_refused_with_the_way_out(params, got):
    with pytest.raises(ValueError, match=f"got parameters of {got}.*optax.partition"):
        flat_masters(optax.sgd(1.0)).init(params)


@pytest.mark.parametrize(
    "gradients",
    [
        {"a": jnp.ones((3, 2), jnp.float16), "b": jnp.ones(3, jnp.float16)},
        {"x": jnp.ones((2, 3), jnp.float16), "y": jnp.ones(3, jnp.float16)},
        {"a": jnp.ones((), jnp.float16)},
    ],
    ids=["transposed", "other names", "one number"],
)
def test_gradients_that_would_land_beside_their_parameters_are_refused(gradients):
    params = {"a": jnp.ones((2, 3), jnp.float16), "b": jnp.ones(3, jnp.float16)}
    tx = flat_masters(optax.sgd(1.0))
    with pytest.raises(
        ValueError, match="got gradients of the shapes .* expected those of the par"
    ):
        tx.update(gradients, tx.init(params), params)


SMALL_TENSORS = {
    "kernel": jnp.ones((3, 2), jnp.float16),
    "bias": jnp.ones(2, jnp.float16),
    "gain": jnp.ones((), jnp.float16),
}
MASK = {"kernel": True, "bias": False, "gain": False}
WARMUP = optax.linear_schedule(0.0, 1e-3, 3)
POINTWISE = {
    "adamw": optax.adamw(1e-3),
    "clipped by the norm of all": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "accumulation": optax.MultiSteps(optax.adam(1e-3), 3),
    "prodigy": optax.contrib.prodigy(),
    "injected": optax.inject_hyperparams(optax.adam)(WARMUP),
    "extra arguments": optax.polyak_sgd(),
    "rmsprop": optax.rmsprop(1e-3, momentum=0.9),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "reduce_on_plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    "frozen": optax.set_to_zero(),
}
OTHER_SIZES, RAISED = "its state has other sizes", "its init raised ValueError"
SHAPED = {
    "muon": (optax.contrib.muon(1e-3), OTHER_SIZES),
    "accumulated muon": (optax.MultiSteps(optax.contrib.muon(1e-3), 2), OTHER_SIZES),
    "adafactor": (optax.adafactor(1e-3), OTHER_SIZES),
    "novograd": (optax.novograd(1e-3), OTHER_SIZES),
    "sm3": (optax.sm3(1e-3), OTHER_SIZES),
    "masked by a tree": (optax.adamw(1e-3, mask=MASK), RAISED),
    "labelled": (
        optax.partition(
            {1: optax.adam(1e-3), 0: optax.sgd(0.1)},
            lambda tree: jax.tree.map(lambda x: int(x.ndim > 1), tree),
        ),
        OTHER_SIZES,
    ),
}


@pytest.mark.parametrize("inner", in_full(POINTWISE, one_of=5))
def test_optimizers_that_take_a_vector_as_they_take_a_tree_may_be_flat(inner):
    state = jax.eval_shape(flat_masters(inner).init, SMALL_TENSORS)
    assert state.masters.vector.shape == (9,)


@pytest.mark.parametrize(("inner", "reason"), SHAPED.values(), ids=SHAPED)
def test_optimizers_whose_state_looks_at_shapes_or_paths_are_refused(inner, reason):
    with pytest.raises(ValueError, match=rf"does not treat .*\({reason}\).*Leave flat_master"):
        jax.eval_shape(flat_masters(inner).init, SMALL_TENSORS)


def test_arrays_without_elements_and_accumulation_may_be_flat():
    params = {**parameters(jnp.float16), "empty": jnp.ones((0, 3), jnp.float16)}
    tx = transforms.with_loss_scale(
        flat_masters(optax.MultiSteps(optax.sgd(0.5), 2)), jmp.DynamicLossScale(8.0)
    )
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(jax.tree.map(lambda p: 8 * p, params), state, params)
    expected = jax.tree.map(lambda p: p - p / 2, params)
    jax.tree.map(np.testing.assert_array_equal, optax.apply_updates(params, updates), expected)


@pytest.mark.parametrize(
    ("other", "infinite"),
    [(1.0, float("inf")), (jnp.ones(2, jnp.complex64), jnp.array([8, jnp.inf], jnp.complex64))],
    ids=["a Python number", "complex"],
)
def test_gradients_beside_flat_masters_are_unscaled_and_checked(other, infinite):
    params = {"half": jnp.ones(2, jnp.float16), "other": other}
    groups = {"half": flat_masters(optax.sgd(1.0)), "other": optax.sgd(1.0)}
    tx = transforms.with_loss_scale(
        optax.partition(groups, {"half": "half", "other": "other"}), jmp.DynamicLossScale(8.0)
    )
    gradients = jax.tree.map(lambda p: 8 * p, params)
    updates, state = tx.update(gradients, tx.init(params), params)
    np.testing.assert_allclose(updates["other"], -1)
    updates, state = tx.update({**gradients, "other": infinite}, state, params)
    assert state.skipped_steps == 1 and (jnp.asarray(updates["other"]) == 0).all()
