"""Masters and parameters that part: loaded parameters, and masters beyond the half range."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

import jmp
from jmp import transforms
from jmp.adapters import linen
from tests.bits import bits

PARAMS = {"a": jnp.ones((2, 2), jnp.float16), "b": jnp.ones(2, jnp.float16), "norm": jnp.ones(2)}
HALF_ALONE = {"a": PARAMS["a"], "b": PARAMS["b"]}
LOADED = jax.tree.map(lambda p: 3 * p, PARAMS)
SGD = optax.sgd(0.5)


MASTERS = transforms.with_master_params(SGD)
LABELS = {"a": "half", "b": "half", "norm": "float32"}
GROUPED = optax.partition({"half": MASTERS, "float32": SGD}, LABELS)
OPTIMIZERS = {
    "a tree": MASTERS,
    "under loss scaling": transforms.mixed_precision(SGD, "O2", jmp.StaticLossScale(1.0)),
    "last in a chain": optax.chain(optax.scale(1.0), MASTERS),
    "in a partition": GROUPED,
}
SMALL_STEPS = transforms.with_master_params(optax.sgd(2.0**-13))
every_optimizer = pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def stepped(tx, state, params):
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    return optax.apply_updates(params, updates), state


@every_optimizer
def test_the_next_step_starts_from_the_parameters_that_were_loaded(tx):
    state = tx.init(PARAMS)
    undone, _ = stepped(tx, state, LOADED)
    assert undone["a"][0, 0] == 0.5  # why masters have to be reset
    params, state = stepped(tx, transforms.reset_masters(state, LOADED), LOADED)
    assert [leaf.ravel()[0] for leaf in jax.tree.leaves(params)] == [2.5, 2.5, 2.5]
    assert bits(transforms.masters(state, params)) == bits(jmp.cast_to_full(params))


def test_parameters_may_stand_in_a_class_that_is_named_like_a_state():
    ModelState = collections.namedtuple("ModelState", "w")
    params = ModelState(jnp.ones(2, jnp.float16))
    state = MASTERS.init(params)
    new = transforms.reset_masters(state, ModelState(params.w * 3))
    assert transforms.masters(new, params).w[0] == 3
    with pytest.raises(TypeError, match="as the parameters"):
        transforms.reset_masters(state, state)


def test_a_python_number_among_parameters_is_set_as_it_is():
    params = {"w": jnp.ones(2, jnp.float16), "n": 2.0}
    new, _ = transforms.set_masters(MASTERS.init(params), params, {"w": jnp.zeros(2), "n": 3.0})
    assert new["n"] == 3.0 and bits(new["w"]) == bits(jnp.zeros(2, jnp.float16))


@every_optimizer
def test_masters_may_be_taken_from_float32_parameters_exactly_and_nothing_else_moves(tx):
    state = tx.init(PARAMS)
    full = jax.tree.map(lambda p: jnp.full(p.shape, 0.1, jnp.float32), PARAMS)
    new = transforms.reset_masters(state, full)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    masters = transforms.masters(new, PARAMS)
    assert masters["a"][0, 0] == jnp.float32(0.1) and masters["norm"][0] == 1.0
    donated = jax.jit(lambda state: state, donate_argnums=0)
    donated(new)
    assert not full["a"].is_deleted()  # they are copies


def test_a_state_without_masters_is_returned_as_it_is():
    state = optax.adam(0.1).init(LOADED)
    assert transforms.reset_masters(state, LOADED) == state


def test_parameters_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"got the shape \(3,\) for params\['b'\]"):
        transforms.reset_masters(GROUPED.init(PARAMS), {**LOADED, "b": jnp.ones(3)})


def test_parameters_that_are_no_longer_half_are_refused_and_not_left_without_masters():
    tx, params, full = MASTERS, HALF_ALONE, jmp.cast_to_full(HALF_ALONE)
    with pytest.raises(ValueError, match=r"params\['a'\] of dtype float32; when .* a half dtype"):
        tx.update(full, tx.init(params), full)
    with pytest.raises(ValueError, match="had no half dtype"):
        tx.update(params, tx.init(full), params)


@pytest.mark.parametrize("read", [transforms.masters, transforms.reset_masters])
@every_optimizer
def test_what_holds_a_state_is_not_taken_for_parameters(tx, read):
    state = tx.init(PARAMS)
    for params in (state, optax.adam(0.1).init(PARAMS), (state, PARAMS)):
        with pytest.raises(TypeError, match=rf"The order is {read.__name__}\(opt_state, param"):
            read(state, params)


VECTOR = optax.flatten(MASTERS)
VECTORS = {
    "flatten": VECTOR,
    "in MultiSteps": optax.MultiSteps(VECTOR, 1).gradient_transformation(),
    "under loss scaling": transforms.with_loss_scale(VECTOR, jmp.StaticLossScale(1.0)),
}


@pytest.mark.parametrize("tx", VECTORS.values(), ids=VECTORS.keys())
def test_masters_of_one_vector_that_something_made_are_nobody_s_and_not_passed_over(tx):
    sentence = r"got nothing for params; .*put it inside, with_master_params\(optax.flatten\(adam"
    state = tx.init(HALF_ALONE)
    for read in (transforms.masters, transforms.reset_masters):
        with pytest.raises(ValueError, match=sentence):
            read(state, HALF_ALONE)
    train_state = linen.TrainState.create(apply_fn=None, params=HALF_ALONE, tx=tx)
    train_state = train_state.apply_gradients(grads=HALF_ALONE)
    with pytest.raises(ValueError, match=sentence):
        train_state.replace(params=HALF_ALONE)
    assert train_state.replace(step=3).step == 3
    both = train_state.replace(params=HALF_ALONE, opt_state=train_state.opt_state)
    assert both.params is HALF_ALONE
    # Of half and float32 ones the vector is float32, and has no masters at all.
    with pytest.raises(ValueError, match="which has no masters.*Put it inside"):
        transforms.masters(jax.jit(tx.init)(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="which has no masters.*Put it inside"):
        linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)


def test_a_policy_without_masters_sees_none_in_a_vector():
    with pytest.raises(ValueError, match="without masters"):
        transforms.mixed_precision(VECTOR, "mixed_bfloat16").init(HALF_ALONE)


@pytest.mark.parametrize("params", [HALF_ALONE, PARAMS])
def test_the_way_out_of_masters_of_one_vector_is_a_way_out(params):
    tx = transforms.with_master_params(optax.flatten(SGD))
    state = linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    tripled = jax.tree.map(lambda p: 3 * p, params)
    state = state.replace(params=tripled).apply_gradients(grads=params)
    assert transforms.masters(state.opt_state, state.params)["a"][0, 0] == 2.5


def test_a_group_of_masters_to_which_no_parameter_belongs_is_no_vector():
    groups = {"used": optax.set_to_zero(), "unused": MASTERS}
    tx = transforms.with_loss_scale(optax.partition(groups, "used"), jmp.StaticLossScale(1.0))
    state = tx.init(PARAMS)
    assert bits(transforms.masters(state, PARAMS)) == bits(jmp.cast_to_full(PARAMS))


class StateOfAUser(linen.TrainState):
    average: jax.Array | None = None


@pytest.mark.parametrize("cls", [linen.TrainState, StateOfAUser])
def test_replacing_the_parameters_of_a_train_state_takes_its_masters_along(cls):
    tx = transforms.mixed_precision(SGD, "O2", jmp.StaticLossScale(1.0))
    state = cls.create(apply_fn=None, params=PARAMS, tx=tx)
    loaded = state.replace(params=LOADED)
    assert type(loaded) is cls and loaded.params is LOADED
    assert transforms.masters(loaded.opt_state, LOADED)["a"][0, 0] == 3.0
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    assert loaded.apply_gradients(grads=grads).params["a"][0, 0] == 2.5
    # Who gives both means both; a tree that describes arrays says nothing of masters.
    both = state.replace(params=LOADED, opt_state=state.opt_state)
    assert both.opt_state is state.opt_state
    for stand_in in (None, jax.sharding.SingleDeviceSharding(jax.devices()[0])):
        described = state.replace(params=jax.tree.map(lambda _, s=stand_in: s, PARAMS))
        assert described.opt_state is state.opt_state
    assert dataclasses.fields(cls)[-1].name == ("average" if cls is StateOfAUser else "batch_stats")


def test_a_field_of_a_users_own_moves_with_a_step_or_not_at_all():
    tx = transforms.with_loss_scale(SGD, jmp.DynamicLossScale(2.0))
    state = StateOfAUser.create(
        apply_fn=None, params={"w": jnp.ones(2)}, tx=tx, average=jnp.zeros(2)
    )
    step = jax.jit(lambda s, g: s.apply_gradients(grads={"w": g}, average=s.average + 1))
    state = step(step(state, jnp.full(2, jnp.inf)), 2 * jnp.ones(2))
    assert state.average[0] == 1.0 and state.step == 1
    assert state.params["w"][0] == 0.0  # the skip has halved the scale to 1


def test_masters_from_the_host_lie_where_they_lay():
    place = jax.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x"))
    state = MASTERS.init({"a": jax.device_put(jnp.ones(4, jnp.float16), place)})
    new = transforms.reset_masters(state, {"a": np.full(4, 3.0, np.float16)})
    assert new.masters["a"].sharding == state.masters["a"].sharding == place
    assert (new.masters["a"] == 3.0).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda params: params,
        lambda params: jax.tree.map(lambda p: jnp.clip(p, -5, 5), params),
        lambda params: jax.device_put(params, jax.devices()[0]),
    ],
    ids=["the same", "clipped", "moved"],
)
def test_parameters_that_are_put_back_keep_what_their_masters_know(change):
    params = {"a": jnp.ones(3, jnp.float16)}
    state = linen.TrainState.create(apply_fn=None, params=params, tx=SMALL_STEPS)
    for _ in range(8):  # each step too small for float16
        state = state.apply_gradients(grads=params)
        state = state.replace(params=change(state.params))
    assert state.params["a"][0] == 1 - 2.0**-10


def test_float32_parameters_that_are_put_into_a_train_state_are_its_masters_exactly():
    params = {"a": jnp.ones(3, jnp.float16)}
    state = linen.TrainState.create(apply_fn=None, params=params, tx=SMALL_STEPS)
    state = state.apply_gradients(grads=params)
    full = jmp.cast_to_full(state.params)
    assert transforms.masters(state.opt_state, full)["a"][0] == 1 - 2.0**-13
    for number in (1.0, 0.1):
        given = jax.tree.map(lambda p, n=number: jnp.full_like(p, n), full)
        assert bits(transforms.masters(state.replace(params=given).opt_state, full)) == bits(given)


def test_parameters_of_another_structure_leave_the_state_as_it_is():
    state = linen.TrainState.create(apply_fn=None, params={"a": PARAMS, "b": PARAMS}, tx=MASTERS)
    part = state.replace(params=state.params["a"])  # to evaluate only an encoder
    assert part.opt_state is state.opt_state


def test_a_static_field_is_replaced_also_in_a_step_that_is_skipped():
    class Counting(linen.TrainState):
        epoch: int = struct.field(pytree_node=False, default=0)

    tx = transforms.with_loss_scale(SGD, jmp.DynamicLossScale(8.0))
    state = Counting.create(apply_fn=None, params=PARAMS, tx=tx)
    bad = jax.tree.map(lambda x: x * jnp.inf, PARAMS)
    skipped = jax.jit(lambda state: state.apply_gradients(grads=bad, epoch=1))(state)
    assert (skipped.epoch, skipped.step) == (1, 0)


def test_a_jump_across_the_range_of_bfloat16_does_not_overflow():
    largest = float(jnp.finfo(jnp.bfloat16).max)
    tx = transforms.with_master_params(optax.identity())
    params = jnp.array([-largest], jnp.bfloat16)
    state = tx.init(params)
    for _ in range(2):
        new = jnp.array([largest], jnp.float32)
        state = state._replace(masters=new)
        updates, _ = tx.update(jnp.zeros(1), state, params)
        params = optax.apply_updates(params, updates)
        assert jnp.isfinite(params).all()
    assert params[0] == largest


def test_masters_are_found_beside_other_trees():
    tx = OPTIMIZERS["under loss scaling"]
    average = collections.namedtuple("Average", "params")(PARAMS)
    state = average, tx.init(PARAMS), average
    assert jax.tree.leaves(transforms.reset_masters(state, LOADED))
    params, state = transforms.set_masters(state, PARAMS, jmp.cast_to_full(LOADED))
    np.testing.assert_array_equal(params["a"], LOADED["a"])
    np.testing.assert_array_equal(transforms.masters(state[:2], params)["a"], LOADED["a"])
