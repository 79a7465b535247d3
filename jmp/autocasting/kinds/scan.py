"""`lax.scan`. A loop must carry the same dtypes round.

A carry is float32, unless it loses nothing in half (`_carries`), or comes in as half and feeds a
product in the same step of a short loop: the residual stream of a scanned transformer. Carries are
decided first: half ones feed products, and what float32 ones receive is kept. Arrays that the body
closes over enter in float32 and are rounded inside, because their gradients add up in the dtype
they enter in. If no gradient is taken they are rounded before the loop.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._carries import carried_in_half, dtypes_of_carries, find_weights
from jmp.autocasting._facts import Info, feeding_values
from jmp.autocasting._graph import Carry, Graph, Node, RowOf, Value
from jmp.autocasting._kinds import Arrays, InnerCall, Kind, register_kind
from jmp.autocasting._level import Level
from jmp.autocasting._numbers import has_symbols
from jmp.autocasting._propagation import turns_of
from jmp.autocasting._steps import Function, Nested
from jmp.autocasting._weight_sums import probed
from jmp.dtypes import FLOAT32

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
        constants, values, arrays = scan.split(inside.inputs)
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
            nested = level.nested(
                node, [plan], stores, [None if v in weights else dtype for v, dtype in pairs]
            )
            rounded = weights.intersection(constants)  # before the loop
            if has_gradient and rounded and not any(map(_jax_compat.has_named_axes, node.inputs)):
                by_turn = [v if v in rounded else None for v in constants]
                sums = probed(plan, by_turn, values, arrays, scan.length)
                nested = nested._replace(probed=sums)
            return nested.rounding([v in rounded for v in inside.inputs], level.half)

        if not any(buffers):
            return planned(in_half, level.context.has_gradient)
        without = [a and not b for a, b in zip(in_half, buffers, strict=True)]
        wide = planned(without, level.context.has_gradient)
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
    fed = feeding_values(graph, [])  # within one step
    return [
        info.dtype == half and value.is_float32 and value in fed
        for value, info in zip(values, before, strict=True)
    ]


register_kind(["scan"], ScanKind())
