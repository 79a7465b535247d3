"""Which float32 carries of a loop lose nothing in half, and which of its operands are weights.

Three sorts lose nothing:

- A *state* that only products read, such as the hidden one of an RNN: each turn computes it anew.
- A *buffer*, such as the keys and values of an attention during generation: what a turn writes into
  it is read by products, in this turn or later ones, and all else only moves it: updates of slices,
  scatters, gathers, concatenations, selections, also in loops and branches inside. Each number is
  rounded once, when it is written. A buffer that anything else reads, in the loop or after it, is
  float32, and so is one that no product reads, such as a record of log-probabilities. Its gradient
  adds up turn by turn: if one is taken, the loop has it in float32.
- A *stream*: what a short loop over layers adds to; see `kinds.scan`.

A carry that a turn adds to, or scales, is none of the first two: arithmetic reads it, and small
steps would be lost.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jmp.autocasting._facts import (
    Destination,
    Info,
    exposed_values,
    holds_product,
    multiplied_values,
    reaching,
)
from jmp.autocasting._graph import Inside, Node, Value, reached
from jmp.autocasting._level import Level
from jmp.autocasting._steps import Plan, Single


class _Carry(NamedTuple):
    before: Value  # a turn
    result: Value  # of a turn
    after: Value  # the loop


class InHalf(NamedTuple):
    """Of each carry whether it is half, and whether it is a buffer."""

    all: list[bool]
    buffers: list[bool]


def carried_in_half(
    inside: Inside,
    node: Node,
    level: Level,
    streams: Sequence[bool] = (),
    condition: Inside | None = None,
) -> InHalf:
    """Returns for each carry of a loop whether it loses nothing in half.

    Args:
      inside: the body; its first outputs are the carries after a turn.
      node: the loop, whose first results are the carries.
      level: that it stands on.
      streams: which carries are half in any case; left out, none.
      condition: of a while loop.
    """
    graph = inside.graph
    triples = zip(inside.carries.values(), graph.outputs, node.outputs, strict=False)
    carries = list(itertools.starmap(_Carry, triples))
    # In a turn, or in one that follows.
    multiplied = reaching(inside, [], holds_product, lambda _: False)
    asked = set() if condition is None else _asked(condition, level.half)
    found = [
        carry
        for number, carry in enumerate(carries)
        if carry.before.is_float32
        and carry.after not in level.facts.carried
        and carry.before in multiplied
        and number not in asked
    ]
    buffers = _buffers(carries)
    # A state is computed anew; whatever reads it after the loop, it was half before.
    found = [c for c in found if not (c in buffers and _stays_wide(c, node, level))]
    while found:
        wide = [carry.result for carry in carries if carry not in found]
        read = exposed_values(graph, wide, level.half)
        kept = [carry for carry in found if carry.before not in read]
        if kept == found:
            break
        found = kept
    pairs = list(itertools.zip_longest(carries, streams, fillvalue=False))
    in_half = [carry in found or is_stream for carry, is_stream in pairs]
    is_buffer = [carry in found and carry in buffers and not stream for carry, stream in pairs]
    return InHalf(in_half, is_buffer)


def _asked(condition: Inside, half: np.dtype) -> set[int]:
    """Returns the numbers of the carries that the condition of a loop reads."""
    read = exposed_values(condition.graph, condition.graph.outputs, half)
    return {number for number, value in condition.carries.items() if value in read}


def dtypes_of_carries(
    values: Sequence[Value], in_half: Sequence[bool], half: np.dtype
) -> tuple[list[np.dtype | None], list[Info], list[Destination]]:
    """Returns the dtypes of carries, what they are before a turn, and where they go after it."""
    dtypes = [half if is_half else v.dtype for v, is_half in zip(values, in_half, strict=True)]
    infos = [Info(dtype, False) for dtype in dtypes]
    goes = [Destination(is_half, carried=not is_half, rounded=is_half) for is_half in in_half]
    return dtypes, infos, goes


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


def find_weights(plan: Plan, in_half: Sequence[bool], level: Level) -> set[Value]:
    """Returns the inputs of a loop's body that may come in rounded, such as weights; carries too.

    Only half products read one, and lookups whose rows are rounded. A table of which only rows are
    looked up does not count: that reads less than would be rounded.

    Args:
      plan: of the body; its first outputs are the carries, and what follows them rows of results.
      in_half: of each carry, as `carried_in_half` returned it.
      level: that the loop stands on.
    """
    lookups = {
        step.node
        for step in plan.steps
        if isinstance(step, Single) and step.node.name == "gather" and step.stores == (level.half,)
    }
    outputs = plan.graph.outputs
    wide = [*itertools.compress(outputs, map(operator.not_, in_half)), *outputs[len(in_half) :]]
    found = multiplied_values(plan.graph, [])
    found -= exposed_values(plan.graph, wide, level.half, lookups)
    if level.half == np.float16:
        # One that may be a mask is held within float16's range, where it is applied.
        found = {value for value in found if not any(user.rule.masks for user in value.users)}
    return {
        value
        for value in found.intersection(plan.graph.inputs)
        if value.is_float32 and value.varies and not lookups.issuperset(value.users)
    }


def _held_by(result: Value) -> set[Value]:
    """Returns the values whose numbers a value may hold, moved and with others between."""

    def operands(value: Value) -> Sequence[Value]:
        node = value.producer
        if node is None:
            return ()
        moves = node.rule.holds_operands or node.rule.casts
        return node.inputs if moves or node.holds_functions else ()

    return set(reached([result], operands))
