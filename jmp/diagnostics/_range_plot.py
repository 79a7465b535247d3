"""Pictures of range reports. matplotlib is optional: it is imported to draw one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jmp.diagnostics._ranges import Limits, Range, limits_of

# Okabe and Ito's colours, told apart by every kind of colour vision, and dashes for print.
STYLES = {
    "parameter": ("#000000", ":"),
    "activation": ("#009E73", "-."),
    "gradient": ("#0072B2", "--"),
    "activation gradient": ("#D55E00", "-"),
    "value": ("#000000", "-"),
}
TOP = 5.0  # of the share's axis


def plot_ranges(totals: Sequence[Range], dtype: DTypeLike, scale: float | None, axes: Any) -> Any:
    """Draws a line for each total; see `RangeReport.plot`."""
    limits = limits_of(dtype)
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plot needs matplotlib, which is not installed. Install jmp with its extra 'examples': "
            "pip install '.[examples]' in its clone."
        ) from error
    if axes is None:
        axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")[1]
    axes.set_yscale("log")
    _fit(axes, totals, limits, scale)
    _shade(axes, limits)
    for place, total in enumerate(totals):
        _line(axes, total, scale, 0.02 + 0.025 * place)
    axes.set(xlabel="absolute value, powers of two", ylabel="share of the numbers, %")
    # Above the words of the shades: within the axes it could hide a line.
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1.06), "borderaxespad": 0}
    axes.legend(fontsize=8, ncols=2, frameon=False, **above)
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
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.6g}" if share <= 1 else "")


def _shade(axes: Any, limits: Limits) -> None:
    """Shades where numbers become zero, subnormal and infinite, and says so above."""
    lowest, normal, largest, far = limits.smallest - 1, limits.normal, limits.largest + 1, 4096
    axes.axvspan(-far, lowest, color="#CCCCCC", linewidth=0)
    axes.axvspan(lowest, normal, color="#EBEBEB", linewidth=0)
    axes.axvspan(largest, far, color="#CCCCCC", linewidth=0)
    words = {"transform": axes.get_xaxis_transform(), "fontsize": 8, "clip_on": False}
    axes.text(lowest, 1.02, "zero ", ha="right", **words)
    axes.text((lowest + normal) / 2, 1.02, "subnormal", ha="center", **words)
    axes.text((normal + largest) / 2, 1.02, f"normal in {limits.name}", ha="center", **words)
    axes.text(largest, 1.02, " infinite", ha="left", **words)


def _line(axes: Any, total: Range, scale: float | None, left: float) -> None:
    color, dashes = STYLES[total.role]
    size = max(1, total.size)
    places = total.lowest + total.shift(scale) + np.arange(len(total.counts) + 1)
    words = f"{total.role}s, {total.dtype}: {100 * total.zeros / size:.3g} % zero"
    line = {"color": color, "linestyle": dashes, "linewidth": 1.6, "label": words}
    axes.stairs(total.counts / size, places, **line)
    # A logarithm has no place for zeros: at the left end, each role beside the others.
    if total.zeros:
        dot = {"color": color, "markersize": 5, "transform": axes.get_yaxis_transform()}
        axes.plot([left], [total.zeros / size], "o", **dot)
