"""How memory reports are printed: several side by side, or one with its modules and arrays."""

from collections.abc import Mapping
from typing import Any

from jmp._describe import described
from jmp.diagnostics._tables import first_rows, size, table

SHOWN = 20
ARRAYS = ("module", "source", "operation", "dtype", "shape", "times", "size")


def compare_memory(reports: Mapping[str, Any]) -> str:
    """Returns one table of several memory reports, a column each.

    Args:
      reports: what `memory_report` returned, by the names of the columns. Totals and peaks are
        also given over those of the first.

    Raises: TypeError for anything but reports by name.

    >>> from jmp.diagnostics import memory_report
    >>> def loss(w, x):
    ...     return jnp.mean(jnp.exp(x @ w))
    >>> arguments = jnp.ones((8, 4)), jnp.ones((16, 8))
    >>> policies = ("float32", "mixed_float16")
    >>> reports = {p: memory_report(loss, p, compiled=False)(*arguments) for p in policies}
    >>> "N : P" in compare_memory(reports)
    True
    """
    check_reports(reports, "compare_memory")
    first = next(iter(reports.values()), None)
    columns = [_cells(r, None if r is first else first) for r in reports.values()]
    names = columns[0] if columns else {}
    rows = [(name, *(column[name] for column in columns)) for name in names]
    return table(("", *reports), [row for row in rows if any(row[1:])])


def check_reports(reports: Any, caller: str) -> None:
    """Raises TypeError if `reports` are no memory reports by name."""
    is_mapping = isinstance(reports, Mapping)
    if not (is_mapping and all(hasattr(r, "total_bytes") for r in reports.values())):
        raise TypeError(
            f"{caller} got {described(reports)}; expected what memory_report(fun)(*args) returned, "
            "by name: {'float32': report, 'mixed_float16': other}."
        )


def render(report: Any) -> str:
    """Returns one report as text: its parts, then the modules and arrays that keep most."""
    lines = [compare_memory({"one step": report})]
    kept = sum(report.residual_bytes.values())
    if not kept:
        return lines[0]
    dtypes = list(report.residual_bytes)
    modules = sorted(report.residual_bytes_by_module.items(), key=lambda m: -sum(m[1].values()))
    cells = [
        (place or "?", *(size(by.get(dtype)) for dtype in dtypes), f"{sum(by.values()) / kept:.1%}")
        for place, by in modules
    ]
    title, columns = "kept for the backward pass, by module:", ("module", *dtypes, "share")
    lines += first_rows(title, columns, cells, SHOWN, "residual_bytes_by_module")
    cells = []
    for row in sorted(report.residuals, key=lambda row: -row.bytes):
        place, shape = (row.module, row.source, row.operation), "x".join(map(str, row.shape))
        cells.append((*place, row.dtype, shape, str(row.times), size(row.bytes)))
    return "\n".join([*lines, *first_rows("by array:", ARRAYS, cells, SHOWN, "residuals")])


def _cells(report: Any, base: Any) -> dict[str, str]:
    """Returns what a column says, by row, also over `base`; "" for nothing."""
    plain, total = report.without_checkpoint, report.total_bytes
    temp, peak = report.xla_temp_bytes, report.xla_peak_bytes
    return {
        **{name: size(number) for name, number in report.parts.items()},
        "total": size(total),
        "total, of the first": _ratio(total, base and base.total_bytes),
        "total without jax.checkpoint": size(plain.total_bytes) if plain else "",
        "P, parameters": f"{report.parameters:,}",
        "N, activations kept": f"{report.activations:,}",
        "N without jax.checkpoint": f"{plain.activations:,}" if plain else "",
        "N : P": _ratio(report.activations, report.parameters),
        **{name: size(number) for name, number in report.closed_forms.items()},
        "XLA: temp": size(temp),
        "XLA: temp, of what JAX keeps": _ratio(report.temp_ratio),
        "XLA: peak of value and gradient": size(peak),
        "XLA: peak, of what was counted": _ratio(report.peak_ratio),
        "XLA: peak, of the first": _ratio(peak, base and base.xla_peak_bytes),
    }


def _ratio(number: float | None, base: float | None = 1) -> str:
    return "" if number is None or not base else f"{number / base:.3g}"
