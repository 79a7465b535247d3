"""Products that are scaled down afterwards, in float16.

`q @ k.T / sqrt(d)` overflows float16 before it is divided. The power of two of such a factor goes
into the operands, half into each: they are rounded after it, as the result was, so no digit changes
but those of subnormal numbers. Operands are divided by 16 at most, so that few become subnormal.

That is done where the result goes to a maximum, as that of a softmax does, or to another product:
there a number that has become subnormal is as good as zero. It is not done where a logarithm or a
sum reads the result, nor in a layer, whose input would be stored once more.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jmp.autocasting._exact_products import provenance_of_results
from jmp.autocasting._facts import compared_values, read_otherwise_values
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._numbers import Known

MOST = 4  # powers of two that an operand is divided by
WHY = "a power of two from behind the product: there it might have overflowed"


def scaled_before(graph: Graph) -> Graph:
    """Divides operands by a power of two that divided the result of their product.

    Args:
      graph: its nodes are changed.
    """
    found = {}
    for node in graph.nodes:
        if node.name == "dot_general" and node.is_product and not _is_layer(node):
            scaling = _scaling_behind(node, graph.outputs)
            if scaling is not None and (powers := _powers_of_two(scaling)):
                found[node] = scaling, powers
    if not found:
        return graph
    compared = compared_values(graph, [])
    others = read_otherwise_values(graph, graph.outputs)
    changed: list[Node] = []
    for node in graph.nodes:
        if node in found:
            scaling, powers = found[node]
            (result,) = scaling.outputs
            if result in compared or result not in others:
                changed += _with_scaled_operands(node, scaling, powers)
        changed.append(node)
    return dataclasses.replace(graph, nodes=changed)


def _is_layer(product: Node) -> bool:
    """Returns whether a product is of results and of a parameter: its operands are large."""
    left, right = product.inputs
    return left.provenance != right.provenance or not (left.is_float32 and right.is_float32)


def _scaling_behind(product: Node, outputs: Sequence[Value]) -> Node | None:
    """Returns the multiplication or division by a number that is the only reader of a product."""
    (value,) = product.outputs
    while value not in outputs and len(value.users) == 1:
        (user,) = value.users
        if user.region != product.region or not user.is_fusible:
            return None
        if user.rule.affine and not user.rule.linear:  # it multiplies or divides
            return user
        if not user.rule.hands_on or user.rule.selects:
            return None
        (value,) = user.outputs
    return None


def _place_of_factor(scaling: Node) -> int | None:
    """Returns which operand is a number of the program; of a division the second one may be."""
    places = (1,) if scaling.name == "div" else (0, 1)
    literals = [(i, scaling.inputs[i].literal) for i in places]
    return next((i for i, x in literals if x is not None and np.ndim(x) == 0), None)


def _powers_of_two(scaling: Node) -> int:
    """Returns how many powers of two of a factor may go before the product."""
    place = _place_of_factor(scaling)
    number = 0.0 if place is None else abs(scaling.inputs[place].constant or 0.0)
    if number == 0 or not math.isfinite(number):
        return 0
    factor = 1 / number if scaling.name == "div" else number
    return min(2 * MOST, max(0, math.floor(-math.log2(factor))))


def _with_scaled_operands(product: Node, scaling: Node, powers: int) -> list[Node]:
    """Returns nodes that scale the operands of a product; changes the product and the factor."""
    place = _place_of_factor(scaling)
    assert place is not None
    factor, inputs = scaling.inputs[place], list(scaling.inputs)
    is_quotient = scaling.name == "div"
    rest = (factor.constant or 0.0) * 2.0 ** (-powers if is_quotient else powers)
    inputs[place] = _number_like(factor, rest)
    scaling.inputs = tuple(inputs)
    added, operands = [], list(product.inputs)
    for side, power in enumerate(((powers + 1) // 2, powers // 2)):
        if power:
            number = _number_like(factor, 2.0 ** (power if is_quotient else -power))
            added.append(_with_factor(product, side, scaling, number))
            (operands[side],) = added[-1].outputs
    product.inputs = tuple(operands)
    for node in added:
        (value, _), (scaled,) = node.inputs, node.outputs
        scaled.users.append(product)
        value.users[:] = [user for user in value.users if user is not product or value in operands]
        value.users.append(node)
    return added


def _with_factor(product: Node, side: int, scaling: Node, number: Value) -> Node:
    """Returns a node that scales an operand of a product as another node scales its result."""
    variable: Any = product.equation.invars[side]  # a literal is a scalar, which nobody multiplies
    read = [variable, Literal(number.literal, number.aval)]
    equation = scaling.equation.replace(invars=read, outvars=[variable])
    inputs = (product.inputs[side], number)
    node = dataclasses.replace(
        product,
        equation=equation,
        inputs=inputs,
        known=Known(provenance=provenance_of_results(equation, scaling.rule, inputs)),
        rule=dataclasses.replace(scaling.rule, reason=WHY),
    )
    node.has_products = node.is_in_full = node.goes_inside = False
    return node


def _number_like(factor: Value, number: float) -> Value:
    literal = np.asarray(number, np.float32)[()]
    return Value(factor.aval, known=Known(number), literal=literal)
