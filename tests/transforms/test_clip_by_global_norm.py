"""`transforms.clip_by_global_norm`: the norm of all shards, where each device holds some."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import transforms

AXES = ("data", "model")
SPECS = {"rows": P("data"), "columns": P(None, "model"), "both": P(AXES), "whole": P()}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)


def gradients():
    random = np.random.default_rng(0)
    shapes = {"rows": (8, 3), "columns": (3, 8), "both": (16,), "whole": (5,)}
    return {name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def clipped_by(tx, updates):
    return tx.update(updates, tx.init(updates))[0]


def clip_on(mesh, updates, specs, axis_name="auto", check_vma=True, max_norm=1.0):
    tx = transforms.clip_by_global_norm(max_norm, axis_name)
    clip = lambda updates: clipped_by(tx, updates)
    mapped = jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=check_vma)
    return jax.jit(mapped)(updates)


def assert_equal(clipped, expected):
    for name, leaf in expected.items():
        assert clipped[name].dtype == leaf.dtype
        np.testing.assert_allclose(clipped[name], leaf, rtol=1e-6, err_msg=name)


ONE = {"both": P(AXES)}
WAYS = {
    "types say what is whole": (SPECS, {}),
    "a large norm": (SPECS, {"max_norm": 100.0}),
    "a gradient does not count along an axis that its type lacks": (SPECS, {"axis_name": AXES}),
    "without types all are shards": (ONE, {"check_vma": False}),
    "without types, along these axes": (ONE, {"check_vma": False, "axis_name": AXES}),
}


@pytest.mark.parametrize(("specs", "options"), WAYS.values(), ids=WAYS.keys())
def test_shards_are_clipped_by_the_norm_of_the_whole(mesh, specs, options):
    """One gradient along each axis, one along both, one replicated, which counts once."""
    updates = {name: gradients()[name] for name in specs}
    expected = clipped_by(optax.clip_by_global_norm(options.get("max_norm", 1.0)), updates)
    assert_equal(clip_on(mesh, updates, specs, **options), expected)


def test_no_names_leave_each_device_the_norm_of_its_own_shards(mesh):
    updates = {"both": gradients()["both"]}
    found = clip_on(mesh, updates, ONE, ())["both"].reshape(8, 2)
    own = np.linalg.norm(updates["both"].reshape(8, 2), axis=1)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), np.minimum(own, 1.0), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_in_one_shard_does_on_all_what_it_does_on_one_device(mesh, bad):
    updates = gradients()
    updates["both"][3] = bad
    expected = clipped_by(optax.clip_by_global_norm(1.0), updates)
    assert_equal(clip_on(mesh, updates, SPECS), expected)


def test_half_gradients_are_squared_in_float32(mesh):
    updates = {"both": np.full(16, 1000.0, np.float16)}  # its square is infinite in float16
    clipped = clip_on(mesh, updates, ONE)
    assert_equal(clipped, {"both": np.full(16, 0.25, np.float16)})


def test_without_mapped_axes_it_is_optaxs(mesh):
    sharded = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, SPECS[name]))
        for name, leaf in gradients().items()
    ]
    both = (package.clip_by_global_norm(0.5) for package in (transforms, optax))
    ours, theirs = (str(jax.make_jaxpr(functools.partial(clipped_by, tx))(sharded)) for tx in both)
    assert ours == theirs


# Gradients that are not added up yet


def update_by(tx, way_out):
    """Returns an update of a parameter whose gradient devices hold parts of."""

    def update(w, x):
        reduced = jax.sharding.reshard(w, P(reduced={"data"}))
        gradient = jax.grad(lambda w: jnp.sum(x @ w))(reduced)
        if way_out:
            gradient = jax.sharding.reshard(gradient, jax.typeof(w).sharding)
        return tx.update({"w": gradient}, tx.init({"w": w}), {"w": w})[0]

    return update


OURS = {
    "with_loss_scale": transforms.with_loss_scale(optax.sgd(1.0), jmp.StaticLossScale(8)),
    "with_master_params": transforms.with_master_params(optax.sgd(1.0)),
    "clip_by_global_norm": transforms.clip_by_global_norm(1.0),
}


@pytest.mark.parametrize("name", OURS)
def test_gradients_that_are_still_to_be_added_up_are_refused(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    arguments = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((4, 4), P()), ((8, 4), P("data")))
    ]
    words = rf"{name} got a gradient, at \['w'\], .* over the axes 'data', .*\.reshard\("
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(update_by(OURS[name], way_out=False), *arguments)
        updates = jax.eval_shape(update_by(OURS[name], way_out=True), *arguments)
    assert updates["w"].shape == (4, 4)


@pytest.mark.parametrize(
    "max_norm", [1, Fraction(5, 2), np.float64(5), jnp.bfloat16(2), jnp.int32(3), np.inf]
)
def test_numbers_of_all_kinds_and_infinity_are_taken_as_optax_takes_them(max_norm):
    updates = {"w": jnp.float32([3.0, 4.0])}
    expected = clipped_by(optax.clip_by_global_norm(float(max_norm)), updates)
    assert_equal(clipped_by(transforms.clip_by_global_norm(max_norm), updates), expected)


def test_a_largest_norm_that_is_traced_is_taken():
    clip = lambda updates, norm: clipped_by(transforms.clip_by_global_norm(norm), updates)
    updates = {"w": jnp.float32([3.0, 4.0])}
    assert jax.jit(clip)(updates, 1.0)["w"].tolist() == clip(updates, 1.0)["w"].tolist()
    tx = optax.inject_hyperparams(transforms.clip_by_global_norm)(max_norm=2.5)
    np.testing.assert_allclose(clipped_by(tx, updates)["w"], [1.5, 2.0], rtol=1e-6)


def test_names_of_axes_are_taken_in_any_container_and_nothing_else():
    for names in (None, [3], ("data", None), b"data", {"data": None}):
        with pytest.raises(TypeError, match=r"axis_name=.*; expected names of axes"):
            transforms.clip_by_global_norm(1.0, names)
    for names in ("data", ("data",), ["data", "model"], {"data", "model"}, ()):
        transforms.clip_by_global_norm(1.0, names)
