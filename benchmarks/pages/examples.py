"""The figures that examples write: digits, the LSTM, GRPO, the NaN hunt, ranges, memory."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

from benchmarks._tables import table
from benchmarks.pages.registry import digits, figure, numbers, percent, size
from benchmarks.programs import MEMORY_RUNS

# The autoencoder.

RUNS = {
    "float32": "float32",
    "unscaled": "float16 without loss scaling",
    "scaled": "float16 with loss scaling",
}


@figure("autoencoder/lost")
def _(found: Any) -> str:
    return percent(np.mean(found["runs"][RUNS["unscaled"]]["zero_gradients"]))


for _short, _run in RUNS.items():
    figure(f"autoencoder/{_short}")(
        lambda found, run=_run: f"{np.mean(found['runs'][run]['final_losses']):.4f}"
    )
numbers({
    "autoencoder/mean-image": "{[mean_image_loss]:.4f}",
})  # fmt: skip


# The character LSTM.

numbers({
    "char_lm/seeds": "{[options][seeds]}",
    "char_lm/steps": "{[options][steps]}",
    "char_lm/margin": "{[options][margin]}",
    "char_lm/held-out": "{[sizes][held_out]:,}",
})  # fmt: skip
figure("char_lm/float32")(
    lambda found: f"{np.mean(found['runs']['float32']['held_out_losses']):.3f}"
)
for _half in ("float16", "bfloat16"):
    figure(f"char_lm/{_half}")(lambda found, half=_half: _interval(found["compared"][half]))


def _interval(compared: Any) -> str:
    low, high = compared["interval"]
    return f"{compared['mean']:+.4f} ({low:+.4f} to {high:+.4f})"


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


def _digits_interval(found: Any, half: str) -> str:
    """Returns the mean difference to float32 and its 95 % interval, in percentage points."""
    result = found["precisions"][f"mixed {half}"]
    mean, error = (100 * result[f"accuracy_difference{end}"] for end in ("", "_standard_error"))
    width = error * stats.t.ppf(0.975, len(result["test_accuracy"]) - 1)
    return f"{mean:+.2f} ({mean - width:+.2f} to {mean + width:+.2f})"


for _half in ("float16", "bfloat16"):
    figure(f"digits/{_half}")(functools.partial(_digits_interval, half=_half))


def _digits_above(found: Any, precision: str) -> str:
    """Returns how far a training loss is above float32's in the worst tenth of the steps."""
    curves = (found["precisions"][name]["loss_curve"] for name in (precision, "float32"))
    own, float32 = (np.reshape(curve, (10, -1)).mean(1) for curve in curves)
    return percent(max(own / float32) - 1, 1)


for _name in ("mixed float16", "static float16"):
    figure(f"digits/above-{_name.split()[0]}")(functools.partial(_digits_above, precision=_name))

numbers({"digits/seeds": "{[options][seeds]}"})


# GRPO.


def _in_words(number: float) -> str:
    """Returns a number such as "1.2e-7" or "1.7"."""
    digits, power = f"{number:.1e}".split("e")
    return f"{digits}e{int(power)}" if int(power) else digits


@figure("grpo/table")
def _(found: Any) -> str:
    rows = []
    for name, run in found["runs"].items():
        deviation = np.std(run["final_rewards"])
        rows.append([
            name,
            f"{run['final_reward']:.3f} ± {deviation:.3f}",
            _in_words(np.mean(run["mean_gaps"])),
            _in_words(np.max(run["largest_gaps"])),
            f"{np.mean(run['sample_sizes']):.6f}",
            f"{np.mean(run['last_sample_sizes']):.4f}",
            percent(np.mean(run["zero_gradients"]), 1),
            f"{np.mean(run['skipped_steps']):.3g}",
        ])  # fmt: skip
    headers = ["training", "final reward", "mean gap", "largest gap"]
    headers += ["sample size", "after an update", "gradients that are zero", "skipped updates"]
    return table(headers, rows)


def _paired(found: Any, name: str) -> Any:
    """Returns the final reward of each seed minus that in float32."""
    finals = (found["runs"][run]["final_rewards"] for run in (name, "float32"))
    return np.subtract(*map(np.array, finals))


def _difference(found: Any, run: str) -> str:
    """Returns the mean over the seeds and the standard deviation."""
    difference = _paired(found, run)
    return f"{difference.mean():+.3f} ± {difference.std():.3f}"


def _differences(found: Any, run: str) -> str:
    return ", ".join(f"{each:+.3f}" for each in _paired(found, run))


UNSCALED = "float16, no loss scaling, sampled in half"
for _short, _run in {
    "float16": "float16, sampled in half",
    "bfloat16": "bfloat16, sampled in half",
    "unscaled": UNSCALED,
}.items():
    figure(f"grpo/difference-{_short}")(functools.partial(_difference, run=_run))
    figure(f"grpo/differences-{_short}")(functools.partial(_differences, run=_run))


@figure("grpo/factors")
def _(found: Any) -> str:
    """How many times larger the mean gap is in bfloat16 than in float16, seed by seed."""
    names = (f"{precision}, sampled in half" for precision in ("bfloat16", "float16"))
    factors = np.divide(*(found["runs"][name]["mean_gaps"] for name in names))
    return f"{factors.min():.1f} to {factors.max():.1f} times"


for _short, _run in {
    "float32": "float32",
    "half-float16": "float16, sampled in half",
    "half-bfloat16": "bfloat16, sampled in half",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "bfloat16-auto": "bfloat16, recompute auto",
    "bfloat16-all": "bfloat16, recompute auto, all roundings",
    "float16-auto": "float16, recompute auto",
}.items():
    figure(f"grpo/gap-{_short}")(
        lambda found, run=_run: _in_words(np.mean(found["runs"][run]["mean_gaps"]))
    )


for _short, _run in {"unscaled": UNSCALED, "float32": "float32"}.items():
    figure(f"grpo/zero-{_short}")(
        lambda found, run=_run: percent(np.mean(found["runs"][run]["zero_gradients"]), 1)
    )


@figure("grpo/applied")
def _(found: Any) -> str:
    """Updates that were applied with a gradient that is not finite, in all trainings."""
    return f"{sum(sum(run['applied_nonfinite']) for run in found['runs'].values()):.0f}"


@figure("grpo/updates")
def _(found: Any) -> str:
    options = found["options"]
    updates = options["steps"] * options["updates"] * options["seeds"] * len(found["runs"])
    return f"{updates:,}"


numbers({
    "grpo/seeds": "{[options][seeds]}",
    "grpo/steps": "{[options][steps]}",
    "grpo/updates-a-step": "{[options][updates]}",
})  # fmt: skip


# What made the NaN.


numbers({
    "overflow/from": "{[skipped_for_good_from]}",
    "overflow/asked": "{[cured_at_step]}",
    "overflow/before": "{[accuracy][at the cure]:.1%}",
    "overflow/after": "{[accuracy][at the end]:.1%}",
})  # fmt: skip


@figure("overflow/left")
def _(found: Any) -> str:
    return str(found["options"]["steps"] - found["cured_at_step"])


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


@figure("memory/table")
def _(found: Any) -> str:
    reports = [found["reports"][run] for run in MEMORY_RUNS]
    parts = [part for part in reports[0]["parts"] if any(r["parts"][part] for r in reports)]
    rows = [[part, *(size(r["parts"][part]) for r in reports)] for part in parts]
    rows.append(["total, by JAX's count", *(size(r["total_bytes"]) for r in reports)])
    peaks = (size(r["xla_peak_bytes"]) for r in reports)
    rows.append(["XLA's peak on a CPU, without the optimizer", *peaks])
    ratios = (r["activations"] / r["parameters"] for r in reports)
    rows.append(["N : P", *map(digits, ratios)])
    return table(["", *MEMORY_RUNS.values()], rows)


def _memory(name: str, make: Callable[[Any], str]) -> None:
    for short, run in zip(("float32", "mixed", "checkpoint"), MEMORY_RUNS, strict=True):
        figure(f"memory/{name}-{short}")(lambda found, run=run: make(found["reports"][run]))


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
