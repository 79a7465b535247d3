"""The hysteresis scale: forgives a few overflows before it backs off (Megatron's definition)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp


class MegatronScaler:
    """Megatron-LM's `DynamicGradScaler.update`, in plain Python."""

    def __init__(self, scale, period, hysteresis, growth=2.0, backoff=0.5, floor=1.0):
        self.scale, self.period, self.hysteresis = scale, period, hysteresis
        self.growth, self.backoff, self.floor = growth, backoff, floor
        self.counter, self.tolerance = 0, hysteresis

    def update(self, finite):
        if not finite:
            self.counter = 0
            self.tolerance -= 1
            if self.tolerance <= 0:
                self.scale = max(self.scale * self.backoff, self.floor)
        else:
            self.counter += 1
            if self.counter == self.period:
                self.counter, self.tolerance = 0, self.hysteresis
                self.scale = self.scale * self.growth
        return self.scale, self.counter, max(self.tolerance, 0)


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

    def run(row):
        return jax.lax.scan(lambda scale, finite: (scale.adjust(finite),) * 2, start, row)[1]

    many = jax.jit(jax.vmap(run))(flags)
    for index, row in enumerate(flags):
        scaler = MegatronScaler(8.0, period, hysteresis)
        expected = np.array([scaler.update(finite) for finite in row])
        np.testing.assert_array_equal(many.loss_scale[index], expected[:, 0])
        np.testing.assert_array_equal(many.counter[index], expected[:, 1])
        np.testing.assert_array_equal(many.tolerance[index], expected[:, 2])


def test_the_first_overflow_is_forgiven_and_the_second_backs_off():
    scale = jmp.HysteresisLossScale(1024.0, hysteresis=2)
    assert history_of(scale, [False, False, False]) == [
        (1024.0, 0, 1),
        (512.0, 0, 0),
        (256.0, 0, 0),
    ]


def test_finite_steps_alone_do_not_restore_the_tolerance():
    scale = jmp.HysteresisLossScale(1024.0, period=100, hysteresis=2)
    assert history_of(scale, [False, True, True, False])[-1] == (512.0, 0, 0)


def test_growth_restores_the_tolerance():
    scale = jmp.HysteresisLossScale(1024.0, period=2, hysteresis=2)
    assert history_of(scale, [False, True, True, False])[-1] == (2048.0, 0, 1)


def test_a_forgiven_overflow_restarts_the_count_of_finite_steps():
    scale = jmp.HysteresisLossScale(8.0, period=2, hysteresis=3)
    assert history_of(scale, [True, False, True])[-1] == (8.0, 1, 2)


def test_with_a_hysteresis_of_one_it_is_the_dynamic_scale():
    flags = np.random.default_rng(0).random(60) < 0.7
    patient = jmp.HysteresisLossScale(2.0**10, period=2, hysteresis=1)
    plain = jmp.DynamicLossScale(2.0**10, period=2)
    for finite in flags:
        patient, plain = patient.adjust(finite), plain.adjust(finite)
        assert float(patient.loss_scale) == float(plain.loss_scale)
        assert int(patient.counter) == int(plain.counter)


def test_the_bounds_hold():
    scale = jmp.HysteresisLossScale(
        4.0, period=1, min_loss_scale=2.0, max_loss_scale=8.0, hysteresis=1
    )
    assert [s for s, _, _ in history_of(scale, [False] * 3 + [True] * 4)] == [
        2.0,
        2.0,
        2.0,
        4.0,
        8.0,
        8.0,
        8.0,
    ]


def test_a_used_up_tolerance_stays_at_zero():
    scale = jmp.HysteresisLossScale(2.0**20, hysteresis=3)
    last = jax.lax.scan(lambda s, f: (s.adjust(f), None), scale, jnp.zeros(50, bool))[0]
    assert int(last.tolerance) == 0
    assert float(last.loss_scale) == 1.0


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
