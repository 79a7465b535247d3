"""Half parameters under a policy whose parameters are float32: refused, with the ways out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp
from jmp import transforms
from jmp.adapters import linen
from jmp.adapters import nnx as jmp_nnx
from tests.bits import bits

F32_POLICIES = ["mixed_bfloat16", "mixed_float16", "float32", "O1", "mixed_float8"]
HALF_POLICY = "p=bf16,c=bf16,o=f32"
SENTENCE = (
    r"params.* of dtype (bfloat16|float16).*without masters.*cast_to_param\(params\) or "
    r"jmp\.cast_to_full\(params\); or.*a policy with half parameters, 'p=b?f16,"
)
refused = pytest.raises(ValueError, match=SENTENCE)


def make(policy="mixed_bfloat16", inner=None):
    return transforms.mixed_precision(inner or optax.sgd(1e-4), policy)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("policy", F32_POLICIES)
def test_a_thousand_updates_that_a_half_one_would_lose_are_refused_before_the_first(policy, dtype):
    params = jnp.ones(2, dtype)
    tx = make(policy)
    for init in (tx.init, functools.partial(jax.eval_shape, tx.init), jax.jit(tx.init)):
        with refused:
            init(params)
    with refused:
        tx.init(jax.ShapeDtypeStruct((2,), dtype))
    with refused:  # loaded after `init`
        tx.update(params, tx.init(jnp.ones(2)), params)


def trained(tx, params, steps):
    """Returns parameters and state after steps whose scaled gradients are ones."""
    ones = jax.tree.map(jnp.ones_like, params)
    step = jax.jit(lambda params, state: tx.update(ones, state, params))
    state = tx.init(params)
    for _ in range(steps):
        updates, state = step(params, state)
        params = optax.apply_updates(params, updates)
    return params, state


def test_both_ways_out_train():
    params = jnp.ones(2, jnp.bfloat16)
    with refused as found:
        make().init(params)
    policy = str(found.value).split("parameters, '")[1].split("'")[0]
    for tx, start in (
        (make(), jmp.get_policy("mixed_bfloat16").cast_to_param(params)),
        (make(), jmp.cast_to_full(params)),
        (make(policy), params),
    ):
        moved, state = trained(tx, start, 100)
        assert moved.dtype == start.dtype
        np.testing.assert_allclose(transforms.masters(state, moved), 0.99, rtol=1e-5)


# A half backbone that is frozen, beside float32 parameters of LoRA.

LORA = {
    "backbone": {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.ones(4, jnp.bfloat16)},
    "lora": {"a": jnp.ones((4, 2)), "b": jnp.zeros((2, 4))},
}
LABELS = {"backbone": "freeze", "lora": "train"}
PARTS = optax.partition({"train": optax.adamw(1e-2), "freeze": optax.set_to_zero()}, LABELS)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_frozen_half_leaves_belong_in_a_tree_of_their_own(policy):
    adam = optax.adam(1e-2)
    for in_one_tree in (PARTS, optax.masked(adam, {"backbone": False, "lora": True})):
        with refused as found:
            make(policy, in_one_tree).init(LORA)
        assert "with_loss_scale(optax.partition({'train': adam, 'freeze': optax.set_to_" in str(
            found
        )
    make(policy, adam).init(LORA["lora"])
    # In one tree only if no half leaf is to have a master.
    tx = transforms.mixed_precision(PARTS, policy, masters="none")
    state = tx.init(LORA)
    gradients = jax.tree.map(lambda p: state.loss_scale.scale(jnp.ones_like(p)), LORA)
    updates, state = tx.update(gradients, state, LORA)
    moved = optax.apply_updates(LORA, updates)
    assert state.grads_finite and bits(moved["backbone"]) == bits(LORA["backbone"])
    assert (moved["lora"]["b"] < 0).all()
    # A policy with half parameters keeps a master of each half leaf, also of those that are frozen.
    masters = make(HALF_POLICY, PARTS).init(LORA).inner_state.masters
    assert all(leaf.dtype == jnp.float32 for leaf in masters["backbone"].values())


def test_leaves_that_have_masters_or_hold_no_half_floats_pass():
    groups = {"freeze": transforms.with_master_params(optax.sgd(1e-2)), "train": optax.adam(1e-2)}
    make(inner=optax.partition(groups, LABELS)).init(LORA)
    params = {"w": jnp.ones(2), "n": jnp.ones(2, jnp.int8), "none": None, "z": jnp.ones(1, complex)}
    make(inner=optax.identity()).init(params)
    make(inner=optax.identity()).init({"w": np.ones(2), "x": np.float32(1.0)})


# The adapters.

PARAMS = {"w": jnp.ones((2, 2)), "norm": jnp.ones(2)}
HALF_PARAMS = {"w": jnp.ones((2, 2), jnp.bfloat16), "norm": jnp.ones(2)}


def to_half(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


def test_a_train_state_refuses_them_in_create_and_in_a_step():
    make_state = lambda params, tx: linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    with refused:
        make_state(HALF_PARAMS, make())
    state = make_state(PARAMS, make())
    loaded = state.replace(params=HALF_PARAMS)
    with refused:
        loaded.apply_gradients(grads=HALF_PARAMS)
    # No policy says there that parameters are float32.
    make_state(HALF_PARAMS, optax.sgd(0.1)).apply_gradients(grads=HALF_PARAMS)


@pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")
def test_an_nnx_optimizer_refuses_them_when_it_is_made_and_in_a_step():
    with refused:
        half = jmp_nnx.cast_params(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), HALF_POLICY)
        nnx.Optimizer(half, make(), wrt=nnx.Param)
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)
    nnx.update(model, to_half(nnx.state(model)))
    before = bits(nnx.as_pure(nnx.state((model, optimizer))))
    with refused:
        jmp_nnx.train_step(lambda m, x: m(x).mean(), model, optimizer, jnp.ones((1, 2)))
    assert bits(nnx.as_pure(nnx.state((model, optimizer)))) == before
