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
from tests.cases import HALF

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


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"a": LOADED["a"]}, r"got nothing for params\['b'\]; expected the shape \(2,\)"),
        ({**LOADED, "b": jnp.ones(3)}, r"got the shape \(3,\) for params\['b'\]"),
    ],
)
def test_parameters_of_another_model_are_refused(params, sentence):
    state = GROUPED.init(PARAMS)
    with pytest.raises(ValueError, match=sentence):
        transforms.reset_masters(state, params)


def test_parameters_that_are_no_longer_half_are_refused_and_not_left_without_masters():
    tx, params, full = MASTERS, HALF_ALONE, jmp.cast_to_full(HALF_ALONE)
    with pytest.raises(ValueError, match=r"params\['a'\] of dtype float32; when .* a half dtype"):
        tx.update(full, tx.init(params), full)
    with pytest.raises(ValueError, match="had no half dtype"):
        tx.update(params, tx.init(full), params)


@pytest.mark.parametrize("read", [transforms.masters, transforms.reset_masters])
@every_optimizer
def test_arguments_in_the_wrong_order_and_no_parameters_at_all_are_refused(tx, read):
    state = tx.init(PARAMS)
    train_state = linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    for params in (state, tx, train_state, optax.adam(0.1).init(PARAMS), (state, PARAMS)):
        for opt_state in (PARAMS, state):
            with pytest.raises(TypeError, match=rf"The order is {read.__name__}\(opt_state, param"):
                read(opt_state, params)
    for nothing in (None, {}, jax.tree.map(lambda _: None, PARAMS)):
        with pytest.raises(ValueError, match=rf"{read.__name__} got nothing for params"):
            read(state, nothing)


VECTOR = optax.flatten(MASTERS)
VECTORS = {
    "flatten": VECTOR,
    "flatten under loss scaling": transforms.with_loss_scale(VECTOR, jmp.StaticLossScale(1.0)),
    "flatten in MultiSteps": optax.MultiSteps(VECTOR, 1).gradient_transformation(),
    "flatten under mixed_precision": transforms.mixed_precision(VECTOR, "mixed_bfloat16"),
}


@pytest.mark.parametrize("name", VECTORS)
def test_masters_of_one_vector_that_something_made_are_nobody_s_and_not_passed_over(name):
    tx = VECTORS[name]
    sentence = r"got nothing for params; .*put it inside, with_master_params\(optax.flatten\(adam"
    if "mixed_precision" in name:  # it sees no master for them
        with pytest.raises(ValueError, match="without masters"):
            tx.init(HALF_ALONE)
        return
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


def test_half_parameters_that_became_float32_in_a_vector_are_refused_as_they_would_have_no_master():
    refused = pytest.raises(ValueError, match="which has no masters.*Put it inside")
    for tx in (VECTORS["flatten"], VECTORS["flatten in MultiSteps"]):
        for init in (tx.init, jax.jit(tx.init)):
            state = init(PARAMS)
            for read in (transforms.masters, transforms.reset_masters):
                with refused:
                    read(state, PARAMS)
        with refused:
            linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    scaled = VECTORS["flatten under loss scaling"]
    for init in (scaled.init, jax.jit(scaled.init)):
        with refused:
            init(PARAMS)
    whole = transforms.with_master_params(optax.flatten(SGD))
    params, state = stepped(whole, whole.init(PARAMS), PARAMS)
    assert transforms.masters(state, params)["a"][0, 0] == 0.5


def test_a_group_of_masters_to_which_no_parameter_belongs_is_no_vector():
    groups = {"used": optax.set_to_zero(), "unused": MASTERS}
    tx = transforms.with_loss_scale(optax.partition(groups, "used"), jmp.StaticLossScale(1.0))
    state = tx.init(PARAMS)
    assert bits(transforms.masters(state, PARAMS)) == bits(jmp.cast_to_full(PARAMS))


def test_the_way_out_of_masters_of_one_vector_is_a_way_out():
    tx = transforms.with_master_params(optax.flatten(SGD))
    state = linen.TrainState.create(apply_fn=None, params=HALF_ALONE, tx=tx)
    tripled = jax.tree.map(lambda p: 3 * p, HALF_ALONE)
    state = state.replace(params=tripled).apply_gradients(grads=HALF_ALONE)
    assert transforms.masters(state.opt_state, state.params)["a"][0, 0] == 2.5


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


def test_a_static_field_cannot_be_part_of_a_step():
    class Counting(linen.TrainState):
        epoch: int = struct.field(pytree_node=False, default=0)

    state = Counting.create(apply_fn=None, params=PARAMS, tx=SGD)
    with pytest.raises(ValueError, match=r"static fields epoch; .*\.replace\("):
        state.apply_gradients(grads=PARAMS, epoch=1)


def test_masters_from_the_host_lie_where_they_lay():
    mesh = jax.make_mesh((2,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    params = {"a": jax.device_put(jnp.ones(4, jnp.float16), sharding)}
    state = MASTERS.init(params)
    new = transforms.reset_masters(state, {"a": np.full(4, 3.0, np.float16)})
    assert new.masters["a"].sharding == state.masters["a"].sharding == sharding
    assert (np.asarray(new.masters["a"]) == 3.0).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_parameter_comes_back_when_its_master_comes_back_into_range(dtype, sign):
    largest = float(jnp.finfo(dtype).max)
    beyond = min(1.5 * largest, float(jnp.finfo(jnp.float32).max))
    tx = transforms.with_master_params(optax.sgd(1.0))
    params = jnp.array([sign], dtype)
    state = tx.init(params)
    # The way back takes two steps: one difference in float32 cannot say so large a change exactly.
    for target, expected in ((beyond, largest), (1000.0, None), (1000.0, 1000.0)):
        gradient = state.masters - jnp.array([sign * target], jnp.float32)
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        assert expected is None or params[0] == jnp.array(sign * expected, dtype)


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


@pytest.mark.parametrize("dtype", HALF)
def test_a_master_that_is_no_number_is_not_hidden(dtype):
    tx = transforms.with_master_params(optax.sgd(1.0))
    params = jnp.ones(1, dtype)
    updates, _ = tx.update(jnp.array([jnp.nan]), tx.init(params), params)
    assert jnp.isnan(optax.apply_updates(params, updates)[0])


def test_masters_are_found_beside_other_trees():
    tx = OPTIMIZERS["under loss scaling"]
    average = collections.namedtuple("Average", "params")(PARAMS)
    state = average, tx.init(PARAMS), average
    assert jax.tree.leaves(transforms.reset_masters(state, LOADED))
    params, state = transforms.set_masters(state, PARAMS, jmp.cast_to_full(LOADED))
    np.testing.assert_array_equal(params["a"], LOADED["a"])
    np.testing.assert_array_equal(transforms.masters(state[:2], params)["a"], LOADED["a"])
