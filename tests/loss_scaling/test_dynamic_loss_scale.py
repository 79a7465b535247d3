"""Dynamic scales: back off on overflow, grow after a period, stay within the bounds.

That with hysteresis forgives a few overflows first (Megatron's definition).
"""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from tests.loss_scaling.definitions import counting, megatron

SMALLEST, LARGEST = 2.0**-126, 2.0**126
NAN, INFINITY = float("nan"), float("inf")


def history_of(scale, flags):
    """Returns scale, count and, with hysteresis, tolerance after each step."""
    history = []
    for finite in flags:
        scale = scale.adjust(finite)
        history.append(tuple(leaf.item() for leaf in jax.tree.leaves(scale)))
    return history


BOUNDS = {"min_loss_scale": 1.0, "max_loss_scale": 64.0}
RULES = {
    f"torch, period {period}": (
        jmp.DynamicLossScale(4.0, 0, period, growth_factor=4.0, **BOUNDS),
        functools.partial(counting, scale=4.0, period=period, growth=4.0, floor=1.0, ceiling=64.0),
    )
    for period in (1, 2, 3)
}
RULES |= {
    f"Megatron, period {period}, hysteresis {hysteresis}": (
        jmp.HysteresisLossScale(8.0, period=period, hysteresis=hysteresis),
        functools.partial(megatron, scale=8.0, period=period, hysteresis=hysteresis),
    )
    for period in (1, 2, 3)
    for hysteresis in (1, 2, 3)
}


@pytest.mark.parametrize(("start", "rule"), RULES.values(), ids=RULES.keys())
def test_every_sequence_of_seven_steps_follows_the_definition(start, rule):
    flags = np.array(list(itertools.product([True, False], repeat=7)))
    adjust = lambda scale, finite: (scale.adjust(finite),) * 2
    many = jax.jit(jax.vmap(lambda row: jax.lax.scan(adjust, start, row)[1]))(flags)
    for index, row in enumerate(flags):
        for leaf, expected in zip(jax.tree.leaves(many), zip(*rule(row), strict=True), strict=True):
            np.testing.assert_array_equal(leaf[index], expected)


HISTORIES = {
    "a fractional period waits for the next whole step": (
        jmp.DynamicLossScale(1.0, period=2.5),
        [True] * 3,
        [(1.0, 1), (1.0, 2), (2.0, 0)],
    ),
    "an infinite period never grows": (
        jmp.DynamicLossScale(8.0, period=INFINITY),
        [True] * 3,
        [(8.0, 1), (8.0, 2), (8.0, 3)],
    ),
    "the ceiling stops growth in the middle of a factor": (
        jmp.DynamicLossScale(8.0, period=1, growth_factor=4.0, max_loss_scale=48.0),
        [True] * 3,
        [(32.0, 0), (48.0, 0), (48.0, 0)],
    ),
    "the factor stands for a backoff that is not given": (
        jmp.DynamicLossScale(16.0, 0, 1, 4, growth_factor=2.0),
        [True, False],
        [(32.0, 0), (8.0, 0)],
    ),
    "the factor stands for a growth that is not given": (
        jmp.DynamicLossScale(16.0, 0, 1, 4, backoff_factor=0.5),
        [True, False],
        [(64.0, 0), (32.0, 0)],
    ),
    "the bounds hold with hysteresis too": (
        jmp.HysteresisLossScale(
            4.0, period=1, hysteresis=1, min_loss_scale=2.0, max_loss_scale=8.0
        ),
        [False, False, True, True, True],
        [(2.0, 0, 0), (2.0, 0, 0), (4.0, 0, 1), (8.0, 0, 1), (8.0, 0, 1)],
    ),
}


@pytest.mark.parametrize(("scale", "flags", "history"), HISTORIES.values(), ids=HISTORIES.keys())
def test_a_history_of_steps(scale, flags, history):
    assert history_of(scale, flags) == history


@pytest.mark.parametrize(("finite", "end"), [(False, SMALLEST), (True, LARGEST)])
def test_a_scale_that_only_falls_or_only_grows_has_a_reciprocal_at_every_step(finite, end):
    scale = jmp.DynamicLossScale(2.0**16, period=1, min_loss_scale=0.0)
    step = lambda scale, finite: (scale.adjust(finite), scale.unscale(jnp.float32(1.0)))
    last, unscaled = jax.lax.scan(step, scale, jnp.full(400, finite))
    assert float(last.loss_scale) == end
    # The reciprocal of 2**127 would be subnormal, and flushed to zero.
    assert np.all(np.isfinite(unscaled)) and np.all(np.asarray(unscaled) > 0)
    assert float(last.unscale(jnp.float32(1.0))) == 1 / end


@pytest.mark.parametrize("factor", [1.1, 3.0, 1.5, 10])
def test_factors_that_are_no_powers_of_two_follow_float32(factor):
    scale = jmp.DynamicLossScale(1000.0, 0, 2, factor)
    flags = [True, True, False, True, True, True, True, False]
    rule = [*counting(flags, 1000.0, 2, growth=factor, backoff=1 / factor, floor=1.0)]
    np.testing.assert_allclose(history_of(scale, flags), rule, rtol=len(flags) * 2.0**-23, atol=0)


@pytest.mark.parametrize("factor", [1e39, 1e300])
def test_a_factor_beyond_float32_leads_to_a_bound_without_a_warning(factor):
    scale = jmp.DynamicLossScale(8.0, 0, 1, factor)
    grown, backed_off = (jax.jit(lambda s, f=f: s.adjust(f))(scale) for f in (True, False))
    assert float(grown.loss_scale) == LARGEST
    assert float(backed_off.loss_scale) == 1.0


def test_arguments_stand_in_deepminds_order():
    parameters = list(inspect.signature(jmp.DynamicLossScale).parameters.values())
    of_hysteresis = inspect.signature(jmp.HysteresisLossScale).parameters.values()
    added = [p.name for p in of_hysteresis if p.kind is p.KEYWORD_ONLY]
    assert added[-2:] == ["hysteresis", "tolerance"]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == ["loss_scale", "counter", "period", "factor", "min_loss_scale"]
    scale = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(1), 2, 4, 2.0)
    assert (scale.period, scale.factor, scale.min_loss_scale) == (2, 4, 2.0)
    assert history_of(scale, [True, False, False]) == [(32.0, 0), (8.0, 0), (2.0, 0)]


@pytest.mark.parametrize(
    "number",
    [8.0, np.float16(8), np.float64(8), jnp.float16(8), jnp.bfloat16(8), jnp.float32(8)],
    ids=lambda number: type(number).__name__ + str(getattr(number, "dtype", "")),
)
def test_any_floating_number_starts_a_float32_scale(number):
    # DeepMind's README starts from a half-precision scalar; its `adjust` then raised.
    scale = jmp.DynamicLossScale(number)
    assert scale.loss_scale.dtype == np.float32
    assert history_of(scale, [False]) == [(4.0, 0)]


@pytest.mark.parametrize(
    ("start", "floor", "ceiling", "expected"),
    [
        (1.0, 4.0, 16.0, 4.0),
        (64.0, 4.0, 16.0, 16.0),
        (4.0, 4.0, 4.0, 4.0),
        (2.0**-149, 0.0, LARGEST, SMALLEST),
        (1e-300, 0.0, LARGEST, SMALLEST),
        (2.0**127, 1.0, LARGEST, LARGEST),
        (2.0**127, 1.0, INFINITY, LARGEST),
        # Beyond float32, and no warning says so.
        (1e39, 1.0, LARGEST, LARGEST),
        (np.float64(1e300), 1.0, LARGEST, LARGEST),
    ],
)
def test_a_start_outside_the_bounds_is_brought_inside(start, floor, ceiling, expected):
    scale = jmp.DynamicLossScale(start, min_loss_scale=floor, max_loss_scale=ceiling)
    assert float(scale.loss_scale) == expected
    assert scale.min_loss_scale == max(floor, SMALLEST)


def restored(scale, *leaves):
    """Returns what a checkpoint returns: unflattening looks at no value."""
    return jax.tree.unflatten(jax.tree.structure(scale), leaves)


@pytest.mark.parametrize("leaf", [NAN, INFINITY, -INFINITY, 0.0, -8.0])
@pytest.mark.parametrize("make", [jmp.DynamicLossScale, jmp.HysteresisLossScale])
def test_a_restored_scale_that_is_none_starts_anew_at_the_next_step(make, leaf):
    scale = make(8.0, period=10)
    broken = restored(scale, jnp.float32(leaf), *jax.tree.leaves(scale)[1:])
    assert float(broken.adjust(True).loss_scale) == 2.0**15
    assert float(broken.adjust(False).loss_scale) in (2.0**14, 2.0**15)
    bounded = make(8.0, max_loss_scale=16.0)
    broken = restored(bounded, jnp.float32(leaf), *jax.tree.leaves(scale)[1:])
    assert float(broken.adjust(True).loss_scale) == 16.0


@pytest.mark.parametrize(("leaf", "kept"), [(2.0**20, 64.0), (0.25, 1.0), (32.0, 32.0)])
def test_a_restored_scale_beyond_its_bounds_comes_back_to_them(leaf, kept):
    scale = jmp.DynamicLossScale(8.0, max_loss_scale=64.0)
    after = restored(scale, jnp.float32(leaf), jnp.int32(0)).adjust(True)
    assert float(after.loss_scale) == kept


@pytest.mark.parametrize(
    ("period", "count", "scale", "counter"),
    [
        (2000, 2**31 - 1, 16.0, 0),
        (2**31 - 1, 2**31 - 2, 16.0, 0),
        (2**31 - 1, 2**31 - 3, 8.0, 2**31 - 2),
        (INFINITY, 2**31 - 2, 8.0, 2**31 - 1),
        (INFINITY, 2**31 - 1, 8.0, 2**31 - 1),
        (2000, -5, 8.0, 1),
        (2000, -(2**31), 8.0, 1),
    ],
)
def test_a_count_never_overflows_and_none_is_negative(period, count, scale, counter):
    before = restored(jmp.DynamicLossScale(8.0, period=period), jnp.float32(8), jnp.int32(count))
    after = before.adjust(True)
    assert (float(after.loss_scale), int(after.counter)) == (scale, counter)


def test_many_scales_side_by_side_take_many_flags():
    many = jmp.DynamicLossScale(jnp.array([8.0, 16.0]), jnp.zeros(2, jnp.int32), period=1)
    after = many.adjust(jnp.array([True, False]))
    np.testing.assert_array_equal(after.loss_scale, [16.0, 8.0])
    with pytest.raises(ValueError, match="expected boolean scalar"):
        many.adjust(True)


@pytest.mark.parametrize("name", ["loss_scale", "counter"])
def test_an_integer_beyond_float64_is_refused_by_its_name(name):
    with pytest.raises(ValueError, match=f"^{name} got "):
        jmp.DynamicLossScale(**{"loss_scale": 8.0, name: 10**400})


@pytest.mark.parametrize(
    ("tolerance", "after_overflow"), [(-(2**31), (4.0, 0)), (-1, (4.0, 0)), (5, (8.0, 1))]
)
def test_a_restored_tolerance_beyond_its_bounds_counts_as_the_nearest(tolerance, after_overflow):
    leaves = [jnp.float32(8), jnp.int32(2**31 - 1), jnp.int32(tolerance)]
    after = restored(jmp.HysteresisLossScale(8.0, hysteresis=2), *leaves).adjust(False)
    assert (float(after.loss_scale), int(after.tolerance)) == after_overflow
    assert int(after.counter) == 0


def test_a_scale_with_hysteresis_is_a_dynamic_scale_but_never_equal_to_one():
    scale = jmp.HysteresisLossScale(8.0)
    assert isinstance(scale, jmp.DynamicLossScale)
    assert scale != jmp.DynamicLossScale(8.0)
    assert scale != jmp.HysteresisLossScale(8.0, hysteresis=3)
    assert scale != jmp.HysteresisLossScale(8.0, tolerance=1)


# Presets: the defaults that people know from other systems.

# Start, growth, backoff, period, floor, ceiling, as each system documents them. Where a system has
# no bound, ours is the last scale whose float32 reciprocal exists.
PRESETS = [
    (jmp.deepmind_loss_scale, (2.0**15, 2.0, 0.5, 2000, 1.0, LARGEST)),
    (jmp.torch_loss_scale, (2.0**16, 2.0, 0.5, 2000, SMALLEST, LARGEST)),
    (jmp.apex_loss_scale, (2.0**16, 2.0, 0.5, 2000, SMALLEST, 2.0**24)),
    (jmp.fastai_loss_scale, (2.0**24, 2.0, 0.5, 500, SMALLEST, LARGEST)),
]
every_preset = pytest.mark.parametrize(
    ("preset", "defaults"), PRESETS, ids=[preset.__name__ for preset, _ in PRESETS]
)


@every_preset
def test_the_defaults_are_those_of_the_system_it_is_named_for(preset, defaults):
    scale = preset()
    start, growth, backoff, period, floor, ceiling = defaults
    assert float(scale.loss_scale) == start
    assert (scale.period, scale.min_loss_scale, scale.max_loss_scale) == (period, floor, ceiling)
    assert float(scale.adjust(False).loss_scale) == start * backoff
    last = jax.lax.fori_loop(0, period, lambda _, scale: scale.adjust(True), scale)
    assert float(last.loss_scale) == min(start * growth, ceiling)
    before = jax.lax.fori_loop(0, period - 1, lambda _, scale: scale.adjust(True), scale)
    assert float(before.loss_scale) == start


@every_preset
def test_disabled_it_is_no_scale_at_all(preset, defaults):
    assert preset(enabled=False) == jmp.NoOpLossScale()
    assert preset(enabled=True) == preset()


def test_torchs_keywords_mean_what_they_mean_in_torch():
    defaults = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    defaults |= {"init_scale": 2.0**16, "enabled": True}
    assert jmp.torch_loss_scale(**defaults) == jmp.torch_loss_scale()
    assert jmp.torch_loss_scale(**{**defaults, "enabled": False}) == jmp.NoOpLossScale()
    others = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    scale = jmp.torch_loss_scale(init_scale=2.0**10, **others)
    assert (float(scale.loss_scale), scale.period, int(scale.counter)) == (2.0**10, 3, 0)
    assert (scale.growth_factor, scale.backoff_factor) == (4.0, 0.25)
