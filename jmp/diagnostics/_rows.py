"""Rows of a precision report, read off a plan."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jmp.autocasting._equations import is_inner_product
from jmp.autocasting._operations import is_product, operations_of
from jmp.autocasting._registry import Category, rule_for
from jmp.autocasting._steps import Plan
from jmp.diagnostics._flops import flops
from jmp.diagnostics._places import module_path, source_line


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


def rows_of(plan: Plan, lines: Lines) -> Iterator[Row]:
    """Yields a row for each product, reduction and exponential of a plan, nested ones included.

    Args:
      plan: of the whole program.
      lines: of `lines_of_callers`, for the jaxpr that was planned.
    """
    for operation in operations_of(plan):
        equation = operation.equation
        kind, name = kind_of(equation), equation.primitive.name
        if kind is None or not operation.dtypes_out:
            continue
        shapes = [tuple(atom.aval.shape) for atom in equation.invars]
        result = tuple(equation.outvars[0].aval.shape)
        times, done = operation.times, 0
        if kind == "product":
            done = times * flops(name, equation.params, shapes, result)
        module = module_path(operation.scope)
        source = source_line(equation, lines.get((id(equation), module), ""))
        yield Row(
            kind, name, module, source, ", ".join(operation.dtypes_in),
            ", ".join(operation.dtypes_out), operation.why, times, done,
        )  # fmt: skip


def kind_of(equation: Any) -> str | None:
    """Returns the kind of row an equation makes; None if it makes none."""
    name = equation.primitive.name
    rule = rule_for(name)
    if is_product(equation):
        return "product"
    if is_inner_product(equation):
        return "reduction"
    if rule.category is Category.FULL and rule.expensive:
        return "exponential"
    return "reduction" if rule.sums else None
