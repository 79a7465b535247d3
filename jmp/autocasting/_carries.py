"""Which float32 carries of a loop lose nothing in half, and which of its operands are weights.

Three sorts do not:

- A *state* that products alone read, such as the hidden one of an RNN: each turn computes it anew.
- A *buffer*, such as the keys and values of an attention during generation: what a turn writes into
  it is read by products, in this turn or later ones, and all else only moves it: updates of slices,
  scatters, gathers, concatenations, selections, also in loops and branches inside. What is written
  is rounded once. A buffer that anything else reads, in the loop or after it, is float32, and so is
  one that no product reads, such as a record of log-probabilities. Its gradient adds up turn by
  turn: where one is taken, the loop has it in float32.
- A *stream*: what a short loop over layers adds to; see `kinds.scan`.

What a turn adds to, or scales, is none of the first two, because arithmetic reads it: there small
steps would be lost.
"""

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._equations import contracts_nothing, rule_of
from jmp.autocasting._flow import reaching_values
from jmp.autocasting._graph import Graph, Node, Value, reached
from jmp.autocasting._kinds import Level, has_kind, kind_of
from jmp.autocasting._numbers import dtype_of, is_inexact
from jmp.autocasting._precision import HOLD_RULES
from jmp.autocasting._propagation import reaching_inputs, reaching_operands, scope_of, walk_inside
from jmp.autocasting._reasons import why_not_lowered
from jmp.autocasting._registry import Category, is_low
from jmp.autocasting._request import Request, Settings
from jmp.autocasting._steps import Arithmetic, Nested, Plan, Single, Unplanned, steps_of
from jmp.dtypes import FLOAT32


class _Carry(NamedTuple):
    before: Value  # a turn
    result: Value  # of a turn
    after: Value  # the loop


class InHalf(NamedTuple):
    """Of each carry whether it is half, and whether it is a buffer."""

    all: list[bool]
    buffers: list[bool]


def carried_in_half(
    graph: Graph,
    values: Sequence[Value],
    node: Node,
    level: Level,
    streams: Sequence[bool] = (),
    condition: ClosedJaxpr | None = None,
) -> InHalf:
    """Returns for each carry of a loop whether it loses nothing in half.

    Args:
      graph: of the body; its first outputs are the carries after a turn.
      values: its inputs that are the carries before a turn.
      node: the loop, whose first results are the carries.
      level: that it stands on.
      streams: which carries are half in any case; left out, none.
      condition: of a while loop; its last inputs are the carries.
    """
    triples = zip(values, graph.outputs, node.outputs, strict=False)
    carries = list(itertools.starmap(_Carry, triples))
    found = [
        carry
        for carry in carries
        if carry.before.is_float32 and carry.after not in level.facts.carried
    ]
    buffers: list[_Carry] = []
    if found:
        multiplied = _multiplied(graph, carries)
        asked = _asked(condition, values, level.context.request)
        found = [carry for carry in found if carry.before in multiplied - asked]
        buffers = _buffers(carries)
        # A state is computed anew; whatever reads it after the loop, it was half before.
        found = [c for c in found if not (c in buffers and _stays_wide(c, node, level))]
    while found:
        wide = [carry.result for carry in carries if carry not in found]
        read = exposed_values(graph, wide, level.context.request)
        kept = [carry for carry in found if carry.before not in read]
        if kept == found:
            break
        found = kept
    pairs = list(itertools.zip_longest(carries, streams, fillvalue=False))
    in_half = [carry in found or is_stream for carry, is_stream in pairs]
    is_buffer = [carry in found and carry in buffers and not stream for carry, stream in pairs]
    return InHalf(in_half, is_buffer)


def _stays_wide(buffer: _Carry, node: Node, level: Level) -> bool:
    """Returns whether a buffer is float32 for what stands around its loop.

    JAX takes no effects in a custom derivative, which chooses its dtype.
    """
    return buffer.after in level.exposed or bool(node.equation.effects)


def _buffers(carries: Sequence[_Carry]) -> list[_Carry]:
    """Returns the carries that may hold their own numbers, or each other's, turn after turn."""
    sources: dict[_Carry, list[_Carry]] = {}
    for carry in carries:
        held = _held_by(carry.result)
        sources[carry] = [other for other in carries if other.before in held]
    return [c for c in carries if c in set(reached(sources[c], sources.__getitem__))]


def find_weights(
    plan: Plan, values: Sequence[Value], in_half: Sequence[bool], level: Level
) -> list[bool]:
    """Returns for each input of a loop's body whether it is a weight, and so may come in rounded.

    Half products alone read it, and lookups whose rows are rounded. A table of which only rows are
    looked up does not count: that reads less than would be rounded.

    Args:
      plan: of the body; its first outputs are the carries, and what follows them rows of results.
      values: inputs of its graph.
      in_half: of each carry, as `carried_in_half` returned it.
      level: that the loop stands on.
    """
    may_be = [value.is_float32 and value.varies for value in values]
    if level.half == np.float16:
        # One that may be a mask is held within float16's range, where it is applied.
        may_be = [
            may and not any(user.rule.masks for user in value.users)
            for may, value in zip(may_be, values, strict=True)
        ]
    if not any(may_be):
        return may_be
    lookups = {
        step.node
        for step in plan.steps
        if isinstance(step, Single) and step.node.name == "gather" and step.stores == (level.half,)
    }
    outputs = plan.graph.outputs
    wide = [*itertools.compress(outputs, map(operator.not_, in_half)), *outputs[len(in_half) :]]
    found = reaching_values(plan.graph.nodes, is_low, [])
    exact = {
        step.node
        for step in plan.steps
        if isinstance(step, Nested) and any(map(_multiplies_float32, step.insides))
    }
    found -= exposed_values(plan.graph, wide, level.context.request, lookups, exact)
    return [
        may and value in found and not lookups.issuperset(value.users)
        for may, value in zip(may_be, values, strict=True)
    ]


def _multiplies_float32(inside: Plan | Unplanned) -> bool:
    """Returns whether a planned function has a product that is not half."""
    return isinstance(inside, Plan) and any(
        isinstance(step, Single)
        and is_low(step.node.equation)
        and step.arithmetic is Arithmetic.FLOAT32
        for step, *_ in steps_of(inside)
    )


def find_caches(plan: Plan) -> list[Value]:
    """Returns the float32 arguments of a program that are buffers: caches that it returns written.

    They keep their dtype, as all arguments do.
    """
    graph, request = plan.graph, plan.request
    inputs = [value for value in graph.inputs if value.is_float32]
    exposed = exposed_values(graph, (), request)
    found = reaching_values(graph.nodes, is_low, [])
    changed = [output for output in graph.outputs if output not in inputs]
    return [
        value
        for value in inputs
        if value in found - exposed
        and any(value.aval.shape == x.aval.shape and value in _held_by(x) for x in changed)
    ]


def exposed_values(
    graph: Graph,
    outputs: Iterable[Value],
    request: Request,
    lookups: Set[Node] = frozenset(),
    exact: Set[Node] = frozenset(),
) -> set[Value]:
    """Returns the values of a level that more than half products read, moved or as they are.

    Args:
      outputs: those of the level that are so read outside.
      lookups: nodes that count as half products.
      exact: nodes that hold a product that is not half, such as one of angles.
    """
    found = set(outputs)
    reads = functools.partial(reads_numbers, settings=request.settings)
    for node in reversed(graph.nodes):
        if node in exact or _reads_float32(node, request):
            found.update(filter(is_inexact, node.inputs))
        elif not node.is_product and node not in lookups:
            results = [value in found for value in node.outputs]
            found.update(reaching_operands(node.equation, node.inputs, results, reads))
    return found


def _asked(condition: ClosedJaxpr | None, values: Sequence[Value], request: Request) -> set[Value]:
    """Returns those of a loop's carries that its condition reads."""
    if condition is None:
        return set()
    reads = functools.partial(reads_numbers, settings=request.settings)
    inputs = reaching_inputs(_jax_compat.open_jaxpr(condition)[0], reads, [True])
    return {
        value for value, is_read in zip(reversed(values), reversed(inputs), strict=False) if is_read
    }


def _multiplied(graph: Graph, carries: Sequence[_Carry]) -> set[Value]:
    """Returns the values that reach a product in a turn, or in one that follows."""
    found: set[Value] = set()
    while True:
        later = [carry.result for carry in carries if carry.before in found]
        again = reaching_values(graph.nodes, is_low, later)
        if again == found:
            return found
        found = again


def _held_by(result: Value) -> set[Value]:
    """Returns the values whose numbers a value may hold, moved and with others between."""

    def operands(value: Value) -> Sequence[Value]:
        node = value.producer
        if node is None:
            return ()
        moves = node.rule.holds_operands or node.rule.casts
        return node.inputs if moves or _jax_compat.holds_functions(node.equation) else ()

    return set(reached([result], operands))


def _reads_float32(node: Node, request: Request) -> bool:
    """Returns whether a node, or something inside it, is a product that is not to be half."""
    half = request.settings.compute_dtype
    if node.region.in_float32:
        return True
    if is_low(node.equation):
        return not node.is_product or bool(why_not_lowered(node, half))
    if not _jax_compat.holds_functions(node.equation):
        return False
    # The rule of a custom derivative may read what the function does not.
    if not node.goes_inside or (node.has_products and node.name in HOLD_RULES):
        return True
    for visit in walk_inside(node.equation):
        if is_low(visit.equation):
            _, *inside = (*visit.around, visit.equation)
            if request.region(scope_of(inside, node.scope)).in_float32:
                return True
    return False


def reads_numbers(equation: JaxprEqn, settings: Settings) -> bool:
    """Returns whether an equation is neither a half product, nor only moves what it reads."""
    rule = rule_of(equation, settings)
    name = equation.primitive.name
    if _jax_compat.holds_functions(equation):
        goes_inside = has_kind(name) and kind_of(name).goes_inside(settings)
        return rule.category is Category.FULL or not goes_inside
    if is_low(equation):
        dtypes = set(map(dtype_of, (*equation.invars, *equation.outvars)))
        is_chosen = not dtypes <= {FLOAT32, settings.compute_dtype}
        return is_chosen or rule.category is not Category.LOW or contracts_nothing(equation)
    if rule.casts:
        return dtype_of(equation.outvars[0]) not in (FLOAT32, settings.compute_dtype)
    return not rule.holds_operands
