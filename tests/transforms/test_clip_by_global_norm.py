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


def assert_equal(clipped, expected, rtol=1e-6):
    for name, leaf in expected.items():
        assert clipped[name].dtype == leaf.dtype
        np.testing.assert_allclose(clipped[name], leaf, rtol=rtol, err_msg=name)


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_shards_are_clipped_by_the_norm_of_the_whole(mesh, max_norm):
    """One gradient along each axis, one along both, one replicated, which counts once."""
    expected = clipped_by(optax.clip_by_global_norm(max_norm), gradients())
    assert_equal(clip_on(mesh, gradients(), SPECS, max_norm=max_norm), expected)


@pytest.mark.parametrize("axis_name", ["auto", AXES])
def test_where_types_do_not_tell_all_gradients_are_shards(mesh, axis_name):
    updates = {"both": gradients()["both"]}
    expected = clipped_by(optax.clip_by_global_norm(1.0), updates)
    found = clip_on(mesh, updates, {"both": P(AXES)}, axis_name, check_vma=False)
    assert_equal(found, expected)


def test_a_replicated_gradient_does_not_count_along_an_axis_that_is_named(mesh):
    expected = clipped_by(optax.clip_by_global_norm(1.0), gradients())
    assert_equal(clip_on(mesh, gradients(), SPECS, AXES), expected)


def test_no_names_leave_each_device_the_norm_of_its_own_shards(mesh):
    updates = {"both": gradients()["both"]}
    found = clip_on(mesh, updates, {"both": P(AXES)}, ())["both"].reshape(8, 2)
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
    clipped = clip_on(mesh, updates, {"both": P(AXES)})
    assert_equal(clipped, {"both": np.full(16, 0.25, np.float16)})


def test_without_mapped_axes_it_is_optaxs(mesh):
    sharded = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, SPECS[name]))
        for name, leaf in gradients().items()
    ]
    both = (package.clip_by_global_norm(0.5) for package in (transforms, optax))
    ours, theirs = (str(jax.make_jaxpr(functools.partial(clipped_by, tx))(sharded)) for tx in both)
    assert ours == theirs


def test_inside_loss_scaling_true_gradients_are_clipped_on_all_shards(mesh):
    clipped = optax.chain(transforms.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = transforms.with_loss_scale(clipped, jmp.StaticLossScale(8))
    update = functools.partial(clipped_by, tx)
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(SPECS,), out_specs=SPECS)
    updates = jax.jit(mapped)(jax.tree.map(lambda g: 8 * g, gradients()))
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradients().values()))
    assert_equal(updates, jax.tree.map(lambda g: -g / norm, gradients()), rtol=1e-5)


# Gradients that are not added up yet


@pytest.fixture(scope="module")
def explicit():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))


def update_by(tx, way_out):
    """Returns an update of a parameter whose gradient devices hold parts of."""

    def update(w, x):
        reduced = jax.sharding.reshard(w, P(reduced={"data"}))
        gradient = jax.grad(lambda w: jnp.sum(x @ w))(reduced)
        if way_out:
            gradient = jax.sharding.reshard(gradient, jax.typeof(w).sharding)
        return tx.update({"w": gradient}, tx.init({"w": w}), {"w": w})[0]

    return update


@pytest.mark.parametrize(
    ("name", "tx"),
    [
        ("with_loss_scale", transforms.with_loss_scale(optax.sgd(1.0), jmp.StaticLossScale(8))),
        ("with_master_params", transforms.with_master_params(optax.sgd(1.0))),
        ("clip_by_global_norm", transforms.clip_by_global_norm(1.0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gradients_that_are_still_to_be_added_up_are_refused(explicit, name, tx):
    arguments = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(explicit, spec))
        for shape, spec in (((4, 4), P()), ((8, 4), P("data")))
    ]
    words = rf"{name} got a gradient, at \['w'\], .* over the axes 'data', .*\.reshard\("
    with jax.set_mesh(explicit):
        with pytest.raises(ValueError, match=words) as raised:
            jax.eval_shape(update_by(tx, way_out=False), *arguments)
        updates = jax.eval_shape(update_by(tx, way_out=True), *arguments)
    assert str(raised.value).split("\n")[0].count(". ") == 0  # one sentence
    assert updates["w"].shape == (4, 4)


@pytest.mark.parametrize(
    "max_norm", ["1", None, [1.0], np.ones(2), True, 1j, np.bool_(1)], ids=repr
)
def test_a_largest_norm_that_is_no_number_is_refused(max_norm):
    with pytest.raises(TypeError, match="expected a number above zero, such as 1.0"):
        transforms.clip_by_global_norm(max_norm)


BELOW = [-1, 0, 0.0, -0.0, np.nan, -np.inf, np.float32(-1), np.array(np.nan), jnp.zeros([])]


@pytest.mark.parametrize("max_norm", BELOW, ids=repr)
def test_a_largest_norm_that_no_norm_is_below_is_refused(max_norm):
    with pytest.raises(ValueError, match="expected a number above zero"):
        transforms.clip_by_global_norm(max_norm)


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


MADE_WITH_AXES = {
    "clip_by_global_norm": lambda names: transforms.clip_by_global_norm(1.0, names),
    "with_loss_scale": lambda names: transforms.with_loss_scale(
        optax.sgd(1.0), jmp.StaticLossScale(8), axis_name=names
    ),
    "mixed_precision": lambda names: transforms.mixed_precision(
        optax.sgd(1.0), "mixed_float16", axis_name=names
    ),
    "accumulated_value_and_grad": lambda names: jmp.accumulated_value_and_grad(
        jnp.sum, jmp.StaticLossScale(8), 2, reduce_axes=names
    ),
}


@pytest.mark.parametrize("make", MADE_WITH_AXES.values(), ids=MADE_WITH_AXES.keys())
def test_what_names_no_axes_is_refused_where_it_is_given(make):
    for names in (3, None, [3], ("data", None), b"data", 1.5, {"data": None}):
        with pytest.raises(TypeError, match=r"(axis_name|reduce_axes)=.*; expected names of axes"):
            make(names)
    for names in ("data", ("data",), ["data", "model"], {"data", "model"}, ()):
        make(names)
