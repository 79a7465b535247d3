"""Few kernels: the check of all gradients, in groups, and what a skipped step leaves as it was."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import NamedSharding, P

import jmp
from jmp import transforms
from jmp.adapters._atomic import keep_if_skipped
from jmp.transforms._few_kernels import (
    SHORTER_THAN_A_LAUNCH,
    SMALL_LEAF,
    gradients_finite,
    selected_by_all,
)
from tests.bits import bits

AUTO = jax.sharding.AxisType.Auto
# Small and large, alike and unlike, more of each than one group holds; no elements; a scalar.
SHAPES = [*[(3,)] * 40, *[(SMALL_LEAF, 2)] * 9]
SHAPES += [(SMALL_LEAF - 1,), (2, SMALL_LEAF), (0, 4), (), (SMALL_LEAF,)]


def on_one_device(tree):
    """Puts arrays where their types say that they are not sharded, among eight devices or not."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AUTO,))
    return jax.device_put(tree, NamedSharding(mesh, P()))


def reductions(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("reduce_and")


def test_finite_gradients_are_finite_in_fewer_reductions():
    gradients = on_one_device([jnp.ones(shape) for shape in SHAPES])
    assert gradients_finite(gradients)
    assert reductions(gradients_finite, gradients) < 10
    assert reductions(jmp.all_finite, gradients) > len(SHAPES)


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.complex64])
def test_one_bad_element_of_one_tensor_is_seen_wherever_it_is(bad, dtype):
    check = jax.jit(gradients_finite)
    shapes = [shape for shape in SHAPES if np.prod(shape)]
    gradients = on_one_device([jnp.ones(shape, dtype) for shape in shapes])
    for position, gradient in enumerate(gradients):
        if position in (0, 31, 32, 39) or position >= 40:
            last = gradient.at[(-1,) * gradient.ndim].set(bad)
            assert not check([*gradients[:position], last, *gradients[position + 1 :]])


def test_dtypes_and_leaves_that_are_no_gradients_may_mix(strict_promotion):
    tree = {
        "half": jnp.ones(3, jnp.bfloat16),
        "full": jnp.ones((2, 2)),
        "complex": jnp.ones(2, jnp.complex64),
        "integer": np.zeros(2, jax.dtypes.float0),
        "steps": jnp.arange(3),
        "nothing": None,
    }
    grouped = {k: on_one_device(v) if isinstance(v, jax.Array) else v for k, v in tree.items()}
    imaginary = jnp.array([1 + 1j * jnp.inf])
    for leaves, bad in ((tree, imaginary), (grouped, on_one_device(imaginary))):
        assert gradients_finite(leaves)
        assert not gradients_finite({**leaves, "complex": bad})
    assert gradients_finite({})


def test_the_largest_finite_numbers_are_finite():
    largest = jnp.full((SMALL_LEAF, 4), jnp.finfo(jnp.float32).max)
    assert gradients_finite(on_one_device([largest, largest, largest[:3]]))


# On eight devices.


def collectives(function, *args):
    text = function.lower(*args).compile().as_text()
    kinds = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"
    return re.findall(rf" ({kinds})(?:-start)?\(", text)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AUTO, AUTO))


SCALED = transforms.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(4.0))
STATE = SCALED.init(None)


def test_sharded_gradients_are_never_gathered(mesh):
    # Alike in shape, and sharded along different axes: as a column's and a row's parallel weights.
    specs = [P("x", "y"), P("y", "x"), P(None, "x"), P("x")] * 4
    places = [NamedSharding(mesh, spec) for spec in specs]
    gradients = jax.device_put([jnp.ones((256, 256))] * len(places), places)
    found = collectives(jax.jit(SCALED.update), gradients, STATE)
    assert set(found) == {"all-reduce"}  # only the flag
    assert len(found) <= len(gradients)
    # If jit itself shards, types name no mesh: that there are eight devices has to be enough.
    step = jax.jit(SCALED.update, in_shardings=(places, None))
    assert set(collectives(step, jax.device_get(gradients), STATE)) == {"all-reduce"}


def test_inside_shard_map_each_device_checks_its_own_part_in_groups(mesh):
    gradients = [jax.device_put(jnp.ones((256, 256)), NamedSharding(mesh, P("x")))] * 16

    def mapped(axis_names):
        options = {"in_specs": (P("x"), P()), "out_specs": (P("x"), P())}
        return jax.shard_map(SCALED.update, mesh=mesh, axis_names=axis_names, **options)

    everywhere = mapped({"x", "y"})
    assert reductions(everywhere, gradients, STATE) < len(gradients)
    assert set(collectives(jax.jit(everywhere), gradients, STATE)) == {
        "all-reduce"
    }  # the flag's agreement
    # Along "y" jit may still shard: there the check is by tensor.
    assert reductions(mapped({"x"}), gradients, STATE) >= len(gradients)


# What a skipped step leaves as it was, whatever its dtype and size.

TX = transforms.with_loss_scale(optax.sgd(0.5, momentum=0.5), jmp.DynamicLossScale(4.0))
GRADIENTS = {True: jnp.ones(3), False: jnp.array([1.0, jnp.inf, 1.0])}


def before():
    """What a step may carry: numbers that are awkward, of many dtypes, small and large."""
    special = jnp.array([0.0, -0.0, jnp.nan, -jnp.inf, 1e-45, 1.0])
    return {
        "mean": special,
        "var": special[::-1],
        "half": special.astype(jnp.bfloat16),
        "count": jnp.array(2**31 - 1, jnp.int32),
        "bytes": jnp.arange(6, dtype=jnp.uint8),
        "seen": jnp.array([True, False, True]),
        "key": jax.random.key(3),
        "large": jnp.arange(SHORTER_THAN_A_LAUNCH + 1, dtype=jnp.float32),
        "nothing": None,
    }


def after():
    moved = {name: jnp.flip(leaf) for name, leaf in before().items() if getattr(leaf, "ndim", 0)}
    return before() | moved | {"count": jnp.int32(-1), "key": jax.random.key(4)}


def step(old, gradients, state):
    _, new_state = TX.update(gradients, state, jnp.zeros(3))
    return keep_if_skipped(after(), old, new_state, state)[0]


WAYS = {"eager": step, "jit": jax.jit(step), "donated": jax.jit(step, donate_argnums=0)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("finite", [True, False])
def test_a_step_leaves_all_that_is_after_it_or_all_that_was_before_it(way, finite):
    kept = WAYS[way](before(), GRADIENTS[finite], TX.init(jnp.zeros(3)))
    assert bits(kept) == bits(after() if finite else before())


def test_each_element_of_a_mapped_step_is_skipped_by_itself():
    gradients = jnp.stack([GRADIENTS[True], GRADIENTS[False]])
    mapped = jax.jit(jax.vmap(step, in_axes=(None, 0, None)))
    kept = mapped(before(), gradients, TX.init(jnp.zeros(3)))
    for row, expected in enumerate((after(), before())):
        assert bits(jax.tree.map(lambda leaf, row=row: leaf[row], kept)) == bits(expected)


def test_updates_and_moments_of_every_size_are_those_of_the_optimizer_alone():
    params = {
        "small": jnp.ones(5),
        "large": jnp.ones(SHORTER_THAN_A_LAUNCH + 1),
        "scalar": jnp.float32(1),
    }
    gradients = jax.tree.map(lambda p: 3 * p, params)
    inner = optax.adam(0.1)
    scaled = transforms.with_loss_scale(inner, jmp.DynamicLossScale(1.0))
    updates, state = jax.jit(scaled.update)(gradients, scaled.init(params), params)
    expected, expected_state = jax.jit(inner.update)(gradients, inner.init(params), params)
    assert bits((updates, state.inner_state)) == bits((expected, expected_state))
    infinite = gradients | {"scalar": jnp.float32(jnp.inf)}
    updates, skipped = jax.jit(scaled.update)(infinite, state, params)
    assert bits(skipped.inner_state) == bits(state.inner_state)
    assert bits(updates) == bits(jax.tree.map(lambda p: -0.0 * p, params))


def test_what_is_selected_with_the_parameters_on_a_tpu_stays_for_every_pattern():
    halves = jnp.arange(2**16, dtype=jnp.uint16)
    singles = jnp.asarray(np.linspace(0, 2**32 - 1, 2**16).astype(np.uint32))
    others = (halves.view(jnp.bfloat16), halves, singles.view(jnp.float32))
    assert bits(selected_by_all(halves, *others)) == bits(halves)
    numbers = jnp.where(jnp.isnan(others[0]), jnp.nan, others[0])  # payloads of NaN do not stay
    assert bits(selected_by_all(numbers, *others)) == bits(numbers)
    passes_on = jax.grad(lambda x: selected_by_all(x, *others).sum())(jnp.ones(2**16, jnp.bfloat16))
    assert (passes_on == 1).all()
