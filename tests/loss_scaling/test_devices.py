"""Eight devices, one of which sees an infinity: who skips, and who agrees."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import transforms

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


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_under_jit_sharding_there_is_one_flag_and_no_gather(axis_type):
    tx = make()
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
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
