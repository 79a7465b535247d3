"""The page on coming from other libraries: its sources, and the numbers of their loss scales.

The rules of the other libraries are written out in Python, as their sources have them; only Flax
is run.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jmp
from jmp import transforms
from jmp.adapters import linen
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


def test_a_source_at_the_foot_of_the_page_is_linked_to():
    for source in re.findall(r"^\[([\w-]+)\]: ", PAGE, re.M):
        assert f"][{source}]" in PAGE, source


# Overflows at the start, single and in pairs, and after the scale has grown twice.
OVERFLOWS = (0, 1, 2, 700, 2300, 2301, 6600, 6602)
FINITE = np.isin(np.arange(9000), OVERFLOWS, invert=True)


def printed(page, expression):
    """Returns the loss scale that a page prints."""
    assert expression in page
    return eval(expression, {"jmp": jmp})


def scales(scale, flags=FINITE):
    """Returns the loss scale after each step."""

    def step(scale, finite):
        scale = scale.adjust(finite)
        return scale, scale.loss_scale

    return np.asarray(jax.lax.scan(step, scale, jnp.asarray(flags))[1])


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


APEX = counting(FINITE, 2.0**16, 2000, ceiling=2.0**24)
MMCV = since_the_last_overflow(2.0**32, 1000)
MEGATRON = megatron(FINITE, 2.0**32, 1000, 2)
KERAS = counting(FINITE, 2.0**15, 2000)
KERAS_2 = counting(FINITE, 2.0**15, 2000, floor=1.0)
OF_MEGATRON = "jmp.HysteresisLossScale(2.0**32, period=1000, hysteresis=2)"
RULES = {
    "torch": (TORCH, "jmp.torch_loss_scale()", counting(FINITE, 2.0**16, 2000)),
    "Apex": (TORCH, "jmp.apex_loss_scale()", APEX),
    "FP16_Optimizer and old mmcv": (TORCH, "jmp.DynamicLossScale(2.0**32, period=1000)", MMCV),
    "Megatron-LM": (TORCH, OF_MEGATRON, MEGATRON),
    "Keras": (JAX, "jmp.DynamicLossScale(2.0**15, min_loss_scale=0.0)", KERAS),
    "Keras 2": (JAX, "jmp.DynamicLossScale(2.0**15)", KERAS_2),
}


@pytest.mark.parametrize("name", RULES)
def test_a_loss_scale_on_a_page_follows_the_other_library(name):
    page, expression, rule = RULES[name]
    expected = np.array([scale for scale, *_ in rule])
    assert len(set(expected)) > 3
    np.testing.assert_array_equal(scales(printed(page, expression)), expected)


def test_mpx_has_a_ceiling():
    scale = jmp.DynamicLossScale(2.0**15, min_loss_scale=1.0, max_loss_scale=65504.0)
    assert "max_loss_scale=65504.0" in JAX
    expected = counting(FINITE, 2.0**15, 2000, floor=1.0, ceiling=65504.0)
    np.testing.assert_array_equal(scales(scale), [scale for scale, _ in expected])


def test_fastais_scale_is_the_same_if_all_overflows_come_first():
    scale = printed(TORCH, "jmp.fastai_loss_scale()")
    call = "jmp.DynamicLossScale(2.0**24, period=500, factor=2.0, min_loss_scale=0.0)"
    written_out = printed(TORCH, call)
    assert jax.tree.structure(scale) == jax.tree.structure(written_out)
    assert scale.loss_scale == written_out.loss_scale
    flags = np.arange(1600) >= 30
    expected = [scale for scale, _ in counting(flags, 2.0**24, 500)]
    assert expected[30] < expected[-1] < 1
    np.testing.assert_array_equal(scales(scale, flags), expected)


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


def test_a_scale_set_by_hand_keeps_the_count_of_steps_as_in_torch():
    new = "dataclasses.replace(opt_state.loss_scale, loss_scale=new_scale)"
    call = f"transforms.set_loss_scale(opt_state, {new})"
    assert f"`{call}`" in TORCH
    tx = transforms.with_loss_scale(optax.sgd(0.1), jmp.torch_loss_scale())
    opt_state = tx.init({"w": jnp.ones(2)})
    opt_state = opt_state._replace(loss_scale=opt_state.loss_scale.adjust(True))
    names = {"transforms": transforms, "dataclasses": dataclasses}
    replaced = eval(call, names, {"opt_state": opt_state, "new_scale": 1024.0})
    assert float(replaced.loss_scale.loss_scale) == 1024.0
    assert int(replaced.loss_scale.counter) == 1


def test_o3_scales_no_loss_only_if_told():
    tx, params = optax.sgd(0.1), {"w": jnp.ones(2, jnp.float16)}
    assert '`transforms.mixed_precision(tx, "O3", jmp.StaticLossScale(1.0))`' in TORCH
    default = jax.eval_shape(transforms.mixed_precision(tx, "O3").init, params).loss_scale
    assert isinstance(default, jmp.DynamicLossScale)


def test_an_empty_list_of_rules_stores_norms_in_half_too():
    assert "`cast_params(variables, policy, [])`" in TORCH
    assert '`cast_params(variables, "O2", [])`' in TORCH
    params = {"LayerNorm_0": {"scale": jnp.ones(2)}}
    for policy in ("p=f16,c=f16,o=f32", "O2"):
        for rules, dtype in ((None, jnp.float32), ([], jnp.float16)):
            cast = linen.cast_params(params, policy, rules)
            assert cast["LayerNorm_0"]["scale"].dtype == dtype


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_a_product_with_a_precision_of_its_own_stays_float32(precision):
    assert "`matmul_precision=high` or `highest` | leave it at `default`" in JAX
    products = lambda x: jnp.matmul(x @ x, x, precision=jax.lax.Precision(precision))
    program = jax.make_jaxpr(jmp.autocast(products, "mixed_bfloat16"))(jnp.ones((2, 2)))
    first, second = (e.outvars[0].aval.dtype for e in program.eqns if "dot" in e.primitive.name)
    assert first == jnp.bfloat16
    assert second == (jnp.bfloat16 if precision == "default" else jnp.float32)
