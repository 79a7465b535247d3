"""What autocast's rules are worth."""

from typing import Any

from benchmarks import planner_rules
from benchmarks._tables import table
from benchmarks.pages.registry import figure

SHORT_TITLES = {
    "resnet": "ResNet",
    "unet": "U-Net",
    "gpt": "GPT",
    "scanned_gpt": "scanned GPT",
    "equinox_attention": "attention",
    "lstm": "LSTM",
    "plain_transformer": "plain transformer",
}


def _rules(found: Any, what: str, models: list[str]) -> str:
    titles = [SHORT_TITLES.get(model, model) for model in models]
    return _worth(found, titles, [(what, model) for model in models])


def _worth(found: Any, titles: list[str], columns: list[tuple[str, str]]) -> str:
    """Returns a table of what each rule is worth; without rules that change nothing.

    Args:
      columns: what was measured, and of which model.
    """
    base = found["all rules"]
    rows = []
    for rule in planner_rules.RULES:
        cells = [
            planner_rules.ratios(figures, base[what][model])
            if (figures := found.get(rule.name, {}).get(what, {}).get(model))
            else ""  # not measured yet
            for what, model in columns
        ]
        rows.append([rule.name, *cells])
    return table(["without the rule", *titles], [row for row in rows if any(row[1:])])


@figure("rules/cost")
def _(found: Any) -> str:
    return _rules(found, "cost", list(found["all rules"]["cost"]))


@figure("rules/lean")
def _(found: Any) -> str:
    """Of programs that a rule changes by 2 % or more, these rules."""
    base = found["all rules"]["lean"]

    def is_felt(rule: str, program: str) -> bool:
        figures = found.get(rule, {}).get("lean", {}).get(program, "the same")
        if figures == "the same":
            return False
        return any(abs(figures[name] / base[program][name] - 1) >= 0.02 for name in figures)

    rules = [rule for rule in found if any(is_felt(rule, program) for program in base)]
    programs = [program for program in base if any(is_felt(rule, program) for rule in rules)]
    kept = {"all rules": found["all rules"], **{rule: found[rule] for rule in rules}}
    return _rules(kept, "lean", programs)


@figure("rules/tpus")
def _(found: Any) -> str:
    columns = [
        (machine, model)
        for machine in planner_rules.ON_TPUS
        for model in found["all rules"].get(machine, {})
    ]
    titles = [f"{machine}: {SHORT_TITLES[model]}" for machine, model in columns]
    return _worth(found, titles, columns)


@figure("rules/errors")
def _(found: Any) -> str:
    models = [name for name in found["all rules"]["errors"] if name in SHORT_TITLES]
    return _rules(found, "errors", models)


@figure("rules/programs")
def _(found: Any) -> str:
    programs = [name for name in found["all rules"]["errors"] if name not in SHORT_TITLES]
    return _rules(found, "errors", programs)
