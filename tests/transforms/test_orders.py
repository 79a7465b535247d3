"""Orders of optax transformations: each one trains right, or is refused with the one that does."""

import collections
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen
from jmp.adapters import nnx as jmp_nnx
from jmp.transforms import WithLossScaleState
from tests.transforms import orders
from tests.transforms.orders import scaled

PARAMS = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}


def refused(table, sentence):
    """Rows of an optimizer and of the error, in which the name of its row may stand."""
    return [pytest.param(tx, sentence.format(name), id=name) for name, tx in table.items()]


OF_SCALING = refused(orders.BEFORE, "before with_loss_scale.*Move it inside")
OF_SCALING += refused(orders.INSIDE, "inside optax.{}, .*Put it around")
OF_SCALING += refused(orders.MOVING_TAIL, "state after with_loss_scale.*Move it inside")
OF_MASTERS = refused(orders.AFTER_MASTERS, "after with_master_params.*Move it inside")
OF_MASTERS += refused(orders.AROUND_MASTERS, "inside optax.{}, which .*Put it around")


@pytest.mark.parametrize(("tx", "sentence"), OF_SCALING)
def test_loss_scaling_in_a_wrong_place_is_refused_with_the_right_one(tx, sentence):
    state = tx.init(PARAMS)
    under_eval_shape = lambda state: jax.eval_shape(transforms.loss_scale_state, state)
    for read in (transforms.check_optimizer_state, transforms.loss_scale_state, under_eval_shape):
        with pytest.raises(ValueError, match=sentence):
            read(state)
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    create = functools.partial(linen.TrainState.create, apply_fn=None, params=PARAMS, tx=tx)
    if tx in orders.MOVING_TAIL.values():  # which a step of an adapter undoes
        assert diagnostics.metrics(state)["loss_scale"] == 1024.0
        assert create().loss_scale.loss_scale == 1024.0
        return
    optimizer = nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    readers = (lambda: diagnostics.metrics(state), create, lambda: jmp_nnx.loss_scale(optimizer))
    for read in readers:
        with pytest.raises(ValueError, match=sentence):
            read()


@pytest.mark.parametrize("name", orders.MASKED)
def test_loss_scaling_of_a_part_of_the_parameters_is_refused(name):
    tx = orders.MASKED[name]
    state = tx.init(PARAMS)
    sentence = f"inside optax.{name}, .*Put it around"
    for read in (transforms.check_optimizer_state, transforms.loss_scale_state):
        with pytest.raises(ValueError, match=sentence):
            read(state)
    with pytest.raises(ValueError, match=sentence):
        linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)


@pytest.mark.parametrize(("tx", "sentence"), OF_MASTERS)
def test_masters_in_a_wrong_place_are_refused_with_the_right_one(tx, sentence):
    params = jmp.cast_to_half(PARAMS)
    of_lookahead = "lookahead" in sentence
    state = tx.init(optax.LookaheadParams.init_synced(params) if of_lookahead else params)
    for read in (transforms.check_optimizer_state, lambda s: transforms.masters(s, params)):
        with pytest.raises(ValueError, match=sentence):
            read(state)
    if not of_lookahead:  # whose parameters are of its own kind
        with pytest.raises(ValueError, match=sentence):
            scaled(tx).init(params)


STORING = {store.__name__: store for store in (
    transforms.with_master_params, transforms.with_split_masters,
    transforms.with_stochastic_rounding, transforms.with_kahan_summation)}  # fmt: skip


@pytest.mark.parametrize("name", STORING)
def test_an_order_of_ways_to_store_that_fails_is_refused_with_the_one_that_does_not(name):
    store, adam = STORING[name], optax.adam(0.1)
    other = STORING["with_split_masters" if "kahan" in name else "with_kahan_summation"]
    stored = lambda inner: transforms.with_stored_state(inner, "int8")
    twice = "; .* each at most once"
    refused_by_init = {
        stored(store(adam)): rf"Swap the two: {name}\(with_stored_state\(adam, 'bfloat16'\)\)",
        store(stored(scaled())): r"with_loss_scale\(with_stored_state\(adam, .*\), loss_scale\)",
        store(scaled()): rf"Swap the two: with_loss_scale\({name}\(adam\), loss_scale\)",
        store(stored(stored(adam))): f"contains with_stored_state{twice}",
        store(store(adam)): f"{name}{twice}",
        store(other(adam)): "one that stores the parameters, .* each at most once",
    }
    for tx, sentence in refused_by_init.items():
        with pytest.raises(ValueError, match=sentence):
            tx.init(PARAMS)
    chain = optax.chain(store(adam), optax.scale(0.5))
    with pytest.raises(ValueError, match=rf"Move it inside: {name}\(optax.chain\(...\)\)"):
        transforms.check_optimizer_state(chain.init(PARAMS))


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


@pytest.mark.parametrize("tx", orders.RIGHT_AROUND_MASTERS.values())
def test_wrappers_that_hand_on_what_masters_say_may_stand_around_them(tx):
    params = jmp.cast_to_half(PARAMS)
    state = tx.init(params)
    transforms.check_optimizer_state(state)
    tx.update(params, state, params)


def test_trees_of_one_s_own_that_hold_optimizer_states_are_no_chains():
    state, ended = scaled().init(PARAMS), optax.EmptyState()
    tuples = ((3, state), (jnp.zeros(()), state), (PARAMS, state), ([1.0], state))
    # A dictionary of one's own, sorted by JAX: no order can be read off it.
    states = {"critic": optax.adam(0.1).init(PARAMS), "generator": state}
    ordered = jax.tree.map(jnp.copy, collections.OrderedDict(z=state, a=ended))
    for whole in (*tuples, states, ordered):
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
