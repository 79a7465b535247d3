"""`lax.scan`. A loop must carry the same dtypes round.

A carry is float32, unless it loses nothing in half: because products alone read it (the hidden
state of an RNN), or because it comes in as half and feeds a product in the same step of a short
loop (the residual stream of a scanned transformer). Carries are decided first: half ones feed
products, and what float32 ones receive is kept. What the body closes over enters in float32 and is
rounded inside, because its gradients add up in the dtype it enters in.
"""

from collections.abc import Sequence, Set
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._flow import Destination, Info, feeding_values
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._kinds import Arrays, Kind, Level, register_kind
from jmp.autocasting._numbers import has_symbols
from jmp.autocasting._propagation import turns_of
from jmp.autocasting._steps import Function, Nested

# The residual stream of a deep network adds up so many layers; a longer loop is one over time,
# where small steps would be lost in half. Error of a gradient, stream in half over stream in
# float32: 1.6 at 16 layers, 2.2 at 128, 4 at 512; of a leaky state (0.99 x + 0.01 f(x)) 14 at 16
# turns and 114 at 128, in float16.
LAYERS = 128


class ScanKind(Kind):
    """A body, called with constants, carries and rows."""

    def arguments(self, node: Node) -> Sequence[Sequence[Value | None]]:
        """Constants and rows."""
        constants, carries, arrays = _jax_compat.Scan.of(node.params).split(node.inputs)
        return [[*constants, *[None] * len(carries), *arrays]]

    def plan(self, node: Node, level: Level) -> Nested:
        """Decides the dtype of each carry first, then plans the body."""
        scan = _jax_compat.Scan.of(node.params)
        closed, carried, stacked = scan.split(node.inputs)
        given = [*closed, *[None] * len(carried), *(value.made_of for value in stacked)]
        graph = level.open(scan.body, node, given)
        consts, before, rows = scan.split(list(map(level.storage.info, node.inputs)))
        _, values, _ = scan.split(graph.inputs[len(graph.constants) :])
        in_half = _carried_in_half(graph, values, before, node, level)
        carries = [
            level.half if is_half else value.dtype
            for value, is_half in zip(values, in_half, strict=True)
        ]
        infos = [*consts, *(Info(dtype, False) for dtype in carries), *rows]
        outputs = [Destination(feeds=is_half, carried=not is_half) for is_half in in_half]
        outputs += map(level.storage.destination, node.outputs[scan.n_carry :])
        # One more than the turns: also a loop of one turn is a loop.
        times = level.context.times * (turns_of(node.equation) + 1)
        context = level.context._replace(times=times, prevent_cse=False)
        plan = level.plan_graph(graph, infos, outputs, context)
        stores = (*carries, *plan.stores[scan.n_carry :])
        # Constants are rounded inside, but those that have no gradient.
        reads = [
            value.dtype if value.varies else info.dtype
            for value, info in zip(closed, consts, strict=True)
        ]
        reads += [*carries, *(info.dtype for info in rows)]
        return level.nested(node, [plan.storing(stores)], stores, reads)

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


def _carried_in_half(
    graph: Graph, values: Sequence[Value], before: Sequence[Info], node: Node, level: Level
) -> list[bool]:
    """Returns for each carry of a scan whether it loses nothing in half.

    Args:
      graph: of the body; `values` are those of its inputs that are carried.
      before: what is known of the carries that come in first.
    """
    results = graph.outputs[: len(values)]
    fed = feeding_values(graph, [])  # within one step
    streams = [
        turns_of(node.equation) <= LAYERS
        and info.dtype == level.half
        and value.is_float32
        and value in fed
        for value, info in zip(values, before, strict=True)
    ]
    found = [
        value.is_float32 and outer not in level.facts.carried
        for value, outer in zip(values, node.outputs, strict=False)
    ]
    while True:
        wide = {result for result, is_half in zip(results, found, strict=True) if not is_half}
        again = [
            is_stream or (is_half and _read_by_products_alone(value, wide))
            for value, is_half, is_stream in zip(values, found, streams, strict=True)
        ]
        if again == found:
            return found
        found = again


def _read_by_products_alone(value: Value, wide: Set[Value]) -> bool:
    """Returns whether nothing else reads a value, a float32 carry (`wide`) included."""
    if value in wide or not value.users:
        return False
    for user in value.users:
        hands_on = user.rule.hands_on or user.name == "concatenate"
        moved = hands_on and all(_read_by_products_alone(v, wide) for v in user.outputs)
        if not (user.is_product or moved):
            return False
    return True


register_kind(["scan"], ScanKind())
