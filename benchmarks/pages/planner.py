"""What autocast's rules and constants are worth."""

import ast
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


@figure("constants/layers")
def _(found: Any) -> str:
    """Errors of a carry in half over those of a carry in float32."""
    rows = []
    for row in found["LAYERS"]:
        if row["turns"] > 512:  # float16 overflows
            continue
        cells = []
        for half, digits in (("float16", 4), ("bfloat16", 3)):
            low, full = row[f"{half}, in half"], row[f"{half}, in float32"]
            cells.append(f"{low:.{digits}f} / {full:.4f} = {low / full:.1f}")
        rows.append([row["carry"], str(row["turns"]), *cells])
    return table(["carry", "iterations", "float16", "bfloat16"], rows)


@figure("constants/losses")
def _(found: Any) -> str:
    rows = []
    for row in found["LOSSES"]:
        before, after = row["before"], row["bytes_moved"]
        rows.append(
            [row["loss"], *(f"{b / 1e9:.2f}" for b in (before, after)), f"{after / before:.2f}"]
        )
    return table(["loss", "GB before", "GB", "ratio"], rows)


def _power(text: str) -> str:
    return text.replace("**", "^")


def _columns(rows: list[dict[str, Any]], key: str, figures: dict[str, str], what: str) -> str:
    """Returns a table that has a column for each measurement, and a row for each figure."""
    headers = [what, *(_power(str(row[key])) for row in rows)]
    return table(
        headers, [[title, *(_figure(row[name]) for row in rows)] for name, title in figures.items()]
    )


def _figure(number: float) -> str:
    return f"{number:.2f}" if isinstance(number, float) else str(number)


RATIOS = {"bytes_moved": "bytes moved", "temp_bytes": "temp memory", "kernels": "kernels"}


@figure("constants/small")
def _(found: Any) -> str:
    """Each cell has bytes, memory and kernels over those with the constant as it is."""
    rows: dict[str, list[str]] = {}
    for row in found["SMALL"]:
        cells = rows.setdefault(_size_of(row["model"]), [])
        cells.append(" ".join(_figure(row[name]) for name in RATIOS))
    sizes = list(dict.fromkeys(_power(row["SMALL"]) for row in found["SMALL"]))
    return table(
        ["a step, with `SMALL` =", *sizes], [[name, *cells] for name, cells in rows.items()]
    )


def _size_of(model: str) -> str:
    """Returns a title for a name and its sizes, "lstm {'width': 256}"."""
    name, _, sizes = model.partition(" ")
    values = ast.literal_eval(sizes)
    words = (
        f"{key} {', '.join(map(str, size)) if isinstance(size, tuple) else size}"
        for key, size in values.items()
    )
    return f"{SHORT_TITLES[name]}, {', '.join(words)}"


OF_SCORES = {"kernels": "kernels", "bytes": "bytes, divided by those of the half scores"}
# Tables with a column for each measurement: what varies, the rows, and the title of the first cell.
VARIED = {
    "LARGE": ("elements", RATIOS, "sum over gather, elements"),
    "LONG": ("length of rows", OF_SCORES, "length of rows"),
    "SHORT": ("classes", RATIOS, "classes"),
    "LOOKED_AT": ("elements", {"milliseconds": "milliseconds"}, "elements"),
}
for _name, _shape in VARIED.items():
    figure(f"constants/{_name.lower().replace('_', '-')}")(
        lambda found, name=_name, shape=_shape: _columns(found[name], *shape)
    )


@figure("constants/unknown")
def _(found: Any) -> str:
    """How many islands of a layer are recomputed, by its width, and by what a symbol counts."""
    rows: dict[int, list[str]] = {}
    for row in found["UNKNOWN"]:
        modes = row["islands"].split(", ")
        recomputed = sum(mode.startswith("recompute") for mode in modes)
        rows.setdefault(row["width"], []).append(f"{recomputed} of {len(modes)}")
    batches = dict.fromkeys(row["batch"] for row in found["UNKNOWN"])
    headers = ["width", *(_batch_title(batch) for batch in batches)]
    return table(headers, [[str(width), *cells] for width, cells in rows.items()])


def _batch_title(batch: str) -> str:
    _, is_symbol, counts = batch.partition("UNKNOWN ")
    return f"a symbol, counted as {counts}" if is_symbol else f"batch {batch}"
