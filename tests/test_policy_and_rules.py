"""Policies, their text, and rules that make exceptions from them."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from jmp.dtypes import dtype_to_names


def test_equal_policies_are_equal_and_hash_alike_however_they_were_written():
    policies = {
        jmp.Policy("float32", "f16", "full"),
        jmp.Policy(jnp.float32, jnp.float16, np.float32),
        jmp.Policy(np.dtype("float32"), np.float16, jnp.dtype("float32")),
        jmp.get_policy("mixed_float16"),
    }
    assert len(policies) == 1


@pytest.mark.parametrize("names", dtype_to_names.values(), ids=lambda names: names[-1])
def test_every_dtype_round_trips_through_text(names):
    policy = jmp.Policy("float32", names[-1], names[0])
    assert jmp.get_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("half", "p=f16,c=f16,o=f16"),
        ("c=f16", "p=full,c=f16,o=f16"),
        ("p=f16", "p=f16,c=f16,o=f16"),
        (" params = f32 , compute = bf16 , output = f32 ", "p=full,c=bf16,o=full"),
        ("mixed_bfloat16", "p=full,c=bf16,o=full"),
        ("O0", "p=full,c=full,o=full"),
        ("O1", "p=full,c=f16,o=full"),
        ("O2", "p=f16,c=f16,o=full"),
        ("O3", "p=f16,c=f16,o=f16"),
    ],
)
def test_the_grammar(text, expected):
    assert str(jmp.get_policy(text)) == expected


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: jmp.get_policy("flot16"), "Unknown dtype 'flot16'.*float16.*mixed_float16"),
        (lambda: jmp.get_policy("p=f32,q=f16"), "Unknown key 'q'.*expected one of p, params"),
        (lambda: jmp.get_policy("p=f32,params=f16"), "gives param_dtype twice"),
        (lambda: jmp.get_policy("p=f32,c"), "Unknown key 'c'"),
        (lambda: jmp.get_policy(""), "Unknown dtype ''"),
        (lambda: jmp.Policy("int32", "f16", "f32"), "Unknown dtype 'int32'"),
        (lambda: jmp.Policy("f32", int, "f32"), "compute_dtype got <class 'int'>"),
        (lambda: jmp.Policy("f32", "f16", None), "output_dtype got None"),
    ],
)
def test_unknown_input_is_refused_with_what_is_known(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_policy_is_no_number():
    with pytest.raises(TypeError, match="expected a Policy or text"):
        jmp.get_policy(16)


def test_casts_go_to_the_dtype_they_name():
    policy = jmp.Policy("f32", "f16", "bf16")
    tree = {"a": np.float32(1), "b": jnp.ones(2, jnp.float16), "n": 3}
    assert policy.cast_to_param(tree)["b"].dtype == jnp.float32
    assert policy.cast_to_compute(tree)["a"].dtype == np.float16
    assert policy.cast_to_output(tree)["b"].dtype == jnp.bfloat16
    assert policy.cast_to_output(tree)["n"] == 3
    assert policy.with_output_dtype("f32").output_dtype == np.float32


class Base:
    pass


class Derived(Base):
    pass


def test_the_first_rule_that_matches_wins():
    rules = jmp.PolicyRules([("a/b", "f16"), ("a*", "bf16"), (Base, "f64")], "f32")
    name = lambda *where: rules.policy_for(*where).compute_dtype.name
    assert name("a/b/kernel") == "float16"  # a rule for a module holds for all inside it
    assert name("a/c") == "bfloat16"
    assert name("x", (Derived,)) == "float64"
    assert name("x/y", (int, Derived)) == "float64"
    assert name("x") == "float32"


def test_a_regular_expression_must_match_a_whole_path():
    rules = jmp.PolicyRules([(re.compile(r"layer\d"), "f16")], "f32")
    assert rules.policy_for("layer1/kernel").compute_dtype == np.float16
    assert rules.policy_for("layer10").compute_dtype == np.float32


def test_rules_that_matched_nothing_are_named():
    rules = jmp.PolicyRules([("haed*", "f32"), (re.compile("x"), "f32"), (Base, "f32")], "f16")
    rules.policy_for("head")
    with pytest.warns(jmp.UnusedRuleWarning, match=r"'haed\*', re.compile\('x'\), Base"):
        rules.warn_unused()


def test_rules_that_all_matched_are_not_mentioned():
    rules = jmp.PolicyRules([("head*", "f32")], "f16")
    rules.policy_for("head/kernel")
    rules.warn_unused()


@pytest.mark.parametrize("rule", [3, ("a",), (3, "f32"), ((), "f32"), ((1, 2), "f32")])
def test_a_rule_is_a_pair_of_a_target_and_a_policy(rule):
    with pytest.raises(TypeError, match="expected"):
        jmp.PolicyRules([rule], "f32")
