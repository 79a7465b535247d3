"""Pictures of memory reports and range reports. matplotlib is optional: imported to draw one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jmp.diagnostics._memory_report import MemoryReport, check_reports
from jmp.diagnostics._range_report import Limits, Range, limits_of

# Okabe and Ito's colours, told apart by every kind of colour vision; lines by dashes in print too.
COLORS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "masters": "#F0E442",
    "copies of parameters": "#CC79A7",
    "activations": "#D55E00",
}
STYLES = {
    "parameter": ("#000000", ":"),
    "activation": ("#009E73", "-."),
    "gradient": ("#0072B2", "--"),
    "activation gradient": ("#D55E00", "-"),
    "value": ("#000000", "-"),
}
TOP = 5.0  # of the share's axis


def plot_memory(reports: Mapping[str, MemoryReport], axes: Any = None) -> Any:
    """Draws a bar for each memory report, stacked of its parts, and beside it XLA's peak.

    The bar is what JAX keeps, counted from shapes; the diamond what XLA's compiled program needs at
    most, where the report has it. The second decides whether a training fits.

    Args:
      reports: what `memory_report` returned, by the names of the bars.
      axes: matplotlib's; new ones if left out.

    Returns: the axes.
    Raises: TypeError for anything but reports by name; ImportError without matplotlib.

    >>> from jmp.diagnostics import memory_report
    >>> arguments = jnp.ones((8, 4)), jnp.ones((16, 8))
    >>> report = memory_report(lambda w, x: jnp.sum(x @ w), compiled=False)(*arguments)
    >>> plot_memory({"float32": report}).get_xlabel()
    'memory, MB'
    """
    check_reports(reports, "plot_memory")
    axes = _axes_or_new(axes, "plot_memory", 6.4, 1.2 + 0.5 * len(reports))
    largest = max((report.total_bytes for report in reports.values()), default=0)
    unit, name = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    ends = [0.0] * len(reports)
    for part, color in COLORS.items():
        widths = [report.parts[part] / unit for report in reports.values()]
        if any(widths):
            axes.barh(list(reports), widths, 0.65, ends, color=color, edgecolor="white", label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    _peaks(axes, [report.xla_peak_bytes for report in reports.values()], ends, unit)
    axes.invert_yaxis()  # the first at the top
    axes.margins(x=0.15)
    axes.set_xlabel(f"memory, {name}")
    axes.legend(fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    return axes


def _peaks(axes: Any, peaks: Sequence[int | None], ends: Sequence[float], unit: float) -> None:
    """Writes the sum behind each bar, and below it XLA's peak, which is marked by a diamond."""
    low = len(ends) - 0.35 if any(peaks) else len(ends) - 0.5
    axes.set_ylim(-0.5, low)
    label = "XLA's peak, no optimizer"
    for position, (end, peak) in enumerate(zip(ends, peaks, strict=True)):
        axes.text(end, position, f" {end:#.3g} kept".replace(". ", " "), va="center", fontsize=8)
        if peak is None:
            continue
        look = {"color": "black", "markersize": 5, "linestyle": ""}
        axes.plot([peak / unit], [position + 0.43], "D", label=label, **look)
        words = f"   {peak / unit:#.3g} peak".replace(". ", " ")
        axes.text(peak / unit, position + 0.43, words, va="center", fontsize=8)
        label = ""  # one line of the legend for all


def plot_ranges(totals: Sequence[Range], dtype: DTypeLike, scale: float | None, axes: Any) -> Any:
    """Draws a line for each total; see `RangeReport.plot`."""
    limits = limits_of(dtype)
    axes = _axes_or_new(axes, "plot", 6.4, 3.6)
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


def _axes_or_new(axes: Any, caller: str, width: float, height: float) -> Any:
    """Returns `axes`, or those of a new figure of that size in inches if it is None."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            f"{caller} needs matplotlib, which is not installed. Install jmp with its extra "
            "'examples': pip install '.[examples]' in its clone."
        ) from error
    if axes is None:
        axes = plt.subplots(figsize=(width, height), layout="constrained")[1]
    return axes
