"""`precision_report`: the operations of an autocast program, the dtype of each, and why.

A printed report has its sums first, then the hazards, then the rows. `assert_products_in`, for
users' tests, checks the dtype of each product of any program.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp._array_calls import ArrayCall
from jmp._messages import function_name
from jmp.autocasting._autocast import Traced
from jmp.autocasting._lowerings import cast
from jmp.autocasting._numbers import dtype_of
from jmp.autocasting._operations import decisions_of, is_product
from jmp.autocasting._passes import target_of
from jmp.autocasting._propagation import walk
from jmp.autocasting._steps import steps_of
from jmp.diagnostics._asked import asked_function, half_program, split_arguments, without_warnings
from jmp.diagnostics._places import module_and_line, place_name
from jmp.diagnostics._reports import FLOAT8, HALVES, Report, added_up, grouped, table, totals
from jmp.diagnostics._rows import Row, hazards_of, rows_with_operations, with_repeated
from jmp.dtypes import floating_dtype
from jmp.policy import Policy, get_policy
from jmp.trees import stands_for_numbers

SHOWN = 8  # products in another dtype, in the error of `assert_products_in`
COLUMNS = ("module", "dtype", "operations [why]", "GFLOP", "source")


def precision_report(
    fun: Callable[..., Any], policy: str | Policy, *early: Any, **options: Any
) -> Callable[..., "PrecisionReport"]:
    """Returns a function that reports what `autocast(fun, policy, **options)` does.

    Called with `fun`'s arguments it traces and plans, and runs nothing: `jax.ShapeDtypeStruct` may
    stand for arrays.

    Args:
      fun, policy: as for `jmp.autocast`. A policy that computes in float32 is refused: there is
        nothing to report. The rows show `fun`, which is the forward pass if it is a loss:
        `assert_products_in(jax.grad(...), dtype)` checks the backward pass. The report traces
        copies of nnx modules among the arguments; half arrays of Equinox modules count as float32
        numbers, as in `equinox.autocast`. A part of `fun` that is under autocast already, such as a
        model that an adapter wrapped, is shown in its dtypes, without reasons: ask about the model
        before it is wrapped.
      options: further options of `jmp.autocast`, such as `rules=` with paths.

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
    fun = asked_function("precision_report(fun, policy)(*args)", fun, early, policy, options)
    program = half_program("precision_report", fun, policy, options)

    def report(*args: Any, **kwargs: Any) -> PrecisionReport:
        with without_warnings():
            traced = program.trace(*split_arguments(*args, **kwargs), stands_for_numbers)
            return _report(traced, str(get_policy(policy)))

    return report


@dataclasses.dataclass(frozen=True)
class PrecisionReport(Report):
    """What `precision_report` found; `print` shows it, `to_dict` gives the data.

    Attributes:
      compute_dtype: the half type.
      rows: products, reductions, exponentials and what devices send each other, in the order of
        the program.
      half_flops_share: share of half and float8 products in the floating-point operations of all
        products, 0 to 1; None if there is no product.
      hazards: sentences that ask you to act, such as on a sum in half; usually empty. Repeated
        modules share a sentence.
      policy: the policy, as text.
      platform: which hardware the plan is for, "tpu", or "gpu", whose plan a CPU has too; see
        `platform=` of `jmp.autocast`.
      decisions: what else autocast does, with how often: forms of equations that move fewer bytes,
        and masks that are held within float16's range.

    `print` shows repeated modules in one line, and writes "(top)" for no module, or the outermost.

    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> report = precision_report(lambda w, x: x @ w, "mixed_bfloat16")(x, x)
    >>> report.compute_dtype, report.half_flops_share, report.float8_flops_share
    ('bfloat16', 1.0, 0.0)
    >>> report.hazards
    []
    """

    compute_dtype: str
    rows: list[Row]
    half_flops_share: float | None
    hazards: list[str]
    policy: str
    platform: str
    decisions: dict[str, int]
    _make_after: Callable[[str], Any] = dataclasses.field(repr=False, compare=False)

    @property
    def float8_flops_share(self) -> float:
        """Share of the floating-point operations of products that are float8, 0 to 1."""
        return _flops_share(self.rows, [FLOAT8]) or 0.0

    @property
    def passes(self) -> tuple[str, ...]:
        """The names of the passes that change a plan for this platform, in their order."""
        return tuple(one.name for one in target_of(self.platform).passes)

    def after(self, name: str) -> Any:
        """Returns the program that autocast makes if it stops after a pass: a `ClosedJaxpr`.

        Two of them, printed, show what the passes between them do.

        Args:
          name: one of `passes`.

        Raises: ValueError for any other name.

        >>> def attend(q, k, v):
        ...     return jax.nn.softmax(q @ k.T) @ v
        >>> q, k = (jax.ShapeDtypeStruct((n, 128), jnp.float32) for n in (256, 128))
        >>> report = precision_report(attend, "mixed_float16", platform="gpu")(q, k, k)
        >>> first, *_ = report.passes
        >>> forms = [str(report.after(name)) for name in (first, "softmax from its half result")]
        >>> ["custom_jvp" in form for form in forms]
        [False, True]
        """
        return self._make_after(name)

    def __str__(self) -> str:
        rows = with_repeated(self.rows)
        by_place = grouped(rows, lambda row: (row.module, row.source, _dtypes_shown(row)))
        times_of_reasons = totals((_reason_of(row), row.times) for row in self.rows)
        most_frequent = sorted(times_of_reasons.items(), key=lambda item: -item[1])
        numbers = {reason: number for number, (reason, _) in enumerate(most_frequent, 1)}
        lines = [
            f"policy: {self.policy}, planned for a {self.platform.upper()}",
            f"products: {_products(self.rows)}",
            "dtypes of operations, and why:",
        ]
        for (dtype, why), times in most_frequent:
            lines.append(f"  [{numbers[dtype, why]}] {times} x {dtype}: {why}")
        lines += ["besides dtypes:"] * bool(self.decisions)
        lines += [f"  {times} x {what}" for what, times in self.decisions.items()]
        lines.append("hazards:" if self.hazards else "hazards: none")
        lines += [f"  {hazard}" for hazard in self.hazards]
        lines += ["", _table(by_place.values(), numbers)]
        if len(rows) < len(self.rows):
            lines.append(
                f"{len(self.rows)} rows; repeated modules (*) and one place share a line, with the "
                "GFLOP of all"
            )
        return "\n".join(lines)


def _report(traced: Traced, policy: str) -> PrecisionReport:
    plan = traced.plan
    arrays = [  # arguments that `apply_to=` names are half
        x if x.dtype == dtype else jax.eval_shape(functools.partial(cast, dtype=dtype), x)
        for x, dtype in zip(traced.arrays, plan.reads[len(traced.constants) :], strict=True)
    ]

    def after(name: str) -> Any:
        emit = functools.partial(traced.emit_until(name), *traced.constants)
        return jax.make_jaxpr(emit)(*arrays)

    found = rows_with_operations(plan)
    rows = added_up((row for row, _ in found), "times", "flops")
    return PrecisionReport(
        compute_dtype=str(plan.request.settings.compute_dtype),
        rows=rows,
        half_flops_share=_flops_share(rows, [*HALVES, FLOAT8]),
        hazards=list(hazards_of(plan, found, rows)),
        policy=policy,
        platform=plan.request.target.platform,
        decisions=totals((what, times) for what, _, times in decisions_of(steps_of(plan))),
        _make_after=after,
    )


def _flops_share(rows: list[Row], dtypes: Collection[str]) -> float | None:
    """Returns the share of the operations of products that read these dtypes."""
    products = [row for row in rows if row.kind == "product"]
    total = sum(row.flops for row in products)
    found = sum(row.flops for row in products if row.dtype_in in dtypes)
    return found / total if total else None


def _products(rows: list[Row]) -> str:
    """Returns how many products read each dtype, and their share of the operations."""
    parts = []
    times = totals((row.dtype_in, row.times) for row in rows if row.kind == "product")
    for dtype, number in times.items():
        share = _flops_share(rows, [dtype]) or 0.0
        parts.append(f"{number} in {dtype} ({share:.1%} of the operations)")
    return ", ".join(parts) or "none"


def _reason_of(row: Row) -> tuple[str, str]:
    """Returns the dtype that a row reads, and why."""
    return row.dtype_in or row.dtype_out, row.why


def _table(groups: Collection[list[Row]], numbers: Mapping[tuple[str, str], int]) -> str:
    """Returns a table with a line for each group of rows, which stand at one place.

    Args:
      numbers: of the reasons.
    """
    top = "(top)" * any(row.module for rows in groups for row in rows)
    cells = []
    for rows in groups:
        operations = []
        for row in rows:
            times = f" x {row.times}" * (row.times > 1)
            operations.append(f"{row.operation}{times} [{numbers[_reason_of(row)]}]")
        flops = sum(row.flops for row in rows)
        gigaflops = f"{flops / 1e9:.3g}" if flops else ""
        place = rows[0].module or top, _dtypes_shown(rows[0])
        cells.append((*place, ", ".join(operations), gigaflops, rows[0].source))
    return table(COLUMNS, cells)


def _dtypes_shown(row: Row) -> str:
    dtypes = " -> ".join(dict.fromkeys(filter(None, (row.dtype_in, row.dtype_out))))
    return f"{dtypes} ({row.precision})" if row.precision else dtypes


def assert_products_in(
    fun: Callable[..., Any], dtype: DTypeLike, *early: Any
) -> Callable[..., None]:
    """Returns a function that checks that every product of `fun` multiplies in `dtype`.

    Called with `fun`'s arguments it traces `fun`, and runs nothing. If `fun` is a gradient,
    products of the backward pass and of recomputations count. Inner products are sums and do not
    count; products inside a kernel or a custom call are not seen.

    Args:
      fun: any function that JAX can trace, such as `jax.grad(jmp.autocast(loss, policy))`; or a
        module of nnx, such as a view. nnx modules, also among the arguments, are traced as copies.
      dtype: the dtype that all floating operands must have.

    Raises: TypeError if `fun` is no function, or its arguments were given in the first call;
      ValueError for a dtype that is not real floating. When called, AssertionError with a line for
      each of the first products in another dtype; also if there is none.

    >>> def loss(w, x):
    ...     return jnp.mean(x @ w)
    >>> gradient = jax.grad(autocast(loss, "mixed_bfloat16"))
    >>> assert_products_in(gradient, jnp.bfloat16)(jnp.ones((8, 8)), jnp.ones((4, 8)))
    """
    function = asked_function("assert_products_in(fun, dtype)(*args)", fun, early)
    expected = floating_dtype(dtype, "dtype")

    def check(*args: Any, **kwargs: Any) -> None:
        call = ArrayCall(function, *split_arguments(*args, **kwargs))
        jaxpr = jax.make_jaxpr(call.results)(*call.arrays).jaxpr
        products = [visit for visit in walk(jaxpr) if is_product(visit.equation)]
        name = function_name(fun)
        if not products:
            raise AssertionError(f"{name} has no product whose dtype could be checked.")
        others = []
        for visit in products:
            dtypes = {dtype for dtype in map(dtype_of, visit.equation.invars) if dtype is not None}
            floating = sorted(str(d) for d in dtypes if jnp.issubdtype(d, jnp.floating))
            if floating != [str(expected)]:
                product = f"{visit.equation.primitive.name} in {', '.join(floating)}"
                others.append(f"{product} at {place_name(*module_and_line(visit))}")
        if others:
            first = f"{len(others)} of {len(products)} products of {name} are not in {expected}:"
            raise AssertionError("\n".join([first, *others[:SHOWN]]))

    return check
