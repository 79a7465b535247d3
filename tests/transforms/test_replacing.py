"""`set_loss_scale`: an optimizer's state goes on with another loss scale."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen
from jmp.adapters import nnx as adapter

PARAMS = {"w": jnp.arange(4.0)}
SCALES = {
    "dynamic": jmp.DynamicLossScale(2.0**10, counter=3),
    "static": jmp.StaticLossScale(8),
    "no-op": jmp.NoOpLossScale(),
    "hysteresis": jmp.HysteresisLossScale(16.0, hysteresis=3),
}


def scaling(scale, inner=None):
    return transforms.with_loss_scale(inner or optax.adam(0.1), scale)


def skipped(tx):
    """The state of an optimizer after a skipped step."""
    return tx.update({"w": jnp.full(4, jnp.inf)}, tx.init(PARAMS), PARAMS)[1]


def assert_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(SCALES, 2)))
def test_a_scale_of_any_class_takes_the_place_of_any_other_and_nothing_else_changes(old, new):
    state = scaling(SCALES[old]).init(PARAMS)
    replaced = transforms.set_loss_scale(state, SCALES[new])
    assert_equal(replaced, scaling(SCALES[new]).init(PARAMS))


def test_what_the_last_steps_were_stays():
    state = skipped(scaling(SCALES["dynamic"]))
    replaced = transforms.set_loss_scale(state, SCALES["static"])
    assert not replaced.grads_finite
    assert replaced.skipped_steps == replaced.consecutive_skips == 1
    assert_equal(replaced.inner_state, state.inner_state)


@pytest.mark.parametrize("old", ["dynamic", "static", "hysteresis"])
def test_where_nothing_is_checked_any_more_the_last_step_counts_as_taken(old):
    tx = scaling(SCALES[old], optax.sgd(1.0))
    state = transforms.set_loss_scale(skipped(tx), SCALES["no-op"])
    assert bool(state.grads_finite) and state.consecutive_skips == 0
    assert state.skipped_steps == 1  # what was skipped so far stays true
    diagnostics.check_skips(state, limit=1)
    assert diagnostics.metrics(state)["grads_finite"]


@pytest.mark.parametrize("new", ["hysteresis", "no-op"])
def test_scale_and_flags_are_of_the_kind_shape_and_place_of_the_state(new):
    replace = functools.partial(transforms.set_loss_scale, new=SCALES[new])
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.NamedSharding(mesh, jax.P())
    state = skipped(scaling(SCALES["dynamic"]))
    expected = replace(state)
    assert_equal(jax.jit(replace)(state), expected)
    assert_equal(replace(jax.tree.map(np.asarray, state)), expected)  # as some checkpoints are
    three = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), tree)
    assert_equal(jax.vmap(replace)(three(state)), three(expected))
    on_mesh = replace(jax.device_put(state, everywhere))
    assert_equal(on_mesh, expected)
    assert {leaf.sharding for leaf in jax.tree.leaves(on_mesh)} == {everywhere}
    for place in (everywhere, None):
        described = functools.partial(jax.tree.map, lambda leaf, place=place: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=place))  # fmt: skip
        assert jax.tree.leaves(replace(described(state))) == jax.tree.leaves(described(expected))


def test_a_train_state_says_that_steps_are_taken_also_with_flags_of_an_older_state():
    tx = scaling(SCALES["dynamic"])
    state = linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    state = state.apply_gradients(grads={"w": jnp.full(4, jnp.inf)})
    assert not state.grads_finite
    older = state.replace(opt_state=state.opt_state._replace(loss_scale=SCALES["no-op"]))
    assert older.grads_finite.dtype == jnp.bool_ and older.grads_finite


WRAPPED = {
    "chain": lambda scale: optax.chain(scaling(scale), optax.scale(1.0)),
    "named chain": lambda scale: optax.named_chain(("a", scaling(scale)), ("b", optax.scale(1.0))),
    "around masters": lambda scale: scaling(scale, transforms.with_master_params(optax.sgd(0.1))),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_scale_is_replaced_wherever_it_stands(name):
    state = WRAPPED[name](SCALES["dynamic"]).init(PARAMS)
    replaced = transforms.set_loss_scale(state, SCALES["hysteresis"])
    assert_equal(replaced, WRAPPED[name](SCALES["hysteresis"]).init(PARAMS))


def test_the_optimizer_goes_on_with_the_new_scale():
    tx = scaling(SCALES["dynamic"], optax.sgd(1.0))
    state = transforms.set_loss_scale(tx.init(PARAMS), SCALES["static"])
    updates, state = tx.update({"w": 8 * jnp.ones(4)}, state, PARAMS)
    assert updates["w"].tolist() == [-1.0] * 4
    assert state.loss_scale == SCALES["static"]


def test_the_new_scale_outlives_a_donated_state():
    new = jmp.DynamicLossScale(64.0)
    state = transforms.set_loss_scale(scaling(SCALES["static"]).init(PARAMS), new)
    for leaf in jax.tree.leaves(state.loss_scale):
        leaf.delete()  # as donation does
    assert new.adjust(True).counter == 1


def test_members_of_a_vmapped_state_may_get_scales_of_their_own():
    state = jax.vmap(scaling(SCALES["dynamic"]).init)({"w": jnp.ones((3, 4))})
    own = jax.vmap(jmp.DynamicLossScale)(jnp.array([2.0, 4.0, 8.0]), jnp.zeros(3, jnp.int32))
    replaced = jax.vmap(transforms.set_loss_scale)(state, own)
    assert replaced.loss_scale.loss_scale.tolist() == [2.0, 4.0, 8.0]


def test_the_state_of_an_nnx_optimizer_takes_it_as_it_is():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, scaling(SCALES["static"], optax.sgd(0.1)), wrt=nnx.Param)
    optimizer.opt_state = transforms.set_loss_scale(optimizer.opt_state, SCALES["dynamic"])
    loss_fn = lambda model, x: (model(x) ** 2).mean()
    adapter.train_step(loss_fn, model, optimizer, jnp.full((1, 2), jnp.inf))
    assert adapter.loss_scale(optimizer).loss_scale == 2.0**9
    optimizer.opt_state = transforms.set_loss_scale(optimizer.opt_state, SCALES["no-op"])
    assert nnx.as_pure(optimizer.opt_state).grads_finite


def test_a_state_without_a_scale_is_refused_with_the_lines_that_give_it_one():
    opt_state = optax.adam(0.1).init(PARAMS)
    with pytest.raises(ValueError, match="without a loss scale") as refused:
        transforms.set_loss_scale(opt_state, SCALES["static"])
    line = "tx.init(params)._replace(inner_state=opt_state)"
    assert line in str(refused.value)
    tx = scaling(SCALES["static"])
    given = eval(line, {"tx": tx, "params": PARAMS, "opt_state": opt_state})
    assert_equal(given, tx.init(PARAMS))


def test_other_kinds_are_refused():
    tx = scaling(SCALES["static"])
    with pytest.raises(TypeError, match="got new=8.0; expected a loss scale"):
        transforms.set_loss_scale(tx.init(PARAMS), 8.0)
    with pytest.raises(TypeError, match="got new=a WithLossScaleState; expected a loss scale"):
        transforms.set_loss_scale(SCALES["static"], tx.init(PARAMS))
    for optimizer in (tx, optax.MultiSteps(tx, 2)):
        with pytest.raises(TypeError, match="not the optimizer itself"):
            transforms.set_loss_scale(optimizer, SCALES["static"])
