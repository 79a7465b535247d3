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

import math
from collections.abc import Sequence, Set

from jmp.autocasting._eligible import root
from jmp.autocasting._extremes import Equation, equation_of, extremes_of
from jmp.autocasting._flow import Facts
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._steps import Bounded, Single, Step

# A bound by a steeper function says too little. Gelu has 1.13, silu 1.10, tanh 1.
STEEP = 8.0


def with_bounds(steps: Sequence[Step], graph: Graph, facts: Facts) -> list[Step]:
    """Returns the steps of a level, its float8 products with the bounds that are known of them."""
    singles = (step for step in steps if isinstance(step, Single))
    products = {step.node for step in singles if step.in_float8 is not None}
    functions = Functions(products, graph, facts)
    bounded = functions.read_by_products_alone()
    results = {function.result for function in bounded}

    def with_its_own(step: Step) -> Step:
        if not isinstance(step, Single) or step.in_float8 is None:
            return step
        form = step.in_float8._replace(
            operands=tuple(functions.bounds(root(value), bounded) for value in step.node.inputs),
            is_bounded=not results.isdisjoint(step.node.outputs),
            has_bias=bool(_behind_vectors(step.node.outputs[0], graph, facts)[1]),
        )
        return step._replace(in_float8=form)

    return list(map(with_its_own, steps))


class Function:
    """What is computed, number by number, of one product's result.

    Attributes:
      result: of the product.
      argument: the result after vectors are added to it, such as a bias.
      added: these vectors.
      places: of the values that are computed of the argument.
      equations: that compute them, in order.
    """

    def __init__(self, result: Value, graph: Graph, facts: Facts) -> None:
        self.result = result
        self.argument, self.added = _behind_vectors(result, graph, facts)
        self.places = {self.argument: 0}
        self.equations: list[Equation] = []

    def take(self, node: Node) -> bool:
        """Adds a node to the function, if it reads nothing else; returns whether it does."""
        (output,) = node.outputs
        if node.rule.reshapes:  # which keeps the numbers' order
            self.places[output] = self.places[node.inputs[0]]
        elif equation := equation_of(node, self.places):
            self.equations.append(equation)
            self.places[output] = len(self.equations)
        return output in self.places

    def bounded(self, value: Value) -> Bounded:
        """Returns what is known of one of its values."""
        extremes = extremes_of(tuple(self.equations), self.places[value])
        return Bounded(self.result, self.added, extremes)


class Functions:
    """The functions of the results of a level's float8 products, and where two are multiplied."""

    def __init__(self, products: Set[Node], graph: Graph, facts: Facts) -> None:
        self.products = products
        self.outputs = set(graph.outputs)
        self.of: dict[Value, Function] = {}  # by the values that they compute
        self.gates: dict[Value, tuple[Value, ...]] = {}  # by the product, the values of two
        for node in graph.nodes if products else ():
            if node in products:
                if _pays(node.inputs, node.outputs[0]):
                    function = Function(node.outputs[0], graph, facts)
                    self.of[function.argument] = function
            elif len(node.outputs) == 1:
                self._visit(node)

    def _visit(self, node: Node) -> None:
        functions = {self.of[value] for value in node.inputs if value in self.of}
        if len(functions) == 1:
            (function,) = functions
            if function.take(node):
                self.of[node.outputs[0]] = function
        elif functions and node.name == "mul":
            self.gates[node.outputs[0]] = node.inputs

    def factors(self, value: Value) -> tuple[tuple[Function, Value], ...]:
        """Returns the functions, with a value of each, that are multiplied to a value; mostly one.

        Returns () for what is computed of anything else.
        """
        values = self.gates.get(value, (value,))
        if not all(v in self.of for v in values):
            return ()
        return tuple((self.of[v], v) for v in values)

    def bounds(self, value: Value, among: Set[Function]) -> tuple[Bounded, ...]:
        """Returns the bounds whose product bounds a value, if the functions are `among` these."""
        factors = self.factors(value)
        if not all(function in among for function, _ in factors):
            return ()
        return tuple(function.bounded(v) for function, v in factors)

    def read_by_products_alone(self) -> set[Function]:
        """Returns the functions that nothing but float8 products reads."""
        partners = {function: self._partners(function) for function in set(self.of.values())}
        found = {function for function, others in partners.items() if others is not None}
        while alone := {f for f in found if not found.issuperset(partners[f] or ())}:
            found -= alone
        return found

    def _partners(self, function: Function) -> set[Function] | None:
        """Returns the functions that are multiplied with one, itself included.

        Returns None if anything but float8 products reads it, or what it is multiplied to.
        """
        partners: set[Function] = set()
        stack = [function.argument]
        while stack:
            value = stack.pop()
            factors = dict(self.factors(value))
            if value in self.outputs or function not in factors:
                return None
            partners.update(factors)
            for user in value.users:
                if user not in self.products:
                    stack += user.outputs
                elif not self._is_known(value, user):
                    return None
        return partners

    def _is_known(self, value: Value, product: Node) -> bool:
        """Returns whether a product that reads a value had better use a bound, and return one."""
        others = [other for other in product.inputs if other is not value]
        extremes = [function.bounded(v).extremes for function, v in self.factors(value)]
        is_flat = all(x.slope <= STEEP and math.isfinite(x.offset) for x in extremes)
        return is_flat and _pays([*product.outputs, *others], value)


def _pays(factors: Sequence[Value], result: Value) -> bool:
    """Returns whether factors in float8 are fewer bytes than their product in bfloat16."""
    return sum(value.size for value in factors) < 2 * result.size


def _behind_vectors(value: Value, graph: Graph, facts: Facts) -> tuple[Value, tuple[Value, ...]]:
    """Returns what a value is after vectors, such as a bias, are added to it; and these."""
    added: list[Value] = []
    while len(value.users) == 1 and value not in graph.outputs:
        (user,) = value.users
        if not user.rule.reshapes:
            others = [other for other in user.inputs if other is not value]
            is_sum = user.rule.linear and len(others) == 1
            if not is_sum or others[0] in facts.dependent or not facts.is_bias(others[0]):
                break
            added.append(root(others[0]))
        (value,) = user.outputs
    return value, tuple(added)
