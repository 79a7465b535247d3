"""An optimizer's state lies where its parameters lie: each array, each scalar, from `init` on."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import transforms
from jmp.adapters import linen
from testbed.machines import wire
from testbed.machines.gpus import compile_for_placed
from tests.bits import bits
from tests.transforms import every_optimizer

SCALE = jmp.DynamicLossScale(16.0, period=2)
O2 = transforms.with_loss_scale(transforms.with_master_params(optax.adam(1e-2)), SCALE)


def make_mesh(shape=(4, 2), axis_type=AxisType.Auto, devices=None):
    names = ("x", "y")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape), devices=devices)


def sharded(mesh, dtype=jnp.float16):
    """Two kernels of one shape that are sharded differently, and a bias that is not."""
    specs = {"a": {"kernel": P("x")}, "b": {"kernel": P("y", "x")}, "bias": P()}
    first, second = ({"kernel": jnp.full((8, 8), number, dtype)} for number in (0.1, 0.2))
    params = {"a": first, "b": second, "bias": jnp.ones(8)}
    return jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def abstract(params, shardings=None):
    def described(leaf, place):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    own = jax.tree.map(lambda leaf: leaf.sharding, params)
    return jax.tree.map(described, params, own if shardings is None else shardings)


def check_placed(state, params, tx):
    """Compares where a state lies with what `state_shardings` says; returns the latter's specs."""
    expected = transforms.state_shardings(tx, params)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    leaves = jax.tree.leaves_with_path(state)
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(expected), strict=True):
        place = jax.tree_util.keystr(path)
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (place, leaf.sharding)
        assert leaf.sharding.device_set == sharding.device_set, place
    return jax.tree.map(lambda sharding: sharding.spec, expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("transform", [lambda init: init, jax.jit], ids=["eager", "jit"])
def test_each_array_of_a_state_lies_as_its_parameter_and_scalars_everywhere(transform, axis_type):
    params = sharded(make_mesh(axis_type=axis_type))
    specs = check_placed(transform(O2.init)(params), params, O2)
    adam, _ = specs.inner_state.inner_state
    assert adam.mu == {"a": {"kernel": P("x")}, "b": {"kernel": P("y", "x")}, "bias": P()}
    assert specs.inner_state.masters["b"]["kernel"] == P("y", "x")
    assert isinstance(specs.inner_state.masters["bias"], optax.MaskedNode)
    assert {adam.count, specs.loss_scale.loss_scale, specs.skipped_steps} == {P()}


def test_the_state_of_every_optimizer_is_placed():
    specs = specs_of(every_optimizer.TRANSFORMATIONS, lambda init: init)
    assert specs["muon"].inner_states["muon"].inner_state[0].mu["kernel"] == P("x")


def specs_of(names, transform):
    mesh = make_mesh((8,))
    params = {"kernel": (jnp.ones((16, 8)), P("x")), "bias": (jnp.ones(8), P())}
    params = {n: jax.device_put(x, NamedSharding(mesh, spec)) for n, (x, spec) in params.items()}
    specs = {}
    for name in names:
        tx = transforms.with_loss_scale(every_optimizer.TRANSFORMATIONS[name], SCALE)
        specs[name] = check_placed(transform(tx.init)(params), params, tx).inner_state
    return specs


# Those whose states have other shapes or paths than their parameters, or no arrays beside scalars.
UNUSUAL = """
    adafactor sm3 lbfgs flatten add_noise sgd masked partition MultiSteps inject_hyperparams
""".split()


def test_unusual_states_are_placed_under_jit_too():
    specs = specs_of(UNUSUAL, jax.jit)
    factored = specs["adafactor"][0]
    assert factored.v["kernel"] == P("x") and factored.v_row["kernel"] == P()
    assert specs["flatten"][0].mu == P()  # one vector
    assert specs["masked"].inner_state[0].mu["kernel"] == P("x")
    assert specs["partition"].inner_states[True].inner_state[0].nu["kernel"] == P("x")
    assert specs["MultiSteps"].acc_grads["kernel"] == P("x")
    assert specs["inject_hyperparams"].inner_state[0].mu["kernel"] == P("x")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_moments_of_another_dtype_or_made_from_shapes_lie_as_their_parameters(axis_type):
    from_shapes = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape), params), optax.identity().update
    )
    mesh = make_mesh(axis_type=axis_type)
    for inner, dtype in ((optax.scale_by_adam(), jnp.complex64), (from_shapes, jnp.float16)):
        params, tx = sharded(mesh, dtype), transforms.with_loss_scale(inner, SCALE)
        with jax.set_mesh(mesh):
            for init in (tx.init, jax.jit(tx.init)):
                moments = check_placed(init(params), params, tx).inner_state
                assert getattr(moments, "nu", moments)["b"]["kernel"] == P("y", "x")


def test_states_of_an_ensemble_lie_as_the_ensemble():
    mesh = make_mesh((8,))
    params = jax.device_put({"kernel": jnp.ones((8, 4, 4))}, NamedSharding(mesh, P("x")))
    state = jax.vmap(O2.init)(params)
    assert state.inner_state.inner_state[0].mu["kernel"].sharding.spec == P("x")
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {8}


@pytest.mark.parametrize("axes", [{"x"}, {"x", "y"}], ids=len)
def test_states_are_made_inside_of_shard_map_with_scalars_that_do_not_vary(axes):
    params = {"kernel": sharded(make_mesh())["a"]["kernel"]}
    parts_of = lambda p: (O2.init(p).inner_state.masters, O2.init(p).loss_scale)
    options = {"in_specs": P("x"), "out_specs": (P("x"), P()), "axis_names": axes}
    init = jax.shard_map(parts_of, mesh=make_mesh(), **options)
    masters, scale = jax.jit(init)(params)
    assert masters["kernel"].sharding.spec == P("x") and scale.loss_scale.sharding.spec == P()


def test_what_jit_captures_and_what_lies_in_host_memory_is_placed():
    params = sharded(make_mesh())
    captured = jax.jit(lambda: O2.init(params))()
    check_placed(captured, params, O2)
    to_host = lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))
    in_host = jax.tree.map(to_host, params)
    moments = O2.init(in_host).inner_state.inner_state[0].mu
    assert moments["b"]["kernel"].sharding == in_host["b"]["kernel"].sharding
    assert jax.jit(O2.init)(in_host).inner_state.inner_state[0].mu["a"]["kernel"].shape == (8, 8)


def test_one_parameter_on_a_mesh_is_enough_to_place_its_state_under_jit():
    sharded = jax.device_put(jnp.ones((16, 8)), NamedSharding(make_mesh((8,)), P("x")))
    tx = transforms.with_loss_scale(optax.adam(1e-3), jmp.NoOpLossScale())
    state = jax.jit(tx.init)({"kernel": sharded, "bias": np.ones(8, np.float32)})
    assert state.inner_state[0].mu["kernel"].sharding.spec == P("x")


def test_compiled_for_eight_h200s_init_makes_shards_in_no_more_kernels(h200):
    """A select by a constant is removed there before shardings are decided, on CPUs after."""
    mesh = wire.h200s({"x": 8})
    specs = {"a": P("x"), "b": P(None, "x")}
    described = functools.partial(jax.ShapeDtypeStruct, (1024, 512), jnp.float32)
    params = {name: described(sharding=NamedSharding(mesh, specs[name])) for name in specs}
    tx = transforms.with_loss_scale(optax.adam(1e-3), SCALE)
    placed = compile_for_placed(tx.init, params)
    plain = compile_for_placed(optax.adam(1e-3).init, params)
    layout = re.search(r"entry_computation_layout=.*->\((.*?)\)}", placed.text)[1]
    assert layout.count("f32[128,512]") == layout.count("f32[1024,64]") == 2
    assert "f32[1024,512]" not in layout and not wire.wire(placed.text)
    scalars = 5  # the scale, its counter, the flag, two counts of skips
    assert placed.kernels <= plain.kernels + scalars
    assert placed.bytes_moved < plain.bytes_moved / 6


def train_step(tx, params, state):
    loss = lambda p: sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(p))
    _, gradients = jmp.scaled_value_and_grad(loss, state.loss_scale)(params)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("transform", [lambda init: init, jax.jit], ids=["eager", "jit"])
def test_three_steps_compile_once_keep_their_places_and_free_what_was_donated(transform, zero):
    params = sharded(make_mesh())
    if zero == 3:
        state, options = transform(O2.init)(params), {}
    else:  # the state is sharded, the parameters are not
        goal = transforms.state_shardings(O2, abstract(params))
        whole = NamedSharding(make_mesh(), P())
        params = jax.device_put(params, whole)
        state = jax.device_put(O2.init(params), goal)
        if transform is jax.jit:
            state = jax.jit(O2.init, out_shardings=goal)(params)
        options = {"out_shardings": (whole, goal)}
    step = jax.jit(functools.partial(train_step, O2), donate_argnums=(0, 1), **options)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, (params, state))
    for _ in range(3):
        before = params, state
        params, state = step(params, state)
        assert jax.tree.map(lambda leaf: leaf.sharding.spec, (params, state)) == specs
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert step._cache_size() == 1 and state.loss_scale.loss_scale == 32.0


def test_the_shardings_of_a_plain_optax_state_place_it_under_jit():
    params = sharded(make_mesh(), jnp.float32)
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), 2)
    places = transforms.state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=places)(params)
    specs = check_placed(state, params, tx)
    assert specs.inner_opt_state[1][0].mu["b"]["kernel"] == P("y", "x")
    assert transforms.state_shardings(tx, abstract(params)) == places


def test_boxed_parameters_of_linen_place_boxed_states():
    ones = nn.with_partitioning(nn.initializers.ones, ("x", "y"))
    params = nn.Dense(8, kernel_init=ones).init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    params = linen.cast_params(params, "O2")
    params = jax.device_put(params, nn.get_sharding(params, make_mesh()))
    for init in (O2.init, jax.jit(O2.init)):
        specs = check_placed(init(params), params, O2)
        assert specs.inner_state.masters["kernel"].value == P("x", "y")
        assert specs.inner_state.inner_state[0].mu["bias"] == P()


def test_a_train_state_lies_where_its_parameters_lie_and_compiles_once():
    params = sharded(make_mesh())
    create = lambda p: linen.TrainState.create(apply_fn=print, params=p, tx=O2)
    for state in (create(params), jax.jit(create)(params)):
        check_placed(state.opt_state, params, O2)
        assert state.step.sharding.spec == P()
        step = jax.jit(lambda state: state.apply_gradients(grads=state.params))
        assert step(step(state)).step == 2 and step._cache_size() == 1


def test_an_optimizer_of_nnx_lies_where_its_module_lies():
    place = functools.partial(jax.device_put, device=NamedSharding(make_mesh((8,)), P("x")))
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda p: place(p.astype(jnp.float16)), nnx.state(model)))
    for create in (nnx.Optimizer, nnx.jit(nnx.Optimizer, static_argnames=("tx", "wrt"))):
        state = nnx.as_pure(create(model, tx=O2, wrt=nnx.Param).opt_state)
        assert state.inner_state.inner_state[0].mu["kernel"].sharding.spec == P("x")
        assert state.inner_state.masters["bias"].sharding.spec == P("x")
        assert state.skipped_steps.sharding.spec == P()
    params = nnx.state(model, nnx.Param)
    check_placed(O2.init(params), params, O2)


def test_a_state_restores_on_other_devices_bit_by_bit(tmp_path):
    params = sharded(make_mesh((8, 1)))
    saved = dict(zip(("params", "state"), train_step(O2, params, O2.init(params)), strict=True))
    devices = jax.devices()
    meshes = [make_mesh(n, devices=devices[: n[0] * n[1]]) for n in ((2, 4), (4, 2), (2, 2))]
    places = [jax.tree.map(lambda leaf: leaf.sharding, sharded(mesh)) for mesh in meshes]
    places += [jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(devices[3]), params)]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", saved)
        checkpointer.wait_until_finished()
        for shardings in places:
            like = abstract(params, shardings)
            state = jax.eval_shape(O2.init, like)
            state = abstract(state, transforms.state_shardings(O2, like))
            got = checkpointer.restore(tmp_path / "saved", {"params": like, "state": state})
            assert bits(got) == bits(saved)
            found = jax.tree.map(lambda leaf: leaf.sharding, got["state"])
            assert found == transforms.state_shardings(O2, got["params"])


def test_traced_parameters_have_no_place():
    with pytest.raises(ValueError, match="call it outside of jit"):
        jax.jit(lambda p: transforms.state_shardings(O2, p))(jnp.ones(3))
