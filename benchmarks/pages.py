"""The figures that stand on pages, each from a file in `results/`.

A page marks them, in a sentence, in a cell or around a whole table:

    <!-- from char_lm/lost -->94 %<!-- end -->

`python -m benchmarks.report` writes what stands between such marks anew, on every page, and a test
compares. The name before the stroke says which file of `results/` it is from and, in `COMMANDS`,
which command makes that file; the name after it is a row of `FIGURES`.
"""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import _counted, planner_rules, programs
from benchmarks._tables import table
from benchmarks._wire_report import MIB
from benchmarks.processes import ROOT
from benchmarks.workloads import UPDATES

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
MARK = re.compile(r"(^ +)?<!-- from (\S+) -->(.*?)<!-- end -->", re.S | re.M)

FILES = {
    "char_lm": "results/char_lm.json",
    "digits": "results/digits.json",
    "overflow": "results/find_overflow.json",
    "ranges": "results/inspect_ranges.json",
    "memory": "results/memory.json",
    "recipes": "results/benchmarks/compiled.json",
    "programs": "results/benchmarks/programs.json",
    "wire": "results/benchmarks/wire.json",
    "rules": "results/planner_rules.json",
    "constants": "results/planner_constants.json",
}
COMMANDS = {
    "char_lm": "python examples/char_lm.py --output-dir results",
    "digits": "python examples/digits.py --output-dir results",
    "overflow": "python examples/find_overflow.py --output-dir results",
    "ranges": "python examples/inspect_ranges.py --output-dir results",
    "memory": "python examples/memory.py --output-dir results",
    "recipes": "python -m benchmarks.run --suite compiled",
    "programs": "python -m benchmarks.run --suite programs",
    "wire": "python -m benchmarks.run --suite wire",
    "rules": "python benchmarks/planner_rules.py",
    "constants": "python benchmarks/planner_constants.py",
}
FIGURES: dict[str, Callable[[Any], str]] = {}


def figure(name: str) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """Registers what makes a figure from the contents of the file that the name begins with."""

    def register(make: Callable[[Any], str]) -> Callable[[Any], str]:
        if name in FIGURES or name.split("/")[0] not in FILES:
            raise ValueError(f"The figure {name!r} is there already, or its file is not in FILES.")
        FIGURES[name] = make
        return make

    return register


def rewritten(text: str) -> str:
    """Returns a page with its marked figures as the files say.

    Raises: ValueError for a name that is not known.
    """

    def again(found: re.Match[str]) -> str:
        indent = found[1] or ""  # of a table in a list
        text = value(found[2])
        if "\n" in text:
            text = "\n".join(indent + line if line else "" for line in text.split("\n")) + indent
        return f"{indent}<!-- from {found[2]} -->{text}<!-- end -->"

    return MARK.sub(again, text)


@functools.cache
def value(name: str) -> str:
    """Returns a figure as it is printed; a table between empty lines."""
    if name not in FIGURES:
        known = ", ".join(sorted(FIGURES))
        raise ValueError(f"A page asks for the figure {name!r}; expected one of {known}.")
    text = FIGURES[name](read(name.split("/")[0]))
    return f"\n\n{text.strip()}\n\n" if "\n" in text else text


@functools.cache
def read(source: str) -> Any:
    return json.loads((ROOT / FILES[source]).read_text())


def write() -> None:
    """Writes the figures of all pages anew."""
    for page in PAGES:
        text = page.read_text()
        page.write_text(rewritten(text))


def digits(number: float) -> str:
    """Returns a number with three digits, such as "7.40" and "475"."""
    return f"{number:#.3g}".removesuffix(".")


def size(number: float) -> str:
    """Returns bytes with three digits, such as "13.2 MB"."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
    unit, one = next((name, one) for name, one in units if number >= one)
    return f"{digits(number / one)} {unit}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


# The character LSTM.

RUNS = {
    "float32": "float32",
    "unscaled": "float16 without loss scaling",
    "scaled": "float16 with loss scaling",
}


@figure("char_lm/lost")
def _(found: Any) -> str:
    return percent(found["underflow"]["zero in float16 without loss scaling"])


@figure("char_lm/seeds")
def _(found: Any) -> str:
    return str(found["options"]["seeds"])


for _short, _run in RUNS.items():
    figure(f"char_lm/{_short}")(lambda found, run=_run: f"{found['runs'][run]['final_loss']:.2f}")


@figure("char_lm/difference")
def _(found: Any) -> str:
    """The largest difference of a seed's final loss with loss scaling to float32's."""
    ours, theirs = (found["runs"][RUNS[name]]["final_losses"] for name in ("scaled", "float32"))
    return f"{np.max(np.abs(np.subtract(ours, theirs))):.4f}"


# Digits.


@figure("digits/table")
def _(found: Any) -> str:
    rows = []
    for name, result in found["precisions"].items():
        error = 100 * result["accuracy_difference_standard_error"]
        against = f"{100 * result['accuracy_difference']:+.2f} ± {error:.2f}"
        curve = result["loss_curve"]
        nan = f" (NaN from step {curve.index(None)} on)" if None in curve else ""
        rows.append([
            name,
            percent(np.mean(result["test_accuracy"]), 2) + nan,
            "" if name == "float32" else against,
            f"{result['parameter_bytes'] / 1000:.0f} kB",
            "" if nan else f"{np.mean(result['skipped_steps']):.3g}",
        ])  # fmt: skip
    headers = ["precision", "test accuracy", "against float32", "parameters", "skipped steps"]
    return table(headers, rows)


def _accuracy(found: Any, name: str) -> str:
    return percent(np.mean(found["precisions"][name]["test_accuracy"]), 2)


@figure("digits/float32")
def _(found: Any) -> str:
    return _accuracy(found, "float32")


@figure("digits/mixed-float16")
def _(found: Any) -> str:
    return _accuracy(found, "mixed float16")


@figure("digits/mixed-float16-difference")
def _(found: Any) -> str:
    result = found["precisions"]["mixed float16"]
    error = 100 * result["accuracy_difference_standard_error"]
    return f"{100 * result['accuracy_difference']:+.2f} ± {error:.2f}"


@figure("digits/seeds")
def _(found: Any) -> str:
    return str(found["options"]["seeds"])


# What made the NaN.


@figure("overflow/from")
def _(found: Any) -> str:
    return str(found["skipped_for_good_from"])


@figure("overflow/asked")
def _(found: Any) -> str:
    return str(found["cured_at_step"])


@figure("overflow/left")
def _(found: Any) -> str:
    return str(found["options"]["steps"] - found["cured_at_step"])


@figure("overflow/before")
def _(found: Any) -> str:
    return percent(found["accuracy"]["at the cure"], 1)


@figure("overflow/after")
def _(found: Any) -> str:
    return percent(found["accuracy"]["at the end"], 1)


# Ranges.


def _total(program: Any, role: str) -> tuple[float, dict[str, float]]:
    """Returns how many numbers of a role there are, and how many become what, in half if any is."""
    rows = [row for row in program["rows"] if row["role"] == role]
    rows = [row for row in rows if row["dtype"] in ("float16", "bfloat16")] or rows
    sums = {name: 0.0 for name in rows[0]["shares"]}
    total = 0
    for row in rows:
        count = sum(row["counts"]) + row["zeros"] + row["infinities"] + row["nans"]
        total += count
        for name, share in row["shares"].items():
            sums[name] += share * count
    return total, sums


def _share(program: str, role: str, what: str) -> Callable[[Any], str]:
    def make(found: Any) -> str:
        (name,) = (name for name in found["programs"] if name.startswith(program))
        total, sums = _total(found["programs"][name], role)
        return percent(sums[what] / total, 1)

    return make


figure("ranges/lost")(_share("float32", "activation gradient", "underflow"))
figure("ranges/zero")(_share("float16 without", "activation gradient", "zero"))
figure("ranges/zero-parameters")(_share("float16 without", "gradient", "zero"))
figure("ranges/zero-scaled")(_share("float16 with a", "activation gradient", "zero"))


@figure("ranges/scale")
def _(found: Any) -> str:
    return f"2^{np.log2(found['programs']['float32']['best_scale']):.0f}"


# Memory.

KINDS = ("float32", "mixed float16", "mixed float16, checkpoint")
KIND_TITLES = ("float32", "mixed float16", "the same, blocks under `jax.checkpoint`")


@figure("memory/table")
def _(found: Any) -> str:
    reports = [found["reports"][kind] for kind in KINDS]
    parts = [part for part in reports[0]["parts"] if any(r["parts"][part] for r in reports)]
    rows = [[part, *(size(r["parts"][part]) for r in reports)] for part in parts]
    rows.append(["total, by JAX's count", *(size(r["total_bytes"]) for r in reports)])
    peaks = (size(r["xla_peak_bytes"]) for r in reports)
    rows.append(["XLA's peak on a CPU, without the optimizer", *peaks])
    ratios = (r["activations"] / r["parameters"] for r in reports)
    rows.append(["N : P", *map(digits, ratios)])
    return table(["", *KIND_TITLES], rows)


def _memory(name: str, make: Callable[[Any], str]) -> None:
    for short, kind in zip(("float32", "mixed", "checkpoint"), KINDS, strict=True):
        figure(f"memory/{name}-{short}")(lambda found, kind=kind: make(found["reports"][kind]))


_memory("kept", lambda report: size(report["total_bytes"]))
_memory("peak", lambda report: size(report["xla_peak_bytes"]))
_memory("temp", lambda report: size(report["xla_temp_bytes"]))
_memory("numbers", lambda report: f"{digits(report['activations'] / 1e6)} million")
_memory("copies", lambda report: size(report["parts"]["copies of parameters"]))
_memory("factor", lambda report: f"{report['transformer_factors']['within the blocks']:.1f}")
_memory("scores", lambda report: f"{report['transformer_factors']['of it attention scores']:.1f}")


@figure("memory/factor-rest")
def _(found: Any) -> str:
    factors = found["reports"]["mixed float16"]["transformer_factors"]
    return f"{factors['within the blocks'] - factors['of it attention scores']:.1f}"


def _gpt2(found: Any, kind: str) -> Any:
    return found["workloads"]["memory"]["recipes"][kind]


@figure("programs/memory-table")
def _(found: Any) -> str:
    reports = [_gpt2(found, kind) for kind in KINDS]
    kept = [
        sum(r["parts"][part] for part in ("activations", "copies of parameters")) for r in reports
    ]
    temps, peaks = ([r[f"xla_{name}_bytes"] for r in reports] for name in ("temp", "peak"))
    rows = [
        ["activations and copies, JAX", *map(size, kept)],
        ["XLA: temp", *map(size, temps)],
        [
            "XLA: temp, of what JAX keeps",
            *map(digits, np.divide(temps, kept)),
        ],
        ["XLA: peak", *map(size, peaks)],
        ["XLA: peak, of float32", "", *(digits(peak / peaks[0]) for peak in peaks[1:])],
    ]
    return table(["", *KIND_TITLES], rows)


@figure("programs/memory-within")
def _(found: Any) -> str:
    """How far XLA's temp in mixed precision is from what JAX keeps."""
    report = _gpt2(found, KINDS[1])
    kept = sum(report["parts"][part] for part in ("activations", "copies of parameters"))
    return percent(abs(report["xla_temp_bytes"] / kept - 1))


@figure("programs/memory-factor")
def _(found: Any) -> str:
    return f"{_gpt2(found, KINDS[1])['transformer_factors']['within the blocks']:.1f}"


@figure("programs/memory-scores")
def _(found: Any) -> str:
    return f"{_gpt2(found, KINDS[1])['transformer_factors']['of it attention scores']:.1f}"


# Recipes side by side.

README_TITLES = {
    "by-hand": "by hand",
    "unscaled": "by hand, no loss scaling",
    "adapter": "ours",
    "masters": "ours, half parameters with float32 masters",
    "autocast": "ours, autocast of the loss",
    "by-hand-cudnn": "by hand, cuDNN attention",
    "autocast-fused": 'ours, autocast of the loss, `attention="fused"`',
    "float32": "float32",
}


@figure("recipes/gpt2-table")
def _(found: Any) -> str:
    recipes = found["workloads"]["gpt2"]["recipes"]
    keys = ("bytes_moved", "kernels", "temp_bytes")
    rows = [
        [title, *(_counted.ratio(recipes, name, key) for key in keys)]
        for name, title in README_TITLES.items()
    ]
    base = recipes["by-hand"]
    absolute = [f"{base['bytes_moved'] / 1e9:.1f} GB", str(base["kernels"])]
    rows[0] = ["by hand", *absolute, f"{base['temp_bytes'] / 1e9:.1f} GB"]
    return table(["", "bytes moved", "kernels", "temp memory"], rows)


def _of_gpt2(name: str) -> Callable[[Any], str]:
    return lambda found: _counted.ratio(found["workloads"]["gpt2"]["recipes"], name, "bytes_moved")


figure("recipes/gpt2-autocast-bytes")(_of_gpt2("autocast"))
figure("recipes/gpt2-float32-bytes")(_of_gpt2("float32"))


@figure("recipes/update-table")
def _(found: Any) -> str:
    update = UPDATES[0]
    recipes = found["workloads"][update.name]["recipes"]
    titles = {
        "unscaled": ("no loss scaling", 26),
        "adapter": ("dynamic loss scaling, step or skip", 28),
        "masters": ("the same, half parameters with float32 masters", 32),
    }
    rows = [
        [
            title,
            f"{recipes[name]['bytes_moved'] / update.parameters:.2f}",
            str(floor),
            str(recipes[name]["kernels"]),
            f"{recipes[name]['temp_bytes'] / update.parameters:.3f}",
        ]
        for name, (title, floor) in titles.items()
    ]
    return table(["", "bytes read and written", "floor", "kernels", "temp bytes"], rows)


# Other programs for an H200.

COST = ("bytes_moved", "temp_bytes", "kernels")


def _over(program: Any, base: Any, digits: int = 3) -> list[str]:
    return [f"{program[name] / base[name]:.{digits}f}" for name in COST]


@figure("programs/autocast-table")
def _(found: Any) -> str:
    rows = []
    for name, title in programs.MODEL_TITLES.items():
        ways = found["workloads"]["autocast"]["recipes"][name]
        base = ways["by hand"]
        absolute = f"{base['bytes_moved'] / 1e9:.2f} GB, {base['temp_bytes'] / 1e6:.0f} MB, "
        absolute += str(base["kernels"])
        full = _over(ways["float32"], base)[:2]
        rows.append([title, *_over(ways["autocast"], base), *full, absolute])
    headers = ["one training step", "bytes moved", "temp memory", "kernels", "float32: bytes"]
    return table([*headers, "float32: temp", "by hand"], rows)


def _autocast_bytes(found: Any) -> list[float]:
    recipes = found["workloads"]["autocast"]["recipes"].values()
    return [ways["autocast"]["bytes_moved"] / ways["by hand"]["bytes_moved"] for ways in recipes]


@figure("programs/autocast-least")
def _(found: Any) -> str:
    return f"{min(_autocast_bytes(found)):.2f}"


@figure("programs/autocast-most")
def _(found: Any) -> str:
    return f"{max(_autocast_bytes(found)):.2f}"


@figure("programs/attention-table")
def _(found: Any) -> str:
    recipes = found["workloads"]["attention"]["recipes"]
    rows = [[name, *_over(ways["fused"], ways["by hand"])] for name, ways in recipes.items()]
    return table(["module", "bytes moved", "temporary memory", "kernels"], rows)


@figure("programs/float8-table")
def _(found: Any) -> str:
    rows = []
    for name, policies in found["workloads"]["float8"]["recipes"].items():
        float8, base = policies["mixed_float8"], policies["mixed_bfloat16"]
        share = f"{float8['float8']} of {float8['products']}"
        rows.append([name, *_over(float8, base, 2), share])
    return table(["", "bytes", "temp memory", "kernels", "products in float8"], rows)


def _all_rows(found: Any, group: str) -> list[list[str]]:
    recipes = found["workloads"][group]["recipes"]
    return [row for counted in recipes.values() for row in counted["rows"]]


@figure("programs/convolutions")
def _(found: Any) -> str:
    headers = ["product of float8 arrays", "runs in", "call of cuDNN", "MB", "MB in bfloat16"]
    return table(headers, _all_rows(found, "convolutions"))


@figure("programs/convolution-steps")
def _(found: Any) -> str:
    headers = ["step", "in float8", "bytes", "temp memory", "kernels", "float8 products"]
    return table(headers, _all_rows(found, "convolution-steps"))


def _more_bytes(form: str) -> Callable[[Any], str]:
    def make(found: Any) -> str:
        """Returns the bytes that networks move more with a form, such as "5 to 6 %"."""
        rows = [row for row in _all_rows(found, "convolution-steps") if row[1] == form]
        more = sorted(round(100 * (float(row[2]) - 1)) for row in rows)
        return f"{more[0]} to {more[-1]} %"

    return make


figure("programs/convolution-forward")(_more_bytes("forward"))
figure("programs/convolution-both")(_more_bytes("forward, gradient of the input"))


@figure("wire/float8-table")
def _(found: Any) -> str:
    """Gathers and sums of FSDP in half and in float8; cases that send the same are one row."""
    titles = {
        "fsdp-shard-map": "`all_gather` in `shard_map`",
        "fsdp-explicit": "`reshard`",
        "fsdp-constraint": "`with_sharding_constraint`",
        "fsdp": "jit alone",
    }
    rows: dict[tuple[str, ...], list[str]] = {}
    for case, title in titles.items():
        recipes = found["workloads"][case]["recipes"]
        if "error" in recipes["autocast-f8"]:
            continue
        half, float8 = recipes["autocast"]["received"], recipes["autocast-f8"]["received"]
        names = (("float8", "all-gather f8e4m3fn"), ("bfloat16", "all-gather bf16"))
        gathers = ", ".join(f"{float8[kind] / MIB:.1f} {name}" for name, kind in names)
        sums = float8["reduce-scatter bf16"]
        cells = f"{half['all-gather f16'] / MIB:.1f}", gathers, f"{sums / MIB:.1f}"
        rows.setdefault(cells, []).append(title)
    headers = ["FSDP", "half: gathers", "float8: gathers", "sums of gradients"]
    return table(headers, [[", ".join(same), *cells] for cells, same in rows.items()])


# What autocast's rules and constants are worth.

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
    """Returns a table of what each rule is worth; without rules that change nothing."""
    base = found["all rules"][what]
    rows = [
        [rule.name, *(planner_rules.ratios(found[rule.name][what][m], base[m]) for m in models)]
        for rule in planner_rules.RULES
        if rule.name in found  # "rows in one pass" is newer than the file
    ]
    titles = [SHORT_TITLES.get(model, model) for model in models]
    return table(["without the rule", *titles], [row for row in rows if any(row[1:])])


@figure("rules/cost")
def _(found: Any) -> str:
    return _rules(found, "cost", list(found["all rules"]["cost"]))


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
    return table(["carry", "turns", "float16", "bfloat16"], rows)


@figure("constants/losses")
def _(found: Any) -> str:
    rows = []
    for row in found["LOSSES"]:
        before, after = row["before"], row["bytes_moved"]
        rows.append(
            [row["loss"], *(f"{b / 1e9:.2f}" for b in (before, after)), f"{after / before:.2f}"]
        )
    return table(["loss", "GB before", "GB", "ratio"], rows)
