"""What every loss scale must do. A new one is a row in `tests/cases.py` and is checked here."""

import copy
import dataclasses
import pickle
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from tests import cases

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
    public = [value for name in jmp.__all__ if isinstance(value := getattr(jmp, name), type)]
    classes = {value for value in public if issubclass(value, jmp.LossScale)}
    assert classes - {jmp.LossScale} == {type(case.make()) for case in cases.LOSS_SCALES}


# Pytrees


@every_scale
def test_leaves_are_named_and_have_their_fixed_dtypes(case):
    for scale in (case.make(), jax.eval_shape(case.make)):
        leaves = jax.tree_util.tree_leaves_with_path(scale)
        assert {leaf_name(path): str(leaf.dtype) for path, leaf in leaves} == case.leaves
        assert all(leaf.shape == () and not leaf.weak_type for _, leaf in leaves)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(case.make()))


IDENTITIES = {
    "flattened": lambda scale: jax.tree.unflatten(*jax.tree.flatten(scale)[::-1]),
    "mapped": lambda scale: jax.tree.map(lambda leaf: leaf, scale),
    "jit": jax.jit(lambda scale: scale),
    "selected": lambda scale: jmp.select_tree(True, scale, scale.adjust(False)),
    "not selected": lambda scale: jmp.select_tree(jnp.array(False), scale.adjust(False), scale),
    "replaced": dataclasses.replace,
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "pickled": lambda scale: pickle.loads(pickle.dumps(scale)),
}


@every_scale
@pytest.mark.parametrize("name", IDENTITIES)
def test_what_hands_a_scale_on_hands_it_on_whole(case, name):
    scale = case.make().adjust(False)
    same = IDENTITIES[name](scale)
    assert_same(same, scale)
    assert hash(jax.tree.structure(same)) == hash(jax.tree.structure(scale))
    assert_same(same.adjust(True), scale.adjust(True))


@every_scale
def test_tree_map_to_anything_is_possible(case):
    for placeholder in (None, "spec", 1.5, object(), jax.P()):
        mapped = jax.tree.map(lambda leaf, to=placeholder: to, case.make())
        assert type(mapped) is type(case.make())
        assert all(getattr(mapped, name) is placeholder for name in case.leaves)


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
@pytest.mark.parametrize("dtype", cases.CASTABLE)
def test_casting_a_whole_state_leaves_the_scale(case, dtype):
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
def test_a_scale_made_inside_jit_comes_out_whole(case):
    scale = jax.jit(lambda: case.make().adjust(True))()
    assert_same(scale, case.make().adjust(True))
    assert_same(scale.adjust(False), case.make().adjust(True).adjust(False))


@every_scale
def test_scan_adjusts_as_eager_code_does(case):
    adjust = lambda scale, finite: (scale.adjust(finite),) * 2
    _, history = jax.lax.scan(adjust, case.make(), jnp.array(FLAGS))
    scale = case.make()
    for index, flag in enumerate(FLAGS):
        scale = scale.adjust(flag)
        assert_same(jax.tree.map(lambda leaf, index=index: leaf[index], history), scale)


@every_dynamic_scale
def test_vmap_adjusts_many_scales_at_once(case):
    flags = jnp.array([FLAGS, FLAGS[::-1]])
    many = jax.vmap(lambda row: adjusted(case.make(), row))(flags)
    again = jax.vmap(lambda scale: scale.adjust(True))(many)
    for index, row in enumerate([FLAGS, FLAGS[::-1]]):
        one = jax.tree.map(lambda leaf, index=index: leaf[index], again)
        assert_same(one, adjusted(case.make(), [*row, True]))


@every_scale
def test_many_steps_under_jit_compile_once_and_adjust_as_eager_code_does(case):
    step = jax.jit(lambda scale, finite: scale.adjust(finite))
    scale = case.make()
    for flag in FLAGS:
        scale = step(scale, jnp.array(flag))
    assert_same(scale, adjusted(case.make(), FLAGS))
    # A copy that was rebuilt by the constructor has the same types again.
    step(dataclasses.replace(scale), jnp.array(True))
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    "case", [c for c in cases.LOSS_SCALES if "counter" in c.leaves], ids=lambda case: case.name
)
@pytest.mark.parametrize("number", [int, float, np.float64, np.int64, np.int32])
def test_a_counter_given_as_any_number_has_the_type_of_every_counter(case, number):
    scale = dataclasses.replace(case.make(), counter=number(0))
    assert_same(scale, dataclasses.replace(case.make(), counter=0))
    assert scale.counter.weak_type == case.make().counter.weak_type


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
@pytest.mark.parametrize(("method", "times"), [("scale", 1), ("unscale", -1)])
def test_every_leaf_is_multiplied_or_divided_in_at_least_float32(case, method, dtype, times):
    numbers = np.array([0.0, 1.0, -1.5, 3.0], dtype)
    with jax.enable_x64(dtype == "float64"):
        for leaf in (numbers, jnp.asarray(numbers), numbers.dtype.type(-1.5)):
            result = getattr(case.make(), method)([leaf])[0]
            if has_no_scale(case):
                assert result is leaf
                continue
            assert result.dtype == scaled_dtype(dtype)
            np.testing.assert_array_equal(result, exact(case, leaf, times=times))


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
def test_leaves_of_64_bits_a_number_stay_so(case, x64):
    for leaf in (np.float64(1e200), np.array(1e200), jnp.float64(1e200), jnp.array([1e200 - 1j])):
        scale = case.make()
        scaled = scale.scale(leaf)
        there_and_back = scale.unscale(scaled)
        assert scaled.dtype == there_and_back.dtype == leaf.dtype
        np.testing.assert_array_equal(there_and_back, leaf)


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
    # A number that float32 cannot hold as a normal one is flushed to zero.
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
@pytest.mark.parametrize("dtype", [*cases.HALF, "float32", "complex64"])
def test_scaling_needs_no_implicit_promotion(case, dtype, strict_promotion):
    scale, leaf = case.make(), jnp.ones(2, dtype)
    np.testing.assert_array_equal(scale.scale(leaf), np.full(2, exact(case, 1.0)))
    np.testing.assert_array_equal(scale.unscale(leaf), np.full(2, exact(case, 1.0, times=-1)))


@every_scale
def test_leaves_that_are_no_numbers_to_scale_pass_as_they_are(case):
    tree = {name: leaf for name, leaf in cases.ODD_LEAVES.items() if name != "python_int"}
    for passed in (case.make().scale(tree), case.make().unscale(tree)):
        leaves = zip(jax.tree.leaves(passed), jax.tree.leaves(tree), strict=True)
        assert all(left is right for left, right in leaves)
        assert jax.tree.structure(passed) == jax.tree.structure(tree)


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


# Adjusting


@every_scale
@pytest.mark.parametrize("finite", [True, False])
def test_adjust_takes_a_bool_of_any_kind(case, finite):
    expected = case.make().adjust(finite)
    for flag in (np.bool_(finite), np.array(finite), jnp.array(finite)):
        assert_same(case.make().adjust(flag), expected)


@every_dynamic_scale
@pytest.mark.parametrize(
    ("flag", "error", "words"),
    [
        *((number, TypeError, "grads_finite of dtype .*; expected a boolean")
          for number in (1, 0, 1.0, np.int32(1), jnp.ones((), jnp.int32))),
        *((vector, ValueError, "expected boolean scalar: one flag for all gradients")
          for vector in ([True], np.array([True, False]), jnp.ones((1, 1), bool))),
    ],
    ids=repr,
)  # fmt: skip
def test_adjust_refuses_all_but_one_flag(case, flag, error, words):
    with pytest.raises(error, match=words):
        case.make().adjust(flag)


@every_scale
def test_a_scale_is_a_value_that_cannot_be_changed(case):
    scale = case.make()
    assert scale == case.make() == jax.jit(lambda scale: scale)(scale)
    assert scale != jmp.StaticLossScale(0.75)
    assert scale != jmp.DynamicLossScale(0.75, min_loss_scale=0.0)
    assert scale != scale.loss_scale
    assert repr(scale).startswith(type(scale).__name__)
    with pytest.raises(dataclasses.FrozenInstanceError):
        scale.loss_scale = 3.0
    if case.leaves:
        with pytest.raises(TypeError, match="unhashable"):
            hash(scale)
    else:
        assert hash(scale) == hash(case.make())


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
    expected = "Expected floating type for loss_scale, got int"
    with pytest.warns(UserWarning, match=expected) as warned:
        scale = scale_class(integer)
    assert warned[0].filename == __file__  # the user's line
    assert scale.loss_scale.dtype == np.float32
    assert float(scale.loss_scale) == 512


def test_an_integer_floor_warns():
    with pytest.warns(UserWarning, match="Expected floating type for min_loss_scale, got int"):
        jmp.DynamicLossScale(8.0, min_loss_scale=2)


def test_nothing_warns_after_construction():
    with pytest.warns(UserWarning, match="Expected floating type"):
        scale = jmp.DynamicLossScale(512, min_loss_scale=2)
    # From here on a warning is an error.
    scale = jax.jit(lambda scale: jax.tree.map(lambda leaf: leaf, scale).adjust(True))(scale)
    assert scale.unscale(scale.scale(1.0)) == 1.0


# The static scale


@pytest.mark.parametrize(
    "number",
    [
        512,
        512.0,
        np.float16(512),
        np.longdouble(512),
        np.int64(512),
        jnp.float32(512),
        Fraction(512),
    ],
)
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
