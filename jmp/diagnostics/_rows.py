"""Rows of a precision report, read off a plan."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jmp import _jax_compat
from jmp.autocasting._graph import FULL, HALF, Node, is_inner_product
from jmp.autocasting._islands import Island
from jmp.autocasting._loops import turns
from jmp.autocasting._registry import Category, rule_for
from jmp.diagnostics._flops import flops
from jmp.diagnostics._places import module_path, source_line

SUMS = (
    "reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "reduce_window_sum",
    "scatter-add", "scatter_add", "psum", "psum_invariant", "reduce_scatter", "reduce",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation, or several that agree in everything but their number.

    Attributes:
      kind: "product", "reduction" or "exponential" (exp, log, powers, roots: what is expensive and
        runs in float32).
      operation: the primitive.
      module: path of modules or name scopes, "" at the top.
      source: "file:line" of the user's code, or of a library's where no frame is the user's;
        several where JAX traced a function once for all its callers.
      dtype_in, dtype_out: of the floating operands as they are read, and of the result as stored.
      why: the reason of the rule or of the planner.
      times: how often it stands in the program, turns of loops included.
      flops: floating-point operations of all of them together; 0 for what is no product.
    """

    kind: str
    operation: str
    module: str
    source: str
    dtype_in: str
    dtype_out: str
    why: str
    times: int = 1
    flops: int = 0


Lines = dict[tuple[int, str], str]


def rows_of(plan: Any, lines: Lines, times: int = 1) -> Iterator[Row]:
    """Yields a row for each product, reduction and exponential of a plan, nested ones included.

    Args:
      plan: of the whole program.
      lines: of `lines_of_callers`, for the jaxpr that was planned.
      times: how often the plan runs.
    """
    for step in plan.steps:
        if isinstance(step, Island):
            for node in step.nodes:
                yield from _rows_of_node(node, plan, lines, times, "float32")
        else:
            yield from _rows_of_node(step, plan, lines, times, None)


def _rows_of_node(
    node: Node, plan: Any, lines: Lines, times: int, inside: str | None
) -> Iterator[Row]:
    count = turns(node) if node.name == "scan" else 1
    if node.mode == "nested":
        for inner in node.inner if isinstance(node.inner, list) else [node.inner]:
            yield from rows_of(inner.plan, lines, times * count)
        return
    if any(True for _ in _jax_compat.inner_jaxprs(node.equation)):
        # Bound as a whole, in the dtypes it was traced with: a region, a custom derivative.
        for jaxpr in _jax_compat.inner_jaxprs(node.equation):
            yield from _rows_as_written(jaxpr, node, lines, node.scope, times * count)
        return
    half = str(plan.context.settings.compute_dtype)
    read = inside or (half if node.mode == HALF else FULL)
    types_in = [read if value.is_float32 else _dtype(value) for value in node.inputs]
    types_out = [str(v.dtype) if v.is_float32 else _dtype(v) for v in node.outputs]
    yield from _row(node.equation, node.why, lines, node.scope, times, types_in, types_out)


def _rows_as_written(jaxpr: Any, node: Node, lines: Lines, outer: Any, times: int) -> Iterator[Row]:
    for equation in jaxpr.eqns:
        inner = list(_jax_compat.inner_jaxprs(equation))
        count = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        scope = outer + equation.source_info.name_stack
        for nested in inner:
            yield from _rows_as_written(nested, node, lines, scope, count)
        if not inner:
            types = [[_dtype(v) for v in side] for side in (equation.invars, equation.outvars)]
            yield from _row(equation, node.why, lines, scope, times, *types)


def _row(
    equation: Any, why: str, lines: Lines, scope: Any, times: int, types_in: list[str],
    types_out: list[str],
) -> Iterator[Row]:  # fmt: skip
    kind, name = kind_of(equation), equation.primitive.name
    types_in, types_out = (list(dict.fromkeys(filter(None, t))) for t in (types_in, types_out))
    if kind is None or not types_out:
        return
    shapes = [tuple(atom.aval.shape) for atom in equation.invars]
    result = tuple(equation.outvars[0].aval.shape)
    operations = times * flops(name, equation.params, shapes, result) if kind == "product" else 0
    module = module_path(scope)
    source = source_line(equation, lines.get((id(equation), module), ""))
    yield Row(
        kind, name, module, source, ", ".join(types_in), ", ".join(types_out), why, times,
        operations,
    )  # fmt: skip


def kind_of(equation: Any) -> str | None:
    """Returns the kind of row an equation makes; None if it makes none."""
    name = equation.primitive.name
    rule = rule_for(name)
    if is_inner_product(equation):
        return "reduction"
    if rule.category is Category.LOW:
        return "product"
    if rule.category is Category.FULL and rule.expensive:
        return "exponential"
    return "reduction" if name in SUMS else None


def _dtype(value: Any) -> str:
    """Returns the name of a floating or complex dtype; "" for any other."""
    dtype = getattr(value.aval, "dtype", None)
    return str(dtype) if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) else ""
