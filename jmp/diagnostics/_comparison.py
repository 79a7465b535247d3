"""How far apart two programs are: `compare`, and `logprob_gap` for log-probabilities.

`compare` measures the errors of results and gradients in mixed precision against float32.
`logprob_gap` measures the distance between the log-probabilities that two programs give the same
tokens. One program scores whole sequences at once, as in training and in prefill; the other
generates one token at a time, with a cache. Both compute the same function, and round in different
places.

The programs run on the device; errors and distances are computed in float64 on the host.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp._array_calls import Argnums, ArrayCall, cotangent, vjp_at
from jmp._messages import check_number, described
from jmp.autocasting._autocast import autocast
from jmp.diagnostics._asked import asked_function, split_arguments
from jmp.diagnostics._reports import Report, grouped, table
from jmp.loss_scaling._gradients import pair_of
from jmp.policy import Policy, get_policy
from jmp.trees import PyTree, cast_to_at_least_float32, path_string

COLUMNS = (
    "of", "path", "elements", "relative error", "largest error", "reference norm", "remark",
)  # fmt: skip
QUANTILES = (0.5, 0.9, 0.99)
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

    >>> def loss(params, x):
    ...     return jnp.mean(jnp.tanh(x @ params["w"]))
    >>> comparison = compare(loss, "mixed_bfloat16")({"w": jnp.eye(4) / 3}, jnp.ones((2, 4)))
    >>> [(row.kind, row.path, row.relative_error < 0.01) for row in comparison.rows]
    [('result', '', True), ('gradient', 'w', True)]
    """
    fun = asked_function("compare(fun, policy)(*args)", fun, early, policy, options)
    scale = check_positive(scale, "compare", "scale", "a loss scale, above zero")
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
      error_norm, reference_norm: Euclidean, of a - b and of b.
      largest_error: the largest absolute a - b.
      relative_error: ||a - b|| / ||b||; 0 if both are zero, infinite if only b is, NaN if b has a
        NaN.

    >>> from jmp.diagnostics import compare
    >>> comparison = compare(lambda w: jnp.sum(w @ w), "mixed_bfloat16")(jnp.eye(2))
    >>> [(row.kind, row.relative_error) for row in comparison.rows]
    [('result', 0.0), ('gradient', 0.0)]
    """

    kind: str
    path: str
    elements: int
    error_norm: float
    reference_norm: float
    largest_error: float
    relative_error: float


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
    fun: Callable[..., Any], given: Arguments, argnums: Argnums, scale: float, has_aux: bool = False
) -> Results:
    """Returns results and gradients, by kind and path, from one compiled program.

    The means of the results are added up, multiplied by `scale` and differentiated. With `has_aux`
    only the first result counts.

    Raises: as `compare`.
    """
    call = ArrayCall(fun, *given)
    positions = {
        ("gradient", path): i
        for i, path in call.within(argnums, "compare").items()
        if jnp.issubdtype(call.arrays[i].dtype, jnp.inexact)
    }

    def of_arrays(*arrays: jax.Array) -> tuple[PyTree, PyTree]:
        results = jax.tree.map(jnp.asarray, call(*arrays))
        if not has_aux:
            _refuse_loss_with_aux(results)
            return results, None
        return pair_of(results, "(loss, aux)")

    def compute(*arrays: jax.Array) -> tuple[PyTree, tuple[jax.Array, ...]]:
        results, vjp, aux = vjp_at(of_arrays, arrays, list(positions.values()))
        gradients = vjp(jax.tree.map(lambda x: cotangent(x, scale / max(1, x.size)), results))
        return (results, aux) if has_aux else results, gradients

    results, gradients = jax.jit(compute)(*call.arrays)
    leaves = jax.tree_util.tree_leaves_with_path(results)
    found = {("result", path_string(path)): leaf for path, leaf in leaves}
    return found | dict(zip(positions, gradients, strict=True))


def _refuse_loss_with_aux(results: PyTree) -> None:
    is_pair = isinstance(results, (tuple, list)) and len(results) == 2
    if is_pair and isinstance(results[0], jax.Array) and results[0].ndim == 0:
        raise TypeError(
            "compare got a pair of a scalar and something else, whose means it would add up. If "
            "they are (loss, aux), write has_aux=True, which differentiates only the loss. "
            "Otherwise return them in a dictionary, or one: lambda *args: fun(*args)[0]."
        )


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
    both = np.isfinite(a) & np.isfinite(b)
    errors = np.abs(a[both] - b[both])
    if not np.all(both | (a == b)):
        errors = np.array([math.nan if np.any(np.isnan(b)) else math.inf])
    return _error_row(kind, path, a.size, errors, b[both], errors)


def error_of_all(kind: str, path: str, rows: list[Difference]) -> Difference:
    """Returns the error of the leaves of all rows as one vector."""
    errors = [row.error_norm for row in rows]
    references = [row.reference_norm for row in rows]
    largest = [row.largest_error for row in rows]
    elements = sum(row.elements for row in rows)
    return _error_row(kind, path, elements, errors, references, largest)


def _error_row(
    kind: str, path: str, elements: int, errors: Any, references: Any, largest: Any
) -> Difference:
    """Returns a row.

    Args:
      errors, references: numbers, or the norms of parts: their Euclidean norms count.
      largest: errors of which the largest counts.
    """
    error, reference = float(np.linalg.norm(errors)), float(np.linalg.norm(references))
    relative = math.inf
    if error == 0 or math.isnan(error):
        relative = error
    elif math.isfinite(error) and reference > 0:
        relative = error / reference
    largest_error = float(np.max(largest, initial=0))  # NumPy keeps a NaN
    return Difference(kind, path, elements, error, reference, largest_error, relative)


def cells_of(row: Difference, is_negligible: bool) -> tuple[str, ...]:
    """Returns a row of a table, in the order of `COLUMNS`."""
    errors = row.relative_error, row.largest_error, row.reference_norm
    remark = "below rounding" if is_negligible else ""
    return row.kind, row.path, str(row.elements), *(f"{error:.2g}" for error in errors), remark


# Log-probabilities.


def logprob_gap(
    trained: Callable[..., Any], sampled: Callable[..., Any], *early: Any
) -> Callable[..., "LogprobGap"]:
    """Returns a function that measures |log p - log q| per token between two programs.

    Each takes the same arguments and returns log-probabilities of the same tokens, one number a
    token, in arrays of one shape: `trained` log p, as training computes it, `sampled` log q, as the
    loop that generates does. Both run on the device as they are given: wrap them in `jmp.autocast`.
    The differences are computed in float64 on the host. Paddings, and tokens after the end of a
    text, should not count: return only those that do, such as `log_p[mask]`.

    Args:
      trained, sampled: functions of arrays, or of any pytrees.

    Returns: a function of their arguments that returns a `LogprobGap`.

    Raises:
      TypeError: one of them is no function or returns no floating array.
      ValueError: shapes differ, or no token is finite in both.

    >>> logits, tokens = jnp.eye(3), jnp.arange(3)
    >>> def score(logits):
    ...     return jnp.diagonal(jax.nn.log_softmax(logits))
    >>> def rounded(logits):
    ...     return score(logits.astype(jnp.bfloat16)).astype(jnp.float32)
    >>> gap = logprob_gap(score, rounded)(logits)
    >>> gap.tokens, 0 < gap.mean <= gap.maximum < 0.01, gap.effective_sample_size > 0.999
    (3, True, True)
    """
    call = "logprob_gap(trained, sampled)(*args)"
    functions = [asked_function(call, f, early) for f in (trained, sampled)]

    def measure(*args: Any, **kwargs: Any) -> LogprobGap:
        args, kwargs = split_arguments(*args, **kwargs)
        log_p, log_q = (_scores(function(*args, **kwargs)) for function in functions)
        if log_p.shape != log_q.shape:
            raise ValueError(
                f"logprob_gap got log-probabilities of the shapes {log_p.shape} and {log_q.shape}; "
                "expected one number for each of the same tokens from both functions."
            )
        return _gap(log_p, log_q)

    return measure


@dataclasses.dataclass(frozen=True)
class LogprobGap(Report):
    """What `logprob_gap` found; `print` shows it, `to_dict` gives the data. Natural logarithms.

    A token that has minus infinity in both has no gap; a token that is not finite in one of them,
    or NaN, is counted in `nonfinite` and is no part of the other numbers.

    Attributes:
      tokens: how many tokens there are.
      nonfinite: how many of them have a gap that is not finite.
      mean, maximum: of |log p - log q|.
      quantiles: of |log p - log q|, by their share: 0.5, 0.9, 0.99.
      bias: the mean of log p - log q, with its sign.
      effective_sample_size: of the importance ratios r = p / q, as a share of the tokens:
        (sum r)^2 / (n sum r^2) (Kong 1992); 1 if all ratios are equal.

    >>> from jmp.diagnostics import logprob_gap
    >>> score = lambda x: jnp.log(x)
    >>> gap = logprob_gap(score, lambda x: score(x) - 0.25)(jnp.full(8, 0.5))
    >>> round(gap.mean, 3), round(gap.effective_sample_size, 3)
    (0.25, 1.0)
    >>> gap.quantiles[0.5] == gap.maximum
    True
    """

    tokens: int
    nonfinite: int
    mean: float
    maximum: float
    quantiles: dict[float, float]
    bias: float
    effective_sample_size: float

    def __str__(self) -> str:
        rows = [("mean", f"{self.mean:.3g}"), ("maximum", f"{self.maximum:.3g}")]
        rows += [(f"quantile {share}", f"{gap:.3g}") for share, gap in self.quantiles.items()]
        lines = [
            f"|log p - log q| of {self.tokens:,} tokens:",
            table(("", "nats"), rows),
            f"log p - log q on average: {self.bias:.3g}",
            f"effective sample size of p / q: {self.effective_sample_size:.4f} of the tokens",
        ]
        if self.nonfinite:
            lines.append(f"left out, not finite: {self.nonfinite:,} tokens")
        return "\n".join(lines)


def _scores(found: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns log-probabilities in float64."""
    dtype = getattr(found, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, np.floating):
        raise TypeError(
            f"logprob_gap got {described(found)} from a function; expected an array of "
            "log-probabilities, one floating number a token. If it returns several, choose one: "
            "lambda *args: fun(*args)[0]."
        )
    return np.asarray(found).astype(np.float64)


def _gap(log_p: Any, log_q: Any) -> LogprobGap:
    """Returns the gap of log-probabilities in float64."""
    with np.errstate(invalid="ignore"):
        differences = np.where(log_p == log_q, 0, log_p - log_q)
    found = differences[np.isfinite(differences)]
    if not found.size:
        raise ValueError(
            f"logprob_gap found no token with finite log-probabilities in both, of {log_p.size}."
        )
    gaps = np.abs(found)
    ratios = np.exp(found - found.max())  # their common factor drops out
    return LogprobGap(
        tokens=log_p.size,
        nonfinite=log_p.size - found.size,
        mean=float(gaps.mean()),
        maximum=float(gaps.max()),
        quantiles={share: float(np.quantile(gaps, share)) for share in QUANTILES},
        bias=float(found.mean()),
        effective_sample_size=float(ratios.sum() ** 2 / (ratios.size * (ratios**2).sum())),
    )
