"""What the planner decides of float8, in passes over the steps of a level.

`PASSES` in `_planner.py` says in which order they run. The first marks products; the others read
these marks (`Single.in_float8`).

`multiply_in_float8` says which products are float8, where the policy asks for it.

`send_in_float8` marks what devices send each other on the way to float8 products. A shard is
rounded to float8 before it is gathered, with the scale that all devices share, so that the numbers
are those of what was gathered and then rounded. The half array is moved beside it, for the sake of
its transpose alone: its gradient adds up over devices as that of half does. What that move computes
nothing reads, and no compiled program keeps it.

`with_bounds` gives float8 products bounds of what they read and return, where those cost less than
a maximum. A scale need not be the largest number: float8_e4m3 has all its digits over 14 octaves,
and scales 256 times too large leave a small GPT's gradient nearly as exact as it was (its error is
0.127, and was 0.129, at initialisation; 0.095 and 0.089 after 300 steps). So no maximum is looked
for where float8 products' results go to others through an elementwise function alone: a bias and
gelu, or silu and a gate.

- By Cauchy and Schwarz a product's results are at most the largest norm of a row of its left factor
  times that of a column of its right one. The factors are float8, and smaller.
- The extremes of the function, and of its slope, are found when the plan is made. Where a gate
  multiplies two functions, so it does their bounds.

Then the function's result, and the cotangent of its argument, can be rounded to float8 where they
are computed; otherwise both are stored in bfloat16, for their maxima, and read again.
"""

import collections
import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._float8 import Bounded, InFloat8, ScalarEquation, equation_of, extremes_of
from jmp.autocasting._flow import Facts, only_read_by
from jmp.autocasting._graph import Graph, Node, Value, downstream, root
from jmp.autocasting._kinds import Level
from jmp.autocasting._numbers import MadeOf, dtype_of, shape_of, size_of
from jmp.autocasting._registry import Category, rule_for
from jmp.autocasting._sending import sends
from jmp.autocasting._steps import Single, Step
from jmp.dtypes import FLOAT32

# Which products are float8.

WHY_FLOAT8 = "a parameter's product on the way to another: its operands are rounded to float8"
# Counted by benchmarks/float8_convolutions.py; the figures stand in docs/float8.md.
WHY_CONVOLUTION = (
    "a convolution: in float8 it moves more bytes, and XLA computes the gradient of its kernel in "
    "bfloat16"
)

# Multiplications. Three products of so many (its own and those of two gradients) take 1.6 us in
# half at the rate of an H200's data sheet (989e12 operations a second), and half of that in float8:
# less is saved than the launch of one kernel takes (about 2 us), and some seven more are launched.
# Not timed: where float8 begins to pay is to be measured on a device, and lies above this.
SMALL_PRODUCT = 2**28
# Tensor cores multiply float8 in pieces of 16; what is thinner is padded to that.
THIN = 16


def multiply_in_float8(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level; its half products are float8, or say why they are not."""
    shared = _shared_factors(level.graph)

    def chosen(step: Step) -> Step:
        if not isinstance(step, Single) or not step.node.region.multiplies_in_float8:
            return step
        node = step.node
        if not (node.is_product and step.arithmetic.is_half):
            return step
        if node in level.facts.embeddings:  # a lookup, which the user has put in `low=`
            return step
        if why := why_not_float8(node, level):
            return step._replace(why=f"{step.why}; not float8: {why}")
        is_shared = not shared.isdisjoint(map(root, node.inputs))
        return step._replace(why=WHY_FLOAT8, in_float8=InFloat8(is_shared))

    return list(map(chosen, steps))


def why_not_float8(node: Node, level: Level) -> str:
    """Returns why a product in half is not float8; "" if it is."""
    facts, context = level.facts, level.context
    if node.name == "conv_general_dilated":
        return WHY_CONVOLUTION
    if node.name != "dot_general":
        return f"{node.name} has no float8 form yet"
    if context.is_transposed:
        return "it stands in a custom_jvp, whose rule JAX transposes"
    if context.devices_part:
        return "devices may go different ways here, and would not share its scales"
    if context.request.settings.float8 == "weights" and not any(
        value not in facts.dependent and value.made_of > MadeOf.INTEGERS for value in node.inputs
    ):
        return "it multiplies two activations (float8='all' takes such products)"
    if not facts.carried.isdisjoint(node.outputs):
        return "a loop carries its result in float32"
    if not _feeds(node, facts):
        return "its result feeds no other product, as that of a head"
    if min(sizes_of(node)) < THIN:
        return f"it is thinner than {THIN}"
    if math.prod(sizes_of(node)) < SMALL_PRODUCT:
        return f"it is small: fewer than 2**{SMALL_PRODUCT.bit_length() - 1} multiplications"
    return ""


def _feeds(product: Node, facts: Facts) -> bool:
    """Returns whether a product's result goes to another, added up over devices on the way or not.

    Sums over devices are float32, so that nothing `feeds` by them; but the result of a product
    whose rows are split over devices is one of their parts.
    """
    values = downstream(product.outputs[0], lambda u: u.is_fusible or u.rule.sums_devices)
    return not facts.feeds.isdisjoint(values)


def sizes_of(node: Node) -> tuple[int, int, int]:
    """Returns rows (with batches), columns and summed elements of a `dot_general`."""
    (summed, right_summed), (_, right_batch) = node.params["dimension_numbers"]
    left, right = (shape_of(value) for value in node.inputs)
    inner = size_of(tuple(left[axis] for axis in summed))
    others = {*right_summed, *right_batch}
    columns = size_of(tuple(size for axis, size in enumerate(right) if axis not in others))
    return node.outputs[0].size // max(1, columns), columns, inner


def _shared_factors(graph: Graph) -> set[Value]:
    """Returns the roots that several products read, on this level or on the outermost."""
    factors = (value for node in graph.nodes if node.is_product for value in node.inputs)
    counts = collections.Counter(map(root, factors))
    return {
        value
        for value, count in counts.items()
        if count > 1 or sum(user.has_products for user in value.origin.users) > 1
    }


def _float8_products(steps: Sequence[Step]) -> set[Node]:
    singles = (step for step in steps if isinstance(step, Single))
    return {step.node for step in singles if step.in_float8 is not None}


# What is sent.

WHY_SENT_IN_FLOAT8 = "float8 products alone read it afterwards: rounded to float8 before it is sent"

ROUNDED_NO_FURTHER = (FLOAT32, np.dtype(jnp.bfloat16))  # float8's scales are bfloat16


def send_in_float8(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps; those that send what float8 products alone read are marked so."""
    graph, readers = level.graph, _float8_products(steps)
    if not readers:
        return list(steps)
    moving = {
        step.node: moves
        for step in steps
        if isinstance(step, Single) and (moves := moves_of(step.node))
    }
    for node in reversed(graph.nodes):
        if node in moving and all(
            only_read_by(value, graph, readers.__contains__) for value in node.outputs
        ):
            readers.add(node)
    sent: set[Node] = set()
    for node in graph.nodes:  # what stands before the first that sends is moved as ever
        if node in readers and node in moving:
            is_first = any(rule_for(move.primitive.name).sends for move in moving[node])
            if is_first or node.inputs[0].producer in sent:
                sent.add(node)
    return [
        step._replace(why=WHY_SENT_IN_FLOAT8, moves_float8=True)
        if isinstance(step, Single) and step.node in sent
        else step
        for step in steps
    ]


def moves_of(node: Node) -> Sequence[JaxprEqn]:
    """Returns the equations that move the numbers of a node's first operand, one after the other.

    Of most nodes that is their own equation. Empty for a node that does more, or reads float32.
    """
    if node.region.in_float32:
        return []
    if node.name == "custom_vjp_call":
        return _moves_inside(node.equation)
    is_full = node.rule.category is Category.FULL  # by the user's word
    is_moved = node.rule.hands_on or sends(node) or is_cast(node.equation)
    return [node.equation] if is_moved and not is_full else []


def is_cast(equation: JaxprEqn) -> bool:
    """Returns whether an equation casts between dtypes that hold the scales of float8."""
    dtypes = {dtype_of(atom) for atom in (*equation.invars, *equation.outvars)}
    return equation.primitive.name == "convert_element_type" and dtypes <= {*ROUNDED_NO_FURTHER}


def _moves_inside(equation: JaxprEqn) -> Sequence[JaxprEqn]:
    """Returns the equations of a custom_vjp that sends its operand; empty if it does more.

    So `jmp.gather_params` is written, and gathers with a dtype for sums of gradients.
    """
    jaxpr, constants = _jax_compat.open_jaxpr(_jax_compat.called(equation.params))
    rules = [rule_for(inner.primitive.name) for inner in jaxpr.eqns]
    are_moves = all(
        rule.hands_on or rule.sends or is_cast(inner)
        for rule, inner in zip(rules, jaxpr.eqns, strict=True)
    )
    read = [inner.invars for inner in jaxpr.eqns] + [jaxpr.outvars]
    written = [jaxpr.invars] + [inner.outvars for inner in jaxpr.eqns]
    is_chain = len(jaxpr.invars) == 1 and read == written and not constants
    return jaxpr.eqns if is_chain and are_moves and any(rule.sends for rule in rules) else []


def moved_in_float8(node: Node, operands: Sequence[Any]) -> list[Any]:
    """Runs a node that moves its first operand on float8 numbers; `_emit` calls it, no pass."""
    for equation in moves_of(node):
        if is_cast(equation):
            continue
        if rule_for(equation.primitive.name).sends:
            operands = lax.optimization_barrier(operands)  # as of what is sent in half, in `_emit`
        operands = _jax_compat.bind(equation.primitive, operands, equation.params)
    return list(operands)


# Bounds.

# A bound by a steeper function says too little. Gelu has 1.13, silu 1.10, tanh 1.
STEEPEST = 8.0


def with_bounds(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level, its float8 products with the bounds that are known of them."""
    products = _float8_products(steps)
    if not products:
        return list(steps)
    bounded = bounded_values(functions_of_values(products, level), products, level.graph)

    def with_its_own(step: Step) -> Step:
        if not isinstance(step, Single) or step.in_float8 is None:
            return step
        form = step.in_float8._replace(
            operands=tuple(
                tuple(function.bound_of(v) for function, v in bounded.get(value, ()))
                for value in step.node.inputs
            )
        )
        if own := bounded.get(step.node.outputs[0]):
            ((function, _),) = own
            form = form._replace(is_bounded=True, has_bias=bool(function.added))
        return step._replace(in_float8=form)

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
