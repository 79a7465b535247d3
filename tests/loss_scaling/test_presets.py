"""Presets: the defaults that people know from other systems."""

import jax
import pytest

import jmp

# Start, growth, backoff, period, floor, ceiling, as each system documents them. Where a system has
# no bound, ours is the last scale whose float32 reciprocal exists.
NO_FLOOR, NO_CEILING = 2.0**-126, 2.0**126
PRESETS = [
    (jmp.deepmind_loss_scale, (2.0**15, 2.0, 0.5, 2000, 1.0, NO_CEILING)),
    (jmp.torch_loss_scale, (2.0**16, 2.0, 0.5, 2000, NO_FLOOR, NO_CEILING)),
    (jmp.apex_loss_scale, (2.0**16, 2.0, 0.5, 2000, NO_FLOOR, 2.0**24)),
    (jmp.fastai_loss_scale, (2.0**24, 2.0, 0.5, 500, NO_FLOOR, NO_CEILING)),
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
