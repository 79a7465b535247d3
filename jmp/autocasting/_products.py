"""Products that are no layers of a network: exact ones.

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
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jmp.autocasting._facts import reaching
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._kinds import has_kind
from jmp.autocasting._numbers import (
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
    equation: JaxprEqn, inner: Sequence[JaxprEqn] | None, rule: Rule, operands: Sequence[Value]
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
