"""Is anything underflowing? Where the numbers of a training step lie, with and without a scale.

    python examples/inspect_ranges.py            # seconds on two CPU cores
    python examples/inspect_ranges.py --help

The model, data and loss are those of `autoencoder.py`, at the first step. Three programs are
measured: the float32 one, which shows what float16 would lose; float16 without loss scaling, which
shows what it does lose; and float16 under the static scale that the first measurement suggests.

Writes `inspect_ranges.json` and `inspect_ranges.svg` into the output folder.
"""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from _common import begin, finish, load_images, parse_options
from autoencoder import Autoencoder, loss_fn
from matplotlib.ticker import MultipleLocator

from jmp import diagnostics

# The exponents of float16's smallest, smallest normal and largest numbers.
SMALLEST, NORMAL, LARGEST = -24, -14, 15
# Okabe and Ito's colours, told apart by every kind of colour vision, and dashes for print.
ROLES = {"gradient": ("#0072B2", "--"), "activation gradient": ("#D55E00", "-")}


class Total(NamedTuple):
    """The numbers of one role, added up."""

    dtype: str
    counts: dict[int, int]  # by exponent: how many lie between 2**exponent and twice that
    zeros: int
    size: int


def total(program: dict[str, Any], role: str) -> Total:
    """Returns the rows of a role of what `to_dict` wrote down: those in half, or all if none is."""
    rows = [row for row in program["rows"] if row["role"] == role]
    rows = [row for row in rows if row["dtype"] == "float16"] or rows
    counts: collections.Counter[int] = collections.Counter()
    for row in rows:
        counts.update(dict(enumerate(row["counts"], row["lowest"])))
    zeros = sum(row["zeros"] for row in rows)
    others = sum(row["infinities"] + row["nans"] for row in rows)
    return Total(rows[0]["dtype"], dict(counts), zeros, counts.total() + zeros + others)


def plot(report: dict[str, Any]) -> Any:
    """Draws the three programs that `inspect_ranges.json` holds.

    The picture is that of Micikevicius et al. 2018, "Mixed Precision Training", figure 3: for each
    role the share of numbers between each two powers of two, on a logarithmic axis.
    """
    programs = report["programs"]
    totals = {name: {role: total(rows, role) for role in ROLES} for name, rows in programs.items()}
    figure, panels = plt.subplots(
        len(programs), figsize=(7, 8.5), sharex=True, sharey=True, layout="constrained"
    )
    fit(panels[0], [found for roles in totals.values() for found in roles.values()])
    for axes, (name, roles) in zip(panels, totals.items(), strict=True):
        shade(axes)
        for place, (role, found) in enumerate(roles.items()):
            draw(axes, role, found, 0.02 + 0.025 * place)
        axes.set(xlabel="absolute value, powers of two", ylabel="share of the numbers, %")
        # Above the words of the shades: within the axes it could hide a line.
        above = {"loc": "lower right", "bbox_to_anchor": (1, 1.06), "borderaxespad": 0}
        axes.legend(fontsize=8, ncols=2, frameon=False, **above)
        axes.set_title(name, loc="left", fontsize=9, fontweight="bold", pad=28)
        axes.label_outer()
    return figure


def fit(axes: Any, totals: list[Total]) -> None:
    """Widens the axes, which all panels share, to float16's limits and the numbers."""
    exponents = [exponent for found in totals for exponent in found.counts]
    left = min(SMALLEST - 8, *exponents) - 3
    right = max(LARGEST + 6, *exponents) + 3
    shares = [number / found.size for found in totals for number in found.counts.values()]
    least = min(0.1, *(share for share in shares if share))
    axes.set(yscale="log", xlim=(left, right), ylim=(least / 2, 5.0))
    axes.xaxis.set_major_locator(MultipleLocator(8 if right - left < 120 else 32))
    axes.xaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.6g}" if share <= 1 else "")


def shade(axes: Any) -> None:
    """Shades where numbers become zero, subnormal and infinite in float16, and says so above."""
    lowest, largest, far = SMALLEST - 1, LARGEST + 1, 4096
    axes.axvspan(-far, lowest, color="#CCCCCC", linewidth=0)
    axes.axvspan(lowest, NORMAL, color="#EBEBEB", linewidth=0)
    axes.axvspan(largest, far, color="#CCCCCC", linewidth=0)
    words = {"transform": axes.get_xaxis_transform(), "fontsize": 8, "clip_on": False}
    axes.text(lowest, 1.02, "zero ", ha="right", **words)
    axes.text((lowest + NORMAL) / 2, 1.02, "subnormal", ha="center", **words)
    axes.text((NORMAL + largest) / 2, 1.02, "normal in float16", ha="center", **words)
    axes.text(largest, 1.02, " infinite", ha="left", **words)


def draw(axes: Any, role: str, found: Total, left: float) -> None:
    """Draws the line of a role, and a dot at `left` for its zeros: a logarithm has no place."""
    color, dashes = ROLES[role]
    edges = np.arange(min(found.counts), max(found.counts) + 2)
    shares = [found.counts.get(int(exponent), 0) / found.size for exponent in edges[:-1]]
    label = f"{role}s, {found.dtype}: {100 * found.zeros / found.size:.3g} % zero"
    axes.stairs(shares, edges, color=color, linestyle=dashes, linewidth=1.6, label=label)
    if found.zeros:
        dot = {"color": color, "markersize": 5, "transform": axes.get_yaxis_transform()}
        axes.plot([left], [found.zeros / found.size], "o", **dot)


def main() -> None:
    arguments = parse_options(__doc__, batch_size=256)
    console = begin(arguments)
    images = jnp.asarray(load_images()[0].reshape(-1, 64)[: arguments.batch_size])
    model = Autoencoder()
    params = model.init(jax.random.key(0), images)["params"]

    def measure(policy: str | None = None, **options: Any) -> diagnostics.RangeReport:
        measured = diagnostics.gradient_report(loss_fn, policy, **options)
        return measured(params, model.apply, images)

    reports = {"float32": measure()}
    scale = reports["float32"].best_scale("float16")
    reports["float16 without loss scaling"] = measure("mixed_float16")
    reports[f"float16 with a loss scale of 2^{np.log2(scale):.0f}"] = measure(
        "mixed_float16", scale=scale
    )
    for name, report in reports.items():
        console.print(f"\n[bold]{name}[/bold]")
        print(report)
    data = {name: report.to_dict() for name, report in reports.items()}
    finish(console, arguments, "inspect_ranges", plot, programs=data)


if __name__ == "__main__":
    main()
