"""Steps that are alike, such as those of the layers of a deep network, share a trace.

JAX traces a function, takes its derivative and transposes it once for each function object, if it
stands under `jax.checkpoint` or `jax.jit`. So steps that agree in all but the values that enter,
and the scope and the line that they stand in, run through one function.
"""

import collections
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jmp._jax_compat import Params
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._steps import Function, Island, Single

# The derivative of an equation that stands under `jax.jit` takes 0.4 ms more to trace the first
# time, and 0.1 to 0.3 ms less each further time.
FEWEST_ALIKE = 3


def sharing_functions(steps: Sequence[Any]) -> list[Any]:
    """Returns steps; those that are alike share a function."""
    alike: dict[Hashable, list[Single | Island]] = collections.defaultdict(list)
    for step in steps:
        if isinstance(step, Island) or (isinstance(step, Single) and _has_derivative(step.node)):
            alike[_key_of(step)].append(step)
    shared: dict[int, dict[Any, Function]] = {}
    for group in alike.values():
        if len(group) >= (2 if isinstance(group[0], Island) else FEWEST_ALIKE):
            shared |= dict.fromkeys(map(id, group), {})
    return [s._replace(shared=shared[id(s)]) if id(s) in shared else s for s in steps]


def _has_derivative(node: Node) -> bool:
    """Returns whether a node may have a derivative, holds no function and has no effect."""
    varies = any(value.varies for value in node.inexact)
    return varies and not (node.holds_functions or node.equation.effects)


def _key_of(step: Single | Island) -> Hashable:
    """Returns what two steps that are alike agree in; their values are numbered as they come.

    Scopes and lines do not count, but inside a recomputed island, which JAX traces with them.
    """
    numbers: dict[Value, int] = {}

    def name(value: Value) -> Hashable:
        if value.literal is None:
            return numbers.setdefault(value, len(numbers))
        if np.ndim(value.literal) == 0 and value.dtype is not None and value.dtype.kind in "biufc":
            return str(value.aval), np.asarray(value.literal).tobytes()
        return "literal", id(value.literal)

    def described(node: Node, params: Params) -> tuple[Hashable, ...]:
        return node.equation.primitive, *sorted(params.items()), node.equation.ctx

    found: list[Hashable] = [(name(value), value.aval, *how) for value, *how in step.reads]
    if isinstance(step, Single):
        return *found, *described(step.node, step.params), *step.stores, step.lowering
    for node in step.nodes:
        form = step.rewrites.get(node)
        found += [
            described(node, node.params),
            node.stack.stack[step.common_scopes :],
            # JAX puts what `jax.jit` stands for on the line of the call.
            step.is_recomputed and node.equation.source_info.traceback,
            tuple(map(name, (*node.inputs, *node.outputs))),
            form and (form.why, *((name(v), v.constant) for v in form.reads)),
        ]
    writes = ((name(value), *how) for value, *how in step.writes)
    made = ((name(value), value.aval, repr(value.constant)) for value in step.numbers)
    return *found, *writes, *made, step.is_recomputed, step.prevent_cse, step.shares_casts
