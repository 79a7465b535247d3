"""How memory reports are drawn."""

from collections.abc import Mapping
from typing import Any

from jmp.diagnostics._axes import axes_or_new
from jmp.diagnostics._memory_report import MemoryReport

# Okabe and Ito's colours, told apart by every kind of colour vision.
COLORS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "masters": "#F0E442",
    "copies of parameters": "#CC79A7",
    "activations": "#D55E00",
}


def plot_memory(reports: Mapping[str, MemoryReport], axes: Any = None) -> Any:
    """Draws a bar for each memory report, stacked of its parts.

    Args:
      reports: what `memory_report` returned, by the names of the bars.
      axes: matplotlib's; new ones if left out.

    Returns: the axes.
    Raises: ImportError without matplotlib.

    >>> from jmp.diagnostics import memory_report
    >>> arguments = jnp.ones((8, 4)), jnp.ones((16, 8))
    >>> report = memory_report(lambda w, x: jnp.sum(x @ w), *arguments, compiled=False)
    >>> plot_memory({"float32": report}).get_xlabel()
    'MB'
    """
    axes = axes_or_new(axes, "plot_memory", 6.4, 1.2 + 0.5 * len(reports))
    largest = max((report.total_bytes for report in reports.values()), default=0)
    unit, name = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    ends = [0.0] * len(reports)
    for part, color in COLORS.items():
        widths = [report.parts[part] / unit for report in reports.values()]
        if any(widths):
            axes.barh(list(reports), widths, 0.65, ends, color=color, edgecolor="white", label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for position, end in enumerate(ends):
        axes.text(end, position, f" {end:.3g}", va="center", fontsize=9)
    axes.invert_yaxis()  # the first at the top
    axes.margins(x=0.1)
    axes.set_xlabel(name)
    axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    return axes
