"""How far one array lies from another: norms and angles, in float64 on the host."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

COLUMNS = (
    "of", "path", "elements", "relative error", "largest error", "reference norm", "cosine",
    "remark",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Difference:
    """The error of one leaf, or of a module's leaves together: a the policy's, b the reference's.

    Everything is computed in float64 on the host: integers are exact up to 2**53, norms overflow
    above 1e154. An element that is the same infinity in both is no error. One that is NaN in the
    reference has no error that could be known: the errors are NaN then. Any other that is not
    finite in one of them is an infinite error. None of these is part of the norms of a and b.

    Attributes:
      kind: "result" or "gradient".
      path: names in the result, or in the differentiated argument, joined by slashes; "" at the
        root. With several `argnums` the argument's number comes first.
      elements: the number of elements of a.
      nonfinite, reference_nonfinite: how many elements of a, and of b, are infinite or NaN.
      error_norm, norm, reference_norm: Euclidean, of a - b, of a and of b.
      inner_product: sum of a * b; the real part where they are complex.
      largest_error: the largest absolute a - b.

    >>> from jmp.diagnostics import compare
    >>> comparison = compare(lambda w: jnp.sum(w @ w), "mixed_bfloat16")(jnp.eye(2))
    >>> [(row.kind, row.relative_error) for row in comparison.rows]
    [('result', 0.0), ('gradient', 0.0)]
    """

    kind: str
    path: str
    elements: int
    nonfinite: int
    reference_nonfinite: int
    error_norm: float
    norm: float
    reference_norm: float
    inner_product: float
    largest_error: float

    @property
    def relative_error(self) -> float:
        """||a - b|| / ||b||; 0 where both are zero, infinite where b is, NaN where b has a NaN."""
        if self.error_norm == 0 or math.isnan(self.error_norm):
            return self.error_norm
        finite = math.isfinite(self.error_norm) and self.reference_norm > 0
        return self.error_norm / self.reference_norm if finite else math.inf

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between a and b; None where one is zero or they are not finite."""
        norms = self.norm * self.reference_norm
        if norms == 0 or not math.isfinite(self.error_norm):
            return None
        return max(-1.0, min(1.0, self.inner_product / norms))  # rounding may go past one


def difference(kind: str, path: str, a: np.ndarray, b: np.ndarray, divisor: float) -> Difference:
    """Returns the error of `a / divisor` against `b`; both may be of any dtype of numbers."""
    wide = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
    with np.errstate(invalid="ignore"):  # a complex infinity by a real number is NaN to NumPy
        a = a.astype(wide).ravel() / divisor
    b = b.astype(wide).ravel()
    counts = a.size, *(int(np.sum(~np.isfinite(x))) for x in (a, b))
    finite = np.isfinite(a) & np.isfinite(b)
    is_defined = bool(np.all(finite | (a == b)))
    unknown = math.nan if np.any(np.isnan(b)) else math.inf
    a, b = a[finite], b[finite]
    errors = np.abs(a - b) if is_defined else np.array([unknown])
    norms = (float(np.linalg.norm(x)) for x in (errors, a, b))
    inner_product, largest = float(np.vdot(a, b).real), float(errors.max(initial=0))
    numbers: list[Any] = [*counts, *norms, inner_product, largest]
    return Difference(kind, path, *numbers)


def together(kind: str, path: str, rows: list[Difference]) -> Difference:
    """Returns the error of the leaves of all rows as one vector."""

    def of(name: str) -> list[Any]:
        return [getattr(row, name) for row in rows]

    counts = (sum(of(name)) for name in ("elements", "nonfinite", "reference_nonfinite"))
    # NumPy keeps a NaN beside an infinity, which Python's own functions pass over.
    error, largest = np.linalg.norm(of("error_norm")), np.max(of("largest_error"))
    norms = (math.hypot(*of(name)) for name in ("norm", "reference_norm"))
    inner_product = math.fsum(of("inner_product"))
    numbers: list[Any] = [*counts, float(error), *norms, inner_product, float(largest)]
    return Difference(kind, path, *numbers)


def by_prefix(rows: Iterable[Difference], depth: int) -> list[Difference]:
    """Returns for each prefix of at most `depth` names of the paths its leaves together."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for row in rows:
        prefix = "/".join(row.path.split("/")[:depth])
        groups.setdefault((row.kind, prefix), []).append(row)
    return [together(*key, leaves) for key, leaves in groups.items()]


def cells(row: Difference, is_negligible: bool) -> tuple[str, ...]:
    """Returns a row of a table, in the order of `COLUMNS`."""
    remark = "below rounding" if is_negligible else ""
    if row.nonfinite or row.reference_nonfinite:
        remark = f"not finite: {row.nonfinite}, in the reference {row.reference_nonfinite}"
    if math.isnan(row.error_norm):
        both = "both are NaN" if row.nonfinite else "the reference is NaN"
        remark = f"{both}, the error unknown; {remark}"
    return (
        row.kind, row.path, str(row.elements), f"{row.relative_error:.2g}",
        f"{row.largest_error:.2g}", f"{row.reference_norm:.2g}",
        "" if row.cosine is None else f"{row.cosine:.6f}", remark,
    )  # fmt: skip


def weight(error: float) -> float:
    """Returns an error to sort by: NaN, which compares with nothing, counts as the worst."""
    return math.inf if math.isnan(error) else error
