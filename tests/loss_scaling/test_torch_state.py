"""Loss scales in the layout of torch's `GradScaler.state_dict()`.

The layout is the documented one, written out here: torch itself is not needed.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jmp

# torch.amp.GradScaler(device="cpu").state_dict() before the first step.
FRESH_GRAD_SCALER = {
    "scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 0,
}


def run(scale, flags):
    for finite in flags:
        scale = scale.adjust(finite)
    return scale


def test_torchs_preset_writes_what_a_fresh_grad_scaler_writes():
    assert jmp.to_torch_state_dict(jmp.torch_loss_scale()) == FRESH_GRAD_SCALER


def test_a_fresh_grad_scaler_reads_as_torchs_preset():
    scale = jmp.from_torch_state_dict(FRESH_GRAD_SCALER)
    preset = jmp.torch_loss_scale()
    assert float(scale.loss_scale) == float(preset.loss_scale)
    assert (scale.period, scale.min_loss_scale) == (preset.period, preset.min_loss_scale)
    for flags in ([False], [True], [False, True, True]):
        assert float(run(scale, flags).loss_scale) == float(run(preset, flags).loss_scale)


def test_the_values_are_plain_numbers_of_the_types_that_torch_reads():
    scale = jmp.DynamicLossScale(jnp.float16(8), jnp.int32(3), 7, jnp.float32(4))
    state = jmp.to_torch_state_dict(scale)
    assert {key: type(value) for key, value in state.items()} == {
        "scale": float,
        "growth_factor": float,
        "backoff_factor": float,
        "growth_interval": int,
        "_growth_tracker": int,
    }
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize(("period", "interval"), [(4.0, 4), (np.float32(4), 4), (2.5, 3)])
def test_a_float_period_is_written_as_the_whole_interval_that_torch_needs(period, interval):
    state = jmp.to_torch_state_dict(jmp.DynamicLossScale(8.0, period=period))
    assert state["growth_interval"] == interval
    assert type(state["growth_interval"]) is int


@pytest.mark.parametrize(
    "scale",
    [
        jmp.DynamicLossScale(2.0**10, 5, 6, min_loss_scale=0.0),
        jmp.DynamicLossScale(8.0, 0, 3, growth_factor=4.0, backoff_factor=0.25),
        jmp.DynamicLossScale(8.0, 1, 2, 4, 2.0, max_loss_scale=2.0**9),
        jmp.HysteresisLossScale(2.0**10, 5, 6, hysteresis=3, tolerance=2),
    ],
    ids=["plain", "factors", "bounds", "hysteresis"],
)
def test_a_restored_scale_goes_on_as_the_saved_one_would(scale):
    saved = run(scale, [True, False, True])
    restored = jmp.from_torch_state_dict(jmp.to_torch_state_dict(saved), like=saved)
    assert type(restored) is type(scale)
    flags = np.random.default_rng(0).random(40) < 0.6
    for finite in flags:
        saved, restored = saved.adjust(finite), restored.adjust(finite)
        assert float(saved.loss_scale) == float(restored.loss_scale)
        assert int(saved.counter) == int(restored.counter)


def test_a_disabled_scaler_is_an_empty_dictionary():
    assert jmp.to_torch_state_dict(jmp.NoOpLossScale()) == {}
    assert jmp.from_torch_state_dict({}) == jmp.NoOpLossScale()


def test_switching_scaling_on_reads_a_state_into_a_dynamic_scale():
    restored = jmp.from_torch_state_dict(FRESH_GRAD_SCALER, like=jmp.NoOpLossScale())
    assert float(restored.loss_scale) == 65536.0


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("scale", 0.0, "expected a positive finite number"),
        ("scale", float("inf"), "expected a positive finite number"),
        ("scale", float("nan"), "scale got nan; expected a positive finite number"),
        ("scale", -8.0, "scale got -8.0; expected a positive finite number"),
        ("_growth_tracker", -1, "counter got -1.0; expected a count from 0"),
        ("_growth_tracker", float("nan"), "counter got nan; expected a count from 0"),
        ("growth_factor", 1.0, "expected a finite number above 1"),
        ("backoff_factor", 1.0, "expected a number between 0 and 1"),
        ("growth_interval", 0, "expected a number of steps of at least 1"),
    ],
)
def test_a_broken_state_is_refused(key, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        jmp.from_torch_state_dict({**FRESH_GRAD_SCALER, key: value})


@pytest.mark.parametrize("key", ["scale", "_growth_tracker"])
def test_a_value_that_is_no_number_is_named(key):
    with pytest.raises(TypeError, match=f"{key} got None; expected one number"):
        jmp.from_torch_state_dict({**FRESH_GRAD_SCALER, key: None})


def test_a_scale_beyond_the_bounds_of_like_is_brought_back_to_them():
    for scale, expected in ((2.0**30, 2.0**24), (2.0**-130, 2.0**-126)):
        state = {**FRESH_GRAD_SCALER, "scale": scale}
        restored = jmp.from_torch_state_dict(state, like=jmp.apex_loss_scale())
        assert float(restored.loss_scale) == expected
