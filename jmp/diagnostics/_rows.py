"""Rows of a precision report, read off a plan."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jmp.autocasting._graph import FULL, HALF, Node, inner_equations, is_inner_product
from jmp.autocasting._islands import Island
from jmp.autocasting._registry import Category, rule_for
from jmp.autocasting._values import Value
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
      kind: "product", "reduction" or "exponential" (exp, log, powers and roots).
      operation: the primitive.
      module: path of modules or name scopes, "" at the top.
      source: "file:line" of the user's code.
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


def rows_of(plan: Any, times: int = 1) -> Iterator[Row]:
    """Yields a row for each product, reduction and exponential of a plan, nested ones included."""
    for step in plan.steps:
        if isinstance(step, Island):
            for node in step.nodes:
                yield from _rows_of_node(node, plan, times, "float32")
        else:
            yield from _rows_of_node(step, plan, times, None)


def _rows_of_node(node: Node, plan: Any, times: int, inside: str | None) -> Iterator[Row]:
    if node.mode == "nested":
        turns = node.params["length"] if node.name == "scan" else 1
        for inner in node.inner if isinstance(node.inner, list) else [node.inner]:
            yield from rows_of(inner.plan, times * turns)
        return
    kind = kind_of(node)
    if kind is None:
        return
    half = str(plan.context.settings.compute_dtype)
    dtype_in = inside or (half if node.mode == HALF else None)
    shapes = [tuple(value.aval.shape) for value in node.inputs]
    # A custom derivative that is kept whole runs as written: float32, if that is what it was.
    yield Row(
        kind,
        node.name,
        module_path(node.scope),
        source_line(node.equation),
        _dtypes(node.inputs, dtype_in),
        _dtypes(node.outputs, None, stored=True),
        node.why,
        times,
        times * flops(node.name, node.params, shapes, tuple(node.outputs[0].aval.shape)),
    )


def kind_of(node: Node) -> str | None:
    """Returns the kind of row a node makes; None if it makes none."""
    if not any(value.is_float32 or _is_half(value) for value in node.outputs):
        return None
    rules = {node.name: rule_for(node.name)}
    if node.name.startswith("custom_"):
        inner = [equation.primitive.name for equation in inner_equations(node.equation)]
        rules = {name: rule_for(name) for name in inner}
    if is_inner_product(node.equation):
        return "reduction"
    if any(rule.category is Category.LOW for rule in rules.values()):
        return "product"
    if any(rule.category is Category.FULL and rule.expensive for rule in rules.values()):
        return "exponential"
    return "reduction" if any(name in SUMS for name in rules) else None


def _is_half(value: Value) -> bool:
    return getattr(value.aval, "dtype", None) in (jnp.float16, jnp.bfloat16)


def _dtypes(values: list[Value], read: str | None, stored: bool = False) -> str:
    found: dict[str, None] = {}
    for value in values:
        dtype = getattr(value.aval, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            continue
        if value.is_float32:
            dtype = (value.dtype or dtype) if stored else (read or FULL)
        found[str(dtype)] = None
    return ", ".join(found)
