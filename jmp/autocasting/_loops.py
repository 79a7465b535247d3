"""Loops and branches: `lax.scan`, `lax.while_loop`, `lax.switch`.

A loop must carry the same dtypes round. A scan's carry is float32, unless it loses nothing in half:
because products alone read it (the hidden state of an RNN), or because it comes in as half and
feeds a product in the same step of a short loop (the residual stream of a scanned transformer).
Carries are decided first: half ones feed products, and what float32 ones receive is kept.
What the body closes over enters in float32 and is rounded inside, because its gradients add up in
the dtype it enters in. The carry of a while loop keeps its nominal dtype; a loop whose condition
depends on floating numbers is not gone into (see `_tolerances`). Branches join to the widest.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting import _flow
from jmp.autocasting._graph import Graph, Node
from jmp.autocasting._islands import MOVES
from jmp.autocasting._nesting import (
    Info,
    Inner,
    MakePlan,
    Tools,
    constant_infos,
    half_or_nominal,
    info_of,
    nominal,
    open_level,
    plan_inner,
    store,
)
from jmp.autocasting._values import UNKNOWN, Value

# The residual stream of a deep network adds up so many layers; a longer loop is one over time,
# where small steps would be lost in half.
LAYERS = 128


class Scan:
    """`lax.scan`."""

    @staticmethod
    def plan(node: Node, context: Any, make_plan: MakePlan) -> None:
        """Fixes the dtype of each carry first, then plans the body."""
        half = context.settings.compute_dtype
        n_consts, n_carry = _jax_compat.scan_counts(node.params)
        closed = node.inputs[:n_consts]
        graph, constants = open_level(node.params["jaxpr"], node, context, closed)
        infos = [*constant_infos(graph, constants), *map(info_of, node.inputs)]
        first = len(constants) + n_consts
        carried = slice(first, first + n_carry)
        in_half = _carried_in_half(graph, carried, infos, node, half)
        carries = [
            Info(half if is_half else nominal(value), False)
            for value, is_half in zip(graph.inputs[carried], in_half, strict=True)
        ]
        infos[carried] = carries
        stacked = node.outputs[n_carry:]
        feeds = [*in_half, *(value.feeds for value in stacked)]
        kept = [*(not is_half for is_half in in_half), *(value.kept for value in stacked)]
        # One more than the turns: also a loop of one turn is a loop.
        repeats = context.repeats * (turns(node) + 1)
        inside = context._replace(repeats=repeats, prevent_cse=False)
        plan = make_plan(graph, infos, feeds, kept, inside)
        node.inner = Inner(plan, constants)
        store(node, [*(info.dtype for info in carries), *plan.output_dtypes[n_carry:]])

    @staticmethod
    def run(node: Node, operands: list[Any], tools: Tools) -> list[Any]:
        """Emits `lax.scan`; constants are closed over and cast inside, at each use."""
        n_consts, n_carry = _jax_compat.scan_counts(node.params)
        consts, init, xs = (
            operands[:n_consts],
            operands[n_consts : n_consts + n_carry],
            operands[n_consts + n_carry :],
        )
        dtypes = [value.dtype for value in node.outputs[:n_carry]]
        init = cast_all(init, dtypes)
        closed = node.inputs[:n_consts]
        stored = [getattr(x, "dtype", None) for x in consts]
        consts = [
            x if v.fixed else cast(x, nominal(v)) for x, v in zip(consts, closed, strict=True)
        ]

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            rounded = cast_all(consts, stored)
            results = node.inner.run([*rounded, *carry, *x], tools.run_plan)
            return cast_all(results[:n_carry], dtypes), results[n_carry:]

        params = node.params
        carry, ys = lax.scan(
            body,
            init,
            xs,
            length=params["length"] if isinstance(params["length"], int) else None,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]


def turns(node: Node) -> int:
    """Returns how often the body of a scan runs; `UNKNOWN` for a length that is a symbol."""
    length = node.params["length"]
    return length if isinstance(length, int) else UNKNOWN


def _carried_in_half(
    graph: Graph, carried: slice, infos: list[Info], node: Node, half: np.dtype
) -> list[bool]:
    """Returns for each carry of a scan whether it loses nothing in half."""
    fed = _flow.feeding_values(graph, [False] * len(graph.outputs))  # within one step
    values, stored = graph.inputs[carried], infos[carried]
    streams = [
        turns(node) <= LAYERS and info.dtype == half and value.is_float32 and value in fed
        for value, info in zip(values, stored, strict=True)
    ]
    results, outside = graph.outputs[: len(values)], node.outputs[: len(values)]
    found = [
        value.is_float32 and not outer.kept for value, outer in zip(values, outside, strict=True)
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


def _read_by_products_alone(value: Value, wide: set[Value]) -> bool:
    """Returns whether nothing else reads a value, a float32 carry (`wide`) included."""
    if value in wide or not value.users:
        return False
    return all(
        user.is_product
        or (
            user.name in (*MOVES, "concatenate", "slice")
            and all(_read_by_products_alone(output, wide) for output in user.outputs)
        )
        for user in value.users
    )


class While:
    """`lax.while_loop`; its condition runs as written."""

    @staticmethod
    def plan(node: Node, context: Any, make_plan: MakePlan) -> None:
        """The carry keeps its nominal dtypes."""
        skipped = node.params["cond_nconsts"]
        n_consts = node.params["body_nconsts"]
        operands = node.inputs[skipped:]
        closed = operands[:n_consts]
        graph, constants = open_level(node.params["body_jaxpr"], node, context, closed)
        infos = [*constant_infos(graph, constants), *map(info_of, operands)]
        first = len(constants) + n_consts
        for i in range(first, len(infos)):
            infos[i] = Info(nominal(graph.inputs[i]), False)
        feeds, kept = [False] * len(graph.outputs), [True] * len(graph.outputs)
        # Nothing is saved for a backward pass, because there is none.
        inside = context._replace(prevent_cse=False)
        node.inner = Inner(make_plan(graph, infos, feeds, kept, inside), constants)
        store(node, [nominal(value) for value in node.outputs])

    @staticmethod
    def run(node: Node, operands: list[Any], tools: Tools) -> list[Any]:
        """Emits `lax.while_loop`."""
        params = node.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        body_consts = operands[first : first + second]
        nominals = [nominal(value) for value in node.inputs]
        init = cast_all(operands[first + second :], nominals[first + second :])
        cond_consts = cast_all(operands[:first], nominals[:first])
        condition = _jax_compat.as_function(params["cond_jaxpr"])
        dtypes = [value.dtype for value in node.outputs]

        def body(carry: list[Any]) -> list[Any]:
            return cast_all(node.inner.run([*body_consts, *carry], tools.run_plan), dtypes)

        return lax.while_loop(lambda carry: condition(*cond_consts, *carry)[0], body, init)


class Cond:
    """`lax.cond` and `lax.switch`."""

    @staticmethod
    def plan(node: Node, context: Any, make_plan: MakePlan) -> None:
        """An output is half if every branch leaves it in half."""
        half = context.settings.compute_dtype
        node.inner = [
            plan_inner(branch, node, node.inputs[1:], context, make_plan)
            for branch in node.params["branches"]
        ]
        branches = [inner.plan.output_dtypes for inner in node.inner]
        dtypes = []
        for value, *stored in zip(node.outputs, *branches, strict=True):
            agreed = half if all(dtype == half for dtype in stored) else None
            dtypes.append(half_or_nominal(value, agreed, half))
        store(node, dtypes)

    @staticmethod
    def run(node: Node, operands: list[Any], tools: Tools) -> list[Any]:
        """Emits `lax.switch`."""
        dtypes = [value.dtype for value in node.outputs]

        def branch(inner: Inner) -> Any:
            return lambda *args: cast_all(inner.run(args, tools.run_plan), dtypes)

        index, *rest = operands
        return lax.switch(index, [branch(inner) for inner in node.inner], *rest)


def cast_all(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Casts each array to the dtype beside it."""
    return [cast(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]


def cast(value: Any, dtype: Any) -> Any:
    """Casts an array to a real floating dtype; anything else passes."""
    if dtype is None or getattr(value, "dtype", dtype) == dtype:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.astype(dtype)
    return jax.lax.convert_element_type(value, dtype)
