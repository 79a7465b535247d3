"""`precision_report`: what an autocast program computes in which dtype, and why.

Printed, a report begins with its sums; then come the hazards, and the rows in groups.
"""

import collections
import dataclasses
import itertools
import math
import re
import string
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jmp._array_calls import ArrayCall
from jmp.autocasting._autocast import make_program
from jmp.autocasting._operations import (
    NoHalfProductWarning,
    decisions_of,
    operations_of,
    rounded_arguments_of,
)
from jmp.autocasting._program import Program, Traced
from jmp.autocasting._registry import rule_for
from jmp.autocasting._steps import steps_of
from jmp.diagnostics._arguments import asked_function, split_arguments
from jmp.diagnostics._hazards import (
    dear_in_float32,
    delicate_in_half,
    float8_hazards,
    float8_places,
    odd_sizes,
    rounded_arguments,
)
from jmp.diagnostics._ranges import FLOAT8, HALVES
from jmp.diagnostics._residuals import residuals
from jmp.diagnostics._rows import Decision, Row, added_up, decisions_in, rows_of
from jmp.diagnostics._tables import size, table, totals
from jmp.diagnostics._walk import Placed, place_name, with_places
from jmp.policy import Policy, get_policy
from jmp.rules import UnusedRuleWarning

COLUMNS = ("module", "dtype", "operations [why]", "GFLOP", "source")
# A number of each reason, with the dtype that it gives.
Numbers = dict[tuple[str, str], int]


def precision_report(
    fun: Callable[..., Any], policy: str | Policy, *early: Any, **options: Any
) -> Callable[..., "PrecisionReport"]:
    """Returns a function that reports what `autocast(fun, policy, **options)` does.

    Called with `fun`'s arguments it traces and plans, and runs nothing: `jax.ShapeDtypeStruct` may
    stand for arrays.

    Args:
      fun, policy: as for `jmp.autocast`. A policy that computes in float32 is refused: it has
        nothing to report. The rows are those of `fun`, so of a loss those of the forward pass:
        `assert_products_in(jax.grad(...), dtype)` checks the backward pass. Of nnx modules among
        the arguments copies are traced; half arrays of Equinox modules count as float32 numbers, as
        in `equinox.autocast`. What is autocast inside `fun` already, such as a model that
        an adapter wrapped, is shown in its dtypes, without its reasons, and counts as without
        autocast too: ask about the model before it is wrapped.
      options: those of `jmp.autocast`, such as `rules=` by paths.

    Returns: a function of `fun`'s arguments that returns a `PrecisionReport`.

    Raises: TypeError if the arguments of `fun` were given in the first call; ValueError for a
      policy that computes in float32; otherwise as `jmp.autocast`.

    >>> def loss(w, x):
    ...     return jnp.mean(jnp.exp(x @ w))
    >>> w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
    >>> report = precision_report(loss, "mixed_float16")(w, x)
    >>> report.half_flops_share
    1.0
    >>> [(row.operation, row.dtype_in) for row in report.rows]
    [('dot_general', 'float16'), ('exp', 'float32'), ('reduce_sum', 'float32')]
    """
    call = "precision_report(fun, policy)(*args)"
    fun = asked_function("precision_report", call, fun, early, policy, of_equinox=True)
    program = make_program(fun, policy, **options)
    if program is None:
        raise ValueError(
            f"precision_report got the policy {get_policy(policy)}, which computes in float32: "
            "autocast leaves the program as it is. Ask with 'mixed_float16' or 'mixed_bfloat16'."
        )

    def of_arrays(*args: Any, **kwargs: Any) -> PrecisionReport:
        with warnings.catch_warnings():
            for told in (UnusedRuleWarning, NoHalfProductWarning):  # they are in the report
                warnings.simplefilter("ignore", told)
            return _report(program, program.trace(args, kwargs), str(get_policy(policy)))

    def report(*args: Any, **kwargs: Any) -> PrecisionReport:
        is_taken = lambda x: isinstance(x, jax.ShapeDtypeStruct)
        call = ArrayCall(of_arrays, *split_arguments(*args, **kwargs), is_taken)
        found: list[PrecisionReport] = []
        jax.eval_shape(lambda *tracers: found.append(call(*tracers)), *call.arrays)
        return found[0]

    return report


@dataclasses.dataclass(frozen=True)
class PrecisionReport:
    """What `precision_report` found; `print` shows it, `to_dict` gives the data.

    Attributes:
      compute_dtype: the half type.
      rows: products, reductions and exponentials, in the order of the program.
      casts: casts between float32 and half that autocast put in, by place: `(from, to, module,
        source) -> number`. XLA merges those of one value.
      half_flops_share: share of the floating-point operations of products that are half or float8,
        0 to 1; None where there is no product.
      residual_bytes: bytes kept for the backward pass, by dtype, arguments not counted; None where
        there is no reverse derivative. As JAX traces it: XLA may keep less.
      residual_bytes_float32: the same for `fun` without autocast.
      hazards: sentences that ask you to act, such as on a sum in half; usually empty.
      policy: the policy, as text.
      decisions: what autocast does besides choosing dtypes, by place: leaner forms of equations,
        and masks that are held within float16's range.

    Printed, modules that repeat stand in one row, and "(top)" stands for no module, or the
    outermost; `table` has a row for each of `rows`.

    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> report = precision_report(lambda w, x: x @ w, "mixed_bfloat16")(x, x)
    >>> report.compute_dtype, report.half_flops_share, report.float8_flops_share, report.hazards
    ('bfloat16', 1.0, 0.0, [])
    """

    compute_dtype: str
    rows: list[Row]
    casts: dict[tuple[str, str, str, str], int]
    half_flops_share: float | None
    residual_bytes: dict[str, int] | None
    residual_bytes_float32: dict[str, int] | None
    hazards: list[str]
    policy: str
    decisions: list[Decision]

    @property
    def float8_flops_share(self) -> float:
        """Share of the floating-point operations of products that are float8, 0 to 1."""
        return _flops_share(self.rows, [FLOAT8]) or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings."""
        data = dataclasses.asdict(self)
        names = ("from", "to", "module", "source", "times")
        casts = [(*place, times) for place, times in self.casts.items()]
        data["casts"] = [dict(zip(names, cast, strict=True)) for cast in casts]
        return data

    def table(self) -> str:
        """Returns every row as text, and what their numbers of reasons mean."""
        numbers, top = _numbers(self.rows), _top(self.rows)
        rows = [_row_cells(row.module or top, [row], numbers) for row in self.rows]
        return "\n".join([table(COLUMNS, rows), *_reasons(self.rows)])

    def __str__(self) -> str:
        return _text(self)


def _report(program: Program, traced: Traced, policy: str) -> PrecisionReport:
    plan, operands = traced.plan, traced.operands
    in_half = _residual_bytes(traced.emit, operands)
    in_float32 = _residual_bytes(traced.as_written, traced.arrays)
    emitted = list(with_places(jax.make_jaxpr(traced.emit)(*operands)))
    steps = list(steps_of(plan))
    operations = list(operations_of(steps))
    decided = list(decisions_of(steps))
    rounded = list(rounded_arguments_of(steps))
    # Nothing below reads the plan.
    rows = rows_of(operations)
    half = str(program.settings.compute_dtype)
    return PrecisionReport(
        compute_dtype=half,
        rows=rows,
        casts=_casts(emitted),
        half_flops_share=_flops_share(rows, [*HALVES, FLOAT8]),
        residual_bytes=in_half,
        residual_bytes_float32=in_float32,
        hazards=[
            *delicate_in_half(rows),
            *rounded_arguments(rounded, half),
            *dear_in_float32(rows),
            *(f"the rule {rule} matched no scope" for rule in plan.request.rules.unused),
            *odd_sizes(emitted, float8_places(rows)),
            *float8_hazards(operations, rows),
        ],
        policy=policy,
        decisions=decisions_in(decided),
    )


def _flops_share(rows: list[Row], dtypes: Collection[str]) -> float | None:
    """Returns the share of the operations of products that read these dtypes."""
    products = [row for row in rows if row.kind == "product"]
    total = sum(row.flops for row in products)
    found = sum(row.flops for row in products if row.dtype_in in dtypes)
    return found / total if total else None


def _casts(placed: Iterable[Placed]) -> dict[tuple[str, str, str, str], int]:
    found: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    for equation, path, source, _ in placed:
        if rule_for(equation.primitive.name).casts:
            before, after = str(equation.invars[0].aval.dtype), str(equation.outvars[0].aval.dtype)
            if {before, after} in ({"float32", name} for name in HALVES):
                found[before, after, path, source] += 1
    return dict(found)


def _residual_bytes(function: Callable[..., Any], arguments: list[Any]) -> dict[str, int] | None:
    try:
        kept = residuals(lambda *a: (function(*a), ()), arguments, range(len(arguments)))
    except (TypeError, ValueError, NotImplementedError):  # a loop; a callback
        return None
    return totals((row.dtype, row.bytes) for row in kept)


class Group(NamedTuple):
    """Rows that agree in everything but the numbers of their modules: blocks are read once."""

    # What they share, with times and operations of all. Its module is written "h/*/attn" where all
    # modules h/0, h/1, ... of the report take part, "h/{3,7}/attn" where only some do.
    row: Row
    repeated: str  # the path up to the first module that repeats, "h/* x 12"; "" where none does
    rest: str  # the path below it


def _text(report: PrecisionReport) -> str:
    """Returns the report as text."""
    groups = grouped(report.rows)
    rows = list(_table_rows(groups, _numbers(report.rows)))
    lines = [*_summary(report), *_reasons(report.rows), *_decisions(report.decisions)]
    lines += [*_hazards(report, [group.row for group in groups]), "", table(COLUMNS, rows)]
    if len(groups) < len(report.rows):
        lines.append(
            f"{len(report.rows)} rows, those of modules that repeat (*) and of one place together, "
            "with the GFLOP of all; report.table() shows each row"
        )
    return "\n".join(lines)


def _summary(report: PrecisionReport) -> Iterable[str]:
    half = report.compute_dtype
    yield f"policy: {report.policy}"
    products = [row for row in report.rows if row.kind == "product"]
    if report.half_flops_share is None:
        yield "products: none"
    else:
        in_half = sum(row.times for row in products if row.dtype_in in HALVES)
        in_float8 = sum(row.times for row in products if row.dtype_in == FLOAT8)
        share = report.float8_flops_share
        also = f"; {in_float8} in float8, {share:.1%} of the operations" if in_float8 else ""
        yield (
            f"products: {in_half} of {sum(row.times for row in products)} in half, "
            f"{report.half_flops_share - share:.1%} of the floating-point operations in {half}"
            f"{also}"
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
        kinds = totals((row.kind, row.times) for row in rows if _dtype_read(row) == dtype)
        parts = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items()]
        yield f"in {dtype}: {', '.join(parts)}"
        for (_, why), number in reasons:
            yield f"  [{number}] {times[dtype, why]} x {why}"


def _numbers(rows: list[Row]) -> Numbers:
    """Returns a number for each dtype and reason: half first, then by how often they count."""
    times = _times(rows)
    by_dtype = totals((_dtype_read(row), row.times) for row in rows)

    def rank(key: tuple[str, str]) -> tuple[bool, int, str, int]:
        dtype, _ = key
        return dtype not in (*HALVES, FLOAT8), -by_dtype[dtype], dtype, -times[key]

    return {key: number for number, key in enumerate(sorted(times, key=rank), 1)}


def _times(rows: list[Row]) -> Numbers:
    return totals(((_dtype_read(row), row.why), row.times) for row in rows)


def _decisions(decisions: list[Decision]) -> Iterable[str]:
    """Yields what was decided besides dtypes, each with its first place and how many there are."""
    if decisions:
        yield "besides dtypes:"
    for what, times in totals((decision.what, decision.times) for decision in decisions).items():
        first, *others = (place_name(d.source, d.module) for d in decisions if d.what == what)
        more = f" and {len(others)} other place{'s' * (len(others) > 1)}" if others else ""
        yield f"  {times} x {what}; at {first}{more}"


def _hazards(report: PrecisionReport, groups: list[Row]) -> Iterable[str]:
    """Yields the hazards, those of modules that repeat once for all of them."""
    by_row = delicate_in_half(report.rows)
    hazards = [*delicate_in_half(groups), *(h for h in report.hazards if h not in by_row)]
    yield "hazards:" if hazards else "hazards: none"
    yield from (f"  {hazard}" for hazard in hazards)


def _table_rows(groups: list[Group], numbers: Numbers) -> Iterable[tuple[str, ...]]:
    """Yields the cells of each row; modules that repeat stand under a row with their number."""
    places: dict[Any, dict[Any, list[Group]]] = {}
    top = _top([group.row for group in groups])
    for group in groups:
        place = group.row.module, _dtypes_shown(group.row), group.row.source
        block = group.repeated or (place, None)
        places.setdefault(block, {}).setdefault(place, []).append(group)
    for block, by_place in places.items():
        has_head = len(by_place) > 1
        if has_head:
            yield (block, *[""] * (len(COLUMNS) - 1))
        for members in by_place.values():
            first = members[0]
            module = f"  {first.rest or '(itself)'}" if has_head else first.row.module or top
            yield _row_cells(module, [group.row for group in members], numbers)


def _top(rows: list[Row]) -> str:
    """Returns what is printed for a row in no module, or in the outermost, whose path is empty."""
    return "(top)" * any(row.module for row in rows)


def _row_cells(module: str, rows: list[Row], numbers: Numbers) -> tuple[str, ...]:
    operations = []
    for row in rows:
        times = f" x {row.times}" * (row.times > 1)
        operations.append(f"{row.operation}{times} [{numbers[_dtype_read(row), row.why]}]")
    flops = sum(row.flops for row in rows)
    gigaflops = f"{flops / 1e9:.3g}" if flops else ""
    return module, _dtypes_shown(rows[0]), ", ".join(operations), gigaflops, rows[0].source


def _dtypes_shown(row: Row) -> str:
    dtypes = " -> ".join(dict.fromkeys(filter(None, (row.dtype_in, row.dtype_out))))
    return f"{dtypes} ({row.precision})" if row.precision else dtypes


def _dtype_read(row: Row) -> str:
    return row.dtype_in or row.dtype_out


def grouped(rows: Sequence[Row]) -> list[Group]:
    """Returns rows of a report in groups, in the order of the program.

    Modules repeat if their names differ in the number at the end alone. Rows make a group if they
    differ in nothing else and stand in every combination of some names, so that the label of the
    group says no more than what is so. Rows that do not are parted: by source line, then by the
    names of their modules, the outermost first.
    """
    siblings: dict[tuple[str, ...], set[str]] = {}
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        path = _path(row)
        stems = tuple(map(_stem, path))
        for depth, name in enumerate(path):
            siblings.setdefault(stems[: depth + 1], set()).add(name)
        shared = dataclasses.replace(row, module="", source="", times=1, flops=0)
        alike.setdefault((shared, stems), []).append(row)
    found = [members for some in alike.values() for members in _parted(some)]
    order = {id(row): index for index, row in enumerate(rows)}
    found.sort(key=lambda members: order[id(members[0])])
    return [_group(members, siblings) for members in found]


def _path(row: Row) -> list[str]:
    return row.module.split("/")


def _parted(rows: list[Row], parts: int = 0) -> Iterator[list[Row]]:
    """Yields rows together if they stand in every combination of their names, else parted.

    Args:
      parts: how many things they agree in: the source line, and names from the outermost on.
    """
    names = [set(at) for at in zip(*map(_path, rows), strict=True)]
    paths = {row.module for row in rows}
    if len(paths) == len(rows) == math.prod(map(len, names)) or parts > len(names):
        yield rows
        return
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault((row.source, *_path(row))[: parts + 1], []).append(row)
    for some in found.values():
        yield from _parted(some, parts + 1)


def _group(rows: list[Row], siblings: dict[tuple[str, ...], set[str]]) -> Group:
    names = [set(at) for at in zip(*map(_path, rows), strict=True)]
    stems = tuple(map(_stem, _path(rows[0])))
    labels = [_label(at, siblings[stems[: depth + 1]]) for depth, at in enumerate(names)]
    source = ", ".join(_by_file(row.source for row in rows))
    row = dataclasses.replace(added_up(rows), module="/".join(labels), source=source)
    repeats = [depth for depth, at in enumerate(names) if len(at) > 1]
    if not repeats:
        return Group(row, "", row.module)
    end = repeats[0] + 1
    repeated = f"{'/'.join(labels[:end])} x {len(names[repeats[0]])}"
    return Group(row, repeated, "/".join(labels[end:]))


def _stem(name: str) -> str:
    """Returns a module's name without its number: "Block_3" is "Block", "3" is "".

    Haiku's first module of a kind has none: "linear", "linear_1".
    """
    return re.sub(r"_?\d+$", "", name)


def _label(names: set[str], siblings: set[str]) -> str:
    """Returns a name; "Block_*" for all that differ in the number, "Block_{3,7}" for some."""
    if len(names) == 1:
        return min(names)
    starts = {name.rstrip(string.digits) for name in names}
    start = starts.pop() if len(starts) == 1 else _stem(min(names))
    if names == siblings:
        return f"{start}*"
    ends = sorted((name.removeprefix(start) for name in names), key=lambda end: (len(end), end))
    is_range = ends[0].isdigit() and int(ends[-1]) - int(ends[0]) == len(ends) - 1 > 1
    return f"{start}{{{f'{ends[0]}-{ends[-1]}' if is_range else ','.join(ends)}}}"


def _by_file(sources: Iterable[str]) -> Iterator[str]:
    """Yields each file once, with all its lines."""
    lines: dict[str, list[str]] = {}
    for source in dict.fromkeys(sources):
        file, _, line = source.rpartition(":")
        lines.setdefault(file, []).append(line)
    for file, numbers in lines.items():
        yield f"{file}:{','.join(numbers)}" if file else ""
