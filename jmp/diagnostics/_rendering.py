"""How a precision report is printed: by rich where it is installed, else in plain columns."""

import io
from collections.abc import Iterable
from typing import Any

COLUMNS = ("kind", "operation", "module", "source", "in", "out", "times", "GFLOP", "why")


def render(report: Any) -> str:
    """Returns the report as text."""
    reasons = list(dict.fromkeys(row.why for row in report.rows))
    rows: list[tuple[str, ...]] = [
        (
            row.kind, row.operation, row.module, row.source, row.dtype_in, row.dtype_out,
            str(row.times), f"{row.flops / 1e9:.3g}" if row.flops else "",
            str(reasons.index(row.why) + 1),
        )
        for row in report.rows
    ]  # fmt: skip
    numbered = [f"  {number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([_table(rows), "why:", *numbered, *_totals(report)])


def _totals(report: Any) -> Iterable[str]:
    share = report.half_flops_share
    if share is not None:
        yield f"products: {share:.1%} of the floating-point operations in {report.compute_dtype}"
    yield f"casts between float32 and {report.compute_dtype}: {sum(report.casts.values())}"
    for name, kept in (
        ("kept for the backward pass", report.residual_bytes),
        ("kept without autocast", report.residual_bytes_float32),
    ):
        if kept is not None:
            parts = [f"{size / 1e6:.3g} MB {dtype}" for dtype, size in sorted(kept.items())]
            yield f"{name}: {', '.join(parts) or 'nothing'}"
    yield from (f"hazard: {hazard}" for hazard in report.hazards)


def _table(rows: list[tuple[str, ...]]) -> str:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (COLUMNS, *rows)
        )
    table = Table(box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=160).print(table)
    return text.getvalue().rstrip()
