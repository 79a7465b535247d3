"""`range_report`: between which powers of two the numbers of a tree lie."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp._messages import described, wrong
from jmp.diagnostics._arguments import split_arguments
from jmp.diagnostics._range_plot import plot_ranges
from jmp.diagnostics._ranges import (
    FLOAT8_LIMITS,
    FLOAT8_PRODUCT,
    HALVES,
    SCALED,
    Range,
    exponent_of,
    exponents,
    nearest_scale,
    row_of,
)
from jmp.diagnostics._tables import first_rows, table
from jmp.trees import PyTree, as_jax_array, is_array, path_string

SHOWN = 10  # of each role
NOTABLE = 0.01  # share of subnormal numbers, which lose digits and no more
SHARES = ("in", "elements", "zero", "underflow", "subnormal", "overflow", "inf, NaN", "powers of 2")

_count = jax.jit(exponents)


def range_report(tree: PyTree) -> "RangeReport":
    """Counts the numbers in each floating leaf of `tree` by powers of two.

    Leaves are counted where they are, sharded or not; the counts alone are fetched, and are exact.

    Args:
      tree: any pytree, such as parameters, gradients, an optimizer's state, an nnx model. Complex
        leaves count as their real and imaginary parts; leaves that are no floating arrays are left
        out.

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


@dataclasses.dataclass(frozen=True, eq=False)
class RangeReport:
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
        longest = max(rows, key=lambda row: len(row.counts))
        counts = np.zeros_like(longest.counts)
        for row in rows:
            first = row.lowest - longest.lowest
            counts[first : first + len(row.counts)] += row.counts
        dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
        names = "zeros", "infinities", "nans"
        special: dict[str, Any] = {n: sum(getattr(row, n) for row in rows) for n in names}
        return Range(role, "", dtypes, counts, longest.lowest, scale=longest.scale, **special)

    @property
    def float8_cotangents(self) -> list[Range]:
        """The cotangents of float8 products, which the backward pass rounds to float8."""
        rows = [row for row in self.rows if row.operation == FLOAT8_PRODUCT]
        return [row for row in rows if row.role == "activation gradient"]

    def best_scale(self, dtype: DTypeLike | None = None, margin: float = 2.0) -> float | None:
        """Returns the largest safe static loss scale, a power of two.

        Under it the largest gradient times `margin` is below the power of two above the maximum of
        `dtype`: with a margin of 2 the scaled gradients are below 2**15 in float16, whose maximum
        is 65504. Gradients of parameters and of activations count, and rows of a tree.

        Args:
          dtype: a half type; the report's if left out.
          margin: a factor of at least 1, rounded up to a power of two. At 1 itself the largest
            gradient may still round to infinity.

        Returns: a scale between 2**-126 and 2**126; None where it cannot be known, because a
          gradient is infinite or NaN (measure under a lower scale) or because all are zero.
        Raises: ValueError for another dtype, or a margin below 1 or infinite.
        """
        found = self._lossless_exponents(dtype, margin)
        return None if found is None else nearest_scale(found[1])

    def lossless_scales(
        self, dtype: DTypeLike | None = None, margin: float = 2.0
    ) -> tuple[float, float] | None:
        """Returns the lowest and the highest scale under which no gradient is lost.

        That is, none becomes zero and, with `margin`, none infinite. Those below the smallest
        normal number keep fewer digits. Arguments are those of `best_scale`.

        Returns: powers of two, the highest being `best_scale`. None where no scale keeps them all,
          and where it cannot be known: `best_scale` is None, or gradients stored in half are zero,
          because they may have become zero by rounding; measure the program in float32.
        Raises: as `best_scale`.
        """
        found = self._lossless_exponents(dtype, margin)
        rows = [row for role in SCALED for row in self.counting(role)]
        hidden = any(row.zeros and row.dtype in HALVES for row in rows)
        if found is None or found[0] > found[1] or hidden:
            return None
        return nearest_scale(found[0]), nearest_scale(found[1])

    def _lossless_exponents(self, dtype: DTypeLike | None, margin: float) -> tuple[int, int] | None:
        rows = [row for role in SCALED for row in self.counting(role) if row.zeros < row.size]
        found = [row.lossless_exponents(dtype or self.dtype, margin) for row in rows]
        known = [exponents for exponents in found if exponents is not None]
        if not known or len(known) < len(found):
            return None
        return max(low for low, _ in known), min(high for _, high in known)

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings."""
        rows = []
        for row in self.rows:
            first, last = row.exponents or (row.lowest, row.lowest - 1)
            counts = row.counts[first - row.lowest : last + 1 - row.lowest].tolist()
            shares = dataclasses.asdict(row.shares(self.dtype))
            rows.append({**vars(row), "counts": counts, "lowest": first, "shares": shares})
            if row in self.float8_cotangents:
                of_float8 = row.float8_shares().items()
                rows[-1]["float8_shares"] = {d: dataclasses.asdict(s) for d, s in of_float8}
        return {"dtype": self.dtype, "best_scale": self.best_scale(), "rows": rows}

    def plot(
        self,
        axes: Any = None,
        *,
        roles: Sequence[str] | None = None,
        dtype: DTypeLike | None = None,
        scale: float | None = None,
    ) -> Any:
        """Draws the share of numbers between each two powers of two, on a logarithmic axis.

        What `dtype` cannot hold is shaded, and lighter where it holds subnormal numbers; a dot at
        the left end is the share of zeros. The picture is that of Micikevicius et al. 2018, "Mixed
        Precision Training", figure 3.

        Args:
          axes: matplotlib's; new ones if left out.
          roles: a line for the total of each; all there are if left out.
          dtype: a half type; the report's if left out.
          scale: the loss scale to show gradients under; the one that is in them if left out.

        Returns: the axes.
        Raises: ImportError without matplotlib; ValueError for a role without rows, another dtype,
          or a scale that is no power of two.
        """
        totals = [self.total(role) for role in (self.roles if roles is None else roles)]
        return plot_ranges(totals, dtype or self.dtype, scale, axes)

    def __str__(self) -> str:
        best, lossless = self.best_scale(), self.lossless_scales()
        lines = [table(("role", "scale", *SHARES), _rows_of_totals(self, best))]
        lines.append(f"best static scale: {'unknown' if best is None else _power(best)}")
        if lossless:
            lines.append(f"scales that lose no gradient: {' to '.join(map(_power, lossless))}")
        for role in self.roles:
            lines += _section(role, self.counting(role), self.dtype)
        lines += _float8_section(self.float8_cotangents)
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


def _section(role: str, rows: list[Range], dtype: str) -> list[str]:
    """Returns the lines of one role; none if nothing is lost."""
    losing = [row for row in rows if any(_losses(row, dtype))]
    rows = sorted(losing, key=lambda row: _losses(row, dtype), reverse=True)
    if not rows:
        return []
    where = ("path", "operation", "source") if any(row.operation for row in rows) else ("path",)
    cells = [(*(getattr(row, name) for name in where), *_shares(row, dtype, None)) for row in rows]
    title = f"{role}s in {dtype}, most is lost first:"
    return first_rows(title, (*where, *SHARES), cells, SHOWN, "rows")


def _float8_section(rows: list[Range]) -> list[str]:
    """Returns the lines of the cotangents of float8 products; none if there is no such product."""
    if not rows:
        return []

    def lost(row: Range) -> list[float]:
        return [share for s in row.float8_shares().values() for share in (s.lost, s.subnormal)]

    sizes = [row.size for row in rows]
    together = [float(share) for share in np.average(list(map(lost, rows)), axis=0, weights=sizes)]
    found = [("all", "", sum(sizes), together)]
    worst_first = sorted(rows, key=lost, reverse=True)
    found += [(row.path, row.source, row.size, lost(row)) for row in worst_first]
    cells = [
        (path, source, str(size), *(f"{100 * share:.3g} %" if share else "0" for share in shares))
        for path, source, size, shares in found
    ]
    names = (limits.name.removeprefix("float8_") for limits in FLOAT8_LIMITS)
    columns = [f"{name} {what}" for name in names for what in ("lost", "subnormal")]
    title = "cotangents of float8 products, each scaled by its largest number:"
    return first_rows(title, ("path", "source", "elements", *columns), cells, SHOWN + 1, "rows")


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
