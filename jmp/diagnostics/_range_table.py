"""How a range report is printed: totals, then for each role the rows that lose most."""

from typing import Any

from jmp.diagnostics._ranges import HALVES, SCALED, Range, exponent_of
from jmp.diagnostics._tables import first_rows, table

SHOWN = 10  # of each role
NOTABLE = 0.01  # share of subnormal numbers, which lose digits and no more
SHARES = ("in", "elements", "zero", "underflow", "subnormal", "overflow", "inf, NaN", "powers of 2")


def render(report: Any) -> str:
    """Returns the report as text."""
    best, lossless = report.best_scale(), report.lossless_scales()
    lines = [table(("role", "scale", *SHARES), _totals(report, best))]
    lines.append(f"best static scale: {'unknown' if best is None else _power(best)}")
    if lossless:
        lines.append(f"scales that lose no gradient: {' to '.join(map(_power, lossless))}")
    for role in report.roles:
        lines += _section(role, report.counting(role), report.dtype)
    return "\n".join(lines)


def _totals(report: Any, best: float | None) -> list[tuple[str, ...]]:
    # In half a scale that comes too late brings nothing back: no use to show one.
    is_half = any(row.dtype in HALVES for row in report.rows)
    found = []
    for role in report.roles:
        total = report.total(role)
        scales = [total.scale]
        if role in SCALED and best not in (None, total.scale) and not is_half:
            scales.append(best)
        for scale in scales:
            shown = _power(scale) if role in SCALED else ""
            found.append((role, shown, *_shares(total, report.dtype, scale)))
    return found


def _section(role: str, rows: list[Range], dtype: str) -> list[str]:
    """Returns the lines of one role; none if nothing is lost."""
    worst = {id(row): _losses(row, dtype) for row in rows}
    rows = [row for row in rows if any(worst[id(row)])]
    rows.sort(key=lambda row: worst[id(row)], reverse=True)
    if not rows:
        return []
    where = ("path", "operation", "source") if any(row.operation for row in rows) else ("path",)
    cells = [(*(getattr(row, name) for name in where), *_shares(row, dtype, None)) for row in rows]
    return first_rows(
        f"{role}s in {dtype}, most is lost first:", (*where, *SHARES), cells, SHOWN, "rows"
    )


def _losses(row: Range, dtype: str) -> tuple[float, ...]:
    """Returns shares to sort by: what is lost, what may be, what loses digits."""
    shares = row.shares(dtype)
    zero = shares.zero if row.dtype in HALVES else 0.0  # it may have underflowed already
    return shares.lost, zero, shares.subnormal if shares.subnormal > NOTABLE else 0.0


def _shares(row: Range, dtype: str, scale: float | None) -> tuple[str, ...]:
    shares, shift = row.shares(dtype, scale), row.shift(scale)
    numbers = (shares.zero, shares.underflow, shares.subnormal, shares.overflow)
    percents = map(_percent, (*numbers, shares.infinite + shares.nan))
    exponents = dict.fromkeys(exponent + shift for exponent in row.exponents or ())
    return row.dtype, str(row.size), *percents, " to ".join(map(str, exponents))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share else "0"


def _power(scale: float) -> str:
    return f"2^{exponent_of(scale)}"
