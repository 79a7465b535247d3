"""Dynamic scales, hysteresis, presets, torch's layout, and the errors of each."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp

LARGEST, SMALLEST = 2.0**126, 2.0**-126


def test_it_grows_after_a_period_of_finite_steps():
    scale = jmp.DynamicLossScale(4.0, period=3)
    course = []
    for _ in range(7):
        scale = scale.adjust(True)
        course.append((float(scale.loss_scale), int(scale.counter)))
    assert course == [(4, 1), (4, 2), (8, 0), (8, 1), (8, 2), (16, 0), (16, 1)]


def test_an_overflow_backs_off_and_restarts_the_count():
    scale = jmp.DynamicLossScale(8.0, period=3).adjust(True).adjust(True).adjust(False)
    assert (float(scale.loss_scale), int(scale.counter)) == (4.0, 0)


def test_floor_and_ceiling_hold():
    scale = jmp.DynamicLossScale(8.0, period=1, min_loss_scale=4.0, max_loss_scale=16.0)
    assert [float((scale := scale.adjust(True)).loss_scale) for _ in range(3)] == [16, 16, 16]
    assert [float((scale := scale.adjust(False)).loss_scale) for _ in range(4)] == [8, 4, 4, 4]


def test_the_scale_never_leaves_where_its_reciprocal_exists():
    scale = jmp.DynamicLossScale(2.0**16, period=1, min_loss_scale=0.0)
    for _ in range(300):
        scale = scale.adjust(False)
    assert float(scale.loss_scale) == SMALLEST
    for _ in range(300):
        scale = scale.adjust(True)
    assert float(scale.loss_scale) == LARGEST
    tiny = jnp.float32(2.0**100)
    assert float(scale.unscale(tiny)) == 2.0**-26


@pytest.mark.parametrize("asked", [1e38, 3.4e38])
def test_a_start_beyond_the_ceiling_is_brought_to_it(asked):
    assert float(jmp.DynamicLossScale(asked).loss_scale) == LARGEST
    assert jmp.StaticLossScale(asked).loss_scale == LARGEST


def test_min_loss_scale_survives_jit_and_tree_map():
    scale = jmp.DynamicLossScale(1024.0, min_loss_scale=512.0)
    scale = jax.jit(lambda s: jax.tree.map(lambda leaf: leaf, s).adjust(False).adjust(False))(scale)
    assert float(scale.loss_scale) == 512.0


def test_a_half_scale_is_taken_as_float32():
    scale = jmp.DynamicLossScale(jnp.asarray(2.0**15, jmp.half_dtype()))
    assert scale.adjust(True).loss_scale.dtype == jnp.float32


def reference_hysteresis(flags, scale, period, hysteresis):
    """Megatron-LM's rule, in plain Python."""
    count, left, course = 0, hysteresis, []
    for finite in flags:
        if finite:
            count += 1
            if count == period:
                count, left, scale = 0, hysteresis, scale * 2
        else:
            count, left = 0, left - 1
            if left <= 0:
                scale = max(scale / 2, 1.0)
        course.append(scale)
    return course


def test_hysteresis_follows_megatrons_rule():
    for flags in itertools.product([True, False], repeat=8):
        scale, course = jmp.HysteresisLossScale(64.0, period=2, hysteresis=3), []
        adjust = lambda s, finite: (s.adjust(finite), s.adjust(finite).loss_scale)
        _, course = jax.lax.scan(adjust, scale, jnp.array(flags))
        assert course.tolist() == reference_hysteresis(flags, 64.0, 2, 3)


def test_a_hysteresis_of_one_is_the_dynamic_scale():
    flags = [True, False, False, True, True, True, False]
    plain, hysteresis = (
        jmp.DynamicLossScale(8.0, period=2),
        jmp.HysteresisLossScale(8.0, period=2, hysteresis=1),
    )
    for finite in flags:
        plain, hysteresis = plain.adjust(finite), hysteresis.adjust(finite)
        assert plain.loss_scale == hysteresis.loss_scale


@pytest.mark.parametrize(
    ("preset", "start", "period"),
    [
        (jmp.deepmind_loss_scale, 2.0**15, 2000),
        (jmp.torch_loss_scale, 2.0**16, 2000),
        (jmp.apex_loss_scale, 2.0**16, 2000),
        (jmp.fastai_loss_scale, 2.0**24, 500),
    ],
)
def test_presets_start_as_their_systems_do_and_can_be_switched_off(preset, start, period):
    scale = preset()
    assert (float(scale.loss_scale), scale.period) == (start, period)
    assert float(scale.adjust(False).loss_scale) == start / 2
    assert preset(enabled=False) == jmp.NoOpLossScale()


def test_torchs_layout_round_trips():
    scale = jmp.DynamicLossScale(
        2.0**12, period=7, growth_factor=4, backoff_factor=0.25, min_loss_scale=2.0
    ).adjust(True)
    state = jmp.to_torch_state_dict(scale)
    assert state == {
        "scale": 4096.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 1,
    }
    assert jmp.to_torch_state_dict(jmp.from_torch_state_dict(state)) == state
    assert jmp.from_torch_state_dict(state, like=scale).min_loss_scale == 2.0
    assert jmp.to_torch_state_dict(jmp.NoOpLossScale()) == {}
    assert jmp.from_torch_state_dict({}) == jmp.NoOpLossScale()


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: jmp.DynamicLossScale(0.0), ValueError, "expected a positive finite number"),
        (lambda: jmp.DynamicLossScale(-1.0), ValueError, "expected a positive finite number"),
        (lambda: jmp.DynamicLossScale(jnp.nan), ValueError, "expected a positive finite"),
        (lambda: jmp.DynamicLossScale(jnp.array(jnp.inf)), ValueError, "expected a positive"),
        (lambda: jmp.DynamicLossScale(2.0, period=0), ValueError, "at least 1"),
        (lambda: jmp.DynamicLossScale(2.0, period=np.nan), ValueError, "at least 1"),
        (lambda: jmp.DynamicLossScale(2.0, factor=1), ValueError, "above 1"),
        (lambda: jmp.DynamicLossScale(2.0, growth_factor=0.5), ValueError, "above 1"),
        (lambda: jmp.DynamicLossScale(2.0, backoff_factor=1.0), ValueError, "between 0 and 1"),
        (lambda: jmp.DynamicLossScale(2.0, min_loss_scale=-1.0), ValueError, "not negative"),
        (
            lambda: jmp.DynamicLossScale(2.0, min_loss_scale=4.0, max_loss_scale=2.0),
            ValueError,
            "below the ceiling",
        ),
        (lambda: jmp.DynamicLossScale(2.0, period="many"), TypeError, "expected one number"),
        (lambda: jmp.HysteresisLossScale(2.0, hysteresis=0), ValueError, "at least 1 overflow"),
        (lambda: jmp.HysteresisLossScale(2.0, hysteresis=1.5), TypeError, "whole number"),
        (lambda: jmp.StaticLossScale(-2.0), ValueError, "not negative"),
        (lambda: jmp.StaticLossScale(np.nan), ValueError, "not negative"),
        (lambda: jax.jit(jmp.StaticLossScale)(2.0), TypeError, "DynamicLossScale"),
        (lambda: jmp.to_torch_state_dict(jmp.StaticLossScale(2)), TypeError, "no static one"),
        (lambda: jmp.from_torch_state_dict({"scale": 1.0}), ValueError, "GradScaler's"),
    ],
)
def test_bad_input_is_refused(make, error, sentence):
    with pytest.raises(error, match=sentence):
        make()


def test_an_integer_scale_warns():
    with pytest.warns(UserWarning, match="Expected floating type for loss_scale"):
        jmp.DynamicLossScale(jnp.asarray(2))


def test_the_value_is_unscaled_and_the_gradients_are_scaled():
    x, y = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    loss_fn = lambda x, y: (jnp.sum(jnp.sin(x) * y), {"aux": x})
    scale = jmp.DynamicLossScale(1024.0)
    grad_fn = jmp.scaled_value_and_grad(loss_fn, scale, argnums=(0, 1), has_aux=True)
    (value, aux), (by_x, by_y) = jax.jit(grad_fn)(x, y)
    np.testing.assert_allclose(value, np.sum(np.sin(x, dtype=np.float64) * y), rtol=1e-6)
    np.testing.assert_allclose(by_x / 1024, np.cos(x, dtype=np.float64) * y, rtol=1e-5)
    np.testing.assert_allclose(by_y / 1024, np.sin(x, dtype=np.float64), rtol=1e-5)
    assert aux["aux"].shape == (5,)


def test_a_half_loss_times_two_to_the_sixteenth_is_finite():
    loss_fn = lambda x: (x * x).astype(jnp.float16)
    value, gradient = jmp.scaled_value_and_grad(loss_fn, jmp.torch_loss_scale())(jnp.float32(0.5))
    assert value.dtype == jnp.float32 and value == 0.25
    assert jnp.isfinite(jmp.torch_loss_scale().scale(value))
    assert jnp.isinf(gradient)  # 2**16 as a float16 cotangent: seen by the check, never silent


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda x: x, r"float32\[3\]; expected a real floating scalar"),
        (lambda x: jnp.int32(2), r"int32\[\]; expected a real floating scalar"),
        (lambda x: (x.sum(), x), "has_aux=True"),
        (lambda x: None, "expected a real floating scalar"),
        (lambda x: x.sum() * 1j, "expected a real floating scalar"),
    ],
)
def test_a_loss_that_is_no_floating_scalar_is_refused(loss, sentence):
    with pytest.raises(TypeError, match=sentence):
        jmp.scaled_value_and_grad(loss, jmp.StaticLossScale(2.0))(jnp.ones(3))


def test_a_number_is_no_loss_scale():
    with pytest.raises(TypeError, match="expected a loss scale"):
        jmp.scaled_value_and_grad(jnp.sum, 512.0)
