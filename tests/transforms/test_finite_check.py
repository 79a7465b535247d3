"""The check of all gradients: the same answer in groups, and no gather where they are sharded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import NamedSharding, P

import jmp
from jmp import transforms
from jmp.transforms._few_kernels import SMALL_LEAF, gradients_finite

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
    text = jax.jit(function).lower(*args).compile().as_text()
    kinds = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"
    return re.findall(rf" ({kinds})(?:-start)?\(", text)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AUTO, AUTO))


def make():
    tx = transforms.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(4.0))
    return tx, tx.init(None)


def sharded_gradients(mesh):
    # Alike in shape, and sharded along different axes: as a column's and a row's parallel weights.
    specs = [P("x", "y"), P("y", "x"), P(None, "x"), P("x")] * 4
    places = [NamedSharding(mesh, spec) for spec in specs]
    return jax.device_put([jnp.ones((256, 256))] * len(places), places), places


def test_sharded_gradients_are_never_gathered(mesh):
    gradients, _ = sharded_gradients(mesh)
    tx, state = make()
    found = collectives(tx.update, gradients, state)
    assert set(found) == {"all-reduce"}  # only the flag
    assert len(found) <= len(gradients)


def test_gradients_sharded_by_jit_itself_are_never_gathered(mesh):
    # Their types name no mesh: that there are eight devices has to be enough.
    gradients, shardings = sharded_gradients(mesh)
    tx, state = make()
    step = jax.jit(tx.update, in_shardings=(shardings, None))
    text = step.lower([np.ones(g.shape, np.float32) for g in gradients], state).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text


def test_inside_shard_map_each_device_checks_its_own_part_in_groups(mesh):
    gradients = [jax.device_put(jnp.ones((256, 256)), NamedSharding(mesh, P("x")))] * 16
    tx, state = make()

    def mapped(axis_names):
        options = {"in_specs": (P("x"), P()), "out_specs": (P("x"), P())}
        return jax.shard_map(tx.update, mesh=mesh, axis_names=axis_names, **options)

    everywhere = mapped({"x", "y"})
    assert reductions(everywhere, gradients, state) < len(gradients)
    assert set(collectives(everywhere, gradients, state)) == {"all-reduce"}  # the flag's agreement
    # Along "y" jit may still shard: there the check is by tensor.
    assert reductions(mapped({"x"}), gradients, state) >= len(gradients)
