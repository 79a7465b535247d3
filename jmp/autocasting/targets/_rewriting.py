"""Rewrites: passes that lower single equations of islands in a leaner form.

A rewrite is a function of a node and its surroundings. It returns a `Rewrite`, or None if it does
not apply. `rewriting` makes a pass of it. A node that one pass has rewritten stays as it is.
"""

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import numpy as np

from jmp.autocasting._facts import Softmax
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._kinds import Level
from jmp.autocasting._passes import Pass
from jmp.autocasting._steps import Island, Rewrite, on_islands


class Surroundings(NamedTuple):
    """The island of an equation, as a rewrite may ask for it."""

    inside: Set[Node]
    is_recomputed: bool
    half: np.dtype
    entering: Set[Value]  # values that enter in half
    leaving: Set[Value]  # results that leave
    in_half: Set[Value]  # those that leave in half
    has_gradient: bool  # see `Context`
    softmaxes: Sequence[Softmax]  # whose sums are added up in the island


def rewriting(
    name: str, changes: str, rewrite: Callable[[Node, Surroundings], Rewrite | None]
) -> Pass:
    """Returns the pass that lowers nodes of islands as `rewrite` says."""

    def rewritten(island: Island, level: Level) -> Island:
        inside = set(island.nodes)
        around = Surroundings(
            inside=inside,
            is_recomputed=island.is_recomputed,
            half=level.half,
            entering={read.value for read in island.reads if read.dtype == level.half},
            leaving={write.value for write in island.writes},
            in_half={write.value for write in island.writes if write.dtype == level.half},
            has_gradient=level.context.has_gradient,
            softmaxes=list(filter(None, (x.within(inside) for x in level.facts.softmaxes))),
        )
        as_written = (node for node in island.nodes if node not in island.rewrites)
        found = {node: form for node in as_written if (form := rewrite(node, around))}
        return island._replace(rewrites={**island.rewrites, **found})

    return Pass(name, changes, on_islands(rewritten))
