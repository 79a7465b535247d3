"""`exponents`: how many elements of an array lie between each two powers of two.

Read off the bit patterns, in integer arithmetic: XLA may flush subnormal floats to zero as soon as
it computes with them, and then they could not be told from zeros.

`Range`: the exponents of one tensor, and what becomes of its elements in a half type.

`range_report`: between which powers of two the numbers of a tree lie.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp._messages import described
from jmp.diagnostics._arguments import apart
from jmp.diagnostics._tables import first_rows, table
from jmp.dtypes import HALF_DTYPES, floating_dtype, is_half
from jmp.trees import PyTree, as_jax_array, is_array, path_string

# The exponents of every dtype but float64.
LOWEST, HIGHEST = -149, 127
SPECIAL = 3  # zeros, infinities and NaNs are counted behind them
DIGIT_BITS, DIGITS = 8, 4


def layout(dtype: DTypeLike) -> range:
    """Returns the exponents that are counted for a dtype.

    Those of float32's subnormals and normals, which all narrower types share, so that counts of
    different types can be added; float64 has a longer row of its own.
    """
    wide = np.dtype(dtype) in (np.float64, np.complex128)
    return range(-1074, 1024) if wide else range(LOWEST, HIGHEST + 1)


def exponents(array: jax.Array) -> jax.Array:
    """Counts the elements of an array by `floor(log2(abs(x)))`, real and imaginary parts each.

    The array keeps its shape all along: flattened, it would be gathered where it is sharded.

    Returns: int32 counts, int64 in x64 mode: those of the exponents of `layout`, then those of
      zeros, infinities and NaNs. Exact below 2**31.

    >>> counts = jax.jit(exponents)(jnp.array([3.0, -2.0, 0.0, jnp.inf, 1e-40]))
    >>> {int(i) + LOWEST: int(counts[i]) for i in counts[:-3].nonzero()[0]}
    {-133: 1, 1: 2}
    >>> counts[-3:].tolist()
    [1, 1, 0]
    """
    mesh = jax.typeof(array).sharding.mesh
    if not mesh.explicit_axes:
        return _exponents(array)
    # Where types name shardings, a scatter asks for the sharding of its result.
    replicated = jax.sharding.PartitionSpec()
    with jax.sharding.use_abstract_mesh(mesh):
        count = jax.sharding.auto_axes(_exponents, axes=mesh.explicit_axes, out_sharding=replicated)
        counts: jax.Array = count(array)
    return counts


def _exponents(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _exponents(array.real) + _exponents(array.imag)
    if array.dtype.itemsize == 1:
        array = array.astype(np.float32)  # exact: all of them are normal float32 numbers, or e8m0
    counted = layout(array.dtype)
    places = len(counted)
    info = jnp.finfo(array.dtype)
    signed = np.int64 if info.bits == 64 else np.int32
    bits = lax.bitcast_convert_type(array, np.dtype(f"uint{info.bits}"))
    magnitude = bits & np.array(2 ** (info.bits - 1) - 1, bits.dtype)
    stored = (magnitude >> np.array(info.nmant, bits.dtype)).astype(signed)
    fraction = magnitude & np.array(2**info.nmant - 1, bits.dtype)
    # A subnormal number is its fraction times the smallest one: the highest bit set counts.
    highest_bit = info.bits - 1 - lax.clz(magnitude).astype(signed)
    smallest = int(info.minexp) - info.nmant
    exponent = jnp.where(stored == 0, highest_bit + smallest, stored + int(info.minexp) - 1)
    special = jnp.where(fraction == 0, places + 1, places + 2)
    place = jnp.where(stored == 2**info.nexp - 1, special, exponent - counted.start)
    place = jnp.where(magnitude == 0, places, place)
    counts = jnp.zeros(places + SPECIAL, jax.dtypes.canonicalize_dtype(np.int64))
    return counts.at[place].add(1, mode="promise_in_bounds")


def digits(counts: jax.Array) -> jax.Array:
    """Splits int32[...] counts into float32[DIGITS, ...] digits of 8 bits, the lowest first.

    What a gradient adds up is float32, exact to 2**24: so many digits are exact when added up over
    2**16 turns of a loop, where the counts themselves would be so over one.
    """
    counts = counts.astype(np.int32)
    shifted = jnp.stack([counts >> DIGIT_BITS * digit for digit in range(DIGITS)])
    return (shifted & ((1 << DIGIT_BITS) - 1)).astype(np.float32)


def from_digits(sums: np.ndarray) -> np.ndarray:
    """Returns the int64[...] counts of float32[DIGITS, ...] sums of digits."""
    weights = 2 ** (DIGIT_BITS * np.arange(DIGITS, dtype=np.int64))
    return np.tensordot(weights, sums.astype(np.int64), 1)


HALVES = tuple(map(str, HALF_DTYPES))
FLOAT8 = "float8_e4m3fn"  # of operands of products, as reports name it
FLOAT8_PRODUCT = "dot_general in float8"  # the operation of a row
# What is multiplied by the loss scale. A tree of values may be one of gradients.
SCALED = ("gradient", "activation gradient", "value")
# Of a loss scale; beyond it the scale or its reciprocal is no normal float32 number.
LARGEST_EXPONENT = 126


class Limits(NamedTuple):
    """Exponents of a half type: its smallest, smallest normal and largest numbers."""

    name: str
    smallest: int
    normal: int
    largest: int


def limits_of(dtype: DTypeLike) -> Limits:
    """Returns the limits of a half type; raises ValueError for any other."""
    half = floating_dtype(dtype, "dtype")
    if not is_half(half):
        raise ValueError(f"Ranges were asked for {half}; expected 'float16' or 'bfloat16'.")
    return _limits(half)


def _limits(dtype: np.dtype) -> Limits:
    info = jnp.finfo(dtype)
    largest = int(math.log2(float(info.max)))
    return Limits(str(dtype), int(info.minexp) - info.nmant, int(info.minexp), largest)


FLOAT8_LIMITS = tuple(_limits(np.dtype(d)) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2))


def exponent_of(scale: float) -> int:
    """Returns the exponent of a loss scale; raises ValueError if it is no normal power of two."""
    fraction, exponent = math.frexp(float(scale))
    if fraction != 0.5 or abs(exponent - 1) > LARGEST_EXPONENT:
        raise ValueError(
            f"Got the loss scale {described(scale)}; expected a power of two between 2**-126 and "
            "2**126, which moves exponents and rounds nothing."
        )
    return exponent - 1


def power_of_two(exponent: int) -> float:
    """Returns 2**exponent, brought between 2**-126 and 2**126."""
    return 2.0 ** max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, exponent))


@dataclasses.dataclass(frozen=True)
class Shares:
    """What becomes of the elements of a tensor in a half type: seven shares that add up to 1."""

    zero: float  # before any rounding
    underflow: float  # below half the smallest subnormal number (2**-25 in float16): becomes zero
    # Up to the smallest normal number (2**-14), with fewer digits. Exactly half the smallest
    # subnormal number counts here, though it rounds to zero.
    subnormal: float
    normal: float  # up to the maximum
    # From the power of two above the maximum on (2**16): infinite. Numbers between 65520 and 65536
    # round to infinity as well; they count as normal.
    overflow: float
    infinite: float  # before any rounding, and so is `nan`
    nan: float

    @property
    def lost(self) -> float:
        """The share that comes out as zero, infinity or NaN, and is no zero."""
        return self.underflow + self.overflow + self.infinite + self.nan


@dataclasses.dataclass(frozen=True, eq=False)
class Range:
    """The exponents of the elements of a tensor, or of all that come from one place.

    Attributes:
      role: "parameter", "gradient", "activation", "activation gradient"; "value" for a leaf of a
        tree that `range_report` was given.
      path: of the leaf in its tree; of an activation, its module or name scope.
      dtype: as stored.
      counts: int64 array: `counts[i]` elements are at least `2**(lowest + i)` and below twice that,
        in absolute value.
      lowest: the exponent of the first count.
      zeros, infinities, nans: elements that have no exponent.
      scale: the loss scale that is in the numbers.
      operation, source: of an activation, the primitive and "file:line" of the user's code.

    >>> row = Range("value", "w", "float32", np.array([2, 1]), -25, zeros=1, infinities=0, nans=0)
    >>> row.size, row.exponents, row.shares("float16", scale=2.0**12).underflow
    (4, (-25, -24), 0.0)
    """

    role: str
    path: str
    dtype: str
    counts: np.ndarray = dataclasses.field(repr=False)
    lowest: int
    zeros: int
    infinities: int
    nans: int
    scale: float = 1.0
    operation: str = ""
    source: str = ""

    @property
    def size(self) -> int:
        """How many elements were counted; complex ones count twice, in a loop each iteration."""
        return int(self.counts.sum()) + self.zeros + self.infinities + self.nans

    @property
    def exponents(self) -> tuple[int, int] | None:
        """The lowest and the highest exponent; None where no element is finite and not zero."""
        (found,) = self.counts.nonzero()
        return (self.lowest + int(found[0]), self.lowest + int(found[-1])) if found.size else None

    def shares(self, dtype: DTypeLike = "float16", scale: float | None = None) -> Shares:
        """Returns what becomes of the elements in a half type under a loss scale; 0 if empty.

        Args:
          dtype: the half type.
          scale: the loss scale, a power of two; the one that is in the numbers if left out.
            Parameters and activations are not scaled.

        Raises: ValueError for another dtype, or a scale that is no power of two.
        """
        return self._shares(limits_of(dtype), self.shift(scale))

    def float8_shares(self) -> dict[str, Shares]:
        """Returns what becomes of the elements in "float8_e4m3fn" and in "float8_e5m2".

        As in a float8 product, the elements are scaled first, so that the power of two of the
        largest is that of the format's largest number; the loss scale changes nothing. If one is
        infinite or NaN, all become NaN. (Micikevicius et al. 2022, "FP8 Formats for Deep
        Learning".)
        """
        if self.infinities or self.nans:
            return {limits.name: Shares(0, 0, 0, 0, 0, 0, nan=1) for limits in FLOAT8_LIMITS}
        _, high = self.exponents or (0, 0)
        # No scale has a reciprocal that is not finite.
        shifts = (min(limits.largest - high, LARGEST_EXPONENT) for limits in FLOAT8_LIMITS)
        pairs = zip(FLOAT8_LIMITS, shifts, strict=True)
        return {limits.name: self._shares(limits, shift) for limits, shift in pairs}

    def _shares(self, limits: Limits, shift: int) -> Shares:
        exponents = self.lowest + shift + np.arange(len(self.counts))
        edges = (limits.smallest - 1, limits.normal, limits.largest + 1)
        below = [int(self.counts[exponents < edge].sum()) for edge in edges]
        finite = np.diff([0, *below, int(self.counts.sum())])
        numbers = (self.zeros, *finite, self.infinities, self.nans)
        return Shares(*(int(number) / max(1, self.size) for number in numbers))

    def shift(self, scale: float | None) -> int:
        """Returns by how much exponents grow where `scale` replaces the scale in the numbers.

        Raises: ValueError for a scale that is no power of two.
        """
        if scale is None or self.role not in SCALED:
            return 0
        return exponent_of(scale) - exponent_of(self.scale)

    def lossless_exponents(self, dtype: DTypeLike, margin: float) -> tuple[int, int] | None:
        """Returns the exponents of the lowest and the highest scale that lose nothing.

        The first may be above the second. None where it cannot be known: there is nothing to scale,
        or infinities or NaNs hide the largest number.

        Raises: ValueError for another dtype, or a margin below 1 or infinite.
        """
        limits = limits_of(dtype)
        if not 1 <= margin < math.inf:
            raise ValueError(f"Got margin={described(margin)}; expected a factor of at least 1.")
        if self.role not in SCALED or self.infinities or self.nans or self.exponents is None:
            return None
        low, high = (exponent - exponent_of(self.scale) for exponent in self.exponents)
        return limits.smallest - low, limits.largest - math.ceil(math.log2(margin)) - high


def row_of(role: str, path: str, dtype: str, counts: np.ndarray, **fields: Any) -> Range:
    """Returns the row of what `exponents` counted; `fields` are the last of a `Range`."""
    numbers = counts.astype(np.int64)
    zeros, infinities, nans = map(int, numbers[-3:])
    lowest = layout(jnp.dtype(dtype)).start
    return Range(role, path, dtype, numbers[:-3], lowest, zeros, infinities, nans, **fields)


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
    ((tree,), _), given = apart(tree), tree
    with jax.enable_x64(True):  # float64 leaves of NumPy stay; a count may exceed 2**31
        leaves = [
            (path_string(path), as_jax_array(leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        counts = jax.device_get([_count(leaf) for _, leaf in leaves])
    if not leaves and callable(given):
        raise TypeError(
            f"range_report got {described(given)}; expected a tree of arrays, such as parameters. "
            "What a loss computes is counted by gradient_report(loss_fn)(*args)."
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
        return None if found is None else power_of_two(found[1])

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
        return power_of_two(found[0]), power_of_two(found[1])

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
        from jmp.diagnostics._plots import plot_ranges

        totals = [self.total(role) for role in (self.roles if roles is None else roles)]
        return plot_ranges(totals, dtype or self.dtype, scale, axes)

    def __str__(self) -> str:
        best, lossless = self.best_scale(), self.lossless_scales()
        lines = [table(("role", "scale", *SHARES), _totals(self, best))]
        lines.append(f"best static scale: {'unknown' if best is None else _power(best)}")
        if lossless:
            lines.append(f"scales that lose no gradient: {' to '.join(map(_power, lossless))}")
        for role in self.roles:
            lines += _section(role, self.counting(role), self.dtype)
        lines += _float8_section(self.float8_cotangents)
        return "\n".join(lines)


def _totals(report: RangeReport, best: float | None) -> list[tuple[str, ...]]:
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
