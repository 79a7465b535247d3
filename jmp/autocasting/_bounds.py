"""Bounds of what float8 products read and return, where they cost less than a maximum.

A scale need not be the largest number: float8_e4m3 has all its digits over 14 octaves, and scales
that are 64 times too large leave a small GPT's gradient as exact as it was (its error is 0.127, and
was 0.129, at initialisation; 0.084 and 0.089 after 300 steps). So where a float8 product's result
goes to other float8 products through an elementwise function alone, as a bias and gelu, no maximum
is looked for:

- By Cauchy and Schwarz a product's results are at most the largest norm of a row of its left factor
  times that of a column of its right one. The factors are float8, and smaller.
- The function, and its slope, are tried at every bfloat16 number when the plan is made.

Then the function's result, and the cotangent of its argument, can be rounded to float8 where they
are computed; otherwise both are stored in bfloat16, for their maxima, and read again.
"""

import functools
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp.autocasting._eligible import root
from jmp.autocasting._flow import Facts
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._steps import Bounded, Extremes, Single, Step
from jmp.dtypes import FLOAT32

# A bound by a steeper function says too little. Gelu has 1.13, silu 1.10, tanh 1.
STEEP = 8.0


def with_bounds(steps: Sequence[Step], graph: Graph, facts: Facts) -> list[Step]:
    """Returns the steps of a level, its float8 products with the bounds that are known of them."""
    singles = (step for step in steps if isinstance(step, Single))
    products = {step.node for step in singles if step.in_float8 is not None}
    bounded: dict[Value, Bounded] = {}  # by what is read, as it was before it was moved
    starts: set[Node] = set()
    for node in products:
        if found := _read_behind(node, products, graph, facts):
            bounded.update(found)
            starts.add(node)

    def with_its_own(step: Step) -> Step:
        if not isinstance(step, Single) or step.in_float8 is None:
            return step
        form = step.in_float8._replace(
            operands=tuple(bounded.get(root(value)) for value in step.node.inputs),
            is_bounded=step.node in starts,
            has_bias=bool(_behind_additions(step.node.outputs[0], facts)[1]),
        )
        return step._replace(in_float8=form)

    return list(map(with_its_own, steps))


def _read_behind(
    product: Node, products: Set[Node], graph: Graph, facts: Facts
) -> dict[Value, Bounded]:
    """Returns what float8 products read of a product's result; {} where anything else reads it."""
    (result,) = product.outputs
    if not _pays(product.inputs, result):
        return {}
    entry, added = _behind_additions(result, facts)
    nodes, ends = _between(entry, products)
    places = {entry: 0}
    program = _program(nodes, places)
    if program is None or not places.keys().isdisjoint(graph.outputs):
        return {}
    found: dict[Value, Bounded] = {}
    for end in ends:
        read = [value for value in end.inputs if value in places]
        others = [value for value in end.inputs if value not in places]
        for value in read:
            extremes = _extremes(program, places[value])
            if not (extremes.steepest <= STEEP and _pays([*end.outputs, *others], value)):
                return {}
            found[root(value)] = Bounded(result, added, extremes)
    return found


def _pays(factors: Sequence[Value], result: Value) -> bool:
    """Returns whether factors in float8 are fewer bytes than their product in bfloat16."""
    return sum(value.size for value in factors) < 2 * result.size


def _behind_additions(value: Value, facts: Facts) -> tuple[Value, tuple[Value, ...]]:
    """Returns what a value is after vectors, such as a bias, are added to it; and these."""
    added: list[Value] = []
    while len(value.users) == 1:
        (user,) = value.users
        if not user.rule.reshapes:
            others = [other for other in user.inputs if other is not value]
            is_sum = user.rule.linear and len(others) == 1
            if not is_sum or others[0] in facts.dependent or not others[0].is_vector:
                break
            added.append(root(others[0]))
        (value,) = user.outputs
    return value, tuple(added)


def _between(entry: Value, products: Set[Node]) -> tuple[list[Node], list[Node]]:
    """Returns the nodes between a value and the products behind it, in order; and the products."""
    found: dict[Node, None] = {}
    stack = [entry]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found[user] = None
                stack += () if user in products else user.outputs
    ordered = sorted(found, key=lambda node: node.index)
    ends = [node for node in ordered if node in products]
    return [node for node in ordered if node not in products], ends


# A function of one number is a list of equations: of each the primitive, its parameters, and what
# it reads: the place of an earlier value, of which 0 is the argument, or a constant by itself.
Equation = tuple[Any, tuple[tuple[str, Any], ...], tuple[int | tuple[float], ...]]


def _program(nodes: Sequence[Node], places: dict[Value, int]) -> tuple[Equation, ...] | None:
    """Returns nodes as a function of one number; None where they are none.

    Args:
      nodes: in order.
      places: of the values so far; those of the nodes' results are added.
    """
    program: list[Equation] = []
    for node in nodes:
        if node.rule.reshapes and node.inputs[0] in places:
            places[node.outputs[0]] = places[node.inputs[0]]
            continue
        read: list[int | tuple[float]] = []
        for value in node.inputs:
            if value in places:
                read.append(places[value])
            elif value.constant is not None:
                read.append((value.constant,))
        if len(read) < len(node.inputs) or not _is_elementwise(node):
            return None
        program.append((node.equation.primitive, tuple(sorted(node.params.items())), tuple(read)))
        places[node.outputs[0]] = len(program)
    return tuple(program)


def _is_elementwise(node: Node) -> bool:
    rule = node.rule
    return node.is_fusible and (rule.elementwise or rule.expensive or rule.casts or rule.cheap)


@functools.lru_cache(maxsize=256)
def _extremes(program: tuple[Equation, ...], place: int) -> Extremes:
    """Tries a function at every bfloat16 number; `place` is that of its result.

    Where the function or its slope is NaN a result, or a cotangent, is NaN too: no scale hides it.
    """
    numbers = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).astype(FLOAT32)
    numbers = numbers[np.isfinite(numbers)]

    def function(argument: Any) -> Any:
        values = [argument]
        for primitive, params, read in program:
            operands = [
                values[x] if isinstance(x, int) else np.full(numbers.shape, x[0], FLOAT32)
                for x in read
            ]
            values += _jax_compat.bind(primitive, operands, dict(params))
        return values[place]

    with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
        pair = jax.jvp(function, (numbers,), (np.ones_like(numbers),))
    results, slopes = (np.abs(np.asarray(array)) for array in pair)
    return Extremes(
        largest=float(np.nanmax(results)),
        at_zero=float(results[numbers == 0].max()),
        steepest=float(np.nanmax(slopes)),
    )
