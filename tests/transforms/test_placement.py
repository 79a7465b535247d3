"""An optimizer's state lies where its parameters lie: each array, each scalar, from `init` on."""

import functools
import re

import equinox as eqx
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
from tests.processes import run_two
from tests.transforms import every_optimizer, two_processes

SCALE = jmp.DynamicLossScale(16.0, period=2)
O2 = two_processes.optimizer()


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


def every_state(names, transform):
    mesh = make_mesh((8,))
    kernel = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("x")))
    params = {"kernel": kernel, "bias": jax.device_put(jnp.ones(8), NamedSharding(mesh, P()))}
    for name in names:
        inner = every_optimizer.TRANSFORMATIONS[name]
        tx = transforms.with_loss_scale(inner, SCALE)
        yield name, check_placed(transform(tx.init)(params), params, tx).inner_state


def test_the_state_of_every_optimizer_is_placed():
    specs = dict(every_state(every_optimizer.TRANSFORMATIONS, lambda init: init))
    assert specs["muon"].inner_states["muon"].inner_state[0].mu["kernel"] == P("x")


# Those whose states have other shapes or paths than their parameters, or no arrays beside scalars.
UNUSUAL = """
    adafactor sm3 lbfgs flatten add_noise sgd masked partition MultiSteps inject_hyperparams
""".split()


def test_unusual_states_are_placed_under_jit_too():
    specs = dict(every_state(UNUSUAL, jax.jit))
    factored = specs["adafactor"][0]
    assert factored.v["kernel"] == P("x") and factored.v_row["kernel"] == P()
    assert specs["flatten"][0].mu == P()  # one vector
    assert specs["masked"].inner_state[0].mu["kernel"] == P("x")
    assert specs["partition"].inner_states[True].inner_state[0].nu["kernel"] == P("x")
    assert specs["MultiSteps"].acc_grads["kernel"] == P("x")
    assert specs["inject_hyperparams"].inner_state[0].mu["kernel"] == P("x")


def test_real_moments_of_complex_parameters_lie_as_these():
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        params = sharded(make_mesh(axis_type=axis_type), jnp.complex64)
        tx = transforms.with_loss_scale(optax.adam(1e-3), SCALE)
        adam = check_placed(jax.jit(tx.init)(params), params, tx).inner_state[0]
        assert adam.nu["b"]["kernel"] == P("y", "x")


def test_moments_that_forget_how_parameters_are_sharded_are_placed():
    def init(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape), params)

    inner = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    tx = transforms.with_loss_scale(inner, SCALE)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = make_mesh(axis_type=axis_type)
        params = sharded(mesh)
        with jax.set_mesh(mesh):
            check_placed(tx.init(params), params, tx)
            check_placed(jax.jit(tx.init)(params), params, tx)


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


def test_on_one_device_init_traces_what_it_traced_before():
    params = {"w": jnp.ones(3, jnp.float16)}
    program = str(jax.make_jaxpr(O2.init)(params))
    assert "optimization_barrier" not in program and "select_n" not in program
    state = O2.init(params)
    kinds = {type(leaf.sharding).__name__ for leaf in jax.tree.leaves(state)}
    assert kinds == {"SingleDeviceSharding"}


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


def test_optimizers_of_nnx_and_states_of_equinox_lie_where_their_modules_lie():
    place = functools.partial(jax.device_put, device=NamedSharding(make_mesh((8,)), P("x")))
    half = lambda leaf: place(leaf.astype(jnp.float16))
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(half, nnx.state(model)))
    params = nnx.state(model, nnx.Param)
    for create in (nnx.Optimizer, nnx.jit(nnx.Optimizer, static_argnames=("tx", "wrt"))):
        state = nnx.as_pure(create(model, tx=O2, wrt=nnx.Param).opt_state)
        assert state.inner_state.inner_state[0].mu["kernel"].sharding.spec == P("x")
        assert state.inner_state.masters["bias"].sharding.spec == P("x")
        assert state.skipped_steps.sharding.spec == P()
    check_placed(O2.init(params), params, O2)

    module = eqx.filter(eqx.nn.Linear(8, 8, key=jax.random.key(0)), eqx.is_inexact_array)
    module = jax.tree.map(half, module)
    for init in (O2.init, eqx.filter_jit(O2.init)):
        assert check_placed(init(module), module, O2).inner_state.masters.weight == P("x")


def restored(folder, like, tx, name="saved"):
    """Restores `{"params": ..., "state": ...}` where abstract parameters say."""
    state = abstract(jax.eval_shape(tx.init, like), transforms.state_shardings(tx, like))
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / name, {"params": like, "state": state})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run on eight devices, and the folder that it was saved in."""
    params = sharded(make_mesh((8, 1)))
    params, state = train_step(O2, params, O2.init(params))
    folder = tmp_path_factory.mktemp("sharded")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", {"params": params, "state": state})
        checkpointer.wait_until_finished()
    return params, state, folder


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (2, 2), None], ids=str)
def test_a_state_restores_on_other_devices_bit_by_bit(saved, shape):
    params, state, folder = saved
    if shape is None:
        place = lambda leaf: jax.sharding.SingleDeviceSharding(jax.devices()[3])
        shardings = jax.tree.map(place, params)
    else:
        mesh = make_mesh(shape, devices=jax.devices()[: shape[0] * shape[1]])
        shardings = jax.tree.map(lambda leaf: leaf.sharding, sharded(mesh))
    got = restored(folder, abstract(params, shardings), O2)
    assert bits(got) == bits({"params": params, "state": state})
    places = jax.tree.map(lambda leaf: leaf.sharding, got["state"])
    assert places == transforms.state_shardings(O2, got["params"])


@pytest.mark.full
def test_two_processes_save_a_state_that_one_restores_bit_by_bit(tmp_path):
    run_two("tests.transforms.two_processes", tmp_path)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    described = functools.partial(jax.ShapeDtypeStruct, sharding=one)
    like = {name: described(*shape) for name, shape in two_processes.SHAPES.items()}
    got = restored(tmp_path, like, O2)
    numbers = np.load(tmp_path / "numbers.npz")
    assert bits(got) == bits([numbers[name] for name in numbers.files])
    assert got["state"].loss_scale.loss_scale == 32.0
    # Rounded stochastically, in codes: what one process on one device computes itself.
    small = restored(tmp_path, like, two_processes.small_optimizer(), "small")
    params = {"kernel": jnp.asarray(two_processes.KERNEL), "bias": jnp.ones(8)}
    assert bits(small) == bits(two_processes.three_small_steps(params))


def test_parameters_without_a_place_are_refused():
    with pytest.raises(ValueError, match=r"float32\[3\].*without a sharding at params\['w'\]"):
        transforms.state_shardings(O2, {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})
    with pytest.raises(ValueError, match="call it outside of jit"):
        jax.jit(lambda p: transforms.state_shardings(O2, p))(jnp.ones(3))
    with pytest.raises(TypeError, match="state_shardings got tx="):
        transforms.state_shardings(jnp.ones(3), {})
