"""Casts, checks and selection of whole trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from jmp.trees import cast_to_at_least_float32, path_string
from tests import cases
from tests.bits import bits

every_dtype = pytest.mark.parametrize("dtype", cases.CASTABLE)


def foreign(numbers):
    """The same numbers in the other order of bytes; NumPy has bfloat16 in one order only."""
    swapped = numbers.dtype.newbyteorder("S") if numbers.dtype != jnp.bfloat16 else numbers.dtype
    return numbers.astype(swapped)


# Casts


@pytest.mark.parametrize("target", [*cases.CASTABLE, "float8_e4m3fn", "float8_e5m2"])
@every_dtype
def test_a_cast_rounds_as_numpy_does(dtype, target, x64):
    # Without subnormals, which XLA flushes in float32 and bfloat16.
    numbers = np.array([0.0, -0.0, 1.0, 1 / 3, -2.7, 100.3], dtype)
    with np.errstate(over="ignore"):
        expected = numbers.astype(target)
    for leaf in (numbers, foreign(numbers), jnp.asarray(numbers)):
        cast = jmp.cast_floating([leaf], target)[0]
        assert cast.dtype == target
        np.testing.assert_array_equal(np.asarray(cast, float), np.asarray(expected, float))
        assert np.signbit(np.asarray(cast, float)[1])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_cast_from_float32_rounds_every_edge_as_numpy_does(dtype):
    numbers = [0, -0.0, 1, 1e-8, 6e-8, 6.1e-5, 65504, 65519, 65520, -1e6, 3e38, np.inf, np.nan]
    edges = np.array(numbers, "f4")
    with np.errstate(over="ignore"):
        expected = edges.astype(dtype)
    for leaf in (edges, jnp.asarray(edges)):
        assert bits(jmp.cast_floating(leaf, dtype)) == bits(expected)


def test_numpy_leaves_stay_numpy():
    tree = jmp.cast_to_half({"array": np.ones(2), "scalar": np.float64(1)})
    assert isinstance(tree["array"], np.ndarray)
    assert isinstance(tree["scalar"], np.float16)


@every_dtype
def test_a_leaf_that_has_the_dtype_already_is_the_same_object(dtype, x64):
    for leaf in cases.floating_leaves(dtype).values():
        assert jmp.cast_floating({"w": leaf}, dtype)["w"] is leaf


@pytest.mark.parametrize("cast", [jmp.cast_to_half, jmp.cast_to_full])
def test_casts_pass_other_leaves_as_they_are(cast):
    tree = cases.ODD_LEAVES | cases.COMPLEX_LEAVES | {"rate": 0.1}
    leaves = zip(jax.tree.leaves(cast(tree)), jax.tree.leaves(tree), strict=True)
    assert all(left is right for left, right in leaves)


@every_dtype
def test_full_is_float32_and_half_is_float16_on_a_cpu(dtype, x64):
    for leaf in cases.floating_leaves(dtype).values():
        assert jmp.cast_to_full([leaf])[0].dtype == np.float32
        assert jmp.cast_to_half([leaf])[0].dtype == np.float16


@every_dtype
def test_at_least_float32_widens_only_half(dtype, x64):
    wide = cast_to_at_least_float32({**cases.floating_leaves(dtype), "step": 3})
    expected = np.float32 if dtype in cases.HALF else np.dtype(dtype)
    assert wide.pop("step") == 3
    assert all(leaf.dtype == expected for leaf in wide.values())


def test_casts_work_inside_jit_and_grad():
    gradient = jax.jit(jax.grad(lambda w: jmp.cast_to_half(w).sum().astype(jnp.float32)))
    assert gradient(jnp.ones(3)).dtype == np.float32


# Finiteness


@every_dtype
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_element_anywhere_is_found(dtype, bad, x64):
    for position in (0, 5, 11):
        numbers = np.zeros((3, 4), dtype)
        numbers.flat[position] = bad
        for leaf in (numbers, foreign(numbers), jnp.asarray(numbers)):
            assert not bool(jmp.all_finite({"good": jnp.ones(2), "bad": [leaf]}))
    assert not bool(jmp.all_finite(np.dtype(dtype).type(bad)))


@every_dtype
def test_the_edges_of_a_dtype_and_values_whose_sum_overflows_are_finite(dtype, x64):
    largest = np.full(100, jnp.finfo(dtype).max, dtype)
    numbers = {"edges": cases.edges(dtype), "largest": largest}
    assert bool(jmp.all_finite(numbers)) and bool(
        jmp.all_finite(jax.tree.map(jnp.asarray, numbers))
    )
    assert not bool(jmp.all_finite(np.array([np.inf, -np.inf], dtype)))  # nor do these cancel


def test_leaves_without_floats_are_not_looked_at():
    assert bool(jmp.all_finite(cases.ODD_LEAVES))
    assert not bool(jmp.all_finite({"odd": cases.ODD_LEAVES, "w": jnp.array(np.nan)}))


@pytest.mark.parametrize("name", cases.COMPLEX_LEAVES)
def test_complex_leaves_are_looked_at(name):
    leaf = cases.COMPLEX_LEAVES[name]
    assert bool(jmp.all_finite([leaf]))
    for bad in (np.inf, np.nan, complex(0, np.inf), complex(0, np.nan)):
        assert not bool(jmp.all_finite([np.asarray(leaf).astype(np.complex64) * 0 + bad]))


@pytest.mark.parametrize("tree", [(), {}, None, [], {"a": None}, 3, "text", np.zeros((0, 3))])
def test_a_tree_without_numbers_is_finite(tree):
    assert bool(jmp.all_finite(tree))


def test_the_answer_is_a_bool_scalar_array_also_without_leaves_or_values():
    for tree in ({"w": jnp.ones(2)}, {}):
        for check in (jmp.all_finite, jax.jit(jmp.all_finite)):
            answer = check(tree)
            assert isinstance(answer, jax.Array)
            assert answer.dtype == np.bool_ and answer.shape == ()
    shapes = {"w": jax.ShapeDtypeStruct((4,), jnp.float16), "b": jax.ShapeDtypeStruct((), "int32")}
    assert jax.eval_shape(jmp.all_finite, shapes).dtype == np.bool_


# Selection

FLAGS = [True, np.bool_(True), np.array(True), jnp.array(True)]


def selectable(first):
    """A leaf of each kind that holds numbers, all of which `first` changes."""
    numbers = np.arange(first, first + 3)
    dtypes = (
        "bfloat16",
        "float8_e4m3fn",
        "int4",
        "complex64",
        "bool",
        "float16",
        "float32",
        "int32",
    )
    return {dtype: jnp.asarray(numbers.astype(dtype)) for dtype in dtypes} | {
        "empty": jnp.zeros((0, 2)),
        "keys": jax.random.split(jax.random.key(first), 3),
        "key": jax.random.key(first),
        "raw_key": jax.random.PRNGKey(first),
        "numpy_array": numbers.astype(np.float32),
        "numpy_bfloat16": numbers.astype(jnp.bfloat16),
        "numpy_scalars": [np.float32(first + 2.5), np.int32(first), np.bool_(first)],
        "python_numbers": [first + 2.5, first, bool(first), first + 2j],
    }


@pytest.mark.parametrize("transform", [lambda select: select, jax.jit], ids=["eager", "jit"])
def test_every_leaf_that_holds_numbers_is_selected(transform):
    select = transform(jmp.select_tree)
    for first, second in ((selectable(0), selectable(1)), (selectable(1), selectable(0))):
        for flag, expected in ((True, first), (False, second)):
            assert bits(select(flag, first, second)) == bits(jax.tree.map(jnp.asarray, expected))


WITHOUT_NUMBERS = (
    *("none_in_a_list", "string", "callable", "object", "float0", "shape_dtype_struct"),
    *("numpy_strings", "numpy_objects", "numpy_dates", "numpy_record"),
    *("long_double", "complex_long_double"),
)


@pytest.mark.parametrize("flag", [True, False])
def test_leaves_that_hold_no_numbers_come_from_the_first_tree(flag):
    odd = {name: cases.ODD_LEAVES[name] for name in WITHOUT_NUMBERS}
    selected = jmp.select_tree(flag, {"odd": odd, "w": 1.0}, {"odd": odd, "w": 2.0})
    leaves = zip(jax.tree.leaves(selected["odd"]), jax.tree.leaves(odd), strict=True)
    assert all(left is right for left, right in leaves)
    assert float(selected["w"]) == (1 if flag else 2)
    assert jmp.select_tree(flag, ["relu", len], ["gelu", max]) == ["relu", len]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: type(flag).__name__)
def test_a_flag_of_any_kind_selects(flag):
    assert int(jmp.select_tree(flag, 1, 2)) == 1
    opposite = not flag if isinstance(flag, bool) else ~flag
    assert int(jmp.select_tree(opposite, 1, 2)) == 2


def test_what_is_selected_comes_bit_for_bit_and_the_other_side_may_hold_nan():
    special = jnp.array([-0.0, np.nan, 2.0**-24, -np.inf], jnp.float16)
    for other in (jnp.zeros(4, jnp.float16), jnp.full(4, np.nan, jnp.float16)):
        assert bits(jmp.select_tree(True, special, other)) == bits(special)
        assert bits(jmp.select_tree(False, special, other)) == bits(other)


@pytest.mark.parametrize(
    ("number", "other", "dtype"),
    [
        (65519.9, jnp.float16(1), "float16"),  # rounds to 65504
        (float("inf"), jnp.float16(1), "float16"),
        (-(2**31), 1, "int32"),
        (-128, jnp.int8(1), "int8"),
        (1 + 2j, jnp.float32(1), "complex64"),
        # Wide leaves of NumPy, in the dtype of JAX
        (np.float64(0.1), np.float64(0), "float32"),
        (np.array([np.inf, np.nan]), np.zeros(2), "float32"),
        (np.int64(-(2**31)), np.int64(0), "int32"),
        (np.uint64(2**32 - 1), np.uint64(0), "uint32"),
    ],
)
def test_a_number_that_fits_is_selected(number, other, dtype):
    selected = jmp.select_tree(True, number, other)
    assert selected.dtype == dtype
    np.testing.assert_array_equal(selected, np.array(number).astype(dtype))


def test_numbers_of_64_bits_stay_so(x64):
    selected = jmp.select_tree(False, np.float64(1), jnp.float64(1e300))
    assert selected.dtype == np.float64 and float(selected) == 1e300
    assert float(jmp.select_tree(True, 1e300, 1.0)) == 1e300


def test_a_python_number_takes_the_dtype_of_the_other_side():
    for flag, expected in ((True, 1), (False, 2)):
        for pair in ((jnp.int32(1), 2), (1, jnp.int32(2))):
            selected = jmp.select_tree(flag, *pair)
            assert selected.dtype == np.int32
            assert int(selected) == expected
    assert jmp.select_tree(False, jnp.float16(1), 2.0).dtype == np.float16


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "complex64"])
def test_a_foreign_byte_order_is_selected_like_any_other(dtype):
    foreign = np.array([1, 2], np.dtype(dtype).newbyteorder("S"))
    for other in (foreign + foreign, jnp.array([2, 4], dtype)):
        selected = jmp.select_tree(False, foreign, other)
        assert selected.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(selected, [2, 4])


@pytest.mark.parametrize("wide", [np.int64(2**40), np.array([1, -(2**40)]), np.uint64(2**63)])
def test_integers_of_numpy_that_would_wrap_are_refused(wide):
    with pytest.raises(ValueError, match=r"integers that u?int32 does not hold at \['tokens'\]"):
        jmp.select_tree(True, {"tokens": wide * 0}, {"tokens": wide})
    with jax.enable_x64(True):
        kept = jmp.select_tree(False, {"tokens": wide * 0}, {"tokens": wide})
    assert np.array_equal(kept["tokens"], wide)
    assert jmp.select_tree(True, np.int64(2**31 - 1), np.int64(-(2**31))) == 2**31 - 1


def test_a_selection_compiles_to_selects_and_no_branches():
    jaxpr = str(jax.make_jaxpr(jmp.select_tree)(True, {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}))
    assert "select_n" in jaxpr
    assert "cond" not in jaxpr


# Paths


def test_paths_are_names_joined_by_slashes():
    tree = {"encoder": {"Dense_0": [jnp.ones(1)]}, "scale": jmp.DynamicLossScale()}
    paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths == ["encoder/Dense_0/0", "scale/loss_scale", "scale/counter"]
    assert path_string(()) == ""
