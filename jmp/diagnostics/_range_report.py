"""`range_report`: between which powers of two the numbers of a tree lie."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp._messages import described, wrong
from jmp.diagnostics._arguments import split_arguments
from jmp.diagnostics._ranges import (
    FLOAT8_LIMITS,
    FLOAT8_PRODUCT,
    HALVES,
    SCALED,
    Range,
    exponent_of,
    exponents,
    limits_of,
    nearest_scale,
    row_of,
)
from jmp.diagnostics._tables import Report, first_rows, table, totals
from jmp.transforms import decode_state
from jmp.trees import PyTree, as_jax_array, is_array, path_string

SHOWN = 10  # of each role
NOTABLE = 0.01  # share of subnormal numbers, which lose digits and no more
MARGIN = 1  # between the largest scaled gradient and the maximum: a power of two
SHARES = ("in", "elements", "zero", "underflow", "subnormal", "overflow", "inf, NaN", "powers of 2")

_count = jax.jit(exponents)


def range_report(tree: PyTree) -> "RangeReport":
    """Counts the numbers in each floating leaf of `tree` by powers of two.

    Leaves are counted where they are, sharded or not; the counts alone are fetched, and are exact.

    Args:
      tree: any pytree, such as parameters, gradients, an optimizer's state, an nnx model. Complex
        leaves count as their real and imaginary parts; leaves that are no floating arrays are left
        out. What `transforms.with_stored_state` has encoded counts as the float32 numbers that it
        stands for.

    Returns: a report with a row of the role "value" for each leaf.
    Raises: TypeError for a function.

    >>> report = range_report({"w": jnp.array([1.0, 3e-6, 1e-9, 0.0])})
    >>> report.rows[0].shares("float16").underflow, report.rows[0].shares("float16").zero
    (0.25, 0.25)
    >>> report.rows[0].shares("float16", scale=2.0**10).underflow
    0.0
    >>> report.best_scale("float16")
    16384.0
    """
    ((tree,), _), given = split_arguments(tree), tree
    tree = decode_state(tree)
    with jax.enable_x64(True):  # float64 leaves of NumPy stay; a count may exceed 2**31
        leaves = [
            (path_string(path), as_jax_array(leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        counts = jax.device_get([_count(leaf) for _, leaf in leaves])
    if not leaves and callable(given):
        raise wrong(
            TypeError,
            "range_report",
            given,
            "a tree of arrays, such as parameters",
            more=" What a loss computes is counted by gradient_report(loss_fn)(*args).",
        )
    pairs = zip(leaves, counts, strict=True)
    return RangeReport(
        tuple(row_of("value", path, str(leaf.dtype), count) for (path, leaf), count in pairs)
    )


@dataclasses.dataclass(frozen=True)
class RangeReport(Report):
    """What `range_report` or `gradient_report` found; `print` shows it, `to_dict` gives the data.

    Where a role has rows that are stored in half, its other rows do not count: they stay in float32
    and lose nothing. Where it has none, all its rows count, for what they would lose. So do the
    gradients of parameters, which arrive in float32, but were products in half before.

    Attributes:
      rows: a `Range` for each leaf and each place, in the order of the tree and of the program.
      dtype: the half type that is meant where none is named.

    >>> range_report({"w": jnp.ones(2), "b": jnp.ones(1)}).total("value").size
    3
    """

    rows: tuple[Range, ...]
    dtype: str = "float16"

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the rows, each once."""
        return tuple(dict.fromkeys(row.role for row in self.rows))

    def counting(self, role: str) -> list[Range]:
        """Returns the rows of a role that count: those in half, or all if none is."""
        rows = [row for row in self.rows if row.role == role]
        return [row for row in rows if row.dtype in HALVES] or rows

    def total(self, role: str) -> Range:
        """Returns the rows of a role that count, added up.

        Raises: ValueError if there is none.
        """
        rows = self.counting(role)
        if not rows:
            known = ", ".join(map(repr, self.roles)) or "no rows at all"
            raise ValueError(
                f"The report has no rows of the role {described(role)}; it has {known}."
            )
        counts = totals(pair for row in rows for pair in row.counts.items())
        return Range(
            role,
            path="",
            dtype=", ".join(dict.fromkeys(row.dtype for row in rows)),
            counts=dict(sorted(counts.items())),
            zeros=sum(row.zeros for row in rows),
            infinities=sum(row.infinities for row in rows),
            nans=sum(row.nans for row in rows),
            scale=rows[0].scale,
        )

    @property
    def float8_cotangents(self) -> list[Range]:
        """The cotangents of float8 products, which the backward pass rounds to float8."""
        rows = [row for row in self.rows if row.operation == FLOAT8_PRODUCT]
        return [row for row in rows if row.role == "activation gradient"]

    def best_scale(self, dtype: DTypeLike | None = None) -> float | None:
        """Returns the largest safe static loss scale, a power of two.

        Under it the largest gradient is below half the power of two above the maximum of `dtype`:
        in float16, whose maximum is 65504, below 2**15. For a larger margin divide it by a power of
        two. Gradients of parameters and of activations count, and rows of a tree.

        Where the gradients span more than the range of `dtype`, no scale keeps them all:
        `total("gradient").shares(dtype, scale)` says what this one loses.

        Args:
          dtype: a half type; the report's if left out.

        Returns: a scale between 2**-126 and 2**126; None where it cannot be known, because a
          gradient is infinite or NaN (measure under a lower scale) or because all are zero.
        Raises: ValueError for another dtype.
        """
        limits = limits_of(dtype or self.dtype)
        rows = [row for role in SCALED for row in self.counting(role)]
        if any(row.infinities or row.nans for row in rows):
            return None
        largest = [max(row.counts) - exponent_of(row.scale) for row in rows if row.counts]
        return nearest_scale(limits.largest - MARGIN - max(largest)) if largest else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings."""
        rows = []
        for row in self.rows:
            first, last = row.exponents or (0, -1)
            counts = [row.counts.get(exponent, 0) for exponent in range(first, last + 1)]
            shares = dataclasses.asdict(row.shares(self.dtype))
            rows.append({**vars(row), "counts": counts, "lowest": first, "shares": shares})
            if row in self.float8_cotangents:
                of_float8 = {name: dataclasses.asdict(row.shares(name)) for name in FLOAT8_LIMITS}
                rows[-1]["float8_shares"] = of_float8
        return {"dtype": self.dtype, "best_scale": self.best_scale(), "rows": rows}

    def __str__(self) -> str:
        best = self.best_scale()
        lines = [table(("role", "scale", *SHARES), _rows_of_totals(self, best))]
        lines.append(f"best static scale: {'unknown' if best is None else _power(best)}")
        for role in self.roles:
            lines += _section(f"{role}s", self.counting(role), self.dtype)
        for dtype in FLOAT8_LIMITS:
            lines += _section("cotangents of float8 products", self.float8_cotangents, dtype)
        return "\n".join(lines)


def _rows_of_totals(report: RangeReport, best: float | None) -> list[tuple[str, ...]]:
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


def _section(what: str, rows: list[Range], dtype: str) -> list[str]:
    """Returns the lines of the rows that lose something in `dtype`; none if nothing is lost."""
    losing = [row for row in rows if any(_losses(row, dtype))]
    rows = sorted(losing, key=lambda row: _losses(row, dtype), reverse=True)
    if not rows:
        return []
    where = ("path", "operation", "source") if any(row.operation for row in rows) else ("path",)
    cells = [(*(getattr(row, name) for name in where), *_shares(row, dtype, None)) for row in rows]
    title = f"{what} in {dtype}, most is lost first:"
    return first_rows(title, (*where, *SHARES), cells, SHOWN, "rows")


def _losses(row: Range, dtype: str) -> tuple[float, ...]:
    """Returns shares to sort by: what is lost, what may be, what loses digits."""
    shares = row.shares(dtype)
    zero = shares.zero if row.dtype in HALVES else 0.0  # it may have underflowed already
    return shares.lost, zero, shares.subnormal if shares.subnormal > NOTABLE else 0.0


def _shares(row: Range, dtype: str, scale: float | None) -> tuple[str, ...]:
    shares, shift = row.shares(dtype, scale), row.shift(scale)
    numbers = shares.zero, shares.underflow, shares.subnormal, shares.overflow
    special = shares.infinite + shares.nan
    percents = (f"{100 * share:.3g} %" if share else "0" for share in (*numbers, special))
    exponents = dict.fromkeys(exponent + shift for exponent in row.exponents or ())
    return row.dtype, str(row.size), *percents, " to ".join(map(str, exponents))


def _power(scale: float) -> str:
    return f"2^{exponent_of(scale)}"
