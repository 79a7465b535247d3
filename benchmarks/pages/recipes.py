"""What `docs/performance.md` says of recipes that were counted in compiled programs."""

from typing import Any

from benchmarks._drawing import FONT, narrow
from benchmarks._tables import TITLES, found_of, section, table, versions_of
from benchmarks.pages.registry import figure
from benchmarks.recipes import RECIPES
from benchmarks.run import BASELINE
from benchmarks.workloads import UPDATES, WORKLOADS

# Steps in float32 are off the scale of the figures: they are in the tables.
PLOTTED = [row.name for row in RECIPES if row.name not in (BASELINE, "float32", "tf32")]
DRAWN = {  # what is counted, with its name and marker
    "bytes_moved": ("bytes moved", "o"),
    "kernels": ("kernels", "s"),
    "temp_bytes": ("temporary memory", "^"),
}
LEAST_DIFFERENCE = 0.02  # a recipe that differs by less from the step by hand is not drawn

for _source in ("recipes", "wire"):
    figure(f"{_source}/versions")(lambda found: versions_of(found["machine"]))


@figure("recipes/steps")
def steps(results: dict[str, Any]) -> str:
    """Returns a table for each model."""
    text = ""
    for _, found in found_of(results, WORKLOADS):
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
            ]
            for name, counted in recipes.items()
        ]
        headers = ["recipe", "GB moved", "ratio", "kernels", "ratio", "GB temp", "ratio"]
        text += section(found, headers, rows)
    return text


def ratio(recipes: dict[str, Any], name: str, key: str) -> str:
    """Returns what is counted of a recipe over that of the step by hand; "" if that failed."""
    base = recipes.get(BASELINE)
    return f"{recipes[name][key] / base[key]:.3f}" if base else ""


@figure("recipes/loss-scaling")
def _(results: dict[str, Any]) -> str:
    rows = []
    pairs = (("by-hand", "unscaled"), ("adapter", "adapter-unscaled"))
    for workload, found in found_of(results, WORKLOADS):
        recipes = found["recipes"]
        if any("error" in recipes.get(name, {"error": ""}) for pair in pairs for name in pair):
            continue
        row = [workload.title]
        for scaled, unscaled in pairs:
            for key in ("kernels", "bytes_moved"):
                row.append(f"{100 * (recipes[scaled][key] / recipes[unscaled][key] - 1):+.2f} %")
        rows.append(row)
    headers = ["what dynamic loss scaling adds", "by hand: kernels", "bytes"]
    return table([*headers, "ours: kernels", "bytes"], rows)


@figure("recipes/updates")
def _(results: dict[str, Any]) -> str:
    text = ""
    for update, found in found_of(results, UPDATES):
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
        text += section(found, headers, rows)
    return text


def plot(results: dict[str, Any]) -> Any:
    """Draws what is counted of each recipe over that of the step by hand, if it differs."""
    labels: list[str] = []
    rows: list[dict[str, float]] = []
    for workload, found in found_of(results, WORKLOADS):
        recipes = found["recipes"]
        labels += ["", workload.title] if labels else [workload.title]
        rows += [{}] * (len(labels) - len(rows))
        for name in PLOTTED:
            counted = {key: recipes[name][key] for key in DRAWN if key in recipes.get(name, {})}
            over = {key: count / recipes[BASELINE][key] for key, count in counted.items()}
            if any(abs(ratio - 1) > LEAST_DIFFERENCE for ratio in over.values()):
                labels.append(TITLES[name])
                rows.append(over)
    what = "over the step by hand:\ncounted in programs compiled for an H200"
    figure, axes = narrow(0.15 * len(rows) + 0.9, what)
    for key, (title, marker) in DRAWN.items():
        places = [place for place, over in enumerate(rows) if key in over]
        axes.plot([rows[p][key] for p in places], places, marker, label=title, markersize=4)
    for place, over in enumerate(rows):
        if over:
            axes.hlines(place, min(over.values()), max(over.values()), color="#bbbbbb", zorder=0)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0)
    for tick, over in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if over else "bold")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    figure.legend(loc="outside upper right", frameon=False, fontsize=FONT)
    return figure
