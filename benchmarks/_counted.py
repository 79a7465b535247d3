"""The parts of the report that were counted in compiled programs."""

from typing import Any

from benchmarks._drawing import narrow
from benchmarks._roofline import BANDWIDTH, LAUNCH, PEAKS
from benchmarks._tables import BASELINE, TITLES, failures, table, total, versions_of
from benchmarks.recipes import RECIPES
from benchmarks.workloads import UPDATES, WORKLOADS

# Steps in float32 are off the scale of the figures: they are in the tables.
PLOTTED = [row.name for row in RECIPES if row.name not in (BASELINE, "float32", "tf32")]
OURS, OTHERS = "#0072B2", "#555555"
DRAWN = {
    "bytes_moved": "bytes moved",
    "kernels": "kernels",
    "temp_bytes": "memory for intermediate values",
}

LIMIT = "modelled limit, model ms: bytes + operations + launches"
MODEL = f"""The *modelled limit*, in model milliseconds, is not measured. It is the shortest time
that the data sheet of an H200 allows for these kernels, to compare a measured step with. It is
the sum over the kernels of the larger of their bytes over {BANDWIDTH / 1e12:.1f} TB/s and their
operations over {PEAKS["f16"] / 1e12:.0f} TFLOP/s in float16 and bfloat16,
{PEAKS["tf32"] / 1e12:.0f} in TF32, {PEAKS["f32"] / 1e12:.0f} in float32, and {1e6 * LAUNCH:.0f}
microsecond for each launch, as XLA estimates it. Its parts: the kernels whose bytes decide, those
whose operations decide, the launches. `benchmarks/_roofline.py` says how operations are counted and
what the model leaves out, such as caches."""


def steps(results: dict[str, Any]) -> str:
    text = f"""## Counted: programs compiled for an H200

One training step, compiled by XLA for an H200 without a device
({versions_of(results["machine"])}): bytes that its
kernels read and write, kernels that it launches, memory for intermediate values. No time was
measured. The ratios are to the same step by hand: `dtype=float16` on each layer, and dynamic loss
scaling without a library.

{MODEL}

With cuDNN's attention a step by hand stores no matrix of probabilities: one kernel forward, one
backward (`jax.nn.dot_product_attention`, `implementation="cudnn"`). Without a device the compiler
does not know cuDNN's workspace, so it is not in GB temp. JAX computes its gradient only for
sequences of even length: the 197 tokens of ViT-B/16 are padded to 198.

"""
    for key, label in DRAWN.items():
        alternative = f"{label.capitalize()} of each recipe, divided by those of the step by hand"
        text += f"![{alternative}](figures/{drawing(key)}.svg)\n"
    text += "\n"
    for workload in WORKLOADS:
        found = results["workloads"].get(workload.name)
        if found is None:
            continue
        # In the order of the list, also where some were counted again or later.
        counts = found["recipes"]
        ran = (row.name for row in RECIPES if "error" not in counts.get(row.name, {"error": ""}))
        recipes = {name: counts[name] for name in ran}
        rows = [
            [
                TITLES[name],
                f"{counted['bytes_moved'] / 1e9:.2f}",
                ratio(recipes, name, "bytes_moved"),
                str(counted["kernels"]),
                ratio(recipes, name, "kernels"),
                f"{counted['temp_bytes'] / 1e9:.2f}",
                ratio(recipes, name, "temp_bytes"),
                limit_text(counted),
                ratio(recipes, name, "model_ms"),
            ]
            for name, counted in recipes.items()
        ]
        headers = ["recipe", "GB moved", "ratio", "kernels", "ratio", "GB temp", "ratio"]
        headers += [LIMIT, "ratio"]
        text += f"### {found['title']}\n\n{table(headers, rows)}{failures(found['recipes'])}\n"
    return text


def ratio(recipes: dict[str, Any], name: str, key: str) -> str:
    """Returns what is counted of a recipe over that of the step by hand; "" if that failed."""
    base = recipes.get(BASELINE)
    return f"{total(recipes[name][key]) / total(base[key]):.3f}" if base else ""


def limit_text(counted: dict[str, Any]) -> str:
    """Returns the modelled limit and its parts, such as "12.67 = 5.02 + 6.69 + 0.96"."""
    parts = counted["model_ms"]
    terms = " + ".join(f"{parts[part]:.2f}" for part in ("bytes", "operations", "launches"))
    return f"{total(parts):.2f} = {terms}"


def loss_scaling(results: dict[str, Any]) -> str:
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

The check has to read every gradient before the update may use one: two bytes per parameter in half,
four if a gradient is float32 (embeddings). Checked one by one, each tensor takes one or two
kernels; ours checks tensors together, and the selection between old and new values is written so
that XLA updates small arrays of one shape in one kernel: biases, moments and running statistics
(both in `jmp/transforms/_few_kernels.py`). XLA does not do this without loss scaling, so a step
with loss scaling may have fewer kernels. A select costs no kernel of its own if its flag is known
when the new value is computed; the means of a ResNet's 53 normalisations are computed long before
the flag.

{table(headers, rows)}
"""


def updates(results: dict[str, Any]) -> str:
    text = "## The update alone\n\nFloat16 gradients, buffers donated; bytes per parameter. The "
    text += "modelled limit is that of the steps above.\n\n"
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
                limit_text(counted),
            ]
            for name, counted in found["recipes"].items()
            if "error" not in counted
        ]
        headers = ["recipe", "bytes", "kernels", "copies", "temp", LIMIT]
        text += f"### {found['title']}\n\n{table(headers, rows)}{failures(found['recipes'])}\n"
    return text


def checks(results: dict[str, Any]) -> str:
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
        headers += [f"{measured['title']}: kernels", "GB moved"]
    return f"""## Ways to check the gradients

The step of our adapter with different checks (`benchmarks/finite_checks.py`, `--suite checks`).
Sums and norms save almost no kernels, because each tensor is still reduced separately. With more
than eight tensors of one shape XLA writes an intermediate array. Long concatenations have few
kernels, but each of their threads searches for its tensor by branches. Times were not measured.
Compare these rows only with each other: in all of them each small array is selected in a kernel
of its own, and ours does not check matrices by rows.

{table(headers, rows)}
"""


def drawing(key: str) -> str:
    """Returns the name of the figure of what is counted, such as "compiled_bytes_moved"."""
    return f"compiled_{key}"


def plot(key: str, results: dict[str, Any]) -> Any:
    """Draws what is counted of each recipe over that of the step by hand: a row a recipe."""
    labels, rows = [], []
    for workload in (w for w in WORKLOADS if w.name in results["workloads"]):
        recipes = results["workloads"][workload.name]["recipes"]
        labels += ["", workload.title] if labels else [workload.title]
        rows += [None] * (len(labels) - len(rows))
        for name in PLOTTED:
            if key in recipes.get(name, {}):
                labels.append(TITLES[name])
                rows.append(recipes[name][key] / recipes[BASELINE][key])
    what = (
        f"{DRAWN[key]}, over those of the step by hand:\ncounted in programs compiled for an H200"
    )
    figure, axes = narrow(0.15 * len(rows) + 0.7, what)
    for place, (label, over) in enumerate(zip(labels, rows, strict=True)):
        if over is not None:
            color = OURS if label.startswith("ours") else OTHERS
            axes.hlines(place, 1, over, color=color, linewidth=1.2)
            axes.plot(over, place, "o", color=color, markersize=3.5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0)
    for tick, over in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if over is None else "normal")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    return figure
