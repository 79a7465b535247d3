"""Exported programs take and return loss scales, states of transforms and TrainState."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import export

import jmp
from jmp import transforms
from jmp.adapters import linen
from jmp.trees import register_for_export

pytest.importorskip("flatbuffers")

SCALES = [
    jmp.DynamicLossScale(2.0**15),
    jmp.torch_loss_scale(growth_interval=np.inf),
    jmp.HysteresisLossScale(2.0**15),
    jmp.StaticLossScale(8.0),
    jmp.NoOpLossScale(),
]
HALF = "p=bf16,c=bf16,o=f32"
WAYS = {
    "scaled": (transforms.mixed_precision(optax.sgd(0.1), "mixed_float16"), jnp.float32),
    "masters": (transforms.with_master_params(optax.sgd(0.1)), jnp.bfloat16),
    **{
        way: (transforms.mixed_precision(optax.sgd(0.1), HALF, masters=way), jnp.bfloat16)
        for way in ("split", "stochastic", "kahan")
    },
    "stored": (transforms.with_stored_state(optax.trace(0.9), "int8"), jnp.float32),
}


@pytest.fixture(scope="module", autouse=True)
def states_of_optax():
    """Optax leaves it to its users to name its own states."""
    register_for_export(optax.TraceState)
    register_for_export(optax.EmptyState)


def through_bytes(function, *args):
    written = export.export(jax.jit(function))(*args).serialize()
    return export.deserialize(bytearray(written)).call(*args)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: type(scale).__name__)
def test_a_loss_scale(scale):
    adjust = lambda scale: scale.adjust(jnp.array(False))
    assert_same(through_bytes(adjust, scale), adjust(scale))


@pytest.mark.parametrize("way", WAYS)
def test_a_state_of_an_optimizer(way):
    tx, dtype = WAYS[way]
    params = {"w": jnp.ones((4, 8), dtype), "b": jnp.zeros(8, dtype)}

    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    assert_same(through_bytes(step, params, state), jax.jit(step)(params, state))


def test_a_train_state_comes_back_without_its_functions():
    model, x = nn.Dense(2), jnp.ones((1, 4))
    tx = transforms.mixed_precision(optax.sgd(0.1), "mixed_float16")
    params = model.init(jax.random.key(0), x)["params"]
    state = linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    step = lambda state: state.apply_gradients(grads=state.params)
    found, expected = through_bytes(step, state), step(state)
    with pytest.raises(TypeError, match=r"left out when the program was exported.*state.replace"):
        found.apply_fn({"params": found.params}, x)
    again = found.replace(apply_fn=model.apply, tx=tx)
    assert_same(jax.tree.leaves(again), jax.tree.leaves(expected))
    assert_same(again.apply_gradients(grads=params).params, step(expected.replace()).params)


def test_what_is_written_names_no_file_of_the_package():
    exported = export.export(jax.jit(lambda scale: scale.adjust(True)))(jmp.DynamicLossScale(8.0))
    written = bytes(exported.serialize())
    assert b"jmp.DynamicLossScale" in written and b"jmp.loss_scaling" not in written
