"""The hysteresis scale: forgives a few overflows before it backs off (Megatron's definition)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from tests.loss_scaling.definitions import megatron


def history_of(scale, flags):
    history = []
    for finite in flags:
        scale = scale.adjust(finite)
        history.append((float(scale.loss_scale), int(scale.counter), int(scale.tolerance)))
    return history


@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_every_sequence_of_seven_steps_follows_the_definition(period, hysteresis):
    flags = np.array(list(itertools.product([True, False], repeat=7)))
    start = jmp.HysteresisLossScale(8.0, period=period, hysteresis=hysteresis)
    adjust = lambda scale, finite: (scale.adjust(finite),) * 2
    many = jax.jit(jax.vmap(lambda row: jax.lax.scan(adjust, start, row)[1]))(flags)
    for index, row in enumerate(flags):
        expected = np.array([*megatron(row, 8.0, period, hysteresis)])
        np.testing.assert_array_equal(many.loss_scale[index], expected[:, 0])
        np.testing.assert_array_equal(many.counter[index], expected[:, 1])
        np.testing.assert_array_equal(many.tolerance[index], expected[:, 2])


def test_the_bounds_hold():
    bounds = {"min_loss_scale": 2.0, "max_loss_scale": 8.0}
    scale = jmp.HysteresisLossScale(4.0, period=1, hysteresis=1, **bounds)
    scales = [scale for scale, _, _ in history_of(scale, [False] * 3 + [True] * 4)]
    assert scales == [2, 2, 2, 4, 8, 8, 8]


@pytest.mark.parametrize("tolerance", [1.0, np.float64(1), np.int64(1), jnp.float16(1)])
def test_a_tolerance_given_as_any_number_is_an_int32_leaf(tolerance):
    scale = jmp.HysteresisLossScale(8.0, hysteresis=2, tolerance=tolerance)
    assert scale.tolerance.dtype == np.int32
    assert history_of(scale, [False]) == [(4.0, 0, 0)]


@pytest.mark.parametrize(
    ("tolerance", "after_overflow"), [(-(2**31), (4.0, 0)), (-1, (4.0, 0)), (5, (8.0, 1))]
)
def test_a_restored_tolerance_beyond_its_bounds_counts_as_the_nearest(tolerance, after_overflow):
    scale = jmp.HysteresisLossScale(8.0, hysteresis=2)
    leaves = [jnp.float32(8), jnp.int32(2**31 - 1), jnp.int32(tolerance)]
    after = jax.tree.unflatten(jax.tree.structure(scale), leaves).adjust(False)
    assert (float(after.loss_scale), int(after.tolerance)) == after_overflow
    assert int(after.counter) == 0


def test_it_is_a_dynamic_scale_but_never_equal_to_one():
    scale = jmp.HysteresisLossScale(8.0)
    assert isinstance(scale, jmp.DynamicLossScale)
    assert scale != jmp.DynamicLossScale(8.0)
    assert scale != jmp.HysteresisLossScale(8.0, hysteresis=3)
    assert scale != jmp.HysteresisLossScale(8.0, tolerance=1)
