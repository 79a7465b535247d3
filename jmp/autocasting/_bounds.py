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
from collections.abc import Mapping, Sequence, Set

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
    bounded = Functions(products, graph, facts).bounded() if products else {}

    def with_its_own(step: Step) -> Step:
        if not isinstance(step, Single) or step.in_float8 is None:
            return step
        (result,) = step.node.outputs
        form = step.in_float8._replace(
            operands=tuple(
                tuple(function.bounded(v) for function, v in bounded.get(value, ()))
                for value in step.node.inputs
            ),
            is_bounded=result in bounded,
            has_bias=bool(_behind_vectors(result, graph, facts)[1]),
        )
        return step._replace(in_float8=form)

    return list(map(with_its_own, steps))


class Function:
    """What is computed, number by number, of one product's result.

    Attributes:
      result: of the product.
      added: vectors that are added to it first, such as a bias.
      argument: the result after that.
      places: of the values that are computed of the argument.
      equations: that compute them, in order.
    """

    def __init__(self, result: Value, argument: Value, added: tuple[Value, ...]) -> None:
        self.result, self.argument, self.added = result, argument, added
        self.places = {argument: 0}
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


Factors = tuple[tuple[Function, Value], ...]


class Functions:
    """The functions of the results of a level's float8 products, and where two are multiplied.

    Attributes:
      factors: of each value that is computed of such results alone, the functions, with a value of
        each, that are multiplied to it; mostly one.
    """

    def __init__(self, products: Set[Node], graph: Graph, facts: Facts) -> None:
        self.products = products
        self.outputs = set(graph.outputs)
        self.factors: dict[Value, Factors] = {}
        for node in graph.nodes:
            if node in products:
                if _pays(node.inputs, node.outputs[0]):
                    path, added = _behind_vectors(node.outputs[0], graph, facts)
                    function = Function(path[0], path[-1], added)
                    self.factors.update((value, ((function, value),)) for value in path)
            elif len(node.outputs) == 1 and node.outputs[0] not in self.factors:
                self._visit(node)

    def _visit(self, node: Node) -> None:
        (output,) = node.outputs
        factors = [self.factors[value] for value in node.inputs if value in self.factors]
        functions = {function for pairs in factors for function, _ in pairs}
        if len(functions) == 1:
            (function,) = functions
            if function.take(node):
                self.factors[output] = ((function, output),)
        elif functions and node.rule.reshapes:
            self.factors[output] = factors[0]
        elif functions and node.name == "mul" and all(len(pairs) == 1 for pairs in factors):
            self.factors[output] = tuple(pair for pairs in factors for pair in pairs)

    def bounded(self) -> Mapping[Value, Factors]:
        """Returns the values whose bounds are used, and the factors that these are computed of.

        It is the one record of who gives a bound and of who reads it. It is closed: all that reads
        one of these values is a float8 product, which reads the bound with it and so gives one of
        its cotangent, or computes other values of these. So where the result of a product is one,
        there is no way on which a cotangent comes to it without a bound.
        """
        found: Mapping[Value, Factors] = self.factors
        while open_ends := {
            function
            for value, factors in found.items()
            if not self._is_closed(value, found)
            for function, _ in factors
        }:
            found = {
                value: factors
                for value, factors in found.items()
                if open_ends.isdisjoint(function for function, _ in factors)
            }
        return found

    def _is_closed(self, value: Value, among: Mapping[Value, Factors]) -> bool:
        return value not in self.outputs and all(
            self._is_known(value, user)
            if user in self.products
            else among.keys() >= {*user.outputs}
            for user in value.users
        )

    def _is_known(self, value: Value, product: Node) -> bool:
        """Returns whether a product that reads a value had better use a bound, and return one."""
        others = [other for other in product.inputs if other is not value]
        extremes = [function.bounded(v).extremes for function, v in self.factors[value]]
        is_flat = all(x.slope <= STEEP and math.isfinite(x.offset) for x in extremes)
        return is_flat and _pays([*product.outputs, *others], value)


def _pays(factors: Sequence[Value], result: Value) -> bool:
    """Returns whether factors in float8 are fewer bytes than their product in bfloat16."""
    return sum(value.size for value in factors) < 2 * result.size


def _behind_vectors(
    value: Value, graph: Graph, facts: Facts
) -> tuple[list[Value], tuple[Value, ...]]:
    """Returns what becomes of a value while vectors, such as a bias, are added to it; and these."""
    path, added = [value], list[Value]()
    while len(path[-1].users) == 1 and path[-1] not in graph.outputs:
        (user,) = path[-1].users
        if not user.rule.reshapes:
            others = [other for other in user.inputs if other is not path[-1]]
            is_sum = user.rule.linear and len(others) == 1
            if not is_sum or others[0] in facts.dependent or not facts.is_bias(others[0]):
                break
            added.append(root(others[0]))
        path += user.outputs
    return path, tuple(added)
