"""What must hold for every input that hypothesis can think of."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

import jmp
from tests.cases import ODD_LEAVES

flags = st.lists(st.booleans(), max_size=40)


@given(
    start=st.floats(1e-30, 1e30),
    factor=st.floats(1.001, 1e30),
    backoff=st.floats(1e-30, 0.999),
    flags=flags,
)
def test_a_scale_stays_finite_and_positive_with_any_parameters(start, factor, backoff, flags):
    scale = jmp.DynamicLossScale(start, 0, 1, factor, 0.0, backoff_factor=backoff)
    for finite in flags:
        scale = scale.adjust(finite)
        assert 2.0**-126 <= float(scale.loss_scale) <= 2.0**126


def arrays():
    numbers = st.lists(st.floats(width=32), min_size=1, max_size=2)
    return st.tuples(numbers, st.sampled_from(["float16", "bfloat16", "float32", "int32", "bool"]))


def to_array(numbers_and_dtype):
    numbers, dtype = numbers_and_dtype
    with np.errstate(all="ignore"):
        return np.array(numbers, np.float32).astype(jnp.dtype(dtype))


leaves = arrays().map(to_array) | arrays().map(lambda a: jnp.asarray(to_array(a)))
# No Python numbers beyond what an array of 32 bits holds: JAX refuses these integers.
leaves |= st.sampled_from(list(ODD_LEAVES.values())) | st.floats(width=32) | st.integers(-9, 9)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=8,
)


@given(trees)
def test_any_tree_passes_casts_scaling_checks_and_selection(tree):
    scale = jmp.DynamicLossScale(8.0)
    for function in (jmp.cast_to_half, jmp.cast_to_full, scale.scale, scale.unscale):
        assert jax.tree.structure(function(tree)) == jax.tree.structure(tree)
    assert jmp.all_finite(tree).shape == ()
    assert jax.tree.structure(jmp.select_tree(True, tree, tree)) == jax.tree.structure(tree)


@given(trees)
@example({"w": math.inf})
@example([math.nan, 1e300])
def test_all_finite_agrees_with_numpy(tree):
    dtypes = (np.float16, jnp.dtype("bfloat16"), np.float32)
    with np.errstate(over="ignore"):  # 1e300 is infinite in float32
        leaves = [x for x in jax.tree.leaves(tree) if not isinstance(x, jax.ShapeDtypeStruct)]
        floats = [
            np.asarray(leaf, np.float32)
            for leaf in leaves
            if isinstance(leaf, float) or getattr(leaf, "dtype", None) in dtypes
        ]
    assert bool(jmp.all_finite(tree)) == all(np.isfinite(leaf).all() for leaf in floats)


words = "p= c= o= params= , , = f32 f16 half bf16 f8_e4m3fn full O1 q ; mixed_float16".split(" ")


@given(
    st.lists(st.sampled_from([*words, " "]), max_size=8).map("".join)
    | st.from_regex(r"[pcoq]=[a-z0-9]+(,[pco]=[a-z0-9]*)*")
    | st.text()
)
def test_any_text_is_a_policy_or_a_value_error_that_says_what_was_expected(text):
    try:
        policy = jmp.get_policy(text)
    except ValueError as error:
        assert "expected" in str(error).lower() or "at most once" in str(error)
    else:
        assert jmp.get_policy(str(policy)) == policy
