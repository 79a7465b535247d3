"""What must hold for every input that hypothesis can think of."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

import jmp
from tests.cases import ODD_LEAVES

powers = st.integers(-140, 127).map(lambda n: math.ldexp(1.0, n))
flags = st.lists(st.booleans(), max_size=40)


@given(start=powers, floor=powers, ceiling=powers, growth=st.integers(1, 8), flags=flags)
def test_a_scale_stays_a_power_of_two_within_its_bounds(start, floor, ceiling, growth, flags):
    floor, ceiling = sorted((floor, ceiling))
    scale = jmp.DynamicLossScale(
        start, period=2, factor=2.0**growth, min_loss_scale=floor, max_loss_scale=ceiling
    )
    for finite in [None, *flags]:
        scale = scale if finite is None else scale.adjust(finite)
        value = float(scale.loss_scale)
        assert scale.min_loss_scale <= value <= scale.max_loss_scale
        assert 2.0**-126 <= value <= 2.0**126
        assert math.frexp(value)[0] == 0.5


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


@given(
    start=powers,
    growth=st.integers(1, 30),
    backoff=st.integers(1, 30),
    period=st.integers(1, 4),
    hysteresis=st.integers(1, 4),
    flags=flags,
)
def test_a_hysteresis_scale_stays_a_power_of_two_and_its_counts_in_range(
    start, growth, backoff, period, hysteresis, flags
):
    scale = jmp.HysteresisLossScale(
        start,
        period=period,
        min_loss_scale=0.0,
        growth_factor=2.0**growth,
        backoff_factor=2.0**-backoff,
        hysteresis=hysteresis,
    )
    for finite in flags:
        scale = scale.adjust(finite)
        value = float(scale.loss_scale)
        assert 2.0**-126 <= value <= 2.0**126
        assert math.frexp(value)[0] == 0.5
        assert 0 <= int(scale.counter) < period
        assert 0 <= int(scale.tolerance) <= hysteresis


@given(st.sampled_from(["float16", "bfloat16", "float32"]), st.floats(width=32), powers)
def test_unscaling_what_was_scaled_is_exact_where_nothing_overflows(dtype, number, power):
    scale = jmp.DynamicLossScale(power, min_loss_scale=0.0)
    with np.errstate(all="ignore"):
        leaf = np.float32(number).astype(dtype)
    smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    scaled = abs(float(leaf)) * float(scale.loss_scale)
    if leaf == 0 or (smallest <= abs(float(leaf)) and smallest <= scaled <= largest):
        assert float(scale.unscale(scale.scale(leaf))) == float(leaf)


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
