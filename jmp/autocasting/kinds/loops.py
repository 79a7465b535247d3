"""Loops: which of their carries are half, and which of their operands are weights.

A loop must carry the same dtypes round. A float32 carry may lose nothing in half, in three sorts:

- A *state* that only products read, such as the hidden one of an RNN: each turn computes it anew.
- A *buffer*, such as the keys and values of an attention during generation: what a turn writes into
  it is read by products, in this turn or later ones, and all else only moves it: updates of slices,
  scatters, gathers, concatenations, selections, also in loops and branches inside. Each number is
  rounded once, when it is written. A buffer that anything else reads, in the loop or after it, is
  float32, and so is one that no product reads, such as a record of log-probabilities. Its gradient
  adds up turn by turn: if one is taken, the loop has it in float32.
- A *stream*: what a short loop over layers adds to; see `_streams`.

A carry that a turn adds to, or scales, is none of the first two: arithmetic reads it, and small
steps would be lost.

In `lax.scan` a carry is float32, unless it loses nothing in half, or comes in as half and feeds a
product in the same step of a short loop: the residual stream of a scanned transformer. Carries are
decided first: half ones feed products, and what float32 ones receive is kept. Arrays that the body
closes over enter in float32 and are rounded inside, because their gradients add up in the dtype
they enter in. If no gradient is taken they are rounded before the loop.

In `lax.while_loop` the condition runs as it was written. A carry keeps its nominal dtype, unless it
loses nothing in half, and the condition does not read it.

A loop whose condition depends on floating numbers runs to a tolerance, and it runs in float32, as
it was written: a fixed point iterated in half may end in a cycle whose steps are longer than the
tolerance, and its loop would never end. The condition may read the numbers themselves, or integers
and booleans that the body computes from them, such as a flag that says "done". So does beam search,
which a score ends: `follow=["while"]` lowers it.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting import _facts
from jmp.autocasting._facts import Destination, Info
from jmp.autocasting._graph import Carry, Graph, Inside, Node, RowOf, Value, reached
from jmp.autocasting._kinds import Arrays, InnerCall, Kind, register_kind
from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import cast_all
from jmp.autocasting._numbers import dtype_of, has_symbols, is_inexact
from jmp.autocasting._precision import as_written
from jmp.autocasting._propagation import Propagation, WayInside, turns_of
from jmp.autocasting._registry import Category, Rule, rule_for
from jmp.autocasting._request import Settings
from jmp.autocasting._sending import may_part
from jmp.autocasting._steps import Function, Nested, Plan, Single
from jmp.dtypes import FLOAT32

# Carries.


class _Carry(NamedTuple):
    before: Value  # a turn
    result: Value  # of a turn
    after: Value  # the loop


def carried_in_half(
    inside: Inside,
    node: Node,
    level: Level,
    streams: Sequence[bool] = (),
    condition: Inside | None = None,
) -> tuple[list[bool], list[bool]]:
    """Returns for each carry of a loop whether it is half, and whether it is a buffer.

    It is half if it loses nothing.

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
    multiplied = _facts.reaching(inside, [], _facts.holds_product, lambda _: False)
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
    # JAX takes no effects in a custom derivative, which would choose the dtype of a buffer. A state
    # is computed anew; whatever reads it after the loop, it was half before.
    wide = [c for c in buffers if node.equation.effects or c.after in level.exposed]
    found = [carry for carry in found if carry not in wide]
    while found:
        results = [carry.result for carry in carries if carry not in found]
        read = _facts.exposed_values(graph, results, level.half)
        kept = [carry for carry in found if carry.before not in read]
        if kept == found:
            break
        found = kept
    pairs = list(itertools.zip_longest(carries, streams, fillvalue=False))
    in_half = [carry in found or is_stream for carry, is_stream in pairs]
    is_buffer = [carry in found and carry in buffers and not stream for carry, stream in pairs]
    return in_half, is_buffer


def _asked(condition: Inside, half: np.dtype) -> set[int]:
    """Returns the numbers of the carries that the condition of a loop reads."""
    read = _facts.exposed_values(condition.graph, condition.graph.outputs, half)
    return {number for number, value in condition.carries.items() if value in read}


def dtypes_of_carries(
    values: Sequence[Value], in_half: Sequence[bool], half: np.dtype
) -> tuple[list[np.dtype | None], list[Info], list[Destination]]:
    """Returns the dtypes of carries, what they are before a turn, and where they go after it."""
    dtypes = [half if is_half else v.dtype for v, is_half in zip(values, in_half, strict=True)]
    infos = [Info(dtype, False) for dtype in dtypes]
    goes = [Destination(is_half, carried=not is_half, rounded=is_half) for is_half in in_half]
    return dtypes, infos, goes


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
    found = _facts.reaching(plan.graph, [], _facts.holds_product, lambda _: False)
    found -= _facts.exposed_values(plan.graph, wide, level.half, lookups)
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


# `lax.scan`.

# The residual stream of a deep network adds up so many layers; a longer loop is one over time,
# where small steps would be lost in half. Error of a gradient, stream in half over stream in
# float32: 1.6 at 16 layers, 2.2 at 128, 4 at 512; of a leaky state (0.99 x + 0.01 f(x)) 14 at 16
# turns and 114 at 128, in float16.
LAYERS = 128


class ScanKind(Kind):
    """A body, called with constants, carries and rows."""

    def calls(self, node: Node) -> Sequence[InnerCall]:
        """With constants, carries and rows."""
        constants, carries, arrays = _jax_compat.Scan.of(node.params).split(node.inputs)
        numbered = (Carry(value, index) for index, value in enumerate(carries))
        return [([*constants, *numbered, *map(RowOf, arrays)], node.outputs)]

    def plan(self, node: Node, level: Level) -> Nested:
        """Decides the dtype of each carry first, then plans the body."""
        scan, (inside,) = _jax_compat.Scan.of(node.params), node.insides
        closed, before, rows = scan.split(list(map(level.info, node.inputs)))
        constants, values, _ = scan.split(inside.inputs)
        streams = _streams(inside.graph, values, before, node, level.half)
        in_half, buffers = carried_in_half(inside, node, level, streams)

        def planned(in_half: Sequence[bool], has_gradient: bool) -> Nested:
            carries, infos, goes = dtypes_of_carries(values, in_half, level.half)
            goes += level.destinations(node)[scan.n_carry :]
            # One more than the turns: also a loop of one turn is a loop.
            times = level.context.times * (turns_of(node.equation) + 1)
            context = level.context._replace(
                times=times, prevent_cse=False, has_gradient=has_gradient
            )
            plan = level.plan_graph(inside.graph, [*closed, *infos, *rows], goes, context)
            # Rows of a float32 carry that only products read behind the loop are stacked in half.
            rows_after = zip(plan.stores[scan.n_carry :], goes[scan.n_carry :], strict=True)
            stacked = (level.half if to.rounded and x == FLOAT32 else x for x, to in rows_after)
            stores = (*carries, *stacked)
            weights = find_weights(plan, in_half, level).difference(values)
            plan = plan.storing(stores).taking_as_is(weights)
            # Constants are rounded inside, but those that have no gradient.
            of_constants = zip(constants, closed, strict=True)
            reads = [v.dtype if v.varies else info.dtype for v, info in of_constants]
            reads += [*carries, *(info.dtype for info in rows)]
            pairs = zip(inside.inputs, reads, strict=True)
            taken = [None if v in weights else dtype for v, dtype in pairs]
            rounded = weights.intersection(constants)  # before the loop
            nested = level.nested(node, [plan], stores, taken)
            return nested.rounding([v in rounded for v in inside.inputs], level.half)

        if not any(buffers):
            return planned(in_half, level.context.has_gradient)
        without = [a and not b for a, b in zip(in_half, buffers, strict=True)]
        wide = planned(without, level.context.has_gradient)
        # If `wide` has weights it is their half form, and its float32 form is differentiated.
        return planned(in_half, False)._replace(differentiated=wide.differentiated or wide)

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `lax.scan`; constants are closed over."""
        scan = _jax_compat.Scan.of(equation.params)
        constants, carries, arrays = scan.split(operands)
        (body,) = functions

        def turn(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            results = body(*constants, *carry, *rows)
            return results[: scan.n_carry], results[scan.n_carry :]

        carry, stacked = lax.scan(
            turn,
            carries,
            arrays,
            length=None if has_symbols((scan.length,)) else scan.length,
            reverse=scan.reverse,
            unroll=scan.unroll,
        )
        return [*carry, *stacked]


def _streams(
    graph: Graph, values: Sequence[Value], before: Sequence[Info], node: Node, half: np.dtype
) -> list[bool]:
    """Returns for each carry of a scan whether it is the residual stream of a deep network.

    Args:
      graph: of the body; `values` are those of its inputs that are carried.
      before: what is known of the carries that come in first.
    """
    if turns_of(node.equation) > LAYERS:
        return [False] * len(values)
    fed = _facts.feeding_values(graph, [])  # within one step
    return [
        info.dtype == half and value.is_float32 and value in fed
        for value, info in zip(values, before, strict=True)
    ]


register_kind(["scan"], ScanKind())


# `lax.while_loop`.


def has_many_conditions(equation: JaxprEqn) -> bool:
    """Returns whether a while loop has a condition for each element, which only vmap can write."""
    condition, _ = _jax_compat.open_jaxpr(_jax_compat.While.of(equation.params).condition)
    return bool(condition.outvars[0].aval.shape)


def runs_to_tolerance(equation: JaxprEqn) -> bool:
    """Returns whether the condition of a while loop depends on floating numbers."""
    floating = list(map(is_inexact, equation.invars))
    join = lambda choices, deciding: any((*choices, *deciding))
    decides, _ = Propagation(_depend, join, is_inexact).through_while(equation, floating)
    return decides


def _depend(
    equation: JaxprEqn, _: tuple[JaxprEqn, ...], operands: list[bool], inside: WayInside[bool]
) -> Sequence[bool]:
    """Returns for each result whether it is floating, or depends on what is."""
    found = inside() or [any(operands)] * len(equation.outvars)
    if rule_for(equation.primitive.name).chooses:
        # Which entry is the largest is no distance that shrinks: a text is generated up to the
        # token that ends it. Integers that are sorted are what they were.
        moved = zip(operands, equation.invars, strict=True)
        own = [depends and not is_inexact(operand) for depends, operand in moved]
        found = own if equation.primitive.name == "sort" else [False] * len(found)
    pairs = zip(found, equation.outvars, strict=True)
    return [depends or is_inexact(variable) for depends, variable in pairs]


class WhileKind(Kind):
    """A condition and a body."""

    def rule(self, equation: JaxprEqn, rule: Rule, settings: Settings) -> Rule:
        """Two sorts of loops are float32."""
        is_asked_for = equation.primitive.name in settings.overrides
        if not is_asked_for and runs_to_tolerance(equation):
            return Rule(Category.FULL, "in a loop that runs to a tolerance")
        if has_many_conditions(equation):
            return Rule(Category.FULL, "in a loop that vmap gave a condition for each element")
        return rule

    def functions(self, equation: JaxprEqn) -> Sequence[ClosedJaxpr]:
        """The condition, then the body."""
        loop = _jax_compat.While.of(equation.params)
        return loop.condition, loop.body

    def calls(self, node: Node) -> Sequence[InnerCall]:
        """With what each closes over, and the carries; no result of the node is the condition's."""
        asked, closed, carries = _jax_compat.While.of(node.params).split(node.inputs)
        numbered = [Carry(value, index) for index, value in enumerate(carries)]
        return [([*asked, *numbered], ()), ([*closed, *numbered], node.outputs)]

    def plan(self, node: Node, level: Level) -> Nested:
        """Plans the body."""
        loop, (condition, inside) = _jax_compat.While.of(node.params), node.insides
        asked, closed, _ = loop.split(node.inputs)
        infos = list(map(level.info, closed))
        in_half, _ = carried_in_half(inside, node, level, condition=condition)
        stores, carries, goes = dtypes_of_carries(node.outputs, in_half, level.half)
        (is_on,) = loop.condition.out_avals
        parts = level.context.devices_part or may_part(node, is_on)
        # Nothing is saved for a backward pass, because there is none.
        context = level.context._replace(prevent_cse=False, devices_part=parts, has_gradient=False)
        body = level.plan_graph(inside.graph, [*infos, *carries], goes, context)
        condition_as_written = as_written(loop.condition, node, level.context.request)
        run_condition = lambda run_plan: _jax_compat.as_function(condition_as_written)
        weights = find_weights(body, in_half, level).intersection(inside.inputs[: len(closed)])
        body = body.storing(stores).taking_as_is(weights)
        is_weight = [value in weights for value in inside.inputs]
        reads = [
            *(value.dtype for value in asked),
            *(None if w else i.dtype for w, i in zip(is_weight, infos, strict=False)),
            *stores,
        ]
        nested = level.nested(node, [run_condition, body], stores, reads)
        return nested.rounding([*(False for _ in asked), *is_weight], level.half)

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `lax.while_loop`."""
        asked, closed, carries = _jax_compat.While.of(equation.params).split(operands)
        condition, body = functions
        dtypes = list(map(dtype_of, equation.outvars))

        def is_on(carry: list[Any]) -> Any:
            # It reads none of those that are half, but may hand them to a function inside.
            return condition(*asked, *cast_all(carry, dtypes))[0]

        return lax.while_loop(is_on, lambda carry: body(*closed, *carry), carries)


register_kind(["while"], WhileKind())
