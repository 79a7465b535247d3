"""The dataflow graph of one level of nesting: values, and the nodes that compute them.

`flatten` reads a jaxpr. Inner jits that mean nothing (no shardings, no donation) are inlined, so
that the planner sees through the many small ones of `jax.numpy`; dead code is left behind. What
remains nested (loops, branches, remat, custom derivatives) is one node each and a level of its own.

The passes of the planner annotate the graph in this order, each reading what the ones before wrote:
`_flow` (feeds, kept, neutral, fixed, is_cut, level), then `_islands` and `_plan` (dtype, mode).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmp import _jax_compat
from jmp.autocasting._equations import DESCENDS, contains_products, draws_bits, rule_of
from jmp.autocasting._regions import Region, RegionRules
from jmp.autocasting._registry import Category, Rule
from jmp.autocasting._settings import Settings
from jmp.autocasting._values import Value, held_constant, know, literal

# How a node runs; besides "nested", and being part of an island.
HALF = "half"
FULL = "float32"
ROUNDED = "float32, rounded"
# Operations that leave the numbers as they are; those that also leave their order.
SHUFFLES = frozenset({"transpose", "slice", "rev", "name", "pvary", "stop_gradient"})
REPEATS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "copy", "copy_p", "expand_dims"})


class Node:
    """One equation.

    Attributes:
      equation: the jaxpr's equation; its own variables are not to be read.
      inputs, outputs: values.
      stack: its name stack within this level; `scope` the same from the outermost level down.
      rule: what the op table says.
      region: what the user said of the scope it stands in.
      index: its place in the program.
      has_products: there is a product inside it that autocast may lower.
      level, is_cut: see `_flow`.
      mode: how it runs, and `why`: written by the planner, printed in reports.
      inner: the plan or plans of what nests, written by its kind (`_kinds`).
    """

    __slots__ = (
        "equation", "name", "params", "inputs", "outputs", "stack", "scope", "rule", "region",
        "index", "has_products", "level", "is_cut", "mode", "why", "inner",
    )  # fmt: skip

    def __init__(
        self,
        equation: Any,
        inputs: list[Value],
        stack: Any,
        scope: Any,
        rule: Rule,
        region: Region,
        index: int,
    ) -> None:
        self.equation = equation
        self.name: str = equation.primitive.name
        self.params = equation.params
        self.inputs = inputs
        self.outputs = [Value(v.aval, self) for v in equation.outvars]
        self.stack = stack
        self.scope = scope
        self.rule = rule
        self.region = region
        self.index = index
        self.has_products = False
        self.level = 0
        self.is_cut = False
        self.mode: Any = None
        self.why = rule.reason
        self.inner: Any = None

    @property
    def fusible(self) -> bool:
        """Whether it may stand in an island."""
        return self.rule.fusible and not self.region.as_written and not self.is_embedding

    @property
    def is_embedding(self) -> bool:
        """Whether it looks rows up in a float32 table on their way to a product."""
        return (
            self.name == "gather"
            and self.outputs[0].is_float32
            and self.outputs[0].feeds
            and not self.outputs[0].kept
            and self.inputs[0].neutral
            and self.inputs[0].constant is None
            and not self.region.is_full
            and not _is_compared(self.outputs[0])
        )

    @property
    def reads_float32(self) -> bool:
        """Whether it is a barrier that reads float32 whatever its operands are stored in."""
        if self.fusible or self.has_products:
            return self.region.is_full
        return self.rule.category in (Category.FULL, Category.AS_WRITTEN)

    @property
    def is_product(self) -> bool:
        """Whether it is computed in the compute dtype on purpose."""
        return self.rule.category is Category.LOW and not self.region.is_full


class Graph:
    """One level: inputs, nodes in program order, outputs."""

    def __init__(self, inputs: list[Value], nodes: list[Node], outputs: list[Value]) -> None:
        self.inputs = inputs
        self.nodes = nodes
        self.outputs = outputs


def flatten(
    jaxpr: Any,
    constants: Sequence[Any],
    operands: Sequence[Value | None],
    scope: Any,
    settings: Settings,
    regions: RegionRules,
) -> Graph:
    """Returns the graph of a jaxpr.

    Args:
      jaxpr: an open jaxpr; its constvars count as its first inputs.
      constants: what the constvars stand for.
      operands: for each further input the value of the outer level that comes in, whose numbers
        are known inside as well; None where it is not one value (the carry of a loop, a slice).
      scope: name stack of the equation that holds it.
    """
    inputs = [Value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
    for value, constant in zip(inputs, constants, strict=False):
        know(value, constant, settings.compute_dtype)
    for value, operand in zip(inputs[len(constants) :], operands, strict=False):
        if operand is not None:
            value.is_known_as(operand)
    nodes: list[Node] = []
    no_stack = _jax_compat.empty_name_stack()
    outputs = _flatten_into(nodes, jaxpr, inputs, no_stack, scope, settings, regions)
    nodes = _alive(nodes, outputs)
    for node in nodes:
        for value in dict.fromkeys(node.inputs):
            value.users.append(node)
    return Graph(inputs, nodes, outputs)


def _flatten_into(
    nodes: list[Node],
    jaxpr: Any,
    inputs: Sequence[Value],
    outer: Any,
    scope: Any,
    settings: Settings,
    regions: RegionRules,
) -> list[Value]:
    values: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def read(atom: Any) -> Value:
        if hasattr(atom, "val"):  # a literal; it has no identity of its own
            return literal(atom)
        return values[atom]

    for equation in map(_jax_compat.sum_over_own_axes, jaxpr.eqns):
        operands = [read(atom) for atom in equation.invars]
        stack = outer + equation.source_info.name_stack
        if _jax_compat.is_plain_jit(equation) and not draws_bits(equation.params["jaxpr"]):
            inner, constants = _jax_compat.open_jaxpr(equation.params["jaxpr"])
            held = [held_constant(constant, settings.compute_dtype) for constant in constants]
            results = _flatten_into(
                nodes, inner, [*held, *operands], stack, scope, settings, regions
            )
            values.update(zip(equation.outvars, results, strict=True))
            continue
        region = regions.region(scope + stack)
        rule = rule_of(equation, settings)
        node = Node(equation, operands, stack, scope + stack, rule, region, len(nodes))
        node.has_products = node.is_product or (
            descends(node, settings) and contains_products(equation, settings)
        )
        _follow_constants(node, settings.compute_dtype)
        nodes.append(node)
        values.update(zip(equation.outvars, node.outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _follow_constants(node: Node, half: np.dtype) -> None:
    """Follows constants, booleans and sources through the operations that only move them."""
    if len(node.outputs) != 1 or not node.inputs:
        return
    (output,) = node.outputs
    first = node.inputs[0]
    if node.name in REPEATS or node.name in SHUFFLES:
        output.constant = first.constant
        output.is_exact = first.is_exact
        output.is_hard = first.is_hard
        if node.name in REPEATS:
            output.source = first.source
    elif node.name == "neg":
        output.constant = None if first.constant is None else -first.constant
        output.is_hard = first.is_hard
    elif node.name == "convert_element_type" and output.is_float32:
        output.constant = first.constant
        output.source = first.source
        output.is_exact = first.is_exact or getattr(first.aval, "dtype", None) == np.bool_
        output.is_hard = first.is_hard
        if first.literal is not None and np.ndim(first.literal) == 0:
            output.constant = float(first.literal)
    elif node.name in ("mul", "select_n", "concatenate") and output.is_float32:
        output.is_hard = any(value.exceeds(half) for value in node.inputs)


def _is_compared(value: Value) -> bool:
    """Returns whether a value is subtracted from, or compared with, one that is not made of it.

    So are coordinates: the difference of two of them has the error of both.
    """
    for user in value.users:
        if user.name in REPEATS or user.name in SHUFFLES:
            if _is_compared(user.outputs[0]):
                return True
        elif user.name in ("sub", "eq", "ne", "lt", "le", "gt", "ge"):
            others = [other for other in user.inputs if other is not value]
            if any(o.constant is None and not _is_made_of(o, value) for o in others):
                return True
    return False


def _is_made_of(value: Value, part: Value) -> bool:
    """Returns whether `part` stands upstream of `value`."""
    first = part.producer.index if part.producer else -1
    seen, stack = {value}, [value]
    while stack:
        current = stack.pop()
        if current is part:
            return True
        if current.producer is not None and current.producer.index > first:
            stack += [v for v in current.producer.inputs if v not in seen]
            seen.update(current.producer.inputs)
    return False


def _alive(nodes: list[Node], outputs: list[Value]) -> list[Node]:
    """Drops what no output and no effect needs."""
    needed = {value.producer for value in outputs}
    kept = []
    for node in reversed(nodes):
        if node in needed or node.equation.effects:
            kept.append(node)
            needed.update(value.producer for value in node.inputs)
    kept.reverse()
    return kept


def descends(node: Node, settings: Settings) -> bool:
    """Returns whether autocast goes inside a node; it binds every other node as a whole."""
    if node.region.is_full or node.fusible or node.rule.category is Category.FULL:
        return False
    return node.name in DESCENDS or (node.name == "custom_vjp_call" and settings.inside_custom_vjp)
