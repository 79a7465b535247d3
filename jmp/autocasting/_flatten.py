"""From a jaxpr to the graph of one level of nesting.

Inner calls that mean nothing (no shardings, no donation) are inlined, so that the planner sees
through the many small ones of `jax.numpy`; dead code is left behind. Whatever remains nested
(loops, branches, remat, custom derivatives) is one node each and a level of its own.
"""

from collections.abc import Iterator, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jmp import _jax_compat
from jmp.autocasting import _products
from jmp.autocasting._equations import contains_products, draws_bits, is_marker, plain_form, rule_of
from jmp.autocasting._graph import Argument, Graph, Inside, Node, RowOf, Value, upstream
from jmp.autocasting._kinds import has_kind, kind_of
from jmp.autocasting._numbers import (
    MADE_OF,
    NOTHING,
    Known,
    ValueProvenance,
    dtype_of,
    known_number,
    known_of,
)
from jmp.autocasting._precision import with_precision
from jmp.autocasting._propagation import inner_equations
from jmp.autocasting._registry import Category, Rule
from jmp.autocasting._request import Request, Settings
from jmp.dtypes import FLOAT32

# An input, as far as it is known: an argument of the function, or what it is made of.
Given = Argument | ValueProvenance | None


def graph_of(
    jaxpr: Jaxpr,
    constants: Sequence[Any],
    operands: Sequence[Given],
    holder: Node | None,
    request: Request,
) -> Graph:
    """Returns the graph of a jaxpr, and of the functions inside.

    Args:
      jaxpr: an open jaxpr; its constvars count as its first inputs.
      constants: what the constvars stand for. Those of the outermost level may be tracers, which
        a graph must not keep.
      operands: for each further input the value of the outer level that comes in, whose numbers
        are known inside as well, or what else is known of it.
      holder: the node that holds it; None at the outermost level.
      request: see `Request`.
    """
    graph = _level_of(jaxpr, constants, operands, holder, request)
    for node in _angles(graph, request.settings):
        node.rule = Rule(Category.FULL, _products.WHY_ANGLE)
        node.is_product = node.has_products = False
    for node in graph.all_nodes():
        # Products that say nothing, in nodes that are bound whole, have the region's precision.
        if not node.goes_inside:
            node.params = with_precision(node, request)
    return graph


def _angles(graph: Graph, settings: Settings) -> Set[Node]:
    """Returns the products of inputs, on all levels, whose results are angles."""
    products = (n for n in graph.all_nodes() if n.is_product and n.name not in settings.overrides)
    found = set(filter(_products.reads_inputs, products))
    return found & _products.products_that_wrap(graph) if found else found


def _level_of(
    jaxpr: Jaxpr,
    constants: Sequence[Any],
    operands: Sequence[Given],
    holder: Node | None,
    request: Request,
) -> Graph:
    half = request.settings.compute_dtype
    anything = [None] * (len(jaxpr.invars) - len(operands))
    arguments = zip(jaxpr.invars, (*operands, *anything), strict=True)
    inputs = [_closed_over_value(array, half) for array in constants]
    inputs += [_input(variable.aval, given) for variable, given in arguments]
    flattening = _Flattening(holder, request)
    around = () if holder is None else (*holder.around, holder.equation)
    outputs = flattening.run(jaxpr, inputs, _jax_compat.empty_name_stack(), around)
    nodes = _alive(flattening.nodes, outputs)
    for node in nodes:
        for value in dict.fromkeys(node.inputs):
            value.users.append(node)
    for node in nodes:
        if has_kind(node.name):
            node.insides = tuple(_insides(node, request))
    own = () if holder is None else constants
    return Graph(inputs, nodes, outputs, own)


def _insides(node: Node, request: Request) -> Iterator[Inside]:
    kind = kind_of(node.name)
    functions = kind.functions(node.equation)
    for function, (arguments, results) in zip(functions, kind.calls(node), strict=True):
        jaxpr, constants = _jax_compat.open_jaxpr(function)
        yield Inside(_level_of(jaxpr, constants, arguments, node, request), arguments, results)


class _Flattening:
    """The nodes found so far."""

    def __init__(self, holder: Node | None, request: Request) -> None:
        self.nodes: list[Node] = []
        self._scope = _jax_compat.empty_name_stack() if holder is None else holder.scope
        self._request = request

    def run(
        self, jaxpr: Jaxpr, inputs: Sequence[Value], outer: Any, around: tuple[JaxprEqn, ...]
    ) -> list[Value]:
        """Adds the nodes of a jaxpr, and returns its outputs.

        Args:
          outer: the name stack that it stands under, within this level.
          around: the equations that hold it, from the outermost level down.
        """
        values: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
        half = self._request.settings.compute_dtype

        def read(atoms: Sequence[Any]) -> list[Value]:
            # A literal has no identity of its own.
            return [_literal(x, half) if isinstance(x, Literal) else values[x] for x in atoms]

        for equation in jaxpr.eqns:
            operands = read(equation.invars)
            stack = _jax_compat.nested_stack(outer, equation.source_info.name_stack)
            if _jax_compat.is_plain_call(equation) and not draws_bits(equation):
                inner, constants = _jax_compat.open_jaxpr(_jax_compat.called(equation.params))
                held = [_closed_over_value(array, half, array) for array in constants]
                results = self.run(inner, [*held, *operands], stack, (*around, equation))
            elif (plain := plain_form(equation, self._request.settings)) is not None:
                results = self.run(plain, operands, outer, around)
            else:
                results = list(self._add(equation, operands, stack, around).outputs)
            values.update(zip(equation.outvars, results, strict=True))
        return read(jaxpr.outvars)

    def _add(
        self,
        equation: JaxprEqn,
        operands: Sequence[Value],
        stack: Any,
        around: tuple[JaxprEqn, ...],
    ) -> Node:
        settings = self._request.settings
        scope = _jax_compat.nested_stack(self._scope, stack)
        rule, region = rule_of(equation, settings), self._request.region(scope)
        if rule.category is Category.LOW and equation.primitive.name not in settings.overrides:
            if why := _products.why_exact(equation, operands):
                rule = Rule(Category.FULL, why)
        inner = tuple(inner_equations(equation)) if _jax_compat.holds_functions(equation) else None
        provenance = _products.provenance_of_results(equation, inner, rule, operands)
        known = _known_result(equation, rule, operands, settings.compute_dtype, provenance)
        node = Node(
            equation,
            tuple(operands),
            known,
            stack,
            scope,
            around,
            rule,
            region,
            index=len(self.nodes),
            inner=inner,
            is_marker=is_marker(equation, inner or ()),
        )
        node.is_in_full = settings.overrides.get(node.name) is Category.FULL
        is_whole = node.region.in_float32 or node.is_fusible or node.rule.category is Category.FULL
        if not is_whole and has_kind(node.name) and not kind_of(node.name).runs_as_written:
            node.goes_inside = True
        inner_products = node.goes_inside and contains_products(inner or (), settings)
        node.has_products = node.is_product or inner_products
        self.nodes.append(node)
        return node


# Numbers that are known before the program runs.


def _input(aval: Any, given: Given) -> Value:
    if isinstance(given, Value):
        return Value(aval, known=given.known, outside=given)
    found = given.value.provenance if isinstance(given, RowOf) else given
    provenance = found if isinstance(found, ValueProvenance) else ValueProvenance.PRODUCTS
    return Value(aval, known=MADE_OF[provenance])


def _closed_over_value(array: Any, half: np.dtype, literal: Any = None) -> Value:
    return Value(jax.typeof(array), known=known_of(array, half), literal=literal)


def _literal(atom: Any, half: np.dtype) -> Value:
    is_number = np.ndim(atom.val) == 0 and atom.aval.dtype == FLOAT32
    known = known_number(float(atom.val), half) if is_number else NOTHING
    return Value(atom.aval, known=known, literal=atom.val)


def _known_result(
    equation: JaxprEqn,
    rule: Rule,
    operands: Sequence[Value],
    half: np.dtype,
    provenance: ValueProvenance,
) -> Known:
    """Follows constants, booleans and sources through the operations that only move them."""
    nothing_more = MADE_OF[provenance]
    if len(equation.outvars) != 1 or not operands:
        return nothing_more
    first, name = operands[0], equation.primitive.name
    # On a mesh JAX places the one of `1 - tanh(x)` on devices: it stays a one.
    if rule.moves or (rule.rearranges and rule.fusible and len(operands) == 1):
        source = first.source if rule.reshapes or rule.repeats else None
        return first.known._replace(source=source, array=None, provenance=provenance)
    if name == "neg":
        constant = None if first.constant is None else -first.constant
        return Known(constant, is_extreme=first.is_extreme, provenance=provenance)
    if dtype_of(equation.outvars[0]) != FLOAT32:
        return nothing_more
    if name == "convert_element_type":
        is_number = first.literal is not None and np.ndim(first.literal) == 0
        known = known_number(float(first.literal), half) if is_number else first.known
        fits_half = first.fits_half or first.dtype == np.bool_
        return known._replace(fits_half=fits_half, array=None, provenance=provenance)
    if rule.keeps_range:
        is_extreme = any(value.is_extreme for value in operands)
        return Known(is_extreme=is_extreme, provenance=provenance)
    return nothing_more


def _alive(nodes: list[Node], outputs: list[Value]) -> list[Node]:
    """Drops what no output and no marker needs."""
    markers = [value for node in nodes if node.is_marker for value in (*node.inputs, *node.outputs)]
    needed = {value.producer for value in upstream(*outputs, *markers)}
    return [node for node in nodes if node in needed or node.is_marker]
