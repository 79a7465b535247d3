"""The dynamic scale: back off on overflow, grow after a period, stay within the bounds."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp

SMALLEST, LARGEST = 2.0**-126, 2.0**126
NAN, INFINITY = float("nan"), float("inf")


def reference(flags, scale, counter, period, growth, backoff, floor, ceiling):
    """The definition in plain Python: the scale and the count after every step."""
    history = []
    for finite in flags:
        if not finite:
            scale, counter = max(scale * backoff, floor), 0
        elif counter + 1 >= period:
            scale, counter = min(scale * growth, ceiling), 0
        else:
            counter += 1
        history.append((scale, counter))
    return history


def history_of(scale, flags):
    history = []
    for finite in flags:
        scale = scale.adjust(finite)
        history.append((float(scale.loss_scale), int(scale.counter)))
    return history


@pytest.mark.parametrize("period", [1, 2, 3])
def test_every_sequence_of_six_steps_follows_the_definition(period):
    flags = np.array(list(itertools.product([True, False], repeat=6)))
    start = jmp.DynamicLossScale(
        4.0, 0, period, min_loss_scale=1.0, growth_factor=4.0, max_loss_scale=64.0
    )

    def run(row):
        return jax.lax.scan(lambda scale, finite: (scale.adjust(finite),) * 2, start, row)[1]

    many = jax.jit(jax.vmap(run))(flags)
    for index, row in enumerate(flags):
        expected = reference(row, 4.0, 0, period, 4.0, 0.5, 1.0, 64.0)
        np.testing.assert_array_equal(many.loss_scale[index], [scale for scale, _ in expected])
        np.testing.assert_array_equal(many.counter[index], [counter for _, counter in expected])


def test_an_overflow_halves_and_restarts_the_count():
    scale = jmp.DynamicLossScale(2.0**15, counter=7)
    assert history_of(scale, [False]) == [(2.0**14, 0)]


def test_growth_comes_with_the_last_step_of_a_period_and_not_one_later():
    assert history_of(jmp.DynamicLossScale(8.0, period=3), [True] * 4) == [
        (8.0, 1),
        (8.0, 2),
        (16.0, 0),
        (16.0, 1),
    ]


def test_a_period_of_one_grows_at_every_finite_step():
    assert history_of(jmp.DynamicLossScale(1.0, period=1), [True] * 3) == [
        (2.0, 0),
        (4.0, 0),
        (8.0, 0),
    ]


def test_a_fractional_period_waits_for_the_next_whole_step():
    assert [s for s, _ in history_of(jmp.DynamicLossScale(1.0, period=2.5), [True] * 3)] == [
        1.0,
        1.0,
        2.0,
    ]


def test_an_infinite_period_never_grows():
    scale = jmp.DynamicLossScale(8.0, period=float("inf"))
    assert history_of(scale, [True] * 5)[-1] == (8.0, 5)


def test_only_finite_steps_in_a_row_count():
    scale = jmp.DynamicLossScale(8.0, period=3)
    assert history_of(scale, [True, True, False, True, True])[-1] == (4.0, 2)


def test_a_count_beyond_the_period_grows_at_once():
    assert history_of(jmp.DynamicLossScale(8.0, 100, period=3), [True]) == [(16.0, 0)]


def test_the_floor_holds_through_jit_and_tree_map():
    # DeepMind's own forgot it there: 512 became 1.
    scale = jmp.DynamicLossScale(1024.0, min_loss_scale=512.0)
    scale = jax.tree.map(lambda leaf: leaf, jax.jit(lambda scale: scale)(scale))
    assert history_of(scale, [False] * 3) == [(512.0, 0)] * 3


def test_endless_overflows_never_reach_zero():
    scale = jmp.DynamicLossScale(2.0**16, min_loss_scale=0.0)
    last, history = jax.lax.scan(
        lambda scale, finite: (scale.adjust(finite), scale.unscale(jnp.float32(1.0))),
        scale,
        jnp.zeros(400, bool),
    )
    assert float(last.loss_scale) == SMALLEST
    assert bool(jmp.all_finite(history))
    assert float(last.unscale(jnp.float32(1.0))) == LARGEST


def test_endless_growth_never_reaches_infinity():
    scale = jmp.DynamicLossScale(2.0**16, period=1)
    last, unscaled = jax.lax.scan(
        lambda scale, finite: (scale.adjust(finite), scale.unscale(jnp.float32(1.0))),
        scale,
        jnp.ones(400, bool),
    )
    assert float(last.loss_scale) == LARGEST
    # The reciprocal of 2**127 would be subnormal, and flushed to zero.
    assert np.all(np.asarray(unscaled) > 0)
    assert float(last.unscale(jnp.float32(1.0))) == SMALLEST


def test_a_scale_at_the_floor_grows_again():
    scale = jmp.DynamicLossScale(0.25, period=1, min_loss_scale=0.25)
    assert history_of(scale, [False, True, True]) == [(0.25, 0), (0.5, 0), (1.0, 0)]


def test_the_ceiling_stops_growth_in_the_middle_of_a_factor():
    scale = jmp.DynamicLossScale(8.0, period=1, growth_factor=4.0, max_loss_scale=48.0)
    assert history_of(scale, [True] * 3) == [(32.0, 0), (48.0, 0), (48.0, 0)]


def test_a_restored_scale_above_the_ceiling_comes_down_with_the_next_finite_step():
    structure = jax.tree.structure(jmp.DynamicLossScale(8.0, max_loss_scale=16.0))
    restored = jax.tree.unflatten(structure, [jnp.float32(64.0), jnp.int32(0)])
    assert restored.adjust(True).loss_scale == 16.0


def test_growth_and_backoff_can_differ():
    scale = jmp.DynamicLossScale(16.0, period=1, growth_factor=8.0, backoff_factor=0.25)
    assert history_of(scale, [False, True]) == [(4.0, 0), (32.0, 0)]


def test_the_factor_stands_for_whichever_is_not_given():
    growth_alone = jmp.DynamicLossScale(16.0, 0, 1, 4, growth_factor=2.0)
    backoff_alone = jmp.DynamicLossScale(16.0, 0, 1, 4, backoff_factor=0.5)
    assert history_of(growth_alone, [True, False]) == [(32.0, 0), (8.0, 0)]
    assert history_of(backoff_alone, [True, False]) == [(64.0, 0), (32.0, 0)]


@pytest.mark.parametrize("factor", [1.1, 3.0, 1.5, 10])
def test_factors_that_are_no_powers_of_two_follow_float32(factor):
    scale = jmp.DynamicLossScale(1000.0, 0, 2, factor)
    flags = [True, True, False, True, True, True, True, False]
    expected = reference(flags, 1000.0, 0, 2, factor, 1 / factor, 1.0, LARGEST)
    actual = history_of(scale, flags)
    assert [counter for _, counter in actual] == [counter for _, counter in expected]
    np.testing.assert_allclose(
        [s for s, _ in actual], [s for s, _ in expected], rtol=len(flags) * 2.0**-23
    )


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
        (2.0**127, 1.0, float("inf"), LARGEST),
    ],
)
def test_a_start_outside_the_bounds_is_brought_inside(start, floor, ceiling, expected):
    scale = jmp.DynamicLossScale(start, min_loss_scale=floor, max_loss_scale=ceiling)
    assert float(scale.loss_scale) == expected


@pytest.mark.parametrize("number", [1e300, np.float64(1e300), 1e39])
def test_a_start_beyond_float32_is_brought_to_the_ceiling_without_a_warning(number):
    assert float(jmp.DynamicLossScale(number).loss_scale) == LARGEST


def test_a_floor_of_zero_is_the_smallest_scale_there_is():
    assert jmp.DynamicLossScale(8.0, min_loss_scale=0.0).min_loss_scale == SMALLEST


def restored(scale, *leaves):
    """What a checkpoint does: unflattening, which looks at no value."""
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_gradients_are_cast_before_they_are_divided(dtype):
    # Divided in half precision, 2**-10 / 2**24 is zero.
    gradient = jnp.full(3, 2.0**-10, dtype)
    unscaled = jmp.DynamicLossScale(2.0**24).unscale(gradient)
    np.testing.assert_array_equal(unscaled, np.full(3, 2.0**-34, np.float32))


def test_scaling_commutes_with_rounding():
    # A power of two moves the exponent alone, so that half-precision sums round alike.
    numbers = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    scale = jmp.DynamicLossScale(2.0**7)
    rounded_first = scale.scale(jnp.asarray(numbers, jnp.float16))
    scaled_first = scale.scale(jnp.asarray(numbers)).astype(jnp.float16).astype(jnp.float32)
    normal = np.abs(numbers) > 2.0**-14
    np.testing.assert_array_equal(
        np.asarray(rounded_first)[normal], np.asarray(scaled_first)[normal]
    )
