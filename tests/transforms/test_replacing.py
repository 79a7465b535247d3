"""`set_loss_scale`: an optimizer's state goes on with another loss scale."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
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


def follow(tx, state, steps):
    """Averages parameters as docs/recipes.md does: of the steps that were taken."""
    params, average = PARAMS, PARAMS
    for _ in range(steps):
        updates, state = tx.update({"w": jnp.ones(4)}, state, params)
        params = optax.apply_updates(params, updates)
        finite = transforms.loss_scale_state(state).grads_finite
        moved = optax.incremental_update(params, average, step_size=0.5)
        average = jmp.select_tree(finite, moved, average)
    return params, average


@pytest.mark.parametrize("old", ["dynamic", "static", "hysteresis"])
def test_an_average_that_follows_goes_on_where_nothing_is_checked_any_more(old):
    tx = scaling(SCALES[old], optax.sgd(1.0))
    before = skipped(tx)
    state = transforms.set_loss_scale(before, SCALES["no-op"])
    assert bool(state.grads_finite) and state.consecutive_skips == 0
    assert state.skipped_steps == 1  # what was skipped so far stays true
    diagnostics.check_skips(state, limit=1)
    assert diagnostics.metrics(state)["grads_finite"]
    params, average = follow(tx, state, 8)
    np.testing.assert_allclose(average["w"] - params["w"], 1.0, atol=0.01)
    again = transforms.set_loss_scale(state, SCALES[old])  # and back
    assert bool(again.grads_finite)


def test_flags_without_a_check_keep_their_kind_shape_and_place():
    new = SCALES["no-op"]
    tx = scaling(SCALES["dynamic"], optax.sgd(0.1))
    traced = jax.jit(lambda state: transforms.set_loss_scale(state, new))(skipped(tx))
    assert bool(traced.grads_finite)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), skipped(tx))
    many = transforms.set_loss_scale(many, new)
    assert many.grads_finite.tolist() == [True] * 3
    assert many.consecutive_skips.tolist() == [0] * 3
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.NamedSharding(mesh, jax.P())
    state = transforms.set_loss_scale(jax.device_put(skipped(tx), everywhere), new)
    assert state.grads_finite.sharding == state.consecutive_skips.sharding == everywhere
    abstract = transforms.set_loss_scale(jax.eval_shape(tx.init, PARAMS), new)
    assert abstract.grads_finite == jax.ShapeDtypeStruct((), jnp.bool_)
    assert abstract.consecutive_skips == jax.ShapeDtypeStruct((), jnp.int32)
    optimizer = nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    optimizer.opt_state.grads_finite[...] = jnp.array(False)
    optimizer.opt_state = transforms.set_loss_scale(optimizer.opt_state, new)
    assert nnx.as_pure(optimizer.opt_state).grads_finite


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
    "around a partition": lambda scale: scaling(
        scale, optax.partition({"all": optax.adam(0.1)}, {"w": "all"})
    ),
    "around MultiSteps and hyperparameters": lambda scale: scaling(
        scale, optax.MultiSteps(optax.inject_hyperparams(optax.sgd)(0.1), 2)
    ),
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


def test_a_traced_state_takes_it_inside_of_jit():
    state = scaling(SCALES["static"]).init(PARAMS)
    traced = jax.jit(lambda state: transforms.set_loss_scale(state, SCALES["dynamic"]))
    assert_equal(traced(state), transforms.set_loss_scale(state, SCALES["dynamic"]))


def test_an_abstract_state_gets_an_abstract_scale_that_lies_where_its_flags_lie():
    tx = scaling(SCALES["static"])
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.NamedSharding(mesh, jax.P())
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
        jax.eval_shape(tx.init, PARAMS),
    )
    replaced = transforms.set_loss_scale(abstract, SCALES["dynamic"])
    leaves = jax.tree.leaves(replaced.loss_scale)
    assert [(leaf.shape, leaf.dtype.name) for leaf in leaves] == [((), "float32"), ((), "int32")]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(replaced))
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(replaced))

    concrete = jax.device_put(tx.init(PARAMS), everywhere)
    replaced = transforms.set_loss_scale(concrete, SCALES["dynamic"])
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(replaced))


def test_an_abstract_state_with_the_old_scale_is_what_orbax_restores_into(tmp_path):
    saved = skipped(scaling(SCALES["hysteresis"]))
    like = jax.eval_shape(scaling(SCALES["static"]).init, PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        like = transforms.set_loss_scale(like, jmp.HysteresisLossScale(2.0, hysteresis=3))
        assert_equal(checkpointer.restore(tmp_path / "state", like), saved)


def test_every_member_of_a_vmapped_state_gets_the_scale_or_one_of_its_own():
    state = jax.vmap(scaling(SCALES["dynamic"]).init)({"w": jnp.ones((3, 4))})
    replaced = transforms.set_loss_scale(state, SCALES["hysteresis"])
    assert replaced.loss_scale.loss_scale.tolist() == [16.0] * 3
    assert replaced.loss_scale.tolerance.tolist() == [3] * 3
    own = jax.vmap(jmp.DynamicLossScale)(jnp.array([2.0, 4.0, 8.0]), jnp.zeros(3, jnp.int32))
    replaced = transforms.set_loss_scale(state, own)
    assert replaced.loss_scale.loss_scale.tolist() == [2.0, 4.0, 8.0]
    with pytest.raises(ValueError, match=r"shapes \[\(3,\)\]; expected scalars, or \(\)"):
        transforms.set_loss_scale(scaling(SCALES["static"]).init(PARAMS), own)


def test_the_state_of_an_nnx_optimizer_takes_it_as_it_is():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, scaling(SCALES["static"], optax.sgd(0.1)), wrt=nnx.Param)
    optimizer.opt_state = transforms.set_loss_scale(optimizer.opt_state, SCALES["dynamic"])
    loss_fn = lambda model, x: (model(x) ** 2).mean()
    adapter.train_step(loss_fn, model, optimizer, jnp.full((1, 2), jnp.inf))
    assert adapter.loss_scale(optimizer).loss_scale == 2.0**9


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
    with pytest.raises(TypeError, match="got loss_scale=8.0; expected a loss scale"):
        transforms.set_loss_scale(tx.init(PARAMS), 8.0)
    with pytest.raises(
        TypeError, match="got loss_scale=a WithLossScaleState; expected a loss scale"
    ):
        transforms.set_loss_scale(SCALES["static"], tx.init(PARAMS))
    for optimizer in (tx, optax.MultiSteps(tx, 2)):
        with pytest.raises(TypeError, match="not the optimizer itself"):
            transforms.set_loss_scale(optimizer, SCALES["static"])


def test_a_state_that_came_back_as_numpy_arrays_is_taken():
    state = jax.tree.map(np.asarray, skipped(scaling(SCALES["dynamic"])))
    new = transforms.set_loss_scale(state, SCALES["hysteresis"])
    assert new.loss_scale.loss_scale == 16.0 and new.skipped_steps == 1
