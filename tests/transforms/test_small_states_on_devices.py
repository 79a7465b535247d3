"""Small states on many devices: where each array lies, and the same bits on any number of them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import transforms
from tests.bits import bits
from tests.commands import in_full

WAYS = {
    "split": transforms.with_split_masters,
    "stochastic": transforms.with_stochastic_rounding,
    "kahan": transforms.with_kahan_summation,
}
SPECS = {"rows": P("x"), "columns": P(None, "y"), "both": P("y", "x"), "whole": P()}


# "int8", which has scales of blocks, in all places; every way and type at least once. Of Adam's two
# moments the scales are found together.
ADAM, TRACE = optax.adam(1e-2), optax.trace(0.9)
ROWS = [("stochastic", "rows", "bfloat16", TRACE), ("kahan", "both", "float16", TRACE)]
ROWS += [("split", "both", "float8_e4m3fn", TRACE), ("split", "columns", "int8", ADAM)]
ROWS += [("split", spec, "int8", TRACE) for spec in ("rows", "both", "whole")]


def placed_param(axis_type, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    if axis_type is AxisType.Explicit:  # types write each None, jit does not
        spec = P(*spec, *(None,) * (2 - len(spec)))
    values = jnp.linspace(-1, 1, 16 * 1024, dtype=jnp.bfloat16).reshape(16, 1024)
    return jax.device_put(values, NamedSharding(mesh, spec))


@pytest.mark.full
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("way", "spec", "kind", "inner"), ROWS)
def test_every_array_of_a_state_lies_as_its_parameter_and_none_is_gathered(
    way, spec, kind, inner, axis_type
):
    tx = WAYS[way](transforms.with_stored_state(inner, kind))
    tx = transforms.with_loss_scale(tx, jmp.DynamicLossScale(16.0))
    params = placed_param(axis_type, SPECS[spec])
    goal = transforms.state_shardings(tx, params)
    for state in (jax.jit(tx.init)(params), tx.init(params)):
        lies_in = lambda leaf, place: leaf.sharding.is_equivalent_to(place, leaf.ndim)
        assert jax.tree.all(jax.tree.map(lies_in, state, goal))
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.shape[1] > 1]
    assert arrays  # codes, scales of blocks, what is kept beside: all but scales of whole rows
    assert all(leaf.sharding.is_equivalent_to(params.sharding, 2) for leaf in arrays)

    def step(params, state):
        updates, state = tx.update(16 * params, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state).compile()
    sending = "all-gather|all-to-all|collective-permute|reduce-scatter"
    sent = rf"= (\(?\w+\[[\d,]*\]).* ({sending})(?:-start)?\("
    assert re.findall(sent, compiled.as_text()) == []
    places = lambda tree: jax.tree.map(lambda leaf: leaf.sharding.shard_shape(leaf.shape), tree)
    before = places((params, state))
    for _ in range(2):  # it takes no arrays that lie elsewhere
        params, state = compiled(params, state)
        assert places((params, state)) == before


@pytest.mark.full
def test_blocks_that_devices_part_are_put_together_where_types_say_where_they_lie():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    values = jnp.linspace(-1, 1, 4 * 344).reshape(4, 344)
    params = jax.device_put(values, NamedSharding(mesh, P(None, "x")))
    tx = transforms.with_stored_state(optax.trace(0.5), "int8", rounding="nearest")
    _, expected = tx.update(values, tx.init(values))
    for run in (lambda f: f, jax.jit):
        updates, state = run(tx.update)(params, run(tx.init)(params))
        assert updates.sharding == params.sharding
        assert state.inner_state.trace.codes.sharding == params.sharding
        assert bits(state) == bits(expected)


# Equal bits: the arithmetic of the inner transformation is exact, whatever XLA fuses.

RULES = [("*", f"*{kind}", kind) for kind in ("bfloat16", "float16", "int8")]
INNER = optax.chain(optax.trace(0.5), optax.scale(-(2.0**-6)))
TREE = {"bfloat16": P("x"), "float16": P(None, "x"), "int8": P("x"), "none": P()}
DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "int8": jnp.bfloat16}


def stochastic(specs=None):
    inner = transforms.with_stored_state(INNER, RULES[:1] + RULES[2:], seed=5, specs=specs)
    return transforms.with_stochastic_rounding(inner, seed=7, specs=specs)


def start():
    numbers = np.random.default_rng(0).standard_normal((16, 48))
    return {name: jnp.asarray(numbers, DTYPES.get(name, jnp.bfloat16)) for name in TREE}


def three_steps(tx, params, state):
    for number in range(3):
        size = 1 + 2.0**-9 * number  # not what half types hold
        gradients = jax.tree.map(lambda p, by=size: p.astype(jnp.float32) * by, params)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def on_mesh(devices, tree):
    mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])
    return mesh, jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), TREE))


@functools.cache
def expected():
    """What one device gives, one operation at a time."""
    tx, params = stochastic(), start()
    params, state = three_steps(tx, params, tx.init(params))
    rows = params["bfloat16"].astype(jnp.float32)
    assert not jnp.array_equal(rows, start()["bfloat16"])
    return bits((params, state))


def by_jit(devices, run=jax.jit):
    tx = stochastic()
    _, params = on_mesh(devices, start())
    return run(functools.partial(three_steps, tx))(params, tx.init(params))


def by_eager(devices):
    return by_jit(devices, run=lambda steps: steps)


def by_shard_map(devices):
    tx = stochastic(TREE)
    mesh, params = on_mesh(devices, start())
    of_state = jax.tree.map(lambda place: place.spec, transforms.state_shardings(tx, params))
    specs = {"in_specs": (TREE, of_state), "out_specs": (TREE, of_state)}
    run = jax.shard_map(functools.partial(three_steps, tx), mesh=mesh, **specs)
    return jax.jit(run)(params, tx.init(params))


@pytest.mark.parametrize(
    ("way", "devices"),
    in_full(
        [(by_shard_map, 2), *((by_jit, n) for n in (8, 1, 2)), (by_shard_map, 8), (by_eager, 8)],
        first=1,
    ),
)
def test_bits_are_the_same_on_any_number_of_devices(way, devices):
    assert bits(way(devices)) == expected()


@pytest.mark.filterwarnings("ignore::jmp.UnusedRuleWarning")
def test_inside_of_shard_map_the_parts_must_be_known_and_rows_whole():
    mesh, params = on_mesh(8, start())

    def over(tx, spec):
        update = lambda params: tx.update(params, tx.init(params), params)[0]
        return jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec)

    with pytest.raises(ValueError, match="does not know which part .*specs="):
        jax.eval_shape(over(stochastic(), P("x")), params["int8"])
    tx = transforms.with_stored_state(INNER, "int8", rounding="nearest", specs=P(None, "x"))
    with pytest.raises(ValueError, match="int8 .*last axis.*along 'x'; expected whole rows"):
        jax.eval_shape(over(tx, P(None, "x")), params["float16"])


def test_values_from_the_host_are_taken_to_where_the_parameters_lie():
    _, params = on_mesh(8, {name: jnp.ones((16, 48), jnp.bfloat16) for name in TREE})
    for store in (transforms.with_master_params, *WAYS.values()):
        tx = store(INNER)
        values = {name: np.full((16, 48), 0.1, np.float32) for name in TREE}
        new, state = transforms.set_masters(tx.init(params), params, values)
        goal = jax.tree.map(lambda p: p.sharding, params), transforms.state_shardings(tx, params)
        assert jax.tree.map(lambda leaf: leaf.sharding, (new, state)) == goal
    reset = transforms.reset_masters(state, jax.tree.map(np.asarray, new))
    assert jax.tree.map(lambda leaf: leaf.sharding, reset) == goal[1]
