"""Rules: exceptions from a policy, by path or by module type; the first that matches wins."""

import re

import pytest

import jmp

F32, F16, BF16 = (jmp.get_policy(name) for name in ("f32", "f16", "bf16"))


class Module:
    pass


class Norm(Module):
    pass


class BatchNorm(Norm):
    pass


@pytest.mark.parametrize(
    ("target", "path", "matches"),
    [
        ("head", "head/kernel", True),
        ("head", "body/head", True),
        ("/head", "body/head", False),
        ("/head", "head/kernel", True),
        ("body/head", "net/body/head/kernel", True),
        ("head/body", "body/head", False),
        ("head", "headline", False),
        ("head*", "headline/kernel", True),
        ("*head", "body/head/kernel", True),
        ("*", "", True),
        ("", "body", False),
        ("*/Dense_0", "Dense_0", True),
        ("*/Dense_0", "a/b/c/Dense_0/bias", True),
        ("encoder/*/kernel", "encoder/block/Dense_0/kernel", True),
        ("Dense_?", "Dense_1/kernel", True),
        ("Dense_[01]", "Dense_2/kernel", False),
        ("DENSE_0", "Dense_0", False),
        ("mlp/linear_1", "mlp/~/linear_1", True),
        ("mlp/~/linear_1", "mlp/linear_1/w", True),
        ("~/linear_1", "net/linear_1", True),
        ("net/~encode/head", "net/head", True),
        # Regular expressions match whole paths.
        (re.compile(r"Dense_\d"), "Dense_12/kernel", False),
        (re.compile(r"kernel"), "a/kernel", False),
        (re.compile(r"(?i)HEAD"), "head", True),
        (re.compile(r"mlp/linear_\d"), "mlp/~/linear_1", True),
        (re.compile(r"mlp/~/linear_\d"), "mlp/linear_1", True),
        (re.compile(r"net/~.*/head"), "net/head", True),
        (re.compile(re.escape("net/~encode/head")), "net/head", True),
        (re.compile(r"[^~/]*/head"), "net/head", True),  # no name, but a class of characters
        (re.compile(r"[^~/]*/head"), "a/net/head", False),
    ],
)
def test_a_glob_matches_from_any_name_of_a_path_on_and_an_expression_whole_paths(
    target, path, matches
):
    rules = jmp.PolicyRules([(target, "f32")], default="f16")
    assert rules.policy_for(path) == (F32 if matches else F16)


@pytest.mark.parametrize(
    ("target", "types", "matches"),
    [
        (Norm, [Norm], True),
        (Norm, [BatchNorm], True),
        (BatchNorm, [Norm], False),
        ((int, BatchNorm), [BatchNorm], True),
        (Norm, [Module, BatchNorm], True),
        (Norm, [Module], False),
        (Norm, [], False),
    ],
)
def test_a_class_matches_its_modules_and_what_is_inside_them(target, types, matches):
    rules = jmp.PolicyRules([(target, "f32")], default="f16")
    assert rules.policy_for("some/path", types) == (F32 if matches else F16)


def test_the_first_rule_that_matches_wins_and_one_behind_it_counts_as_unused():
    pairs = [("head/out", "bf16"), ("head", "f32"), ("*", "f16"), ("body", "f32")]
    rules = jmp.PolicyRules(iter(pairs), default="f64")
    assert rules.policy_for("head/out/kernel") == BF16
    assert rules.policy_for("head/in/kernel") == F32
    assert rules.policy_for("body") == F16
    assert rules.unused == ["'body'"]


def test_the_fallback_comes_after_the_rules_and_before_the_default():
    def norms_are_full(path, module_types):
        return F32 if any(issubclass(t, Norm) for t in module_types) else None

    rules = jmp.PolicyRules([("head", "bf16")], default="f16", fallback=norms_are_full)
    assert rules.policy_for("head/norm", [BatchNorm]) == BF16
    assert rules.policy_for("body/norm", [BatchNorm]) == F32
    assert rules.policy_for("body/dense", [Module]) == F16


def test_policies_are_taken_as_text_or_as_they_are():
    rules = jmp.PolicyRules([("a", BF16), ("b", "O1")], default=F32)
    assert rules.policy_for("a") == BF16
    assert rules.policy_for("b") == jmp.get_policy("O1")
    assert rules.policy_for("c") == rules.default == F32


def test_no_rules_at_all_give_the_default():
    rules = jmp.PolicyRules([], default="mixed_bfloat16")
    assert rules.policy_for("any", [Norm]) == jmp.get_policy("mixed_bfloat16")


@pytest.mark.parametrize("pairs", [[], [("a", "f32"), (Norm, "f32")]])
def test_rules_that_all_matched_warn_of_nothing(pairs):
    rules = jmp.PolicyRules(pairs, default="f16")
    rules.policy_for("a"), rules.policy_for("b", [BatchNorm])
    assert rules.unused == []
    rules.warn_unused()  # a warning is an error in tests


def test_rules_that_never_matched_are_named_in_a_warning():
    rules = jmp.PolicyRules(
        [("haed*", "f32"), ("body", "f32"), (re.compile("x+"), "f32"), ((int, Norm), "f32")],
        default="f16",
    )
    rules.policy_for("body/kernel", [Module])
    assert rules.unused == ["'haed*'", "re.compile('x+')", "int | Norm"]
    with pytest.warns(jmp.UnusedRuleWarning, match="matched no parameter and no module") as caught:
        rules.warn_unused()
    message = str(caught[0].message)
    assert "'haed*', re.compile('x+'), int | Norm. Check their spelling" in message
    assert "body" not in message.split("Check")[0]


def test_a_warning_of_many_long_rules_is_short():
    rules = jmp.PolicyRules([(f"{i}" * 1000, "f32") for i in range(1000)], default="f16")
    with pytest.warns(jmp.UnusedRuleWarning, match="and 992 more. Check") as caught:
        rules.warn_unused()
    assert len(str(caught[0].message)) <= 1500
