"""Casting, checking and selecting whole trees, at the edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from tests.bits import bits
from tests.cases import HALF, ODD_LEAVES


@pytest.mark.parametrize("dtype", [*HALF, jnp.float32])
def test_a_cast_is_a_plain_cast(dtype):
    values = np.array([0, -0.0, 1, 1e-8, 6e-8, 6.1e-5, 65504, 65520, 3e38, np.inf, np.nan], "f4")
    with np.errstate(over="ignore"):
        expected = values.astype(dtype)
    for array in (values, jnp.asarray(values)):
        assert bits(jmp.cast_floating(array, dtype)) == bits(expected)


def test_numpy_arrays_stay_numpy_and_scalars_are_cast():
    tree = jmp.cast_floating({"array": np.ones(2), "scalar": np.float64(1)}, "bfloat16")
    assert isinstance(tree["array"], np.ndarray)
    assert tree["scalar"].dtype == jnp.bfloat16


def test_casts_pass_over_dict(ODD_LEAVES):
    leaves = dict(ODD_LEAVES)
    for cast in (jmp.cast_to_half, jmp.cast_to_full):
        assert all(cast(leaves)[name] is leaf for name, leaf in leaves.items())


def test_a_cast_to_an_integer_is_refused():
    with pytest.raises(ValueError, match="expected a real floating dtype"):
        jmp.cast_floating(jnp.ones(2), jnp.int32)


def test_all_finite_looks_at_elements_not_at_sums():
    assert jmp.all_finite({"w": jnp.array([6e4, 6e4], jnp.float16)})
    assert jmp.all_finite(jnp.full(2, jnp.finfo(jnp.float32).max))


@pytest.mark.parametrize("dtype", [*HALF, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_one_bad_element_anywhere_is_found(dtype, bad):
    for position in (0, 4):
        tree = {"good": jnp.ones(3), "bad": jnp.ones(5, dtype).at[position].set(bad)}
        assert not jmp.all_finite(tree)


def test_all_finite_passes_over_dict(ODD_LEAVES):
    assert jmp.all_finite(dict(ODD_LEAVES))
    assert jmp.all_finite(None) and jmp.all_finite({})


def test_select_takes_every_array_leaf():
    first, second = (
        {
            "float": jnp.full(2, value, jnp.float16),
            "int": jnp.int32(value),
            "bool": jnp.array(value == 1),
            "key": jax.random.key(value),
            "float8": jnp.full(2, value, jnp.float8_e4m3fn),
            "numpy": np.float32(value),
            "number": value,
        }
        for value in (1, 2)
    )
    for pred, chosen in ((True, first), (False, second)):
        for flag in (pred, np.bool_(pred), jnp.array(pred)):
            selected = jax.jit(jmp.select_tree)(flag, first, second)
            assert bits(selected) == bits(jax.tree.map(jnp.asarray, chosen))


def test_leaves_without_numbers_come_from_the_first_tree():
    first = {name: leaf for name, leaf in dict(ODD_LEAVES).items() if name not in ("shape",)}
    second = dict(first, string="other", callable=max)
    selected = jmp.select_tree(False, first, second)
    for name in ("float0", "none", "string", "callable", "numpy strings", "numpy objects"):
        assert selected[name] is first[name]


@pytest.mark.parametrize("pred", [jnp.ones([1], bool), jnp.int32(1), 1.0])
def test_select_refuses_what_is_no_flag(pred):
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        jmp.select_tree(pred, None, None)


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ({"b": jnp.ones(2)}, "different structure"),
        ({"a": jnp.ones(3)}, r"at \['a'\]: float32\[2\] and float32\[3\]"),
        ({"a": jnp.ones(2, jnp.float16)}, r"float32\[2\] and float16\[2\]"),
    ],
)
def test_select_says_where_trees_differ(second, sentence):
    with pytest.raises(ValueError, match=sentence):
        jmp.select_tree(True, {"a": jnp.ones(2)}, second)
