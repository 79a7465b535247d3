"""How a precision report is printed: the summary, then the hazards, then the rows in groups."""

import itertools
from collections.abc import Iterable
from typing import Any

from jmp.diagnostics._hazards import delicate_in_half
from jmp.diagnostics._places import place_name
from jmp.diagnostics._ranges import HALVES
from jmp.diagnostics._row_groups import Group, grouped
from jmp.diagnostics._rows import Decision, Row
from jmp.diagnostics._tables import size, table, totals

COLUMNS = ("module", "dtype", "operations [why]", "GFLOP", "source")

# A number of each reason, with the dtype that it gives.
Numbers = dict[tuple[str, str], int]


def render(report: Any) -> str:
    """Returns the report as text."""
    groups = grouped(report.rows)
    rows = list(_rows(groups, _numbers(report.rows)))
    lines = [*_totals(report), *_reasons(report.rows), *_decisions(report.decisions)]
    lines += [*_hazards(report, [group.row for group in groups]), "", table(COLUMNS, rows)]
    if len(groups) < len(report.rows):
        lines.append(
            f"{len(report.rows)} rows, those of modules that repeat (*) and of one place together, "
            "with the GFLOP of all; report.table() shows each row"
        )
    return "\n".join(lines)


def render_every_row(report: Any) -> str:
    """Returns all rows as text, and what their numbers of reasons mean."""
    numbers = _numbers(report.rows)
    rows = [_cells(row.module, [row], numbers) for row in report.rows]
    return "\n".join([table(COLUMNS, rows), *_reasons(report.rows)])


def _totals(report: Any) -> Iterable[str]:
    half = report.compute_dtype
    yield f"policy: {report.policy}"
    products = [row for row in report.rows if row.kind == "product"]
    if report.half_flops_share is None:
        yield "products: none"
    else:
        in_half = sum(row.times for row in products if row.dtype_in in HALVES)
        yield (
            f"products: {in_half} of {sum(row.times for row in products)} in half, "
            f"{report.half_flops_share:.1%} of the floating-point operations in {half}"
        )
    yield f"casts between float32 and {half}: {sum(report.casts.values())}"
    names = "kept for the backward pass", "kept without autocast"
    both = report.residual_bytes, report.residual_bytes_float32
    for name, kept in zip(names, both, strict=True):
        if kept is not None:
            parts = [f"{size(number)} {dtype}" for dtype, number in sorted(kept.items())]
            yield f"{name}: {', '.join(parts) or 'nothing'}"


def _reasons(rows: list[Row]) -> Iterable[str]:
    """Yields for each dtype what is computed in it, and each reason with its number and count."""
    times = _times(rows)
    for dtype, reasons in itertools.groupby(_numbers(rows).items(), lambda item: item[0][0]):
        kinds = totals((row.kind, row.times) for row in rows if _dtype(row) == dtype)
        parts = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items()]
        yield f"in {dtype}: {', '.join(parts)}"
        for (_, why), number in reasons:
            yield f"  [{number}] {times[dtype, why]} x {why}"


def _numbers(rows: list[Row]) -> Numbers:
    """Returns a number for each dtype and reason: half first, then by how often they count."""
    times = _times(rows)
    by_dtype = totals((_dtype(row), row.times) for row in rows)

    def rank(key: tuple[str, str]) -> tuple[bool, int, str, int]:
        dtype, _ = key
        return dtype not in HALVES, -by_dtype[dtype], dtype, -times[key]

    return {key: number for number, key in enumerate(sorted(times, key=rank), 1)}


def _times(rows: list[Row]) -> Numbers:
    return totals(((_dtype(row), row.why), row.times) for row in rows)


def _decisions(decisions: list[Decision]) -> Iterable[str]:
    """Yields what was decided besides dtypes, each with its first place and how many there are."""
    if decisions:
        yield "besides dtypes:"
    for what, times in totals((decision.what, decision.times) for decision in decisions).items():
        first, *others = (place_name(d.source, d.module) for d in decisions if d.what == what)
        more = f" and {len(others)} other places" if others else ""
        yield f"  {times} x {what}; at {first}{more}"


def _hazards(report: Any, groups: list[Row]) -> Iterable[str]:
    """Yields the hazards, those of modules that repeat once for all of them."""
    by_row = delicate_in_half(report.rows)
    hazards = [*delicate_in_half(groups), *(h for h in report.hazards if h not in by_row)]
    yield "hazards:" if hazards else "hazards: none"
    yield from (f"  {hazard}" for hazard in hazards)


def _rows(groups: list[Group], numbers: Numbers) -> Iterable[tuple[str, ...]]:
    """Yields the cells of each row; modules that repeat stand under a row with their number."""
    places: dict[Any, dict[Any, list[Group]]] = {}
    for group in groups:
        place = group.row.module, _dtypes(group.row), group.row.source
        block = group.repeated or (place, None)
        places.setdefault(block, {}).setdefault(place, []).append(group)
    for block, by_place in places.items():
        has_head = len(by_place) > 1
        if has_head:
            yield (block, *[""] * (len(COLUMNS) - 1))
        for members in by_place.values():
            first = members[0]
            module = f"  {first.rest or '(itself)'}" if has_head else first.row.module
            yield _cells(module, [group.row for group in members], numbers)


def _cells(module: str, rows: list[Row], numbers: Numbers) -> tuple[str, ...]:
    operations = [
        row.operation + f" x {row.times}" * (row.times > 1) + f" [{numbers[_dtype(row), row.why]}]"
        for row in rows
    ]
    flops = sum(row.flops for row in rows)
    gigaflops = f"{flops / 1e9:.3g}" if flops else ""
    return module, _dtypes(rows[0]), ", ".join(operations), gigaflops, rows[0].source


def _dtypes(row: Row) -> str:
    return " -> ".join(dict.fromkeys(filter(None, (row.dtype_in, row.dtype_out))))


def _dtype(row: Row) -> str:
    return row.dtype_in or row.dtype_out
