"""What every loss scale must do. A new one is a row in `tests/cases.py` and is checked here."""

import copy
import dataclasses
import pickle
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from jmp._messages import described
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


def dtypes_of(scale, case):
    return {name: str(getattr(scale, name).dtype) for name in case.leaves}


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
def test_neither_casts_nor_x64_change_the_dtypes_of_a_scale(case):
    for dtype in (*cases.HALF, "float32", "int8"):
        mapped = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), case.make())
        assert dtypes_of(mapped, case) == case.leaves
    with jax.enable_x64(True):
        assert (
            dtypes_of(jax.jit(lambda scale: scale.adjust(True))(case.make()), case) == case.leaves
        )
        for dtype in cases.CASTABLE:  # 2**16 is infinite in float16, and 2**-30 is zero there
            cast = jmp.cast_floating({"params": jnp.ones(2), "scale": case.make()}, dtype)
            assert cast["params"].dtype == dtype
            assert_same(cast["scale"], case.make())


# Transformations


@every_scale
def test_steps_under_jit_and_in_a_scan_are_those_of_eager_code_and_compile_once(
    case, strict_promotion
):
    step = jax.jit(lambda scale, finite: scale.adjust(finite))
    adjust = lambda scale, finite: (scale.adjust(finite),) * 2
    _, history = jax.lax.scan(adjust, case.make(), jnp.array(FLAGS))
    eager, compiled = case.make(), jax.jit(case.make)()
    for index, flag in enumerate(FLAGS):
        eager, compiled = eager.adjust(flag), step(compiled, jnp.array(flag))
        assert_same(compiled, eager)
        assert_same(jax.tree.map(lambda leaf, index=index: leaf[index], history), eager)
    # A copy that was rebuilt by the constructor has the same types again.
    step(dataclasses.replace(compiled), jnp.array(True))
    assert step._cache_size() == 1


@every_dynamic_scale
def test_vmap_adjusts_many_scales_at_once(case):
    flags = jnp.array([FLAGS, FLAGS[::-1]])
    many = jax.vmap(lambda row: adjusted(case.make(), row))(flags)
    again = jax.vmap(lambda scale: scale.adjust(True))(many)
    for index, row in enumerate([FLAGS, FLAGS[::-1]]):
        one = jax.tree.map(lambda leaf, index=index: leaf[index], again)
        assert_same(one, adjusted(case.make(), [*row, True]))


@every_dynamic_scale
@pytest.mark.parametrize("number", [int, float, np.float64, np.int64, np.int32, jnp.float16])
def test_a_count_given_as_any_number_has_the_type_of_every_count(case, number):
    for name in case.leaves.keys() - {"loss_scale"}:
        scale = dataclasses.replace(case.make(), **{name: number(1)})
        assert_same(scale, dataclasses.replace(case.make(), **{name: 1}))
        assert not getattr(scale, name).weak_type


# Scaling and unscaling


def exact(case, numbers, *, times=1):
    """The oracle in 64 bits a number: `numbers` times a power of the scale."""
    numbers = np.asarray(numbers)
    wide = numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)
    return wide * float(case.make().loss_scale) ** times


@every_scale
@pytest.mark.parametrize("dtype", [*cases.CASTABLE, "complex64", "complex128"])
@pytest.mark.parametrize(("method", "times"), [("scale", 1), ("unscale", -1)])
def test_every_leaf_is_multiplied_or_divided_in_at_least_float32(
    case, method, dtype, times, strict_promotion
):
    numbers = np.array([0.0, 1.0, -1.5, 3.0])
    numbers = (numbers * (1 - 0.5j) if "complex" in dtype else numbers).astype(dtype)
    leaves = [numbers, numbers[2]]
    if dtype != "bfloat16":  # which NumPy has in one order of bytes
        leaves.append(numbers.astype(numbers.dtype.newbyteorder("S")))
    with jax.enable_x64(numbers.dtype in (np.float64, np.complex128)):
        for leaf in (*leaves, jnp.asarray(numbers)):
            result = getattr(case.make(), method)([leaf])[0]
            if isinstance(case.make(), jmp.NoOpLossScale):
                assert result is leaf
                continue
            assert result.dtype == ("float32" if dtype in cases.HALF else dtype)
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
def test_float16_gradients_of_every_size_survive_unscaling(case):
    numbers = cases.edges("float16")
    unscaled = case.make().unscale(jnp.asarray(numbers))
    expected = exact(case, numbers, times=-1)
    # A number that float32 cannot hold as a normal one is flushed to zero.
    expected[np.abs(expected) < np.finfo(np.float32).tiny] = 0
    np.testing.assert_array_equal(np.asarray(unscaled, np.float64), expected)


@every_scale
def test_leaves_that_are_no_numbers_to_scale_pass_as_they_are(case):
    tree = {name: leaf for name, leaf in cases.ODD_LEAVES.items() if name != "python_int"}
    for passed in (case.make().scale(tree), case.make().unscale(tree)):
        leaves = zip(jax.tree.leaves(passed), jax.tree.leaves(tree), strict=True)
        assert all(left is right for left, right in leaves)
        assert jax.tree.structure(passed) == jax.tree.structure(tree)


@every_scale
def test_infinity_and_nan_stay_visible(case):
    numbers = np.array([np.inf, -np.inf, np.nan], np.float16)
    for method in (case.make().scale, case.make().unscale):
        np.testing.assert_array_equal(method(jnp.asarray(numbers)), numbers)
        infinite = method(jnp.array([complex(np.inf, 0)]))
        assert jnp.isinf(infinite.real) and infinite.imag == 0  # a complex product has a NaN


# Adjusting


@every_scale
@pytest.mark.parametrize("finite", [True, False])
def test_adjust_takes_a_bool_of_any_kind(case, finite):
    expected = case.make().adjust(finite)
    for flag in (np.bool_(finite), np.array(finite), jnp.array(finite)):
        assert_same(case.make().adjust(flag), expected)


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

NAN, INFINITY = float("nan"), float("inf")
# Numbers at the ends of what is allowed; docs/mistakes.md has those of every other kind.
REFUSED = {
    "loss_scale": [-0.0, INFINITY, np.float32(0.0)],
    "period": [0.5],
    "factor": [1, 1.0, INFINITY],
    "growth_factor": [INFINITY, NAN],
    "backoff_factor": [0.0, 1.0, NAN],
    "min_loss_scale": [NAN, -INFINITY],
    "max_loss_scale": [-1.0, NAN],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dynamic_scale_refuses_what_lies_just_outside(name):
    for number in REFUSED[name]:
        with pytest.raises(ValueError, match=re.escape(f"{name} got {described(number)}; ")):
            jmp.DynamicLossScale(**{name: number})
    for value in (True, "2", [2.0]):
        with pytest.raises(TypeError, match=re.escape(f"{name} got {described(value)}; ")):
            jmp.DynamicLossScale(**{name: value})


def test_the_leaves_of_a_scale_may_be_traced_and_nothing_else():
    scale = jax.jit(lambda value: jmp.DynamicLossScale(value))(jnp.float16(8.0))
    assert_same(scale, jmp.DynamicLossScale(8.0))
    for name in ("period", "factor", "min_loss_scale", "max_loss_scale"):
        make = lambda value, name=name: jmp.DynamicLossScale(**{name: value}).loss_scale
        with pytest.raises(TypeError, match=f"{name} got a traced value; .* be a plain number"):
            jax.jit(make)(2.0)
    with pytest.raises(TypeError, match="StaticLossScale got a traced value.*DynamicLossScale"):
        jax.jit(lambda value: jmp.StaticLossScale(value).scale(1.0))(2.0)


@pytest.mark.parametrize("scale_class", [jmp.DynamicLossScale, jmp.HysteresisLossScale])
@pytest.mark.parametrize("integer", [512, np.int32(512), np.array(512), jnp.int32(512)], ids=repr)
def test_an_integer_scale_or_floor_warns_once(scale_class, integer):
    expected = "Expected floating type for loss_scale, got int"
    with pytest.warns(UserWarning, match=expected) as warned:
        scale = scale_class(integer)
    assert warned[0].filename == __file__  # the user's line
    assert scale.loss_scale.dtype == np.float32
    # From here on a warning is an error.
    scale = jax.jit(lambda scale: jax.tree.map(lambda leaf: leaf, scale).adjust(True))(scale)
    assert scale.loss_scale == 512 and scale.unscale(scale.scale(1.0)) == 1.0
    with pytest.warns(UserWarning, match="Expected floating type for min_loss_scale, got int"):
        scale_class(8.0, min_loss_scale=2)


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
        (3.0, 3.0),
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
    scale = jmp.StaticLossScale(asked)
    assert scale.loss_scale == got
    if got:
        unscaled = float(scale.unscale(jnp.float32(got)))
        assert abs(unscaled - 1) <= np.finfo(np.float32).eps
