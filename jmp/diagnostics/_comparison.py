"""`compare`: the errors of results and gradients in mixed precision, measured against float32.

Both programs run on the device; the errors are computed in float64 on the host.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp._array_calls import ArrayCall, cotangent, vjp_at
from jmp._messages import PrecisionWarning, check_number, users_stacklevel
from jmp.autocasting._autocast import autocast
from jmp.diagnostics._arguments import asked_function, split_arguments
from jmp.diagnostics._tables import Report, grouped, table
from jmp.loss_scaling._gradients import pair_of
from jmp.policy import Policy, get_policy
from jmp.trees import PyTree, cast_to_at_least_float32, path_string

COLUMNS = (
    "of", "path", "elements", "relative error", "largest error", "reference norm", "remark",
)  # fmt: skip
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments, and those by name
Results = dict[tuple[str, str], jax.Array]  # by kind, "result" or "gradient", and path


def compare(
    fun: Callable[..., Any],
    policy: str | Policy,
    *early: Any,
    argnums: int | Sequence[int] = 0,
    scale: float = 1.0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., "Comparison"]:
    """Returns a function that measures `autocast(fun, policy)` against `fun` in float32.

    Called with `fun`'s arguments it compiles both and runs them, forward and backward. A scalar
    result is differentiated as it is. Any other result is replaced by its mean, and several by
    the sum of their means: the cotangent of a result of n elements is 1 / n everywhere. With
    `has_aux` only the loss is differentiated; both are compared.

    In the reference half arguments are widened, exactly, and products run at the highest precision
    of the device: no TF32. Integers, keys and all that is no float pass as they are.

    Args:
      fun, policy: as for `jmp.autocast`.
      argnums: as in `jax.grad`: the arguments whose floating arrays are differentiated; () for
        none.
      scale: loss scale of the policy's run: its cotangents are multiplied by it, and its
        gradients divided in float64, so that the comparison counts no underflow that a loss scale
        avoids.
      has_aux: whether `fun` returns a pair `(loss, aux)`, as for `jax.grad`.
      options: further options of `jmp.autocast`, such as `rules`.

    Returns: a function of `fun`'s arguments, any pytrees, that returns a `Comparison`. They are not
      donated.

    Raises:
      TypeError: `fun` is no function, or its arguments were given in the first call; when called,
        with `has_aux` a result that is no pair, without it a pair of a scalar and something else,
        which may be `(loss, aux)`; otherwise as `jmp.autocast`.
      ValueError: a scale that is not positive; when called, `argnums` that name no argument.

    Warns: `PrecisionWarning` if a result is float16 and the scale is beyond its range.

    >>> def loss(params, x):
    ...     return jnp.mean(jnp.tanh(x @ params["w"]))
    >>> comparison = compare(loss, "mixed_bfloat16")({"w": jnp.eye(4) / 3}, jnp.ones((2, 4)))
    >>> [(row.kind, row.path, row.relative_error < 0.01) for row in comparison.rows]
    [('result', '', True), ('gradient', 'w', True)]
    """
    fun = asked_function("compare(fun, policy)(*args)", fun, early, policy)
    check_positive(scale, "compare", "scale", "a loss scale, above zero")
    lowered = autocast(fun, policy, **options)

    def measure(*args: Any, **kwargs: Any) -> Comparison:
        given = split_arguments(*args, **kwargs)
        found = results_and_gradients(lowered, given, argnums, scale, has_aux)
        wide = cast_to_at_least_float32(given)
        with jax.default_matmul_precision("highest"):
            expected = results_and_gradients(fun, wide, argnums, 1.0, has_aux)
        return comparison_of(policy, scale, found, expected)

    return measure


@dataclasses.dataclass(frozen=True)
class Difference:
    """The error of one leaf, or of a module's leaves together: a the policy's, b the reference's.

    Everything is computed in float64 on the host: integers are exact up to 2**53, norms overflow
    above 1e154. An element that is the same infinity in both is no error. If an element of the
    reference is NaN, the errors are NaN too, because nobody knows them. Any other element that is
    not finite in a or b is an infinite error. None of these elements is part of the norm of b.

    Attributes:
      kind: "result" or "gradient".
      path: names in the result, or in the differentiated argument, joined by slashes; "" at the
        root. With several `argnums` the argument's number comes first.
      elements: the number of elements of a.
      nonfinite, reference_nonfinite: how many elements of a, and of b, are infinite or NaN.
      error_norm, reference_norm: Euclidean, of a - b and of b.
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
    reference_norm: float
    largest_error: float

    @property
    def relative_error(self) -> float:
        """||a - b|| / ||b||; 0 if both are zero, infinite if only b is, NaN if b has a NaN."""
        if self.error_norm == 0 or math.isnan(self.error_norm):
            return self.error_norm
        finite = math.isfinite(self.error_norm) and self.reference_norm > 0
        return self.error_norm / self.reference_norm if finite else math.inf


@dataclasses.dataclass(frozen=True)
class Comparison(Report):
    """What `compare` found; `print` shows modules and the worst leaves, `to_dict` gives the data.

    Attributes:
      policy: the policy, as text.
      scale: the loss scale of the policy's run.
      rows: a row for each leaf: results first, then gradients.

    >>> found = compare(lambda w: w @ w, "mixed_float16")(jnp.eye(2))
    >>> found.policy, [row.kind for row in found.worst(2)]
    ('p=full,c=f16,o=full', ['result', 'gradient'])
    """

    policy: str
    scale: float
    rows: list[Difference]

    def worst(self, n: int = 10) -> list[Difference]:
        """Returns the `n` leaves of the largest relative errors, the worst first.

        Gradients that consist of rounding errors come last, such as the gradient of the bias of
        attention's keys: the reference's norm is below 16 unit roundoffs of the norm of all
        gradients, and the error below 16 unit roundoffs of the compute dtype.
        """
        return self._worst_first(self.rows)[:n]

    def by_module(self, depth: int = 1) -> list[Difference]:
        """Returns a row for each prefix of at most `depth` names of the paths, the worst first.

        The leaves below a prefix count as one vector; with depth 0 there is one prefix, of all
        leaves.

        >>> params = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones((1, 2))}}
        >>> dense = lambda p, x: x @ p["dense"]["kernel"] + p["dense"]["bias"]
        >>> rows = compare(dense, "mixed_bfloat16")(params, jnp.ones((4, 2))).by_module()
        >>> [(row.path, row.elements) for row in rows if row.kind == "gradient"]
        [('dense', 6)]
        """
        prefix = lambda row: (row.kind, "/".join(row.path.split("/")[:depth]))
        groups = grouped(self.rows, prefix).items()
        return self._worst_first(error_of_all(*key, leaves) for key, leaves in groups)

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings.

        Errors may be infinite or NaN.
        """
        rows = [{**vars(row), "relative_error": row.relative_error} for row in self.rows]
        return super().to_dict() | {"rows": rows}

    def __str__(self) -> str:
        scaled = f", loss scale {self.scale:g}" if self.scale != 1 else ""
        modules = self.by_module()
        lines = [f"{self.policy} against float32{scaled}:", self._table(modules)]
        if len(modules) < len(self.rows):
            worst = self.worst()
            lines += [f"the worst {len(worst)} of {len(self.rows)} leaves:", self._table(worst)]
        return "\n".join(lines)

    def _table(self, rows: list[Difference]) -> str:
        return table(COLUMNS, [cells_of(row, self._is_negligible(row)) for row in rows])

    def _worst_first(self, rows: Iterable[Difference]) -> list[Difference]:
        def order(row: Difference) -> tuple[bool, float]:
            error = row.relative_error
            # A NaN, which compares with nothing, counts as the worst.
            return self._is_negligible(row), -math.inf if math.isnan(error) else -error

        return sorted(rows, key=order)

    def _is_negligible(self, row: Difference) -> bool:
        zero, noise = self._roundings
        return row.kind == "gradient" and row.reference_norm < zero and row.error_norm < noise

    @functools.cached_property
    def _roundings(self) -> list[float]:
        """16 unit roundoffs of the norm of all gradients, in float32 and in the compute dtype."""
        norms = (row.reference_norm for row in self.rows if row.kind == "gradient")
        total = math.hypot(*norms)
        dtypes = (np.float32, get_policy(self.policy).compute_dtype)
        return [8 * float(jnp.finfo(dtype).eps) * total for dtype in dtypes]


def check_positive(number: float, caller: str, name: str, expected: str) -> float:
    """Returns a number; raises TypeError for anything else, ValueError if it is not above zero."""
    is_right = lambda number: 0 < number < math.inf
    return float(check_number(number, caller, expected, is_right, name=name))


def results_and_gradients(
    fun: Callable[..., Any],
    given: Arguments,
    argnums: int | Sequence[int],
    scale: float,
    has_aux: bool = False,
) -> Results:
    """Returns results and gradients, by kind and path, from one compiled program."""
    call = ArrayCall(fun, *given)
    positions = {
        ("gradient", path): i
        for i, path in call.within(argnums, "compare").items()
        if jnp.issubdtype(call.arrays[i].dtype, jnp.inexact)
    }

    def compute(*arrays: jax.Array) -> tuple[PyTree, tuple[jax.Array, ...]]:
        of_arrays = lambda *arrays: jax.tree.map(jnp.asarray, call(*arrays))
        results, vjp = vjp_at(of_arrays, arrays, list(positions.values()))
        return results, vjp(cotangents_of(results, scale, has_aux))

    results, gradients = jax.jit(compute)(*call.arrays)
    return {
        ("result", path_string(path)): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(results)
    } | dict(zip(positions, gradients, strict=True))


def cotangents_of(results: PyTree, scale: float, has_aux: bool) -> PyTree:
    """Returns the cotangents of results whose means are added up and multiplied by a scale.

    Args:
      has_aux: whether the results are a pair, of which only the first counts.

    Raises: as `compare`.
    Warns: if the dtype of a result has no number as large as its cotangent, which is infinite then,
      as in training.
    """

    def of(path: Any, x: Any) -> Any:
        number = scale / max(1, x.size)
        if x.dtype == jnp.float16 and number > float(jnp.finfo(jnp.float16).max):
            number, name = math.inf, path_string(path)
            warnings.warn(
                f"compare's result{' ' * bool(name)}{name} is float16 under the policy, which has "
                f"no number as large as the scale {scale:g}: its gradients are infinite, as in "
                "training with this scale. Widen what the loss is computed from "
                "(jmp.cast_to_full of the parameters or the batch), or the loss itself.",
                PrecisionWarning,
                stacklevel=users_stacklevel(),
            )
        return cotangent(x, number)

    if has_aux:
        loss, aux = pair_of(results, "(loss, aux)")
        zeros = jax.tree.map(lambda x: cotangent(x, 0), aux)
        leaves = jax.tree.leaves((jax.tree_util.tree_map_with_path(of, loss), zeros))
        return jax.tree.unflatten(jax.tree.structure(results), leaves)
    is_pair = isinstance(results, (tuple, list)) and len(results) == 2
    if is_pair and jax.tree.leaves(results)[0] is results[0] and np.ndim(results[0]) == 0:
        raise TypeError(
            "compare got a pair of a scalar and something else, whose means it would add up. If "
            "they are (loss, aux), write has_aux=True, which differentiates only the loss. "
            "Otherwise return them in a dictionary, or one: lambda *args: fun(*args)[0]."
        )
    return jax.tree_util.tree_map_with_path(of, results)


def comparison_of(
    policy: str | Policy, scale: float, found: Results, expected: Results
) -> Comparison:
    """Returns the `Comparison` of results and gradients that were computed already.

    Args:
      found: the results of the policy, with gradients that are multiplied by `scale`.
      expected: the results of the reference.
    """
    divisors = {"result": 1.0, "gradient": float(scale)}
    rows = [
        error_of(*key, np.asarray(found[key]), np.asarray(expected[key]), divisors[key[0]])
        for key in expected
        if not jnp.issubdtype(expected[key].dtype, jax.dtypes.extended)  # keys
    ]
    return Comparison(str(get_policy(policy)), float(scale), rows)


def error_of(kind: str, path: str, a: np.ndarray, b: np.ndarray, divisor: float) -> Difference:
    """Returns the error of `a / divisor` against `b`; both may be of any dtype of numbers."""
    wide = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
    with np.errstate(invalid="ignore"):  # NumPy makes NaN of a complex infinity over a real number
        a = a.astype(wide).ravel() / divisor
    b = b.astype(wide).ravel()
    is_finite, is_reference_finite = np.isfinite(a), np.isfinite(b)
    both = is_finite & is_reference_finite
    errors = np.abs(a[both] - b[both])
    if not np.all(both | (a == b)):
        errors = np.array([math.nan if np.any(np.isnan(b)) else math.inf])
    return Difference(
        kind=kind,
        path=path,
        elements=a.size,
        nonfinite=int(np.sum(~is_finite)),
        reference_nonfinite=int(np.sum(~is_reference_finite)),
        error_norm=float(np.linalg.norm(errors)),
        reference_norm=float(np.linalg.norm(b[both])),
        largest_error=float(errors.max(initial=0)),
    )


def error_of_all(kind: str, path: str, rows: list[Difference]) -> Difference:
    """Returns the error of the leaves of all rows as one vector."""

    def of(name: str) -> list[Any]:
        return [getattr(row, name) for row in rows]

    return Difference(
        kind=kind,
        path=path,
        elements=sum(of("elements")),
        nonfinite=sum(of("nonfinite")),
        reference_nonfinite=sum(of("reference_nonfinite")),
        # NumPy keeps a NaN beside an infinity; Python's own functions pass over it.
        error_norm=float(np.linalg.norm(of("error_norm"))),
        reference_norm=math.hypot(*of("reference_norm")),
        largest_error=float(np.max(of("largest_error"))),
    )


def cells_of(row: Difference, is_negligible: bool) -> tuple[str, ...]:
    """Returns a row of a table, in the order of `COLUMNS`."""
    remark = "below rounding" if is_negligible else ""
    if row.nonfinite or row.reference_nonfinite:
        remark = f"not finite: {row.nonfinite}, in the reference {row.reference_nonfinite}"
    return (
        row.kind, row.path, str(row.elements), f"{row.relative_error:.2g}",
        f"{row.largest_error:.2g}", f"{row.reference_norm:.2g}", remark,
    )  # fmt: skip
