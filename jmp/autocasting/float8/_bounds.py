"""Bounds of what float8 products read and return, where they cost less than a maximum.

A scale need not be the largest number: float8_e4m3 has all its digits over 14 octaves, and scales
256 times too large leave a small GPT's gradient nearly as exact as it was (its error is 0.127, and
was 0.129, at initialisation; 0.095 and 0.089 after 300 steps). So no maximum is looked for where
float8 products' results go to others through an elementwise function alone: a bias and gelu, or
silu and a gate.

- By Cauchy and Schwarz a product's results are at most the largest norm of a row of its left factor
  times that of a column of its right one. The factors are float8, and smaller.
- The extremes of the function, and of its slope, are found when the plan is made. Where a gate
  multiplies two functions, so it does their bounds.

Then the function's result, and the cotangent of its argument, can be rounded to float8 where they
are computed; otherwise both are stored in bfloat16, for their maxima, and read again.
"""

import concurrent.futures
import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting._facts import Facts, only_read_by
from jmp.autocasting._graph import Graph, Node, Value, root
from jmp.autocasting._kinds import Level
from jmp.autocasting._steps import Single, Step
from jmp.autocasting.float8._arithmetic import Extremes
from jmp.autocasting.float8._passes import Bounded, ProductInFloat8, products_in_float8
from jmp.dtypes import FLOAT32

# A bound by a steeper function says too little. Gelu has 1.13, silu 1.10, tanh 1.
STEEPEST = 8.0


def with_bounds(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level, its float8 products with the bounds that are known of them."""
    lowerings = products_in_float8(steps)
    products = set(lowerings)
    if not products:
        return list(steps)
    bounded = bounded_values(functions_of_values(products, level), products, level.graph)

    def with_its_own(step: Step) -> Step:
        if not isinstance(step, Single) or step.node not in products:
            return step
        form = lowerings[step.node].form
        factors = tuple(
            tuple(function.bound_of(v) for function, v in bounded.get(value, ()))
            for value in step.node.inputs
        )
        if own := bounded.get(step.node.outputs[0]):
            ((function, _),) = own
            form = form._replace(is_bounded=True, has_bias=bool(function.added))
        return step._replace(lowering=ProductInFloat8(form, factors))

    return list(map(with_its_own, steps))


class FunctionOfProduct:
    """What is computed, number by number, of one product's result.

    Attributes:
      result: the product's.
      argument: the function's: the result, vectors added to it, such as a bias.
      added: these vectors.
      slots: the index of each value: 0 of the argument, of others the number of their equation.
      equations: that compute these, in order.
    """

    def __init__(self, result: Value) -> None:
        self.result = self.argument = result
        self.added: list[Value] = []
        self.slots = {result: 0}
        self.equations: list[ScalarEquation] = []

    def add_before(self, node: Node, level: Level) -> bool:
        """Adds a node that adds a vector to the argument, or reshapes it, and alone reads it.

        Returns: whether the node does so; it is not added otherwise.
        """
        if not only_read_by(self.argument, level.graph, lambda user: user is node):
            return False
        if not node.rule.reshapes:
            vector = _vector_added(node, self.argument, level.facts)
            if vector is None:
                return False
            self.added.append(root(vector))
        self.argument = node.outputs[0]
        self.slots[self.argument] = 0
        return True

    def add(self, node: Node) -> bool:
        """Adds a node that is elementwise, or reshapes, and reads values of the function alone.

        Returns: whether the node does so; it is not added otherwise.
        """
        if node.rule.reshapes:  # which keeps the numbers' order
            slot = self.slots[node.inputs[0]]
        elif equation := equation_of(node, self.slots):
            self.equations.append(equation)
            slot = len(self.equations)
        else:
            return False
        self.slots[node.outputs[0]] = slot
        return True

    def bound_of(self, value: Value) -> Bounded:
        """Returns what is known of one of its values."""
        equations = tuple(self.equations[: self.slots[value]])
        return Bounded(self.result, tuple(self.added), extremes_of(equations))


def _vector_added(node: Node, value: Value, facts: Facts) -> Value | None:
    """Returns the vector, such as a bias, that a node adds to a value; None for all other nodes."""
    others = [other for other in node.inputs if other is not value]
    if not node.rule.linear or len(others) != 1 or others[0] in facts.dependent:
        return None
    return others[0] if facts.is_bias(others[0]) else None


# The functions, with a value of each, that are multiplied to a value; mostly one, that value's own.
Functions = tuple[tuple[FunctionOfProduct, Value], ...]


def functions_of_values(products: Set[Node], level: Level) -> dict[Value, Functions]:
    """Returns the values that are computed of results of float8 products alone."""
    found: dict[Value, Functions] = {}
    for node in level.graph.nodes:
        if len(node.outputs) != 1:
            continue
        (output,) = node.outputs
        read = [found[value] for value in node.inputs if value in found]
        functions = {function for pairs in read for function, _ in pairs}
        if node in products:
            if _saves_bytes(node.inputs, output):
                found[output] = ((FunctionOfProduct(output), output),)
        elif len(functions) == 1:
            (function,) = functions
            # Each tries to add the node, and returns whether it did: first as a part of the
            # argument (a bias), else as an equation that is computed of the argument.
            if function.add_before(node, level) or function.add(node):
                found[output] = ((function, output),)
        elif functions and node.rule.reshapes:
            found[output] = read[0]
        elif functions and node.name == "mul" and all(len(pairs) == 1 for pairs in read):
            found[output] = tuple(pair for pairs in read for pair in pairs)
    return found


def bounded_values(
    known: Mapping[Value, Functions], products: Set[Node], graph: Graph
) -> Mapping[Value, Functions]:
    """Returns the values whose bounds are used, and the functions that these are computed of.

    It is the one record of who gives a bound and of who reads it. It is closed: all that reads
    one of these values is a float8 product, which reads the bound with it and so gives one of
    its cotangent, or computes other values of these. So where the result of a product is one,
    there is no way on which a cotangent comes to it without a bound.
    """

    def uses_bound(value: Value, user: Node) -> bool:
        if user in products:
            return _is_worth_a_bound(value, known[value], user)
        return known.keys() >= {*user.outputs}

    while open_ends := {
        function
        for value, pairs in known.items()
        if not only_read_by(value, graph, functools.partial(uses_bound, value))
        for function, _ in pairs
    }:
        known = {
            value: pairs
            for value, pairs in known.items()
            if open_ends.isdisjoint(function for function, _ in pairs)
        }
    return known


def _is_worth_a_bound(value: Value, functions: Functions, product: Node) -> bool:
    """Returns whether a product that reads a value had better use a bound, and return one."""
    others = [other for other in product.inputs if other is not value]
    extremes = [function.bound_of(v).extremes for function, v in functions]
    is_flat = all(x.slope <= STEEPEST and math.isfinite(x.offset) for x in extremes)
    return is_flat and _saves_bytes([*product.outputs, *others], value)


def _saves_bytes(factors: Sequence[Value], result: Value) -> bool:
    """Returns whether factors in float8 are fewer bytes than their product in bfloat16."""
    return sum(value.size for value in factors) < 2 * result.size


# The extremes of elementwise functions of one number. They are tried at every bfloat16 number, in
# float32, and with each step rounded to bfloat16, as a plan may compute it: where large numbers
# cancel, as in `(x + 1000) - 1000`, results and slopes differ.


class ScalarEquation(NamedTuple):
    """One equation of a function of one number; all of it can be hashed."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    # Of each operand the index among the values so far, of which 0 is the argument; or a constant.
    reads: tuple[int | tuple[float], ...]


def equation_of(node: Node, slots: Mapping[Value, int]) -> ScalarEquation | None:
    """Returns a node as an equation; None unless it is elementwise, and reads what has a slot."""
    rule = node.rule
    if _jax_compat.holds_functions(node.equation):  # a custom derivative, of a shape of its own
        return None
    if not (node.is_fusible and (rule.elementwise or rule.expensive or rule.casts or rule.cheap)):
        return None
    reads: list[int | tuple[float]] = []
    for value in node.inputs:
        if value in slots:
            reads.append(slots[value])
        elif value.constant is not None:
            reads.append((value.constant,))
        else:
            return None
    return ScalarEquation(node.equation.primitive, tuple(sorted(node.params.items())), tuple(reads))


@functools.lru_cache(maxsize=256)
def extremes_of(equations: tuple[ScalarEquation, ...]) -> Extremes:
    """Returns the extremes of a function, whose result is the last value of its equations.

    Where the function or its slope is NaN a result, or a cotangent, is NaN too: it is left out.
    """
    numbers = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).astype(FLOAT32)
    numbers = numbers[np.isfinite(numbers)]

    def function(argument: Any, is_rounded: bool) -> Any:
        values = [argument]
        for primitive, params, reads in equations:
            operands = [
                values[x] if isinstance(x, int) else np.full(numbers.shape, x[0], FLOAT32)
                for x in reads
            ]
            (value,) = _jax_compat.bind(primitive, operands, dict(params))
            is_rounded_here = is_rounded and value.dtype == FLOAT32
            values.append(lax.reduce_precision(value, 8, 7) if is_rounded_here else value)
        return values[-1]

    def values_and_slopes(is_rounded: bool) -> Any:
        run = functools.partial(function, is_rounded=is_rounded)
        # NaN is expected.
        with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
            return jax.jvp(run, (numbers,), (np.ones_like(numbers),))

    # In a thread of its own nothing is being traced, and no mesh of other devices is set.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        pairs = list(thread.map(values_and_slopes, (False, True)))
    results = np.fmax(*(np.abs(values) for values, _ in pairs))
    slopes = np.fmax(*(np.abs(slopes) for _, slopes in pairs))
    sizes = np.abs(numbers)
    is_far, is_near = (sizes > 2.0**64) & (sizes < 2.0**100), sizes < 2.0**100
    # Of what jumps at every turn, as rounding does, no slope says how it grows.
    growth = _largest_number(results[is_far] / sizes[is_far])
    slope = max(_largest_number(slopes), growth)
    with np.errstate(invalid="ignore"):  # infinite, the slope of what is not finite
        offset = _largest_number(results[is_near] - slope * sizes[is_near])
    return Extremes(_largest_number(results), offset, slope)


def _largest_number(numbers: Any) -> float:
    """Returns the largest of some numbers, those that are NaN left out; at least zero."""
    return float(np.nanmax(numbers, initial=0.0))
