"""How a range report is drawn."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmp.diagnostics._axes import axes_or_new
from jmp.diagnostics._ranges import Limits, Range

# Okabe and Ito's colours, told apart by every kind of colour vision; and by dashes in print.
STYLES = {
    "parameter": ("#000000", ":"),
    "activation": ("#009E73", "-."),
    "gradient": ("#0072B2", "--"),
    "activation gradient": ("#D55E00", "-"),
    "value": ("#000000", "-"),
}
TOP = 30.0  # of the share's axis: room for the legend above 100 %


def draw(totals: Sequence[Range], limits: Limits, scale: float | None, axes: Any) -> Any:
    """Draws a line for each total; see `RangeReport.plot`."""
    axes = axes_or_new(axes, "plot", 6.4, 3.6)
    axes.set_yscale("log")
    _fit(axes, totals, limits, scale)
    _shade(axes, limits)
    for total in totals:
        _line(axes, total, scale)
    axes.set(xlabel="magnitude", ylabel="share of the numbers")
    axes.legend(fontsize=8, loc="upper right")
    return axes


def _fit(axes: Any, totals: Sequence[Range], limits: Limits, scale: float | None) -> None:
    """Widens the axes to the limits and the numbers: they may be shared, or drawn on already."""
    from matplotlib.ticker import MultipleLocator

    ends = [end + total.shift(scale) for total in totals for end in total.exponents or ()]
    ends += [limits.smallest - 8, limits.largest + 6]
    left, right = axes.get_xlim()
    left, right = min(left, min(ends) - 3), max(right, max(ends) + 3)
    shares = [total.counts[total.counts > 0] / total.size for total in totals if total.size]
    least = min([0.1, *(float(share.min()) for share in shares if share.size)])
    axes.set(xlim=(left, right), ylim=(min(axes.get_ylim()[0], least / 2), TOP))
    axes.xaxis.set_major_locator(MultipleLocator(8 if right - left < 120 else 32))
    axes.xaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.6g} %" if share <= 1 else "")


def _shade(axes: Any, limits: Limits) -> None:
    """Shades where numbers become zero, subnormal and infinite, and says so above."""
    lowest, largest, far = limits.smallest - 1, limits.largest + 1, 4096
    axes.axvspan(-far, lowest, color="#CCCCCC", linewidth=0)
    axes.axvspan(lowest, limits.normal, color="#EBEBEB", linewidth=0)
    axes.axvspan(largest, far, color="#CCCCCC", linewidth=0)
    for place, side, word in (
        (lowest, "right", "zero "),
        ((lowest + limits.normal) / 2, "center", "subnormal"),
        ((limits.normal + largest) / 2, "center", f"normal in {limits.name}"),
        (largest, "left", " infinite"),
    ):
        above = axes.get_xaxis_transform()
        axes.text(place, 1.02, word, transform=above, ha=side, fontsize=8, clip_on=False)


def _line(axes: Any, total: Range, scale: float | None) -> None:
    color, dashes = STYLES[total.role]
    size = max(1, total.size)
    places = total.lowest + total.shift(scale) + np.arange(len(total.counts) + 1)
    words = f"{total.role}s, {total.dtype}: {100 * total.zeros / size:.3g} % zero"
    line = {"color": color, "linestyle": dashes, "linewidth": 1.6, "label": words}
    axes.stairs(total.counts / size, places, **line)
    # A logarithm has no place for zeros: at the left end, whatever is drawn there later.
    zeros = [total.zeros / size] if total.zeros else []
    left = [0.02] * len(zeros)
    axes.plot(left, zeros, "o", color=color, markersize=6, transform=axes.get_yaxis_transform())
