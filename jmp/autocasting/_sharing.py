"""Which islands are alike, as those of the layers of a deep network are: they share one trace.

JAX traces what is under `jax.checkpoint`, its derivative and its transpose once for each function
object. So islands that agree in all but the values that enter, and the scope that they stand in,
are emitted through one function.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from jmp.autocasting._graph import Node, Value
from jmp.autocasting._steps import Island


def common_scopes_of(nodes: Sequence[Node]) -> int:
    """Returns how many name scopes all nodes stand in together."""
    stacks = [node.stack.stack for node in nodes]
    count = len(stacks[0])
    while any(stack[:count] != stacks[0][:count] for stack in stacks):
        count -= 1
    return count


def key_of(island: Island) -> Hashable:
    """Returns what islands that are alike agree in."""
    numbers: dict[Value, int] = {}

    def name(value: Value) -> Hashable:
        if value.held is None:
            return numbers.setdefault(value, len(numbers))
        if np.ndim(value.held) == 0 and value.dtype is not None and value.dtype.kind in "biufc":
            return str(value.aval), np.asarray(value.held).tobytes()
        return "held", id(value.held)

    def describe(node: Node) -> Hashable:
        rewrite, equation = island.rewrites.get(node), node.equation
        return (
            equation.primitive,
            tuple(sorted(node.params.items())),
            str(node.stack[island.common_scopes :]),
            (equation.source_info.traceback, equation.ctx),
            tuple(map(name, node.inputs)),
            tuple(map(name, node.outputs)),
            () if rewrite is None else (rewrite.why, *map(name, rewrite.reads)),
        )

    return (
        tuple((name(value), value.aval, dtype) for value, dtype, *_ in island.reads),
        tuple(map(describe, (*island.clones, *island.nodes))),
        tuple((name(value), dtype, saturates) for value, dtype, saturates in island.leaves),
        (len(island.clones), island.recompute, island.prevent_cse, island.shares_casts),
    )
