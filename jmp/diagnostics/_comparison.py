"""`compare`: how far results and gradients in mixed precision lie from those in float32."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp._calls import ArrayCall, cotangent, vjp_at
from jmp._describe import described
from jmp.autocasting._autocast import autocast
from jmp.diagnostics._asked import check_asked
from jmp.diagnostics._comparison_checks import check_float64, cotangent_of, warn_of_narrow_results
from jmp.diagnostics._errors import COLUMNS, Difference, by_prefix, cells, difference, weight
from jmp.diagnostics._scoped_modules import apart, in_paths
from jmp.diagnostics._tables import table
from jmp.policy import Policy, get_policy
from jmp.trees import PyTree, cast_floating, cast_to_at_least_float32, is_complex, path_string

Given = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments, and those by name
Results = dict[tuple[str, str], jax.Array]  # by kind, "result" or "gradient", and path


def compare(
    fun: Callable[..., Any],
    policy: str | Policy,
    *early: Any,
    argnums: int | Sequence[int] = 0,
    reference: str = "float32",
    scale: float = 1.0,
    **options: Any,
) -> Callable[..., "Comparison"]:
    """Returns a function that measures `autocast(fun, policy)` against `fun` in float32 or float64.

    Called with `fun`'s arguments it compiles both and runs them, forward and backward. A scalar
    result is differentiated as it is. Any other result is replaced by its mean, and several by the
    sum of their means: the cotangent of a result of n elements is 1 / n everywhere. Leave out
    results that should have no part in the gradient by `lambda *args: fun(*args)[0]`.

    If the policy or a rule has float8 products, it measures the same without them too.

    In the reference half arguments are widened, exactly, and products run at the highest precision
    of the device: no TF32. Integers, keys and all that is no float pass as they are.

    Args:
      fun, policy: as for `jmp.autocast`. A policy that computes in float32 is `fun` itself: its
        error against float64 is the one that any training has.
      argnums: as in `jax.grad`: which arguments are differentiated, their floating arrays alone;
        () for none.
      reference: "float32", or "float64", for which `fun` runs under `jax.enable_x64`. What `fun`
        itself casts to float32 stays float32 there, with a warning.
      scale: loss scale of the policy's run: its cotangents are multiplied, its gradients divided,
        in float64, so that what underflows without a loss scale is not counted.
      options: those of `jmp.autocast`, such as `rules`.

    Returns: a function of `fun`'s arguments, any pytrees, that returns a `Comparison`. They are not
      donated.

    Raises:
      TypeError: `fun` is no function, or its arguments were given in the first call; otherwise as
        `jmp.autocast`.
      ValueError: another reference, a scale that is not positive; when called, argnums that are not
        there, and `reference="float64"` where `fun` draws random numbers of 64 bits, because they
        differ from those in float32.

    Warns: where `fun` casts float64 down under `reference="float64"`; where a result is float16 and
      the scale is beyond its range.

    >>> def loss(params, x):
    ...     return jnp.mean(jnp.tanh(x @ params["w"]))
    >>> comparison = compare(loss, "mixed_bfloat16")({"w": jnp.eye(4) / 3}, jnp.ones((2, 4)))
    >>> [(row.kind, row.path, row.relative_error < 0.01) for row in comparison.rows]
    [('result', '', True), ('gradient', 'w', True)]
    """
    check_asked("compare", "compare(fun, policy)(*args)", fun, early, policy)
    if reference not in ("float32", "float64"):
        raise ValueError(
            f"compare got reference={described(reference)}; expected 'float32' or 'float64'."
        )
    if not 0 < scale < math.inf:
        raise ValueError(
            f"compare got scale={described(scale)}; expected a loss scale, above zero."
        )
    if isinstance(options.get("rules"), Iterator):  # read more than once
        options["rules"] = tuple(options["rules"])
    fun = in_paths(fun)
    lowered = autocast(fun, policy, **options)
    plain = _without_float8(policy, options)
    half = None if plain is None else autocast(fun, plain[0], **plain[1])

    def measure(*args: Any, **kwargs: Any) -> Comparison:
        given = apart(*args, **kwargs)
        found = run(lowered, given, argnums, scale)
        warn_of_narrow_results(found, scale)
        found_in_half = None if half is None else run(half, given, argnums, scale)
        if reference == "float64":
            with jax.enable_x64(True):
                expected = _run_in_float64(fun, given, argnums)
        else:
            with jax.default_matmul_precision("highest"):
                expected = run(fun, cast_to_at_least_float32(given), argnums, 1.0)
        return comparison_of(policy, reference, scale, found, expected, found_in_half)

    return measure


def _without_float8(policy: str | Policy, options: Any) -> tuple[Policy, dict[str, Any]] | None:
    """Returns a policy and its options without float8 products; None if there are none."""
    rules = options.get("rules", ())
    policies = [get_policy(policy), *(get_policy(p) for _, p in rules)]
    if all(p.product_dtype is None for p in policies):
        return None
    plain = [dataclasses.replace(p, product_dtype=None) for p in policies]
    targets = (target for target, _ in rules)
    return plain[0], {**options, "rules": list(zip(targets, plain[1:], strict=True))}


def comparison_of(
    policy: str | Policy,
    reference: str,
    scale: float,
    found: Results,
    expected: Results,
    without_float8: Results | None = None,
) -> "Comparison":
    """Returns what `compare` does, of results and gradients that were computed already.

    Args:
      found: the policy's, whose gradients are multiplied by `scale`.
      expected: the reference's.
      without_float8: those of the policy without its float8 products, if it has any.
    """
    divisors = {"result": 1.0, "gradient": float(scale)}

    def rows(results: Results) -> list[Difference]:
        return [
            difference(*key, np.asarray(results[key]), np.asarray(expected[key]), divisors[key[0]])
            for key in expected
            if not jnp.issubdtype(expected[key].dtype, jax.dtypes.extended)  # keys
        ]

    plain = [] if without_float8 is None else rows(without_float8)
    return Comparison(str(get_policy(policy)), reference, float(scale), rows(found), plain)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found; `print` shows modules and the worst leaves, `to_dict` gives the data.

    Attributes:
      policy: the policy, as text.
      reference: "float32" or "float64".
      scale: the loss scale of the policy's run.
      rows: one for each leaf: results first, then gradients.
      without_float8: the same rows where products are half instead of float8; empty where none is
        float8.

    >>> found = compare(lambda w: w @ w, "mixed_float16")(jnp.eye(2))
    >>> found.policy, [row.kind for row in found.worst(2)]
    ('p=full,c=f16,o=full', ['result', 'gradient'])
    """

    policy: str
    reference: str
    scale: float
    rows: list[Difference]
    without_float8: list[Difference] = dataclasses.field(default_factory=list)

    def worst(self, n: int = 10) -> list[Difference]:
        """Returns the `n` leaves of the largest relative errors, the worst first.

        Last come gradients that are rounding alone, such as that of the bias of attention's keys:
        the reference's norm is below 16 unit roundoffs of the norm of all gradients, and the error
        below 16 unit roundoffs of the compute dtype.
        """
        return self._worst_first(self.rows)[:n]

    def by_module(self, depth: int = 1) -> list[Difference]:
        """Returns a row for each prefix of at most `depth` names of the paths, the worst first.

        The norms are those of all leaves below the prefix as one vector; with depth 0 of all.

        >>> params = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones((1, 2))}}
        >>> dense = lambda p, x: x @ p["dense"]["kernel"] + p["dense"]["bias"]
        >>> rows = compare(dense, "mixed_bfloat16")(params, jnp.ones((4, 2))).by_module()
        >>> [(row.path, row.elements) for row in rows if row.kind == "gradient"]
        [('dense', 6)]
        """
        return self._worst_first(by_prefix(self.rows, depth))

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings.

        Errors may be infinite or NaN.
        """
        data = dataclasses.asdict(self)
        for name in ("rows", "without_float8"):
            for row, entry in zip(getattr(self, name), data[name], strict=True):
                entry |= {"relative_error": row.relative_error, "cosine": row.cosine}
        return data

    def __str__(self) -> str:
        scaled = f", loss scale {self.scale:g}" if self.scale != 1 else ""
        modules = self.by_module()
        lines = [f"{self.policy} against {self.reference}{scaled}:", self._table(modules)]
        if len(modules) < len(self.rows):
            worst = self.worst()
            lines += [f"the worst {len(worst)} of {len(self.rows)} leaves:", self._table(worst)]
        return "\n".join(lines)

    def _table(self, rows: list[Difference]) -> str:
        found = [cells(row, self._is_negligible(row)) for row in rows]
        if not self.without_float8:
            return table(COLUMNS, found)
        plain = [*self.without_float8, *by_prefix(self.without_float8, 1)]
        errors = {(row.kind, row.path): f"{row.relative_error:.2g}" for row in plain}
        columns = (*COLUMNS[:4], "without float8", *COLUMNS[4:])
        return table(columns, [(*c[:4], errors[c[0], c[1]], *c[4:]) for c in found])

    def _worst_first(self, rows: Iterable[Difference]) -> list[Difference]:
        return sorted(rows, key=lambda row: (self._is_negligible(row), -weight(row.relative_error)))

    def _is_negligible(self, row: Difference) -> bool:
        gradients = [row for row in self.rows if row.kind == "gradient"]
        total = math.hypot(*(row.reference_norm for row in gradients))
        dtypes = (self.reference, get_policy(self.policy).compute_dtype)
        zero, noise = (8 * float(jnp.finfo(dtype).eps) * total for dtype in dtypes)
        return row.kind == "gradient" and row.reference_norm < zero and row.error_norm < noise


def _run_in_float64(fun: Callable[..., Any], given: Given, argnums: int | Sequence[int]) -> Results:
    """Returns what `run` does, in float64; x64 is enabled."""
    wide = cast_floating(given, "float64")
    wide = jax.tree.map(lambda x: x.astype(np.complex128) if is_complex(x) else x, wide)
    call = ArrayCall(fun, *wide)
    try:
        check_float64(jax.make_jaxpr(call)(*call.arrays))
        return run(fun, wide, argnums, 1.0)
    except TypeError as error:
        error.add_note(
            "This came from compare's run in float64, where fun must take float64 arguments: a "
            "dtype written into fun may not fit. reference='float32' runs it as it is."
        )
        raise


def run(
    fun: Callable[..., Any], given: Given, argnums: int | Sequence[int], scale: float
) -> Results:
    """Returns results and gradients, by kind and path, from one compiled program."""
    call = ArrayCall(fun, *given)
    paths = {
        ("gradient", path): i
        for i, path in call.within(argnums, "compare").items()
        if jnp.issubdtype(call.arrays[i].dtype, jnp.inexact)
    }

    def results_and_gradients(*arrays: jax.Array) -> tuple[PyTree, tuple[jax.Array, ...]]:
        results, vjp = vjp_at(call, arrays, list(paths.values()))
        return results, vjp(jax.tree.map(lambda x: cotangent(x, cotangent_of(x, scale)), results))

    results, gradients = jax.jit(results_and_gradients)(*call.arrays)
    return {
        ("result", path_string(path)): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(results)
    } | dict(zip(paths, gradients, strict=True))
