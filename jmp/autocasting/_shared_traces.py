"""Islands that are alike share a trace: those of the layers of a deep network, say."""

from collections.abc import Hashable, Iterable

import numpy as np

from jmp.autocasting._graph import Node, Value
from jmp.autocasting._steps import Fused, Island, S, Step


def with_keys(steps: Iterable[Step]) -> list[Step]:
    """Returns steps whose recomputed islands share a trace with those that are alike.

    JAX traces what is under `jax.checkpoint`, its derivative and its transpose once for each
    function object. So islands that agree in all but the values that enter, and the scope that they
    stand in, such as those of the layers of a deep network, are emitted through one function.
    """

    def with_key(step: S) -> S:
        if isinstance(step, Fused):
            return step._replace(plain=tuple(map(with_key, step.plain)))
        if isinstance(step, Island) and step.is_recomputed:
            return step._replace(key=_key_of(step))
        return step

    return list(map(with_key, steps))


def _key_of(island: Island) -> Hashable:
    numbers: dict[Value, int] = {}

    def name(value: Value) -> Hashable:
        if value.literal is None:
            return numbers.setdefault(value, len(numbers))
        if np.ndim(value.literal) == 0 and value.dtype is not None and value.dtype.kind in "biufc":
            return str(value.aval), np.asarray(value.literal).tobytes()
        return "literal", id(value.literal)

    def describe(node: Node) -> Hashable:
        rewrite, equation = island.rewrites.get(node), node.equation
        return (
            equation.primitive,
            tuple(sorted(node.params.items())),
            node.stack.stack[island.common_scopes :],
            (equation.source_info.traceback, equation.ctx),
            tuple(map(name, node.inputs)),
            tuple(map(name, node.outputs)),
            rewrite and (rewrite.why, *((name(v), v.constant) for v in rewrite.reads)),
        )

    return (
        tuple((name(value), value.aval, dtype) for value, dtype, *_ in island.reads),
        tuple(map(describe, island.nodes)),
        tuple((name(value), dtype, saturates) for value, dtype, saturates in island.writes),
        tuple((name(value), value.aval, repr(value.constant)) for value in island.numbers),
        (island.is_recomputed, island.prevent_cse, island.shares_casts),
    )
