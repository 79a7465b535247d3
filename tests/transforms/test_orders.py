"""Orders of optax transformations: each one trains right, or is refused with the one that does."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen
from jmp.adapters import nnx as jmp_nnx
from jmp.transforms import WithLossScaleState
from tests.transforms import orders
from tests.transforms.orders import scaled

PARAMS = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}


def rows(table):
    return pytest.mark.parametrize("tx", table.values(), ids=table.keys())


@pytest.mark.parametrize(
    "read",
    [
        transforms.check_optimizer_state,
        transforms.loss_scale_state,
        diagnostics.metrics,
        lambda state: jax.eval_shape(transforms.loss_scale_state, state),
    ],
    ids=["check_optimizer_state", "loss_scale_state", "metrics", "under eval_shape"],
)
@rows(orders.BEFORE)
def test_what_stands_before_loss_scaling_is_refused(tx, read):
    with pytest.raises(ValueError, match="before with_loss_scale.*Move it inside"):
        read(tx.init(PARAMS))


@rows(orders.BEFORE)
def test_adapters_refuse_what_stands_before_loss_scaling(tx):
    with pytest.raises(ValueError, match="Move it inside"):
        linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.raises(ValueError, match="Move it inside"):
        jmp_nnx.loss_scale(optimizer)


@pytest.mark.parametrize(("name", "tx"), orders.INSIDE.items(), ids=orders.INSIDE.keys())
def test_loss_scaling_inside_another_wrapper_is_refused_by_name(name, tx):
    sentence = f"inside optax.{name}, .*Put it around"
    state = tx.init(PARAMS)
    for read in (transforms.check_optimizer_state, transforms.loss_scale_state):
        with pytest.raises(ValueError, match=sentence):
            read(state)
    with pytest.raises(ValueError, match=sentence):
        tx = tx.gradient_transformation() if name == "MultiSteps" else tx
        linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)


@rows(orders.MASKED)
def test_loss_scaling_of_a_part_of_the_parameters_is_refused_in_init(tx):
    for init in (tx.init, lambda params: jax.eval_shape(tx.init, params)):
        with pytest.raises(ValueError, match="inside optax.partition or optax.masked.*around"):
            init(PARAMS)


@rows(orders.AFTER_MASTERS)
def test_what_follows_masters_is_refused(tx):
    params = jmp.cast_to_half(PARAMS)
    state = tx.init(params)
    for read in (transforms.check_optimizer_state, lambda s: transforms.masters(s, params)):
        with pytest.raises(ValueError, match="after with_master_params.*Move it inside"):
            read(state)


@rows(orders.MOVING_TAIL)
def test_a_state_behind_loss_scaling_is_refused_where_no_adapter_undoes_it(tx):
    state = tx.init(PARAMS)
    for read in (transforms.check_optimizer_state, transforms.loss_scale_state):
        with pytest.raises(ValueError, match="state after with_loss_scale.*Move it inside"):
            read(state)
    assert diagnostics.metrics(state)["loss_scale"] == 1024.0
    state = linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    assert state.loss_scale.loss_scale == 1024.0


@rows(orders.AFTER_MASTERS)
def test_what_follows_masters_inside_loss_scaling_is_refused_in_init(tx):
    with pytest.raises(ValueError, match="after with_master_params.*Move it inside"):
        scaled(tx).init(jmp.cast_to_half(PARAMS))


def test_a_tail_without_a_state_is_taken_and_what_it_does_on_a_skip_is_as_documented():
    state = orders.STILL_TAIL.init(PARAMS)
    assert transforms.loss_scale_state(state).loss_scale.loss_scale == 1024.0
    bad = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
    updates, _ = orders.STILL_TAIL.update(bad, state, PARAMS)
    assert updates["b"][0] == jnp.float32(0.1)  # plain optax: weight decay acts on a skip
    train_state = linen.TrainState.create(apply_fn=None, params=PARAMS, tx=orders.STILL_TAIL)
    after = train_state.apply_gradients(grads=bad)
    assert (after.params["b"] == PARAMS["b"]).all() and after.step == 0


def test_masters_last_in_a_chain_follow_what_stands_before_them():
    params = jmp.cast_to_half(PARAMS)
    tx = optax.chain(optax.add_decayed_weights(0.5), transforms.with_master_params(optax.sgd(1.0)))
    state = tx.init(params)
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    new = optax.apply_updates(params, updates)
    assert new["b"].dtype == jnp.float16 and new["b"][0] == 0.5
    assert transforms.masters(state, new)["b"][0] == 0.5


@pytest.mark.parametrize("name", orders.AROUND_MASTERS)
def test_a_wrapper_that_parts_masters_from_parameters_is_refused_by_name(name):
    tx, params = orders.AROUND_MASTERS[name], jmp.cast_to_half(PARAMS)
    of_lookahead = name == "lookahead"
    state = tx.init(optax.LookaheadParams.init_synced(params) if of_lookahead else params)
    for read in (transforms.check_optimizer_state, lambda s: transforms.masters(s, params)):
        with pytest.raises(ValueError, match=f"inside optax.{name}, which .*Put it around"):
            read(state)


@rows(orders.RIGHT_AROUND_MASTERS)
def test_wrappers_that_hand_on_what_masters_say_may_stand_around_them(tx):
    params = jmp.cast_to_half(PARAMS)
    state = tx.init(params)
    transforms.check_optimizer_state(state)
    tx.update(params, state, params)


def test_a_tuple_of_one_s_own_around_an_optimizer_s_state_is_no_chain():
    state = scaled().init(PARAMS)
    for whole in ((3, state), (jnp.zeros(()), state), (PARAMS, state), ([1.0], state)):
        assert transforms.loss_scale_state(whole).loss_scale.loss_scale == 1024.0
        assert diagnostics.metrics(whole)["loss_scale"] == 1024.0


def test_a_package_whose_name_begins_with_optax_is_not_optax():
    class CountState(NamedTuple):
        inner: WithLossScaleState

    CountState.__module__ = "optax_of_a_user"
    state = CountState(scaled().init(PARAMS))
    assert transforms.loss_scale_state(state).loss_scale.loss_scale == 1024.0
    CountState.__module__ = "optax.counting"
    with pytest.raises(ValueError, match="inside optax.count, "):
        transforms.loss_scale_state(state)


def test_half_parameters_with_moments_behind_loss_scaling_train_and_skip():
    params = jmp.cast_to_half(PARAMS)
    tx = optax.chain(scaled(optax.identity()), optax.trace(0.9))
    state = linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    for factor in (jnp.inf, 1024.0):
        before = state
        state = state.apply_gradients(grads=jax.tree.map(lambda p, f=factor: f * p, PARAMS))
        assert (state.step == before.step) == jnp.isinf(factor)
    assert state.opt_state[1].trace["b"].dtype == jnp.float32
    assert (state.params["b"] == 3).all() and state.step == 1  # the scale is 512 by then


def test_other_trees_that_hold_optimizer_states_are_no_chains():
    # A dictionary of one's own, sorted by JAX: no order can be read off it.
    states = {"critic": optax.adam(0.1).init(PARAMS), "generator": scaled().init(PARAMS)}
    assert transforms.loss_scale_state(states).loss_scale.loss_scale == 1024.0
    ordered = collections.OrderedDict(z=scaled().init(PARAMS), a=optax.EmptyState())
    assert transforms.loss_scale_state(jax.tree.map(jnp.copy, ordered)) is not None


def test_an_init_that_reads_values_runs_for_real():
    def init(params):
        return float(params["b"].sum())  # no tracer has a value

    tx = scaled(optax.GradientTransformation(init, lambda u, s, p=None: (u, s)))
    assert tx.init(PARAMS).inner_state == 2.0


def test_counts_of_skips_stay_at_the_largest_integer():
    tx = scaled()
    largest = jnp.array(2**31 - 1, jnp.int32)
    state = tx.init(PARAMS)._replace(skipped_steps=largest, consecutive_skips=largest)
    _, state = tx.update(jax.tree.map(lambda p: p * jnp.inf, PARAMS), state)
    assert state.skipped_steps == state.consecutive_skips == largest


def test_one_loss_scale_around_a_partition_unscales_every_group():
    labels = {"a": "fast", "b": "slow"}
    tx = scaled(optax.partition({"fast": optax.sgd(1.0), "slow": optax.sgd(0.5)}, labels))
    gradients = jax.tree.map(lambda p: 1024.0 * p, PARAMS)
    updates, _ = tx.update(gradients, tx.init(PARAMS), PARAMS)
    assert updates["a"][0, 0] == -1.0 and updates["b"][0] == -0.5


def test_a_module_trains_with_a_tail_as_without_one_and_a_skip_undoes_it():
    model = nn.Dense(1)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    inside = scaled(optax.chain(optax.adam(0.1), optax.add_decayed_weights(0.1)))
    behind = optax.chain(scaled(optax.identity()), optax.adam(0.1), optax.add_decayed_weights(0.1))
    ends = []
    for tx in (inside, behind):
        state = linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        for factor in (1.0, jnp.nan, 3.0):
            grads = jax.tree.map(lambda p, factor=factor: 1024.0 * factor * p, params)
            state = state.apply_gradients(grads=grads)
        ends.append(state.params)
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), *ends))
