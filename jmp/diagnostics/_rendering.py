"""How a precision report is printed."""

from collections.abc import Iterable
from typing import Any

from jmp.diagnostics._tables import table

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
    return "\n".join([table(COLUMNS, rows), "why:", *numbered, *_totals(report)])


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
