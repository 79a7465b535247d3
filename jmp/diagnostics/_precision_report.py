"""`precision_report`: what an autocast program computes in which dtype, and why."""

import collections
import dataclasses
import warnings
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.extend.core import Jaxpr

from jmp import _jax_compat
from jmp._calls import ArrayCall
from jmp.autocasting._autocast import make_program
from jmp.autocasting._operations import NoHalfProductWarning
from jmp.autocasting._program import Program, Traced
from jmp.autocasting._registry import rule_for
from jmp.diagnostics._asked import check_asked
from jmp.diagnostics._float8_hazards import float8_hazards, float8_places
from jmp.diagnostics._hazards import (
    dear_in_float32,
    delicate_in_half,
    odd_sizes,
    rounded_arguments,
    unused_rules,
)
from jmp.diagnostics._places import lines_of_callers, with_places
from jmp.diagnostics._ranges import FLOAT8, HALVES
from jmp.diagnostics._rendering import render, render_every_row
from jmp.diagnostics._residuals import residuals
from jmp.diagnostics._rows import Decision, Row, decisions_in, rows_of
from jmp.diagnostics._scoped_modules import apart, in_paths
from jmp.diagnostics._tables import totals
from jmp.policy import Policy, get_policy
from jmp.rules import UnusedRuleWarning


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
    check_asked("precision_report", "precision_report(fun, policy)(*args)", fun, early, policy)
    program = make_program(in_paths(fun), policy, **options)
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
        call = ArrayCall(of_arrays, *apart(*args, **kwargs), is_taken)
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
        """Returns every row as text, and the reasons."""
        return render_every_row(self)

    def __str__(self) -> str:
        return render(self)


def _report(program: Program, traced: Traced, policy: str) -> PrecisionReport:
    jaxpr, constants = _jax_compat.open_jaxpr(traced.closed)
    lines = lines_of_callers(jaxpr)
    rows = rows_of(traced.plan, lines)
    operands = [*constants, *traced.arrays]
    emitted = _jax_compat.open_jaxpr(jax.make_jaxpr(traced.emit)(*operands))[0]
    return PrecisionReport(
        str(program.settings.compute_dtype),
        rows,
        _casts(emitted),
        _flops_share(rows, [*HALVES, FLOAT8]),
        _residual_bytes(traced.emit, operands),
        _residual_bytes(_jax_compat.as_function(traced.closed), traced.arrays),
        [
            *delicate_in_half(rows),
            *rounded_arguments(traced.plan, lines),
            *dear_in_float32(rows),
            *unused_rules(traced),
            *odd_sizes(emitted, float8_places(rows)),
            *float8_hazards(traced.plan, rows),
        ],
        policy,
        decisions_in(traced.plan, lines),
    )


def _flops_share(rows: list[Row], dtypes: Collection[str]) -> float | None:
    """Returns the share of the operations of products that read these dtypes."""
    products = [row for row in rows if row.kind == "product"]
    total = sum(row.flops for row in products)
    found = sum(row.flops for row in products if row.dtype_in in dtypes)
    return found / total if total else None


def _casts(jaxpr: Jaxpr) -> dict[tuple[str, str, str, str], int]:
    found: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    for equation, path, source, _ in with_places(jaxpr):
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
