"""`range_report`: between which powers of two the numbers of arrays lie.

`exponents` counts them on the device. It reads bit patterns, in integer arithmetic: XLA may flush
subnormal floats to zero as soon as it computes with them, and then they could not be told from
zeros. A `Range` is the count of one tensor, and says what a half type does to it; a `RangeReport`
has one for each tensor. `range_report` makes it of a tree, and `_gradient_report` of a step.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jmp._messages import described, listed, wrong
from jmp.diagnostics._asked import split_arguments
from jmp.diagnostics._reports import FLOAT8, HALVES, Report, first_rows, table, totals
from jmp.dtypes import floating_dtype
from jmp.transforms import decode_state
from jmp.trees import PyTree, as_jax_array, is_array, path_string

SHOWN = 10  # of each role
NOTABLE = 0.01  # share of subnormal numbers, which lose digits and no more
MARGIN = 1  # between the largest scaled gradient and the maximum: a power of two
SHARES = ("in", "elements", "zero", "underflow", "subnormal", "overflow", "inf, NaN", "powers of 2")

# The exponents of every dtype but float64.
LOWEST, HIGHEST = -149, 127
SPECIAL = 3  # zeros, infinities and NaNs are counted behind them


def counted_exponents(dtype: DTypeLike) -> range:
    """Returns the exponents that are counted for a dtype.

    Float32 and all narrower types share the exponents of float32's subnormal and normal numbers, so
    that their counts can be added; float64 has a longer row.
    """
    wide = np.dtype(dtype) in (np.float64, np.complex128)
    return range(-1074, 1024) if wide else range(LOWEST, HIGHEST + 1)


def exponents(array: jax.Array) -> jax.Array:
    """Counts the elements of an array by `floor(log2(abs(x)))`, real and imaginary parts each.

    The array keeps its shape: if it were flattened, a sharded one would be gathered.

    Returns: int32 counts, int64 in x64 mode: of `counted_exponents`, then of zeros, infinities and
      NaNs. They are exact below 2**31.

    >>> counts = jax.jit(exponents)(jnp.array([3.0, -2.0, 0.0, jnp.inf, 1e-40]))
    >>> {int(i) + LOWEST: int(counts[i]) for i in counts[:-3].nonzero()[0]}
    {-133: 1, 1: 2}
    >>> counts[-3:].tolist()
    [1, 1, 0]
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return exponents(array.real) + exponents(array.imag)
    if array.dtype.itemsize == 1:
        array = array.astype(np.float32)  # exact: all of them are normal float32 numbers, or e8m0
    counted = counted_exponents(array.dtype)
    places = len(counted)
    info = jnp.finfo(array.dtype)
    bits = lax.bitcast_convert_type(array, np.dtype(f"uint{info.bits}"))
    magnitude = bits & np.array(2 ** (info.bits - 1) - 1, bits.dtype)
    stored = (magnitude >> np.array(info.nmant, bits.dtype)).astype(np.int32)
    fraction = magnitude & np.array(2**info.nmant - 1, bits.dtype)
    # A subnormal number is its fraction times the smallest one: the highest bit set counts.
    highest_bit = info.bits - 1 - lax.clz(magnitude).astype(np.int32)
    smallest = int(info.minexp) - info.nmant
    exponent = jnp.where(stored == 0, highest_bit + smallest, stored + int(info.minexp) - 1)
    special = jnp.where(fraction == 0, places + 1, places + 2)
    place = jnp.where(stored == 2**info.nexp - 1, special, exponent - counted.start)
    place = jnp.where(magnitude == 0, places, place)
    counts = jnp.zeros(places + SPECIAL, jax.dtypes.canonicalize_dtype(np.int64))
    # If types name shardings, a scatter asks for the sharding of its result.
    mesh = jax.typeof(array).sharding.mesh
    whole = NamedSharding(mesh, PartitionSpec()) if mesh.explicit_axes else None
    return counts.at[place].add(1, mode="promise_in_bounds", out_sharding=whole)


FLOAT8_PRODUCT = "dot_general in float8"  # the operation of a row
# Roles that the loss scale multiplies. A tree of values may be a tree of gradients.
SCALED = ("gradient", "activation gradient", "value")
# A larger loss scale, or its reciprocal, is no normal float32 number.
LARGEST_EXPONENT = 126


FLOAT8_TYPES = (FLOAT8, "float8_e5m2")


def limits_of(dtype: DTypeLike, known: Sequence[str] = HALVES) -> jnp.finfo:
    """Returns the limits of one of the known types; raises ValueError for any other.

    All finite numbers are below two to the power of `maxexp`.
    """
    name = str(floating_dtype(dtype, "dtype"))
    if name not in known:
        raise ValueError(f"Ranges were asked for {name}; expected one of {listed(known)}.")
    return jnp.finfo(name)


def exponent_of(scale: float) -> int:
    """Returns the exponent of a loss scale; raises ValueError if it is no normal power of two."""
    fraction, exponent = math.frexp(float(scale))
    if fraction != 0.5 or abs(exponent - 1) > LARGEST_EXPONENT:
        raise ValueError(
            f"Got the loss scale {described(scale)}; expected a power of two between 2**-126 and "
            "2**126, which moves exponents and rounds nothing."
        )
    return exponent - 1


@dataclasses.dataclass(frozen=True)
class Shares:
    """The elements of a tensor in a narrow type: seven shares that add up to 1."""

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


@dataclasses.dataclass(frozen=True)
class Range:
    """The exponents of the elements of a tensor, or of all that come from one place.

    Attributes:
      role: "parameter", "gradient", "activation", "activation gradient"; "value" for a leaf of a
        tree that `range_report` was given.
      path: the path of the leaf in its tree; for an activation its module or name scope.
      dtype: the dtype in which it is stored.
      counts: by exponent, in ascending order: `counts[i]` elements are at least `2**i` and below
        twice that, in absolute value.
      zeros, infinities, nans: elements that have no exponent.
      scale: the loss scale by which the numbers are multiplied.
      operation, source: for an activation, the primitive and "file:line" of the user's code.

    >>> row = Range("value", "w", "float32", {-25: 2, -24: 1}, zeros=1, infinities=0, nans=0)
    >>> row.size, row.exponents, row.shares("float16", scale=2.0**12).underflow
    (4, (-25, -24), 0.0)
    """

    role: str
    path: str
    dtype: str
    counts: dict[int, int] = dataclasses.field(repr=False)
    zeros: int
    infinities: int
    nans: int
    scale: float = 1.0
    operation: str = ""
    source: str = ""

    @property
    def size(self) -> int:
        """How many elements were counted; complex ones count twice, in a loop each iteration."""
        return sum(self.counts.values()) + self.zeros + self.infinities + self.nans

    @property
    def exponents(self) -> tuple[int, int] | None:
        """The lowest and the highest exponent; None if no element is finite and not zero."""
        return (min(self.counts), max(self.counts)) if self.counts else None

    def shares(self, dtype: DTypeLike = "float16", scale: float | None = None) -> Shares:
        """Returns the shares of the elements in a narrow type; shares of 0 if there are no
        elements.

        In float8, as in a float8 product, the elements are scaled first, so that the largest has
        the exponent of the format's largest number; the loss scale changes nothing. If one is
        infinite or NaN, all become NaN. (Micikevicius et al. 2022, "FP8 Formats for Deep
        Learning".)

        Args:
          dtype: a half type, "float8_e4m3fn" or "float8_e5m2".
          scale: the loss scale, a power of two; by default the row's own. Parameters and
            activations are not scaled.

        Raises: ValueError for another dtype, or a scale that is no power of two.
        """
        limits = limits_of(dtype, (*HALVES, *FLOAT8_TYPES))
        if str(limits.dtype) in HALVES:
            shift = self.shift(scale)
        elif self.infinities or self.nans:
            return Shares(0, 0, 0, 0, 0, 0, nan=1)
        else:
            # No scale has a reciprocal that is not finite.
            shift = min(limits.maxexp - 1 - max(self.counts, default=0), LARGEST_EXPONENT)
        half_of_smallest = limits.minexp - limits.nmant - 1
        edges = (half_of_smallest, limits.minexp, limits.maxexp)
        finite = [0] * (len(edges) + 1)
        for exponent, number in self.counts.items():
            finite[sum(edge <= exponent + shift for edge in edges)] += number
        numbers = (self.zeros, *finite, self.infinities, self.nans)
        return Shares(*(number / max(1, self.size) for number in numbers))

    def shift(self, scale: float | None) -> int:
        """Returns by how much exponents grow if `scale` replaces the row's own scale.

        Raises: ValueError for a scale that is no power of two.
        """
        if scale is None or self.role not in SCALED:
            return 0
        return exponent_of(scale) - exponent_of(self.scale)


def row_of(role: str, path: str, dtype: str, counts: np.ndarray, *fields: Any) -> Range:
    """Returns the row of what `exponents` counted; `fields` are the last of a `Range`."""
    zeros, infinities, nans = map(int, counts[-SPECIAL:])
    pairs = zip(counted_exponents(jnp.dtype(dtype)), counts.tolist(), strict=False)
    found = {exponent: number for exponent, number in pairs if number}
    return Range(role, path, dtype, found, zeros, infinities, nans, *fields)


_count = jax.jit(exponents)


def range_report(tree: PyTree) -> "RangeReport":
    """Counts the numbers in each floating leaf of `tree` by powers of two.

    Leaves are counted on their devices, sharded or not; only the counts are fetched. They are
    exact.

    Args:
      tree: any pytree, such as parameters, gradients, an optimizer's state, an nnx model. Complex
        leaves count as their real and imaginary parts; leaves that are no floating arrays are left
        out. States that `transforms.with_stored_state` has encoded count as the float32 numbers
        that they stand for.

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
    (values,), _ = split_arguments(tree)
    with jax.enable_x64(True):  # float64 leaves of NumPy stay; a count may exceed 2**31
        leaves = [
            (path_string(path), as_jax_array(leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(decode_state(values))
            if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        counts = jax.device_get([_count(leaf) for _, leaf in leaves])
    if not leaves and callable(tree):
        expected = "a tree of arrays, such as parameters"
        more = " To count the values in a loss use gradient_report(loss_fn)(*args)."
        raise wrong(TypeError, "range_report", tree, expected, more=more)
    pairs = zip(leaves, counts, strict=True)
    rows = (row_of("value", path, str(leaf.dtype), count) for (path, leaf), count in pairs)
    return RangeReport(tuple(rows))


@dataclasses.dataclass(frozen=True)
class RangeReport(Report):
    """What `range_report` or `gradient_report` found; `print` shows it, `to_dict` gives the data.

    If a role has rows that are stored in half, its other rows do not count: they stay in float32
    and lose nothing. If it has none, all its rows count, for what they would lose. This holds for
    gradients of parameters too, which arrive in float32, but were products in half before.

    Attributes:
      rows: a `Range` for each leaf and each place, in the order of the tree and of the program.
      dtype: the half type that is meant if none is named.

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
        """Returns the rows of a role that count: the rows in half, or all if none is."""
        rows = [row for row in self.rows if row.role == role]
        return [row for row in rows if row.dtype in HALVES] or rows

    def total(self, role: str) -> Range:
        """Returns the rows of a role that count, added up.

        Raises: ValueError if there is none.
        """
        rows = self.counting(role)
        if not rows:
            known = ", ".join(map(repr, self.roles)) or "no rows at all"
            got = described(role)
            raise ValueError(f"The report has no rows of the role {got}; it has {known}.")
        counts = totals(pair for row in rows for pair in row.counts.items())
        dtype = ", ".join(dict.fromkeys(row.dtype for row in rows))
        names = ("zeros", "infinities", "nans")
        zeros, infinities, nans = (sum(getattr(row, name) for row in rows) for name in names)
        by_exponent = dict(sorted(counts.items()))
        return Range(role, "", dtype, by_exponent, zeros, infinities, nans, rows[0].scale)

    @property
    def float8_cotangents(self) -> list[Range]:
        """The cotangents of float8 products, which the backward pass rounds to float8."""
        rows = (row for row in self.rows if row.role == "activation gradient")
        return [row for row in rows if row.operation == FLOAT8_PRODUCT]

    def best_scale(self, dtype: DTypeLike | None = None) -> float | None:
        """Returns the largest safe static loss scale, a power of two.

        Under it the largest gradient is below half the power of two above the maximum of `dtype`:
        in float16, whose maximum is 65504, below 2**15. For a larger margin divide it by a power of
        two. Gradients of parameters and of activations count, and rows of a tree.

        If the gradients span more than the range of `dtype`, no scale keeps them all:
        `total("gradient").shares(dtype, scale)` says what this one loses.

        Args:
          dtype: a half type; the report's if left out.

        Returns: a scale between 2**-126 and 2**126; None if it cannot be known, because a gradient
          is infinite or NaN (measure under a lower scale) or because all are zero.
        Raises: ValueError for another dtype.
        """
        limits = limits_of(dtype or self.dtype)
        rows = [row for role in SCALED for row in self.counting(role)]
        largest = [max(row.counts) - exponent_of(row.scale) for row in rows if row.counts]
        if not largest or any(row.infinities or row.nans for row in rows):
            return None
        exponent = limits.maxexp - 1 - MARGIN - max(largest)
        return 2.0 ** max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, exponent))

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings."""
        rows = []
        for row in self.rows:
            first, last = row.exponents or (0, -1)
            counts = [row.counts.get(exponent, 0) for exponent in range(first, last + 1)]
            shares = dataclasses.asdict(row.shares(self.dtype))
            rows.append({**vars(row), "counts": counts, "lowest": first, "shares": shares})
        return {"dtype": self.dtype, "best_scale": self.best_scale(), "rows": rows}

    def __str__(self) -> str:
        best = self.best_scale()
        cells = []
        for total in map(self.total, self.roles):
            scale = _power(total.scale) if total.role in SCALED else ""
            cells.append((total.role, scale, *_shares(total, self.dtype)))
        lines = [table(("role", "scale", *SHARES), cells)]
        lines.append(f"best static scale: {'unknown' if best is None else _power(best)}")
        for role in self.roles:
            lines += _section(f"{role}s", self.counting(role), self.dtype)
        for dtype in FLOAT8_TYPES:
            lines += _section("cotangents of float8 products", self.float8_cotangents, dtype)
        return "\n".join(lines)


def _section(what: str, rows: list[Range], dtype: str) -> list[str]:
    """Returns the lines of the rows that lose something in `dtype`; none if nothing is lost."""
    losing = [row for row in rows if any(_losses(row, dtype))]
    rows = sorted(losing, key=lambda row: _losses(row, dtype), reverse=True)
    if not rows:
        return []
    where = ("path", "operation", "source") if any(row.operation for row in rows) else ("path",)
    cells = [(*(getattr(row, name) for name in where), *_shares(row, dtype)) for row in rows]
    title = f"{what} in {dtype}, most is lost first:"
    return first_rows(title, (*where, *SHARES), cells, SHOWN, "rows")


def _losses(row: Range, dtype: str) -> tuple[float, ...]:
    """Returns shares to sort by: the lost share, the share that may be, the share that loses
    digits."""
    shares = row.shares(dtype)
    zero = shares.zero if row.dtype in HALVES else 0.0  # it may have underflowed already
    return shares.lost, zero, shares.subnormal if shares.subnormal > NOTABLE else 0.0


def _shares(row: Range, dtype: str) -> tuple[str, ...]:
    shares = row.shares(dtype)
    numbers = shares.zero, shares.underflow, shares.subnormal, shares.overflow
    special = shares.infinite + shares.nan
    percents = (f"{100 * share:.3g} %" if share else "0" for share in (*numbers, special))
    ends = dict.fromkeys(row.exponents or ())
    return row.dtype, str(row.size), *percents, " to ".join(map(str, ends))


def _power(scale: float) -> str:
    return f"2^{exponent_of(scale)}"
