"""Turns the JSON of `benchmarks.run` into `docs/performance.md` and its pictures.

python -m benchmarks.report
"""

import json
import pathlib
from typing import Any

import matplotlib
import numpy as np
from tabulate import tabulate

from benchmarks.processes import ROOT
from benchmarks.recipes import RECIPES
from benchmarks.run import BASELINE, CONTROL, TORCH
from benchmarks.workloads import UPDATES, WORKLOADS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = ROOT / "results" / "benchmarks"
DOCS = ROOT / "docs"
TITLES = {row.name: row.title for row in RECIPES} | {
    CONTROL: "by hand, a second process (A/A control)",
    "torch-eager": "PyTorch AMP, eager",
    "torch-compile": "PyTorch AMP, torch.compile",
}
assert set(TORCH) < set(TITLES)
# Okabe and Ito's colours.
COLORS = {"unscaled": "#999999", "adapter": "#0072B2", "autocast": "#009E73", "masters": "#CC79A7"}
OTHERS = {"deepmind-jmp": "#E69F00", "mpx": "#D55E00", "dynamic-scale": "#F0E442"}
PLOTTED = {**COLORS, **OTHERS, "apply-if-finite": "#56B4E9"}


def load(suite: str) -> dict[str, Any] | None:
    path = RESULTS / f"{suite}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(headers: list[str], rows: list[list[Any]]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True) + "\n"


def versions_of(machine: dict[str, Any]) -> str:
    names = {"python": "Python", "jax": "JAX", "jaxlib": "jaxlib", "flax": "Flax", "optax": "Optax"}
    return ", ".join(f"{title} {machine[name]}" for name, title in names.items())


def failures(recipes: dict[str, Any]) -> str:
    """Returns a line for every recipe that did not run, with its reason."""
    lines = [f"- {TITLES[n]}: not run: {r['error']}" for n, r in recipes.items() if "error" in r]
    return "\n" + "\n".join(lines) + "\n" if lines else ""


# Counted in compiled programs.


def compiled_section(results: dict[str, Any]) -> str:
    text = f"""## Counted: programs compiled for an H200

One training step, compiled by XLA for an H200 without a device
({versions_of(results["machine"])}): bytes that its
kernels read and write, kernels it launches, memory for intermediate values. No time was measured.
The ratios are to the same step by hand: `dtype=float16` on every layer, dynamic loss scaling
written out.

![Bytes, kernels and temporary memory of every recipe, over those of the step by hand](compiled.png)

"""
    for workload in WORKLOADS:
        found = results["workloads"].get(workload.name)
        if found is None:
            continue
        recipes = {n: r for n, r in found["recipes"].items() if "error" not in r}
        base = recipes[BASELINE]
        rows = []
        for name, counted in recipes.items():
            ratios = [
                f"{counted[key] / base[key]:.3f}"
                for key in ("bytes_moved", "kernels", "temp_bytes")
            ]
            rows.append(
                [
                    TITLES[name],
                    f"{counted['bytes_moved'] / 1e9:.2f}",
                    ratios[0],
                    str(counted["kernels"]),
                    ratios[1],
                    f"{counted['temp_bytes'] / 1e9:.2f}",
                    ratios[2],
                ]
            )
        headers = ["recipe", "GB moved", "ratio", "kernels", "ratio", "GB temp", "ratio"]
        text += f"### {found['title']}\n\n{table(headers, rows)}{failures(found['recipes'])}\n"
    return text


def scaling_section(results: dict[str, Any]) -> str:
    rows = []
    for workload in WORKLOADS:
        recipes = results["workloads"].get(workload.name, {}).get("recipes", {})
        pairs = (("by-hand", "unscaled"), ("adapter", "adapter-unscaled"))
        if any("error" in recipes.get(name, {"error": ""}) for pair in pairs for name in pair):
            continue
        row = [workload.title]
        for scaled, unscaled in pairs:
            for key in ("kernels", "bytes_moved"):
                row.append(f"{100 * (recipes[scaled][key] / recipes[unscaled][key] - 1):+.2f} %")
        rows.append(row)
    headers = [
        "what dynamic loss scaling adds",
        "by hand: kernels",
        "bytes",
        "ours: kernels",
        "bytes",
    ]
    return f"""## What loss scaling adds

The check has to read every gradient before the update may use one: two bytes a parameter. By tensor
it takes one or two kernels each; ours checks tensors together (`jmp/transforms/_finite_check.py`).
What is left on a ResNet is mostly the selection of its running statistics, 106 small arrays, which
a skipped step has to leave as they were.

{table(headers, rows)}
"""


def updates_section(results: dict[str, Any]) -> str:
    text = "## The update alone\n\nFloat16 gradients, buffers donated; bytes a parameter.\n\n"
    for update in UPDATES:
        found = results["workloads"].get(update.name)
        if found is None:
            continue
        rows = [
            [
                TITLES[name],
                f"{counted['bytes_moved'] / update.parameters:.2f}",
                str(counted["kernels"]),
                str(counted["copies"]),
                f"{counted['temp_bytes'] / update.parameters:.2f}",
            ]
            for name, counted in found["recipes"].items()
            if "error" not in counted
        ]
        headers = ["recipe", "bytes", "kernels", "copies", "temp"]
        text += f"### {found['title']}\n\n{table(headers, rows)}{failures(found['recipes'])}\n"
    return text


def checks_section(results: dict[str, Any]) -> str:
    found = results["workloads"]
    names = list(next(iter(found.values()))["recipes"])
    rows = []
    for check in names:
        row = [check]
        for measured in found.values():
            counted = measured["recipes"][check]
            row += [str(counted["kernels"]), f"{counted['bytes_moved'] / 1e9:.3f}"]
        rows.append(row)
    headers = [""]
    for measured in found.values():
        headers += [f"{measured['title'].split(',')[0]}: kernels", "GB moved"]
    return f"""## Ways to check the gradients

What was tried (`benchmarks/finite_checks.py`, `--suite checks`): the step of our adapter with one
check or another. Sums and norms save no kernel: each tensor is reduced by itself all the same.
Beyond eight tensors of one shape XLA writes an intermediate array. Long concatenations count as few
kernels, but each of their threads has to find its tensor branch by branch: compiled for an H200,
the kernel of eight concatenated matrices holds 108 branches and loads single elements, that of
eight matrices checked element by element 4 branches. How long either takes was not measured.

{table(headers, rows)}
"""


def plot_compiled(results: dict[str, Any], path: pathlib.Path) -> None:
    workloads = [w for w in WORKLOADS if w.name in results["workloads"]]
    figure, axes = plt.subplots(3, 1, figsize=(9, 8), sharex=True, layout="constrained")
    keys = (("bytes_moved", "bytes"), ("kernels", "kernels"), ("temp_bytes", "temp memory"))
    for axis, (key, label) in zip(axes, keys, strict=True):
        for position, (name, color) in enumerate(PLOTTED.items()):
            ratios = []
            for workload in workloads:
                recipes = results["workloads"][workload.name]["recipes"]
                counted = recipes.get(name, {}).get(key, np.nan)
                ratios.append(counted / recipes[BASELINE][key])
            x = np.arange(len(workloads)) + (position - len(PLOTTED) / 2 + 0.5) * 0.1
            axis.bar(x, np.array(ratios) - 1, 0.1, bottom=1, color=color, label=TITLES[name])
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylabel(f"{label}, over\nthose by hand")
        axis.grid(axis="y", alpha=0.3)
    axes[-1].set_xticks(
        range(len(workloads)), [w.title.replace(", ", "\n") for w in workloads], fontsize=8
    )
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


# Measured.


def ratio_text(measured: dict[str, Any]) -> str:
    low, high = measured.get("interval", (1, 1))
    return f"{measured['ratio']:.3f} ({low:.3f} to {high:.3f})"


def gpu_section(results: dict[str, Any], compiled: dict[str, Any] | None) -> str:
    machine, ceilings = results["machine"], results["ceilings"]
    bandwidth = ceilings["bytes_per_second"]
    names = {"half": "float16", "tf32": "tf32", "float32": "float32"}
    rates = {key: ceilings[f"{name}_flops_per_second"] / 1e12 for key, name in names.items()}
    text = f"""## Measured on a GPU

{machine["device"]}, driver {machine["driver"]}, {machine["platform_version"]},
{versions_of(machine)}. Every recipe in
a process of its own, compiled once, in shuffled rounds; the median of the ratios within a round,
with its 95 % bootstrap interval. The second process by hand says what chance makes of a ratio.
Ceilings measured on the same device: {bandwidth / 1e12:.2f} TB/s, {rates["half"]:.0f} TFLOP/s in
float16, {rates["tf32"]:.0f} in TF32, {rates["float32"]:.0f} in float32. "Limit" is the larger of
the counted bytes over that bandwidth and the model's operations over that rate, "MFU" the model's
operations a second over the rate.

"""
    for workload in (*WORKLOADS, *UPDATES):
        found = results["workloads"].get(workload.name)
        if found is None:
            continue
        counted = (compiled or {"workloads": {}})["workloads"].get(workload.name, {"recipes": {}})
        flops, rows = found.get("flops", 0), []
        for name, measured in found["recipes"].items():
            if "error" in measured:
                continue
            rate = 1e12 * rates.get(name, rates["half"])
            program = "float32" if name == "tf32" else BASELINE if name == CONTROL else name
            moved = counted["recipes"].get(program, {}).get("bytes_moved")
            limit = max(moved / bandwidth, flops / rate) if moved else None
            peak = measured.get("peak_bytes")
            rows.append(
                [
                    TITLES[name],
                    f"{1e3 * measured['seconds']:.2f}",
                    ratio_text(measured),
                    f"{1e3 * limit:.2f}" if limit else "",
                    f"{100 * flops / measured['seconds'] / rate:.0f} %" if flops else "",
                    f"{measured['compiler_bytes'] / 1e9:.2f}"
                    if "compiler_bytes" in measured
                    else "",
                    f"{peak / 1e9:.2f}" if peak else "",
                ]
            )
        headers = ["recipe", "ms", "over by hand", "limit ms", "MFU", "GB compiler", "GB peak"]
        text += f"### {found['title']}\n\n{table(headers, rows)}{failures(found['recipes'])}\n"
    return text


NO_GPU = """## Measured on a GPU

Not yet: no GPU was at hand when this page was made. `python -m benchmarks.run --suite gpu` measures
it, and `python -m benchmarks.report` puts it here. With `--rehearse` the same suite runs at a tiny
size anywhere.

"""


def cpu_section(results: dict[str, Any]) -> str:
    machine = results["machine"]
    text = f"""## Measured on a CPU

{versions_of(machine)}; the median of paired ratios, as on a GPU. A CPU computes half
products no faster, mostly slower: mixed precision is for GPUs and TPUs, and these times say nothing
of those. What a CPU can say is how long tracing takes, which happens there in any case.

"""
    for update in UPDATES:
        if found := results["workloads"].get(update.name):
            rows = [
                [
                    TITLES[name],
                    f"{1e3 * measured['seconds']:.1f}",
                    ratio_text(measured),
                    compilation_text(name, found["recipes"]),
                ]
                for name, measured in found["recipes"].items()
                if "error" not in measured
            ]
            headers = ["recipe", "ms", "over by hand", "compilation over by hand"]
            text += f"### {found['title']}\n\n{table(headers, rows)}{failures(found['recipes'])}\n"
    models = [w for w in WORKLOADS if w.name in results["workloads"]]
    if not models:
        return text
    rows = []
    for name, title in TITLES.items():
        row = [title]
        for model in models:
            recipes = results["workloads"][model.name]["recipes"]
            measured = recipes.get(name, {"error": "not asked for"})
            failed = "error" in measured
            row += ["", ""] if failed else [ratio_text(measured), compilation_text(name, recipes)]
        if any(row[1:]):
            rows.append(row)
    headers = ["over by hand"]
    for model in models:
        headers += [f"{model.title.split(',')[0]}: tracing", "compilation"]
    return f"""{text}### Tracing and compiling a step

Tracing paired, with its interval; compiled once.

{table(headers, rows)}
"""


def compilation_text(name: str, recipes: dict[str, Any]) -> str:
    seconds = recipes[name].get("compile_seconds")
    by_hand = recipes[BASELINE].get("compile_seconds")
    return f"{seconds / by_hand:.2f}" if seconds and by_hand else ""


INTRODUCTION = """# Performance

The same training step in the recipes that people use, side by side; each is a file of
[benchmarks/recipes](../benchmarks/recipes), which says where it comes from and which known defect
it steps around. `make bench` installs the peers, counts and times everything that needs no GPU, and
makes this page.

"""


def main() -> None:
    compiled, checks, gpu, cpu = map(load, ("compiled", "checks", "gpu", "cpu"))
    text = INTRODUCTION
    if compiled:
        text += compiled_section(compiled) + scaling_section(compiled) + updates_section(compiled)
        plot_compiled(compiled, DOCS / "compiled.png")
    if checks:
        text += checks_section(checks)
    text += gpu_section(gpu, compiled) if gpu else NO_GPU
    if cpu:
        text += cpu_section(cpu)
    (DOCS / "performance.md").write_text(text.rstrip() + "\n")
    print(f"Wrote {DOCS / 'performance.md'}.")


if __name__ == "__main__":
    main()
