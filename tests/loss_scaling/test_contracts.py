"""What every loss scale must do. A new one is a row in `tests/cases.py` and is checked here."""

import copy
import dataclasses
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from tests import cases
from tests.commands import in_full

every_scale = pytest.mark.parametrize("case", cases.LOSS_SCALES, ids=lambda case: case.name)
every_dynamic_scale = pytest.mark.parametrize(
    "case", [case for case in cases.LOSS_SCALES if case.leaves], ids=lambda case: case.name
)
FLAGS = [True, True, False, True, False, False, False, True, True, True, True, True]


def adjusted(scale, flags):
    for flag in flags:
        scale = scale.adjust(flag)
    return scale


def assert_same(actual, expected):
    """Equal classes, static fields, leaves and dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def leaf_name(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def test_every_public_class_has_a_row():
    classes = {
        value
        for name in jmp.__all__
        if isinstance(value := getattr(jmp, name), type) and issubclass(value, jmp.LossScale)
    }
    assert classes - {jmp.LossScale} == {type(case.make()) for case in cases.LOSS_SCALES}


# Pytrees


@every_scale
def test_leaves_are_named_and_have_their_fixed_dtypes(case):
    leaves = jax.tree_util.tree_leaves_with_path(case.make())
    assert {leaf_name(path): str(leaf.dtype) for path, leaf in leaves} == case.leaves
    for _, leaf in leaves:
        assert isinstance(leaf, jax.Array)
        assert leaf.shape == ()
        assert not leaf.weak_type


@every_scale
def test_unflattening_restores_what_was_flattened(case):
    leaves, structure = jax.tree.flatten(case.make())
    assert_same(jax.tree.unflatten(structure, leaves), case.make())


@every_scale
def test_two_scales_made_alike_have_one_structure(case):
    assert jax.tree.structure(case.make()) == jax.tree.structure(case.make())
    assert hash(jax.tree.structure(case.make())) == hash(jax.tree.structure(case.make()))


@every_scale
def test_tree_map_of_the_identity_changes_nothing(case):
    assert_same(jax.tree.map(lambda leaf: leaf, case.make()), case.make())


@every_scale
@pytest.mark.parametrize("placeholder", [None, "spec", 1.5, object(), jax.P()], ids=type)
def test_tree_map_to_anything_is_possible(case, placeholder):
    mapped = jax.tree.map(lambda leaf: placeholder, case.make())
    assert type(mapped) is type(case.make())
    for name in case.leaves:
        assert getattr(mapped, name) is placeholder


@every_scale
def test_tree_map_to_shardings_places_the_scale(case):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = jax.sharding.NamedSharding(mesh, jax.P())
    shardings = jax.tree.map(lambda leaf: replicated, case.make())
    placed = jax.device_put(case.make(), shardings)
    assert all(leaf.sharding == replicated for leaf in jax.tree.leaves(placed))
    assert_same(placed, case.make())
    stepped = jax.jit(lambda s: s.adjust(False), in_shardings=(shardings,))(placed)
    assert_same(stepped, case.make().adjust(False))


@every_scale
def test_eval_shape_gives_the_dtypes_without_the_values(case):
    shapes = jax.eval_shape(lambda: case.make())
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    assert {leaf_name(path): str(leaf.dtype) for path, leaf in leaves} == case.leaves


@every_scale
@pytest.mark.parametrize("dtype", cases.CASTABLE)
def test_casting_a_whole_state_leaves_the_dtypes_of_the_scale(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        scale = jmp.cast_floating({"params": jnp.ones(2), "scale": case.make()}, dtype)["scale"]
    assert {name: str(getattr(scale, name).dtype) for name in case.leaves} == case.leaves


@every_scale
@pytest.mark.parametrize("dtype", cases.CASTABLE)
def test_casting_a_whole_state_leaves_the_value_of_the_scale(case, dtype):
    # 2**16 is infinite in float16, and 2**-30 is zero there.
    with jax.enable_x64(dtype == "float64"):
        cast = jmp.cast_floating({"params": jnp.ones(2), "scale": case.make()}, dtype)
        assert cast["params"].dtype == dtype
        assert_same(cast["scale"], case.make())


@every_scale
def test_a_tree_map_to_other_numbers_leaves_the_dtypes_of_the_scale(case):
    for dtype in (jnp.float16, jnp.float32, jnp.int8, jnp.bfloat16):
        mapped = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), case.make())
        assert {name: str(getattr(mapped, name).dtype) for name in case.leaves} == case.leaves


# Transformations


@every_scale
def test_jit_returns_the_scale_it_was_given(case):
    assert_same(jax.jit(lambda scale: scale)(case.make()), case.make())


@every_scale
def test_a_scale_made_inside_jit_comes_out_whole(case):
    scale = jax.jit(lambda: case.make().adjust(True))()
    assert_same(scale, case.make().adjust(True))
    assert_same(scale.adjust(False), case.make().adjust(True).adjust(False))


@every_scale
def test_jit_adjusts_as_eager_code_does(case):
    scale = case.make()
    step = jax.jit(lambda scale, finite: scale.adjust(finite))
    for flag in FLAGS:
        scale = step(scale, flag)
    assert_same(scale, adjusted(case.make(), FLAGS))


@every_scale
def test_scan_adjusts_as_eager_code_does(case):
    scale, history = jax.lax.scan(
        lambda scale, finite: (scale.adjust(finite), scale), case.make(), jnp.array(FLAGS)
    )
    assert_same(scale, adjusted(case.make(), FLAGS))
    for index in range(len(FLAGS)):
        at_index = jax.tree.map(lambda leaf, index=index: leaf[index], history)
        assert_same(at_index, adjusted(case.make(), FLAGS[:index]))


@every_scale
def test_while_loop_carries_the_scale(case):
    _, scale = jax.lax.while_loop(
        lambda carry: carry[0] < 3,
        lambda carry: (carry[0] + 1, carry[1].adjust(False)),
        (0, case.make()),
    )
    assert_same(scale, adjusted(case.make(), [False] * 3))


@every_scale
def test_cond_takes_the_scale_on_both_branches(case):
    scale = jax.jit(
        lambda scale, flag: jax.lax.cond(flag, lambda s: s.adjust(True), lambda s: s, scale)
    )(case.make(), False)
    assert_same(scale, case.make())


@every_dynamic_scale
def test_vmap_adjusts_many_scales_at_once(case):
    flags = jnp.array([FLAGS, FLAGS[::-1]])
    many = jax.vmap(lambda row: adjusted(case.make(), row))(flags)
    again = jax.vmap(lambda scale: scale.adjust(True))(many)
    for index, row in enumerate([FLAGS, FLAGS[::-1]]):
        one = jax.tree.map(lambda leaf, index=index: leaf[index], again)
        assert_same(one, adjusted(case.make(), [*row, True]))


@every_scale
def test_select_tree_selects_the_scale(case):
    before, after = case.make(), case.make().adjust(False)
    assert_same(jmp.select_tree(True, before, after), before)
    assert_same(jmp.select_tree(jnp.array(False), before, after), after)


@every_scale
def test_many_steps_compile_once(case):
    traces = []

    @jax.jit
    def step(scale, finite):
        traces.append(1)
        return scale.adjust(finite)

    scale = case.make()
    for flag in FLAGS:
        scale = step(scale, jnp.array(flag))
    for flag in FLAGS:  # a copy that was rebuilt by the constructor has the same types again
        scale = step(dataclasses.replace(scale), jnp.array(flag))
    assert len(traces) == 1
    assert step._cache_size() == 1


@every_dynamic_scale
@pytest.mark.parametrize("number", in_full([int, np.float64, float, np.int64, np.int32], first=2))
def test_a_counter_given_as_any_number_compiles_once(case, number):
    scale = dataclasses.replace(case.make(), counter=number(0))
    step = jax.jit(lambda scale, finite: scale.adjust(finite))
    for flag in FLAGS:
        scale = step(scale, flag)
    assert step._cache_size() == 1
    assert_same(scale, adjusted(dataclasses.replace(case.make(), counter=0), FLAGS))


@every_scale
def test_adjusting_keeps_class_and_options(case):
    assert jax.tree.structure(adjusted(case.make(), FLAGS)) == jax.tree.structure(case.make())


@every_scale
def test_adjusting_needs_no_implicit_promotion(case, strict_promotion):
    strictly = adjusted(case.make(), FLAGS)
    with jax.numpy_dtype_promotion("standard"):
        assert_same(strictly, adjusted(case.make(), FLAGS))


@every_scale
def test_x64_does_not_widen_the_scale(case):
    with jax.enable_x64(True):
        scale = jax.jit(lambda scale: scale.adjust(True))(case.make())
        assert {name: str(getattr(scale, name).dtype) for name in case.leaves} == case.leaves


# Scaling and unscaling


def scaled_dtype(dtype):
    return "float32" if dtype in cases.HALF else dtype


def exact(case, numbers, *, times=1):
    """The float64 oracle: `numbers` times a power of the scale."""
    return np.asarray(numbers, np.float64) * float(case.make().loss_scale) ** times


def has_no_scale(case):
    return isinstance(case.make(), jmp.NoOpLossScale)


@every_scale
@pytest.mark.parametrize("dtype", cases.CASTABLE)
def test_scale_multiplies_every_leaf_in_at_least_float32(case, dtype):
    numbers = np.array([0.0, 1.0, -1.5, 3.0], dtype)
    with jax.enable_x64(dtype == "float64"):
        for leaf in (numbers, jnp.asarray(numbers), numbers.dtype.type(-1.5)):
            scaled = case.make().scale([leaf])[0]
            if has_no_scale(case):
                assert scaled is leaf
                continue
            assert scaled.dtype == scaled_dtype(dtype)
            np.testing.assert_array_equal(scaled, exact(case, leaf))


@every_scale
@pytest.mark.parametrize("dtype", cases.CASTABLE)
def test_unscale_divides_every_leaf_in_at_least_float32(case, dtype):
    numbers = np.array([0.0, 1.0, -1.5, 3.0], dtype)
    with jax.enable_x64(dtype == "float64"):
        for leaf in (numbers, jnp.asarray(numbers), numbers.dtype.type(-1.5)):
            unscaled = case.make().unscale([leaf])[0]
            if has_no_scale(case):
                assert unscaled is leaf
                continue
            assert unscaled.dtype == scaled_dtype(dtype)
            np.testing.assert_array_equal(unscaled, exact(case, leaf, times=-1))


@every_scale
@pytest.mark.parametrize("dtype", cases.CASTABLE)
def test_unscaling_what_was_scaled_is_exact(case, dtype):
    numbers = np.linspace(-3, 3, 101).astype(dtype)
    with jax.enable_x64(dtype == "float64"):
        for leaf in (jnp.asarray(numbers), numbers):
            scale = case.make()
            there_and_back = scale.unscale(scale.scale({"w": leaf}))["w"]
            np.testing.assert_array_equal(np.asarray(there_and_back, dtype), numbers)
            back_and_there = jax.jit(lambda s, leaf: s.scale(s.unscale(leaf)))(scale, leaf)
            np.testing.assert_array_equal(np.asarray(back_and_there, dtype), numbers)


@every_scale
def test_a_float64_scalar_stays_float64(case):
    with jax.enable_x64(True):
        for leaf in (np.float64(1e200), np.array(1e200), jnp.float64(1e200)):
            scale = case.make()
            there_and_back = scale.unscale(scale.scale(leaf))
            assert there_and_back.dtype == np.float64
            assert float(there_and_back) == 1e200


@every_scale
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_a_foreign_byte_order_is_scaled_like_any_other(case, dtype):
    foreign = np.array([1.5, -2.0], np.dtype(dtype).newbyteorder("S"))
    scale = case.make()
    np.testing.assert_array_equal(np.real(scale.scale(foreign)), exact(case, foreign.real))
    unscaled = np.real(scale.unscale(foreign))
    np.testing.assert_array_equal(unscaled, exact(case, foreign.real, times=-1))


@every_scale
def test_float16_gradients_of_every_size_survive_unscaling(case):
    numbers = cases.edges("float16")
    unscaled = case.make().unscale(jnp.asarray(numbers))
    expected = exact(case, numbers, times=-1)
    # What float32 cannot hold as a normal number is flushed to zero.
    expected[np.abs(expected) < np.finfo(np.float32).tiny] = 0
    np.testing.assert_array_equal(np.asarray(unscaled, np.float64), expected)


@every_scale
def test_python_floats_are_scaled_to_float32(case):
    scale = case.make()
    scaled = scale.scale({"loss": cases.PYTHON_FLOAT})["loss"]
    unscaled = scale.unscale({"loss": cases.PYTHON_FLOAT})["loss"]
    assert float(scaled) == exact(case, cases.PYTHON_FLOAT)
    assert float(unscaled) == exact(case, cases.PYTHON_FLOAT, times=-1)
    assert float(scale.unscale(scaled)) == cases.PYTHON_FLOAT
    if not has_no_scale(case):
        assert scaled.dtype == unscaled.dtype == np.float32


@every_scale
@pytest.mark.parametrize("name", cases.COMPLEX_LEAVES)
def test_complex_leaves_are_scaled_and_stay_complex(case, name):
    leaf, scale = cases.COMPLEX_LEAVES[name], case.make()
    scaled = scale.scale([leaf])[0]
    assert scaled.dtype == np.complex64
    np.testing.assert_array_equal(np.real(scaled), exact(case, np.real(leaf)))
    np.testing.assert_array_equal(np.imag(scaled), exact(case, np.imag(leaf)))
    np.testing.assert_array_equal(scale.unscale(scaled), leaf)


@every_scale
def test_complex128_stays_complex128(case):
    with jax.enable_x64(True):
        leaf, scale = jnp.array([1e200 - 1j]), case.make()
        assert scale.scale(leaf).dtype == np.complex128
        np.testing.assert_array_equal(scale.unscale(scale.scale(leaf)), leaf)


@every_scale
@pytest.mark.parametrize("dtype", [*cases.HALF, "float32", "complex64"])
def test_scaling_needs_no_implicit_promotion(case, dtype, strict_promotion):
    scale, leaf = case.make(), jnp.ones(2, dtype)
    np.testing.assert_array_equal(scale.scale(leaf), np.full(2, exact(case, 1.0)))
    np.testing.assert_array_equal(scale.unscale(leaf), np.full(2, exact(case, 1.0, times=-1)))


@every_scale
@pytest.mark.parametrize("name", sorted(cases.ODD_LEAVES.keys() - {"python_int"}))
def test_leaves_that_are_no_numbers_to_scale_pass_as_they_are(case, name):
    leaf, scale = cases.ODD_LEAVES[name], case.make()
    for tree in (scale.scale({"odd": leaf}), scale.unscale({"odd": leaf})):
        passed = tree["odd"]
        assert passed is leaf or (passed == leaf and isinstance(leaf, list))


@every_scale
def test_infinity_and_nan_stay_visible(case):
    numbers = jnp.array([np.inf, -np.inf, np.nan], jnp.float16)
    for result in (case.make().scale(numbers), case.make().unscale(numbers)):
        np.testing.assert_array_equal(result, np.array([np.inf, -np.inf, np.nan], np.float32))
        assert not bool(jmp.all_finite(result))


@every_scale
def test_an_empty_tree_is_scaled(case):
    for empty in ((), {}, None, [None]):
        assert case.make().scale(empty) == empty
        assert case.make().unscale(empty) == empty


@every_scale
def test_the_factor_can_be_read(case):
    assert float(case.make().loss_scale) > 0
    assert float(case.make().adjust(True).loss_scale) > 0


# Adjusting


@every_scale
@pytest.mark.parametrize("finite", [True, False])
def test_adjust_takes_a_bool_of_any_kind(case, finite):
    expected = case.make().adjust(finite)
    for flag in (np.bool_(finite), np.array(finite), jnp.array(finite)):
        assert_same(case.make().adjust(flag), expected)


@every_scale
def test_adjust_returns_a_new_scale_and_leaves_the_old(case):
    scale = case.make()
    scale.adjust(False), scale.adjust(True)
    assert_same(scale, case.make())


@every_dynamic_scale
@pytest.mark.parametrize("flag", [1, 0, 1.0, np.int32(1), jnp.ones((), jnp.int32)], ids=repr)
def test_adjust_refuses_a_number(case, flag):
    with pytest.raises(TypeError, match="adjust got grads_finite of dtype .*; expected a boolean"):
        case.make().adjust(flag)


@every_dynamic_scale
@pytest.mark.parametrize("flag", [[True], np.array([True, False]), jnp.ones((1, 1), bool)])
def test_adjust_refuses_a_vector(case, flag):
    with pytest.raises(ValueError, match="expected boolean scalar: one flag for all gradients"):
        case.make().adjust(flag)


# Values: equality, copies, immutability


@every_scale
def test_equal_scales_are_equal_and_others_are_not(case):
    assert case.make() == case.make()
    assert jax.jit(lambda scale: scale)(case.make()) == case.make()
    assert case.make() != jmp.StaticLossScale(0.75)
    assert case.make() != jmp.DynamicLossScale(0.75, min_loss_scale=0.0)
    assert case.make() != case.make().loss_scale


@every_scale
def test_scales_without_leaves_hash_and_those_with_arrays_do_not(case):
    if case.leaves:
        with pytest.raises(TypeError, match="unhashable"):
            hash(case.make())
    else:
        assert hash(case.make()) == hash(case.make())


@every_scale
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda scale: pickle.loads(pickle.dumps(scale))]
)
def test_copies_are_equal(case, duplicate):
    scale = case.make().adjust(False)
    assert_same(duplicate(scale), scale)
    assert_same(adjusted(duplicate(scale), FLAGS), adjusted(scale, FLAGS))


@every_scale
def test_replacing_nothing_gives_an_equal_scale(case):
    scale = case.make().adjust(False)
    assert_same(dataclasses.replace(scale), scale)


@every_scale
def test_a_scale_cannot_be_changed(case):
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.make().loss_scale = 3.0


@every_scale
def test_the_representation_names_the_class(case):
    assert repr(case.make()).startswith(type(case.make()).__name__)


# Bad input


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [row[1:] for row in cases.REFUSED_SCALES],
    ids=[row[0] for row in cases.REFUSED_SCALES],
)
def test_a_constructor_refuses_what_is_no_scale_and_says_why(call, error, sentence):
    with pytest.raises(error) as raised:
        call()
    assert sentence in str(raised.value)


@pytest.mark.parametrize("name", ["period", "factor", "min_loss_scale", "max_loss_scale"])
def test_a_traced_option_is_refused(name):
    def build(value):
        return jmp.DynamicLossScale(**{name: value}).loss_scale

    with pytest.raises(TypeError, match=f"{name} got a traced value; .* must be a plain number"):
        jax.jit(build)(2.0)


def test_a_traced_static_scale_is_refused():
    with pytest.raises(TypeError, match="StaticLossScale got a traced value.*DynamicLossScale"):
        jax.jit(lambda value: jmp.StaticLossScale(value).scale(1.0))(2.0)


def test_a_traced_dynamic_scale_is_accepted():
    scale = jax.jit(lambda value: jmp.DynamicLossScale(value))(jnp.float16(8.0))
    assert_same(scale, jmp.DynamicLossScale(8.0))


@pytest.mark.parametrize("scale_class", [jmp.DynamicLossScale, jmp.HysteresisLossScale])
@pytest.mark.parametrize("integer", [512, np.int32(512), np.array(512), jnp.int32(512)], ids=repr)
def test_an_integer_scale_warns(scale_class, integer):
    with pytest.warns(UserWarning, match="Expected floating type for loss_scale, got int"):
        scale = scale_class(integer)
    assert scale.loss_scale.dtype == np.float32
    assert float(scale.loss_scale) == 512


def test_an_integer_floor_warns():
    with pytest.warns(UserWarning, match="Expected floating type for min_loss_scale, got int"):
        jmp.DynamicLossScale(8.0, min_loss_scale=2)


def test_nothing_warns_after_construction():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scale = jmp.DynamicLossScale(512, min_loss_scale=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale = jax.jit(lambda scale: jax.tree.map(lambda leaf: leaf, scale).adjust(True))(scale)
        scale.unscale(scale.scale(1.0))


# The static scale alone


@pytest.mark.parametrize("number", [512, 512.0, np.float16(512), np.int64(512), jnp.float32(512)])
def test_a_static_scale_is_a_python_float(number):
    assert type(jmp.StaticLossScale(number).loss_scale) is float
    assert jmp.StaticLossScale(number) == jmp.StaticLossScale(512.0)


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (2.0**127, 2.0**126),
        (1e300, 2.0**126),
        (2.0**-149, 2.0**-126),
        (1e-40, 2.0**-126),
        (1e-300, 2.0**-126),
        (0.0, 0.0),
        (-0.0, 0.0),
    ],
)
def test_a_static_scale_is_brought_within_the_scales_that_have_a_reciprocal(asked, got):
    assert jmp.StaticLossScale(asked).loss_scale == got


@pytest.mark.parametrize("number", [2.0**126, 2.0**-126, 3.0])
def test_a_static_scale_at_the_bounds_has_a_reciprocal(number):
    scale = jmp.StaticLossScale(number)
    unscaled = float(scale.unscale(jnp.float32(number)))
    assert abs(unscaled - 1) <= np.finfo(np.float32).eps


def test_a_no_op_scale_hands_back_the_very_same_tree():
    tree = {"w": jnp.ones(2, jnp.float16), "loss": 1.5}
    scale = jmp.NoOpLossScale()
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(jnp.array(False)) is scale
    assert scale.loss_scale == 1.0
