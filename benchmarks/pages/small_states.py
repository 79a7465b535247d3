"""Half parameters and small states of optimizers: bytes, final losses, second moments."""

import functools
from typing import Any

import matplotlib
import numpy as np

from benchmarks._tables import table
from benchmarks.pages.registry import figure, numbers

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# The names of the file, and how pages and the picture write them.
WAYS = {
    "float32": ("float32 parameters", "float32"),
    "full": ('`masters="full"`', "full"),
    "split": ('`masters="split"`', "split"),
    "kahan": ('`masters="kahan"`', "kahan"),
    "stochastic": ('`masters="stochastic"`', "stochastic"),
    "split, bfloat16 state": ("split, state in bfloat16", "split,\nbfloat16 state"),
    "stochastic, int8 state": ("stochastic, state in int8", "stochastic,\nint8 state"),
    "stochastic, float8_e4m3fn state": (
        "stochastic, state in float8_e4m3fn",
        "stochastic,\nfloat8 state",
    ),
    "none": ('`masters="none"`', "none"),
    "optax": ("plain optax, parameters and state in bfloat16", "plain optax"),
}
SHORT = {way: way.replace(", ", "-").removesuffix(" state").replace("_", "-") for way in WAYS}


def _difference(row: Any) -> str:
    """Returns how final losses differ from those in float32, in thousandths of a nat."""
    return f"{1000 * row['difference']:+.1f} ± {1000 * row['difference_spread']:.1f}"


@figure("small_states/table")
def _(found: Any) -> str:
    rows = []
    for way, (title, _) in WAYS.items():
        counted, trained = found["bytes"]["ways"][way], found["text"]["ways"][way]
        rows.append([
            title,
            f"{counted['held']:.2f}",
            f"{counted['moved']:.2f}",
            f"{trained['final_loss']:.4f} ± {trained['spread']:.4f}",
            "" if way == "float32" else _difference(trained),
        ])  # fmt: skip
    headers = ["way", "bytes held", "bytes moved", "final loss", "difference, 0.001 nats"]
    return table(headers, rows)


@figure("small_states/moments")
def _(found: Any) -> str:
    ways = found["moments"]["ways"]
    value = lambda way: f"{ways[way]['step']:.3f} ± {ways[way]['spread']:.3f}"
    rows = [["optax's own, with bfloat16 parameters", value("optax, bfloat16 parameters"), ""]]
    for kind in ("bfloat16", "float16", "float8_e4m3fn", "int8"):
        rows.append(
            [kind, *(value(f"{kind}, {rounding}") for rounding in ("nearest", "stochastic"))]
        )
    return table(["stored as", "to the nearest", "stochastically"], rows)


numbers({
    "small_states/text-steps": "{[text][steps]:,}",
    "small_states/text-parameters": "{[text][parameters]:,}",
    "small_states/seeds": "{[text][seeds]}",
    "small_states/counted-tensors": "{[bytes][tensors]}",
})  # fmt: skip


@figure("small_states/counted-parameters")
def _(found: Any) -> str:
    return f"{found['bytes']['parameters'] / 1e6:.1f} million"


def _of_language_model(found: Any, way: str) -> str:
    """Returns the final loss less that in float32, in nats."""
    row = found["text"]["ways"][way]
    return f"{row['difference']:+.4f} ± {row['difference_spread']:.4f}"


def _bytes(found: Any, way: str, what: str) -> str:
    return f"{found['bytes']['ways'][way][what]:.2f}".removesuffix(".00")


for _way, _short in SHORT.items():
    figure(f"small_states/difference-{_short}")(functools.partial(_of_language_model, way=_way))
    for _what in ("held", "moved"):
        figure(f"small_states/{_what}-{_short}")(functools.partial(_bytes, way=_way, what=_what))


def plot(found: Any) -> Any:
    """Draws bytes a parameter above, and below the final losses over those in float32."""
    counted, trained = found["bytes"]["ways"], found["text"]["ways"]
    places = np.arange(len(WAYS))
    labels = [label for _, label in WAYS.values()]
    with plt.rc_context({"font.size": 14}):
        figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 12), layout="constrained")
    left = np.zeros(len(WAYS))
    parts = {"parameter": "parameter", "beside": "kept beside it", "state": "Adam's state"}
    colors = ("#56B4E9", "#D55E00", "#0072B2")  # Okabe and Ito's
    for (part, label), color in zip(parts.items(), colors, strict=True):
        widths = np.array([counted[way][part] for way in WAYS])
        top.barh(places, widths, left=left, color=color, label=label)
        left += widths
    for place, held in zip(places, left, strict=True):
        top.text(held + 0.15, place, f"{held:.2f}".removesuffix(".00"), va="center", fontsize=13)
    top.set(xlabel="bytes held for a parameter", xlim=(0, 16))
    means, spreads = (
        np.array([trained[way][key] for way in WAYS], float) * 1000
        for key in ("difference", "difference_spread")
    )
    bottom.errorbar(means, places, xerr=spreads, fmt="o", color=colors[2], capsize=4, markersize=7)
    for place, way in enumerate(WAYS):
        dots = np.array(trained[way]["differences"], float) * 1000
        bottom.plot(dots, np.full(len(dots), place), "|", color="0.5", markersize=9, zorder=0)
    bottom.axvline(0, color="black", linewidth=0.8)
    bottom.set_xscale("symlog", linthresh=10)
    ticks = [-10, -5, 0, 5, 10, 100]
    bottom.set_xticks(ticks, map(str, ticks))
    bottom.set(xlabel="final loss less that in float32, 0.001 nats\n(logarithmic beyond 10)")
    for axes in (top, bottom):
        axes.set_yticks(places, labels, fontsize=13)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    place = {"loc": "lower left", "bbox_to_anchor": (-0.25, 1), "ncols": 2}
    top.legend(**place, frameon=False, fontsize=12, columnspacing=1)
    return figure
