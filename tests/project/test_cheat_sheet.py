"""The tables of the cheat sheet: each call is made, each policy has its dtypes."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jmp
from jmp import diagnostics, transforms
from testbed import ROOT

PAGE = (ROOT / "docs" / "cheat_sheet.md").read_text()


def rows_of(heading):
    """Returns the cells of a section's table, without its titles."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]
    lines = re.findall(r"^\|(.*)\|$", section, re.M)[2:]
    assert lines
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def codes(text):
    return re.findall(r"`([^`]+)`", text)


POLICIES = [(eval(code), row[1:]) for row in rows_of("Policies") for code in codes(row[0])]


@pytest.mark.parametrize("text, cells", POLICIES, ids=[text for text, _ in POLICIES])
def test_a_policy_has_the_dtypes_and_gets_the_optimizer_of_its_row(text, cells):
    policy = jmp.get_policy(text)
    products = policy.product_dtype or policy.compute_dtype
    dtypes = [str(jnp.dtype(d)) for d in (policy.param_dtype, products, policy.output_dtype)]
    state = transforms.mixed_precision(optax.sgd(0.1), text).init(jnp.ones(2, policy.param_dtype))
    has_scale = not isinstance(state.loss_scale, jmp.NoOpLossScale)
    has_masters = type(state.inner_state).__name__ == "WithMasterParamsState"
    assert cells == dtypes + ["yes" if it else "no" for it in (has_scale, has_masters)]


PATHS = {  # what each rule must match, and must not
    '("head", "float32")': (["head", "net/head"], ["body"]),
    '("/head", "float32")': (["head"], ["net/head"]),
    '("encoder/*", "float32")': (["encoder/Dense_0"], ["decoder/Dense_0"]),
    '(re.compile("layer_[01]"), "float32")': (["layer_0", "layer_1"], ["layer_2"]),
}


@pytest.mark.parametrize("code", [codes(row[0])[0] for row in rows_of("Rules")])
def test_a_rule_matches_what_its_row_says(code):
    rules = jmp.PolicyRules([eval(code, {"re": re, "nn": nn})], "mixed_float16")
    in_float32 = lambda *place: rules.policy_for(*place) == jmp.get_policy("float32")
    if "nn." in code:
        assert in_float32("any", [nn.Conv]) and not in_float32("any", [nn.Dense])
        return
    inside, outside = PATHS[code]
    assert all(map(in_float32, inside)) and not any(map(in_float32, outside))


@pytest.mark.parametrize("code", [code for row in rows_of("Loss scales") for code in codes(row[0])])
def test_a_loss_scale_is_made_and_taken_over(code):
    policy, opt_state = "mixed_float16", transforms.mixed_precision(optax.sgd(0.1), "O1")
    scale = eval(code, {"jmp": jmp})
    for state in (
        transforms.mixed_precision(optax.sgd(0.1), policy, scale).init(jnp.ones(2)),
        transforms.set_loss_scale(opt_state.init(jnp.ones(2)), scale),
    ):
        assert type(state.loss_scale) is type(scale)
        assert state.loss_scale.loss_scale == scale.loss_scale


def test_every_call_for_a_report_runs():
    def loss_fn(params, x):
        with jax.named_scope("layer"):
            return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

    params, x = {"w": jnp.full((8, 8), 0.1)}, jnp.ones((4, 8))
    names = {"jax": jax, "diagnostics": diagnostics, "loss_fn": loss_fn, "params": params, "x": x}
    names |= {"policy": "mixed_float16", "half_loss_fn": jmp.autocast(loss_fn, "mixed_float16")}
    names["opt_state"] = transforms.mixed_precision(optax.sgd(0.1), "O1").init(params)
    calls = [codes(row[-1])[0] for row in rows_of("Reports")]
    assert calls.pop() == "python -m jmp"  # which tests/test_main.py runs
    for call in calls:
        eval(call, names)
