"""Loops and branches: `lax.scan`, `lax.while_loop`, `lax.switch`.

A loop must carry the same dtypes round. A scan's carry is float32, unless it loses nothing in half:
because products alone read it (the hidden state of an RNN), or because it comes in as half and
feeds a product in the same step of a short loop (the residual stream of a scanned transformer).
What the body closes over enters in float32 and is rounded inside, because its gradients add up in
the dtype it enters in. The carry of a while loop keeps its nominal dtype. Branches join
to the widest.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting import _flow
from jmp.autocasting._graph import FULL, Node
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
        n_consts, n_carry = _jax_compat.scan_counts(node.params)
        closed = node.inputs[:n_consts]
        graph, constants = open_level(node.params["jaxpr"], node, context, closed)
        infos = [*constant_infos(graph, constants), *map(info_of, node.inputs)]
        skip = len(constants)
        carries = range(skip + n_consts, skip + n_consts + n_carry)
        # Within one step nothing outside is fed.
        _flow.mark_feeds(graph, [False] * len(graph.outputs))
        for i in carries:
            is_short = turns(node) <= LAYERS
            infos[i] = Info(_carry_dtype(graph.inputs[i], infos[i], context, is_short), False)
        feeds = [value.feeds for value in node.outputs]
        while True:
            _flow.mark_feeds(graph, feeds)
            again = [graph.inputs[i].feeds or feeds[k] for k, i in enumerate(carries)]
            if again == feeds[:n_carry]:
                break
            feeds[:n_carry] = again
        kept = [infos[i].dtype == nominal(graph.inputs[i]) for i in carries]
        # One more than the turns: also a loop of one turn is a loop.
        repeats = context.repeats * (turns(node) + 1)
        plan = make_plan(
            graph, infos, feeds, context._replace(repeats=repeats, prevent_cse=False), kept
        )
        node.inner = Inner(plan, constants)
        dtypes = plan.output_dtypes
        dtypes[:n_carry] = [infos[i].dtype for i in carries]
        store(node, dtypes)

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


def _carry_dtype(value: Value, info: Info, context: Any, is_short: bool) -> Any:
    half = context.settings.compute_dtype
    if not value.is_float32:
        return nominal(value)
    alone = _read_by_products_alone(value)
    is_stream = is_short and info.dtype == half and value.feeds
    return half if alone or is_stream else nominal(value)


def _read_by_products_alone(value: Value) -> bool:
    return bool(value.users) and all(
        user.is_product
        or (
            user.name in (*MOVES, "concatenate", "slice")
            and all(_read_by_products_alone(output) for output in user.outputs)
        )
        for user in value.users
    )


class While:
    """`lax.while_loop`; its condition runs as written."""

    @staticmethod
    def plan(node: Node, context: Any, make_plan: MakePlan) -> None:
        """The carry keeps its nominal dtypes."""
        condition, _ = _jax_compat.open_jaxpr(node.params["cond_jaxpr"])
        if condition.outvars[0].aval.shape:
            # Under vmap each element has its own condition; no public function says that.
            node.mode = FULL
            for value in node.outputs:
                value.dtype = nominal(value)
            return
        skipped = node.params["cond_nconsts"]
        n_consts = node.params["body_nconsts"]
        operands = node.inputs[skipped:]
        closed = operands[:n_consts]
        graph, constants = open_level(node.params["body_jaxpr"], node, context, closed)
        infos = [*constant_infos(graph, constants), *map(info_of, operands)]
        first = len(constants) + n_consts
        for i in range(first, len(infos)):
            infos[i] = Info(nominal(graph.inputs[i]), False)
        feeds = [False] * len(graph.outputs)
        # Nothing is kept for a backward pass, because there is none.
        inside = context._replace(prevent_cse=False)
        kept = [True] * len(feeds)
        node.inner = Inner(make_plan(graph, infos, feeds, inside, kept), constants)
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
