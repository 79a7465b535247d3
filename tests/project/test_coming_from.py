"""The page on coming from other libraries: its sources, and the numbers of their loss scales.

The rules of the other libraries are written out in Python, as their sources have them; only Flax
is run.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jmp
from jmp import transforms
from testbed import ROOT
from tests.loss_scaling.definitions import counting, megatron

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
# Its sections on PyTorch and its libraries, and those on JAX's libraries and Keras.
TORCH, _, JAX = PAGE.partition("\n## Flax")
SECTIONS = re.split(r"^## ", PAGE, flags=re.M)[1:]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_a_section_names_what_was_read_for_it_at_a_fixed_state(section):
    text = section.partition("\nRead: ")[2]
    names = re.findall(r"\]\[([\w-]+)\]", text)
    assert names
    for name in names:
        assert re.search(rf"^\[{name}\]: https://\S+/blob/[0-9a-f]{{40}}/\S+$", PAGE, re.M), name


# Overflows at the start, single and in pairs, and after the scale has grown twice.
OVERFLOWS = (0, 1, 2, 700, 2300, 2301, 6600, 6602)
FINITE = np.isin(np.arange(9000), OVERFLOWS, invert=True)


def printed(page, expression):
    """Returns the loss scale that a page prints."""
    assert expression in page
    return eval(expression, {"jmp": jmp})


def scales(scale):
    """Returns the loss scale after each step."""

    def step(scale, finite):
        scale = scale.adjust(finite)
        return scale, scale.loss_scale

    return np.asarray(jax.lax.scan(step, scale, jnp.asarray(FINITE))[1])


def since_the_last_overflow(scale, period):
    """`fp16_utils.DynamicLossScaler` of Apex, and mmcv's `LossScaler`."""
    last = -1
    for iteration, finite in enumerate(FINITE):
        if not finite:
            scale, last = max(scale / 2, 1), iteration
        elif (iteration - last) % period == 0:
            scale *= 2
        yield (scale,)


def deepspeed(scale, period, hysteresis, floor):
    last, left = -1, hysteresis
    for iteration, finite in enumerate(FINITE):
        stable = iteration - last - 1
        if not finite:
            if left == 1:
                scale = max(scale / 2, floor)
            else:
                left -= 1
            last = iteration
        elif stable > 0 and stable % period == 0:
            left, scale = hysteresis, scale * 2
        yield scale


# The presets for torch, Apex and fastai have tests in tests/loss_scaling/test_presets.py.
RULES = {
    "FP16_Optimizer and old mmcv": (
        TORCH,
        "jmp.DynamicLossScale(2.0**32, period=1000)",
        since_the_last_overflow(2.0**32, 1000),
    ),
    "Megatron-LM": (
        TORCH,
        "jmp.HysteresisLossScale(2.0**32, period=1000, hysteresis=2)",
        megatron(FINITE, 2.0**32, 1000, 2),
    ),
    "Keras": (
        JAX,
        "jmp.DynamicLossScale(2.0**15, min_loss_scale=0.0)",
        counting(FINITE, 2.0**15, 2000),
    ),
    "Keras 2": (
        JAX,
        "jmp.DynamicLossScale(2.0**15)",
        counting(FINITE, 2.0**15, 2000, floor=1.0),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_loss_scale_on_a_page_follows_the_other_library(name):
    page, expression, rule = RULES[name]
    expected = np.array([scale for scale, *_ in rule])
    assert len(set(expected)) > 3
    np.testing.assert_array_equal(scales(printed(page, expression)), expected)


def test_deepspeed_grows_one_step_later_and_backs_off_at_the_same_steps():
    ours = scales(printed(TORCH, "jmp.HysteresisLossScale(2.0**16, period=1000, hysteresis=2)"))
    theirs = np.array(list(deepspeed(2.0**16, 1000, 2, 1.0)))

    def steps(scale, sign):
        changes = np.diff(np.log2(scale), prepend=16)
        return np.flatnonzero(changes == sign)

    np.testing.assert_array_equal(steps(theirs, -1), steps(ours, -1))
    np.testing.assert_array_equal(steps(theirs, 1), steps(ours, 1) + 1)
    assert len(steps(ours, 1)) > 3 and len(steps(ours, -1)) > 3


def test_flax_grows_after_one_step_more_than_its_interval():
    ours = printed(JAX, "jmp.torch_loss_scale(growth_interval=2001)")

    def step(scale, finite):
        factor = jnp.where(finite, 1.0, jnp.inf)
        scale = scale.value_and_grad(lambda w: w * factor)(1.0).dynamic_scale
        return scale, scale.scale

    start = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2.0**16))
    theirs = jax.lax.scan(step, start, jnp.asarray(FINITE))[1]
    np.testing.assert_array_equal(scales(ours), theirs)


def test_o3_scales_no_loss_only_if_told():
    tx, params = optax.sgd(0.1), {"w": jnp.ones(2, jnp.float16)}
    assert '`transforms.mixed_precision(tx, "O3", jmp.StaticLossScale(1.0))`' in TORCH
    default = jax.eval_shape(transforms.mixed_precision(tx, "O3").init, params).loss_scale
    assert isinstance(default, jmp.DynamicLossScale)
