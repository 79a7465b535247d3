"""Bounds of what products read and return, if they cost less than a maximum.

A scale need not be the largest number: float8_e4m3 has all its digits over 14 octaves, and scales
256 times too large leave a small GPT's gradient nearly as exact as it was (its error is 0.127,
and was 0.129, at initialisation; 0.095 and 0.089 after 300 steps). So no maximum is computed if
only an elementwise function is between one float8 product and the next: a bias and gelu, or silu
and a gate.

- By Cauchy and Schwarz a product's results are at most the largest norm of a row of its left
  factor times the largest norm of a column of its right one. The factors are float8, and smaller.
- The extremes of the function, and of its slope, are found when the plan is made. If a gate
  multiplies two functions, their bounds are multiplied too.

Then the kernels that compute the function's result, and the cotangent of its argument, can round
them to float8. Otherwise both are stored in bfloat16, for their maxima, and read again.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence, Set

from jmp.autocasting._facts import Facts, only_read_by
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._level import Level
from jmp.autocasting._steps import Single, Step, on
from jmp.autocasting.float8._extremes import FunctionOfProduct
from jmp.autocasting.float8._passes import Functions, ProductInFloat8, products_in_float8

# The bound of a steeper function says too little. Gelu has 1.13, silu 1.10, tanh 1.
STEEPEST = 8.0


def with_bounds(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level, its float8 products with the bounds that are known of them."""
    lowerings = products_in_float8(steps)
    products = set(lowerings)
    bounded = bounded_values(functions_of_values(products, level), products, level.graph)

    @on(Single)
    def with_its_own(step: Single, _: Level) -> Single:
        if step.node not in products:
            return step
        form = lowerings[step.node].form
        factors = tuple(bounded.get(value, ()) for value in step.node.inputs)
        if own := bounded.get(step.node.outputs[0]):
            (function,) = own
            form = form._replace(is_bounded=True, has_bias=bool(function.added))
        return step._replace(lowering=ProductInFloat8(form, factors))

    return with_its_own(steps, level)


def functions_of_values(products: Set[Node], level: Level) -> dict[Value, Functions]:
    """Returns the values that are computed only from results of float8 products."""
    found: dict[Value, Functions] = {}
    for node in level.graph.nodes:
        if len(node.outputs) != 1 or node.outputs[0] in found:
            continue
        (output,) = node.outputs
        read = [found[value] for value in node.inputs if value in found]
        functions = [function for group in read for function in group]
        n_products = len({function.product for function in functions})
        if node in products:
            if _saves_bytes(node.inputs, output):
                found |= _with_vectors(output, level)
        elif n_products == 1:
            if node.rule.reshapes or _is_scalar(node, found):
                before = {each for function in functions for each in function.nodes}
                nodes = (*sorted(before, key=lambda each: each.index), node)
                found[output] = (dataclasses.replace(functions[0], nodes=nodes),)
        elif functions and node.rule.reshapes:
            found[output] = read[0]
        elif functions and node.name == "mul" and all(len(group) == 1 for group in read):
            found[output] = tuple(functions)
    return found


def _with_vectors(result: Value, level: Level) -> dict[Value, Functions]:
    """Returns a product's result, and the values that reshape it and add vectors to it.

    It ends with a value that something else reads, or several nodes read. All of these values have
    one function, which is the identity of the last one.
    """
    values, added = [result], list[Value]()
    while (argument := values[-1]) not in level.graph.outputs and len(argument.users) == 1:
        (node,) = argument.users
        if not node.rule.reshapes:
            vector = _vector_added(node, argument, level.facts)
            if vector is None:
                break
            added.append(vector.root)
        values.append(node.outputs[0])
    function = FunctionOfProduct(result, tuple(added), argument)
    return dict.fromkeys(values, (function,))


def _vector_added(node: Node, value: Value, facts: Facts) -> Value | None:
    """Returns the vector, such as a bias, that a node adds to a value; None for all other nodes."""
    others = [other for other in node.inputs if other is not value]
    if not node.rule.linear or len(others) != 1 or others[0] in facts.dependent:
        return None
    return others[0] if facts.is_bias(others[0]) else None


def bounded_values(
    known: Mapping[Value, Functions], products: Set[Node], graph: Graph
) -> Mapping[Value, Functions]:
    """Returns the values whose bounds are used, with their functions.

    This is the one record of who gives a bound and who reads it. It is closed: whatever reads one
    of these values is a float8 product or computes another of these values. A float8 product reads
    the bound too, and so gives a bound of its cotangent. So if the result of a product is one of
    the values, no cotangent comes to it without a bound.
    """

    def uses_bound(value: Value, user: Node) -> bool:
        if user in products:
            return _is_worth_a_bound(value, known[value], user)
        return known.keys() >= {*user.outputs}

    while open_ends := {
        function.product
        for value, functions in known.items()
        if not only_read_by(value, graph, functools.partial(uses_bound, value))
        for function in functions
    }:
        known = {
            value: functions
            for value, functions in known.items()
            if open_ends.isdisjoint(function.product for function in functions)
        }
    return known


def _is_worth_a_bound(value: Value, functions: Functions, product: Node) -> bool:
    """Returns whether a product that reads a value had better use a bound, and return one."""
    others = [other for other in product.inputs if other is not value]
    extremes = [function.extremes for function in functions]
    is_flat = all(x.slope <= STEEPEST and math.isfinite(x.offset) for x in extremes)
    return is_flat and _saves_bytes([*product.outputs, *others], value)


def _saves_bytes(factors: Sequence[Value], result: Value) -> bool:
    """Returns whether factors in float8 are fewer bytes than their product in bfloat16."""
    return sum(value.size for value in factors) < 2 * result.size


def _is_scalar(node: Node, known: Collection[Value]) -> bool:
    """Returns whether a node is elementwise, and reads only known values and constants."""
    if node.holds_functions:  # a custom derivative, of a shape of its own
        return False
    # In a difference of each two numbers JAX repeats both operands, so that none meets itself.
    if any(value.size != node.outputs[0].size for value in node.inputs if value in known):
        return False
    rule = node.rule
    is_elementwise = rule.elementwise or rule.expensive or rule.casts or rule.cheap
    are_read = all(value in known or value.constant is not None for value in node.inputs)
    return node.is_fusible and is_elementwise and are_read
