"""Eight devices, one of which sees an infinity: who skips, and who agrees."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import transforms
from jmp.adapters import linen
from jmp.adapters import nnx as jmp_nnx
from tests.commands import in_full

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
GRADIENTS = jnp.ones(8).at[5].set(jnp.inf)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AUTO, AUTO))


def make(axis_name="auto"):
    sgd, scale = optax.sgd(1.0, momentum=0.5), jmp.DynamicLossScale(4.0)
    return transforms.with_loss_scale(sgd, scale, axis_name=axis_name)


EVERYWHERE = P(("x", "y"))


def on_devices(mesh, update, in_specs, out_specs, check_vma=True):
    options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
    return jax.jit(jax.shard_map(update, mesh=mesh, **options))


def run_on(mesh, tx, spec, check_vma):
    def update(gradients, state):
        updates, state = tx.update(gradients, state)
        return updates, state.loss_scale.loss_scale[None]

    # A momentum of zeros, the same on all devices; each reports the scale it ends with.
    state = tx.init(jnp.zeros(GRADIENTS.shape[0] // (8 if spec == EVERYWHERE else 4)))
    run = on_devices(mesh, update, (spec, P()), (spec, EVERYWHERE), check_vma)
    return run(GRADIENTS, state)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_name", ["auto", ("x", "y")])
@pytest.mark.parametrize("spec", [EVERYWHERE, P("x")])
def test_devices_that_share_a_scale_agree_under_shard_map(mesh, spec, axis_name, check_vma):
    updates, scales = run_on(mesh, make(axis_name), spec, check_vma)
    assert jnp.all(updates == 0)
    assert scales.tolist() == [2.0] * 8


@pytest.mark.parametrize("check_vma", [True, False])
def test_agreement_can_be_switched_off(mesh, check_vma):
    updates, scales = run_on(mesh, make(()), EVERYWHERE, check_vma)
    assert sorted(scales.tolist()) == [2.0] + [4.0] * 7
    assert (updates == 0).sum() == 1


def test_devices_agree_along_a_named_axis_only(mesh):
    _, scales = run_on(mesh, make("y"), EVERYWHERE, True)
    assert sorted(scales.tolist()) == [2.0] * 2 + [4.0] * 6


def test_a_device_with_a_scale_of_its_own_skips_on_its_own(mesh):
    tx = make()
    states = jax.vmap(tx.init)(jnp.zeros((8, 1)))

    def update(gradients, state):
        state = jax.tree.map(lambda leaf: leaf[0], state)
        updates, state = tx.update(gradients, state)
        return updates, state.loss_scale.loss_scale[None]

    specs = EVERYWHERE, EVERYWHERE
    _, scales = on_devices(mesh, update, specs, specs)(GRADIENTS, states)
    assert scales.tolist() == [4.0] * 5 + [2.0] + [4.0] * 2


def test_devices_agree_under_pmap():
    tx = make()
    update = jax.pmap(lambda g, s: tx.update(g, s), axis_name="batch", in_axes=(0, None))
    updates, state = update(GRADIENTS, tx.init(jnp.zeros(())))
    assert jnp.all(updates == 0)
    assert state.loss_scale.loss_scale.tolist() == [2.0] * 8


def test_under_jit_sharding_there_is_one_flag_and_no_gather(mesh):
    tx = make()
    sharded = jax.device_put(GRADIENTS, NamedSharding(mesh, EVERYWHERE))
    update = jax.jit(tx.update)
    state = tx.init(jnp.zeros_like(sharded))
    updates, new_state = update(sharded, state)
    assert jnp.all(updates == 0) and new_state.loss_scale.loss_scale == 2.0
    assert "all-gather" not in update.lower(sharded, state).compile().as_text()


def test_a_vmapped_axis_is_not_agreed_on_unless_named():
    gradients = GRADIENTS[:, None]
    for axis_name, expected in (("auto", [4.0] * 5 + [2.0] + [4.0] * 2), ("seed", [2.0] * 8)):
        tx = make(axis_name)
        states = jax.vmap(tx.init)(jnp.zeros((8, 1)))
        _, states = jax.vmap(tx.update, axis_name="seed")(gradients, states)
        assert states.loss_scale.loss_scale.tolist() == expected


# A whole training step, in which the rows of one device overflow: nothing moves, on any device.

TX = transforms.mixed_precision(optax.adam(0.1), "O2", jmp.DynamicLossScale(4.0))
W = jnp.full((8, 8), 0.5, jnp.float16)
ROWS = jnp.ones((16, 8))
BAD = ROWS.at[11].set(jnp.inf)


def mse(w, x):
    return jnp.mean((x.astype(jnp.float16) @ w).astype(jnp.float32) ** 2)


def plain_step(place):
    def step(params, state, x):
        gradient = jmp.scaled_value_and_grad(mse, state.loss_scale)(params, x)[1]
        updates, state = TX.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = place(W)
    return jax.jit(step), (params, TX.init(params))


def linen_step(place):
    state = linen.TrainState.create(apply_fn=None, params={"w": place(W)}, tx=TX)

    def step(state, x):
        loss = lambda params: mse(params["w"], x)
        gradients = jmp.scaled_value_and_grad(loss, state.loss_scale)(state.params)[1]
        return (state.apply_gradients(grads=gradients),)

    return jax.jit(step), (state,)


def nnx_step(place):
    model = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = place(W)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        jmp_nnx.train_step(lambda model: mse(model.kernel[...], x), model, optimizer)
        return (nnx.state((model, optimizer)),)

    return jax.jit(step), (state,)


def bits_of(tree):
    """What each device holds, by path."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        found[name] = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        if leaf.sharding.is_fully_replicated:
            assert len(set(found[name])) == 1, f"{name} differs between devices"
    return found


@pytest.mark.parametrize(
    ("make_step", "spec", "axis_type"),
    in_full(
        [
            *(
                (step, P(*x), AUTO)
                for step in (plain_step, linen_step, nnx_step)
                for x in ("", "x")
            ),
            (plain_step, P(), EXPLICIT),
            (linen_step, P(), EXPLICIT),
        ],
        one_of=3,
    ),
)
def test_rows_of_one_device_that_overflow_are_a_step_that_no_device_takes(
    make_step, spec, axis_type
):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    rows = NamedSharding(mesh, P("x"))
    with jax.set_mesh(mesh):
        step, before = make_step(lambda w: jax.device_put(w, NamedSharding(mesh, spec)))
        before = step(*before, jax.device_put(ROWS, rows))
        held = bits_of(before)
        after = step(*before, jax.device_put(BAD, rows))
    moved = [name for name, bits in bits_of(after).items() if bits != held[name]]
    # The last word of each path, as in `.opt_state.loss_scale.counter` or nnx's `[...].value`.
    words = {re.findall("[a-z_]+", name.removesuffix(".value"))[-1] for name in moved}
    scaling = {"loss_scale", "grads_finite", "skipped_steps", "consecutive_skips"}
    assert scaling <= words <= scaling | {"counter"}
