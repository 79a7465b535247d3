"""Products that are no layers of a network: exact ones, and those whose operands are scaled down.

Positions, angles, counts and features are *exact*. Rounding their operands or results to half is an
error that no tolerance covers: bfloat16 counts to 256 and float16 to 2048, and an angle of 1000 is
known to 4 in bfloat16. Half models written by hand compute these in float32, and so does autocast:

- A product that contracts nothing, or only axes of length one, is an elementwise multiplication
  (`positions[:, None] @ frequencies[None]`). `_equations` writes it as one, so that it fuses.
- A product of which *neither* operand has a gradient counts: positions by `tril @ ones`, places in
  an expert by `tril @ one_hot`.
- A product of a matrix made of constants with an input transforms data: a Fourier transform, a
  filterbank, an interpolation. One made from integer inputs does not, nor one of the answers
  what is equal: `one_hot(tokens) @ table` looks rows up, and stays half. Nor do ones in
  one column of zeros, where the derivative of one output begins.
- A product of inputs whose result reaches `sin`, `cos`, `floor` or another function that wraps
  gives angles or coordinates: Fourier features. Not those behind another product, such as the
  hidden layers of a network with sines: by hand these are half as well.

The flattening follows what a value is made of (`ValueProvenance`) from the inputs on.

Scores of an attention are *scaled* before, in float16: `q @ k.T / sqrt(d)` overflows before it is
divided. The power of two of such a factor goes into the operands, half into each: they are rounded
after it, as the result was, so no digit changes but those of subnormal numbers. Operands are
divided by 16 at most, so that few become subnormal. That is done where the result goes to a
maximum, as that of a softmax does, or to another product: there a number that has become subnormal
is as good as zero. It is not done where a logarithm or a sum reads the result, nor in a layer,
whose input would be stored once more.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jmp.autocasting._facts import compared_values, reaching, read_otherwise_values
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._kinds import has_kind
from jmp.autocasting._numbers import (
    Known,
    ValueProvenance,
    dtype_of,
    is_inexact,
    provenance_of_array,
    shape_of,
    size_of,
)
from jmp.autocasting._registry import NO_RULE, Category, Rule, is_low, rule_for

WHY_COUNTS = "neither operand has a gradient: it counts, and a half type counts to 256 or 2048"
WHY_TABLE = "a matrix made of constants transforms an input: rounding it would be felt in all data"
WHY_ANGLE = "its result goes to a function that wraps, such as sin: large angles need all digits"

WHY_EXACT = (WHY_COUNTS, WHY_TABLE, WHY_ANGLE)

WHY_SCALED = "a power of two from behind the product: there it might have overflowed"
MOST_POWERS = 4  # of two, by which an operand is divided


def why_exact(equation: JaxprEqn, operands: Sequence[Value]) -> str:
    """Returns why a product of these is computed in float32, whatever reads it; "" if it need not.

    NumPy arrays might be weights: a network of these would be float32 as a whole, if they counted
    as constants. So they transform inputs, and what comes out counts as a product's result. One
    number repeated is no table, but for instance where a derivative begins.
    """
    provenance = [value.provenance for value in operands[:2]]
    if max(provenance) <= ValueProvenance.INTEGERS:
        return WHY_COUNTS
    is_table = any(
        value.provenance in (ValueProvenance.CONSTANTS, ValueProvenance.TABLES)
        and value.constant is None
        and not _chooses_columns(equation, side, value)
        for side, value in enumerate(operands[:2])
    )
    # Choices and integers look rows up, in a NumPy array too.
    looks_up = not {ValueProvenance.CHOICES, ValueProvenance.INTEGERS}.isdisjoint(provenance)
    is_data = max(provenance) <= ValueProvenance.INPUTS and not looks_up
    return WHY_TABLE if is_table and is_data else ""


def _chooses_columns(equation: JaxprEqn, side: int, value: Value) -> bool:
    """Returns whether an operand is ones among zeros, at one place of the axis that is added up.

    The derivative of one output of several begins with it, such as that of an energy. It is also
    the direction of a derivative by one coordinate. Its product with a weight is a column of the
    weight, as a product with one-hot rows is. Ones at several places are a table: they add up data.
    """
    node = value.producer
    if node is None or not node.rule.joins or equation.primitive.name != "dot_general":
        return False
    arrays = node.inexact
    ones = [x for x in arrays if x.constant != 0]
    axes = equation.params["dimension_numbers"][0][side]
    if len(ones) != 1 or abs(ones[0].constant or 0.0) != 1 or len(arrays) < 2 or len(axes) != 1:
        return False
    numbers, shape = node.params.get("dimension_numbers"), shape_of(ones[0])
    if numbers is None:  # of a scatter they say where
        return len(shape) == len(shape_of(value)) and shape[axes[0]] == 1
    return axes[0] in numbers.inserted_window_dims and size_of(shape_of(node.inputs[1])) == 1


def provenance_of_results(
    equation: JaxprEqn,
    inner: Sequence[JaxprEqn] | None,
    rule: Rule,
    operands: Sequence[Value],
) -> ValueProvenance:
    """Returns what an equation's floating results are made of; others: see `Value`.

    Args:
      inner: the equations inside it; None if it holds no function.
    """
    found = max((value.provenance for value in operands), default=ValueProvenance.CONSTANTS)
    if found is ValueProvenance.PRODUCTS:
        return found
    if is_low(equation):
        is_exact = rule.category is Category.FULL and why_exact(equation, operands)
        # The result of a NumPy array counts as a product's; see `why_exact`.
        has_table = ValueProvenance.TABLES in (value.provenance for value in operands)
        return found if is_exact and not has_table else ValueProvenance.PRODUCTS
    if inner is not None:
        return max(found, _made_inside(equation, inner))
    if rule.draws_bits or rule == NO_RULE:
        return max(found, ValueProvenance.INPUTS)
    if equation.primitive.name == "eq":
        return max(found, ValueProvenance.CHOICES)
    is_moved = rule.moves or rule.casts
    # A function of choices is a matrix of numbers again, such as `eye(n) - 1 / n`.
    return ValueProvenance.CONSTANTS if found is ValueProvenance.CHOICES and not is_moved else found


def _made_inside(equation: JaxprEqn, inside: Iterable[JaxprEqn]) -> ValueProvenance:
    """Returns what is made inside an equation, beside its operands.

    Arrays that its functions close over, random numbers, and products: exact ones count as well,
    because which those are is known only when the inside is planned.
    """
    found = list(map(provenance_of_array, _closed_over(equation)))
    for inner in inside:
        if is_low(inner):
            return ValueProvenance.PRODUCTS
        found += map(provenance_of_array, _closed_over(inner))
        rule = rule_for(inner.primitive.name)
        if rule.draws_bits or (rule == NO_RULE and not has_kind(inner.primitive.name)):
            found.append(ValueProvenance.INPUTS)
    return max(found, default=ValueProvenance.CONSTANTS)


def _closed_over(equation: JaxprEqn) -> Iterator[Any]:
    """Yields the floating arrays that functions of an equation close over."""
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            for array in getattr(item, "consts", ()):
                if jnp.issubdtype(array.dtype, jnp.inexact):
                    yield array


def products_that_wrap(graph: Graph) -> set[Node]:
    """Returns the products, on all levels, whose results reach a function that wraps."""
    wrapped = reaching(graph, [], wraps, lambda node: node.multiplies)
    products = (node for node in graph.all_nodes() if node.is_product)
    return {node for node in products if not wrapped.isdisjoint(node.outputs)}


def reads_inputs(product: Node) -> bool:
    """Returns whether no other product stands before one: it gives angles, if its result wraps."""
    return all(v.is_float32 and v.provenance <= ValueProvenance.INPUTS for v in product.inputs[:2])


def wraps(node: Node) -> bool:
    """Returns whether a node depends on the fraction of its argument, or of its turns."""
    return any(map(_wraps, node.equations))


def _wraps(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    if name == "exp":  # of an angle times i
        return dtype_of(equation.invars[0]) in (np.complex64, np.complex128)
    if name == "convert_element_type":  # to integers
        return is_inexact(equation.invars[0]) and not is_inexact(equation.outvars[0])
    return rule_for(name).wraps


# Products that are scaled before.


class _Scaling(NamedTuple):
    """A node that multiplies or divides the result of a product by a number of the program."""

    node: Node
    place: int  # of the number among its operands
    powers: int  # of two that go before the product


def scaled_before(graph: Graph) -> Graph:
    """Divides operands by a power of two that divided the result of their product.

    Args:
      graph: its nodes are changed.
    """
    products = (n for n in graph.nodes if n.name == "dot_general" and n.is_product)
    scalings = {n: _scaling_behind(n, graph.outputs) for n in products if not _is_layer(n)}
    if not any(scalings.values()):
        return graph
    compared = compared_values(graph, [])
    others = read_otherwise_values(graph, graph.outputs)
    changed: list[Node] = []
    for node in graph.nodes:
        if (scaling := scalings.get(node)) is not None:
            (result,) = scaling.node.outputs
            if result in compared or result not in others:
                changed += _with_scaled_operands(node, scaling)
        changed.append(node)
    return dataclasses.replace(graph, nodes=changed)


def _is_layer(product: Node) -> bool:
    """Returns whether a product is of results and of a parameter: its operands are large."""
    left, right = product.inputs
    return left.provenance != right.provenance or not (left.is_float32 and right.is_float32)


def _scaling_behind(product: Node, outputs: Sequence[Value]) -> _Scaling | None:
    """Returns the multiplication or division by a number that is the only reader of a product."""
    (value,) = product.outputs
    while value not in outputs and len(value.users) == 1:
        (user,) = value.users
        if user.region != product.region or not user.is_fusible:
            return None
        if user.rule.affine and not user.rule.linear:  # it multiplies or divides
            return _scaling_by(user)
        if not user.rule.hands_on or user.rule.selects:
            return None
        (value,) = user.outputs
    return None


def _scaling_by(node: Node) -> _Scaling | None:
    """Returns how a node scales down by a number that the program holds, if it does."""
    is_quotient = node.name == "div"
    for place in (1,) if is_quotient else (0, 1):
        number = node.inputs[place]
        if number.literal is None or np.ndim(number.literal) > 0:
            continue
        factor = abs(number.constant or 0.0)
        if factor == 0 or not math.isfinite(factor):
            return None
        divisor = factor if is_quotient else 1 / factor
        powers = min(2 * MOST_POWERS, math.floor(math.log2(divisor)))
        return _Scaling(node, place, powers) if powers > 0 else None
    return None


def _with_scaled_operands(product: Node, scaling: _Scaling) -> list[Node]:
    """Returns nodes that scale the operands of a product; changes the product and the factor."""
    node, place, powers = scaling
    factor, base = node.inputs[place], 2.0 if node.name == "div" else 0.5
    rest = _number_like(factor, (factor.constant or 0.0) * base**-powers)
    _set_operands(node, [rest if i == place else v for i, v in enumerate(node.inputs)])
    added, operands = [], list(product.inputs)
    for side, power in enumerate(((powers + 1) // 2, powers // 2)):
        if power:
            added.append(_with_factor(product, side, node, _number_like(factor, base**power)))
            (operands[side],) = added[-1].outputs
    _set_operands(product, operands)
    for each in added:
        (value, _), (scaled,) = each.inputs, each.outputs
        scaled.users.append(product)
        value.users[:] = [user for user in value.users if user is not product or value in operands]
        value.users.append(each)
    return added


def _set_operands(node: Node, operands: Sequence[Value]) -> None:
    node.inputs = tuple(operands)
    node.inexact = [value for value in operands if value.is_inexact]


def _with_factor(product: Node, side: int, scaling: Node, number: Value) -> Node:
    """Returns a node that scales an operand of a product as another node scales its result."""
    variable: Any = product.equation.invars[side]  # a literal is a scalar, which nobody multiplies
    read = [variable, Literal(number.literal, number.aval)]
    equation = scaling.equation.replace(invars=read, outvars=[variable])
    inputs = (product.inputs[side], number)
    provenance = provenance_of_results(equation, None, scaling.rule, inputs)
    return dataclasses.replace(
        product,
        equation=equation,
        inputs=inputs,
        known=Known(provenance=provenance),
        rule=dataclasses.replace(scaling.rule, reason=WHY_SCALED),
        has_products=False,
        is_in_full=False,
        goes_inside=False,
    )


def _number_like(factor: Value, number: float) -> Value:
    literal = np.asarray(number, np.float32)[()]
    return Value(factor.aval, known=Known(number), literal=literal)
