"""Rewrites: leaner forms of equations of islands. A new one is a file here and a row below.

A rewrite is a function of a node and its surroundings that returns a `Rewrite`, or None where it
does not apply. The first that applies counts.
"""

from collections.abc import Callable

from jmp.autocasting._graph import Node
from jmp.autocasting._steps import Rewrite, Surroundings
from jmp.autocasting.rewrites.one_pass import sums_in_one_pass
from jmp.autocasting.rewrites.pick import pick_as_sum
from jmp.autocasting.rewrites.softmax import (
    pad_softmaxes,
    softmax_from_half_result,
    softmax_of_half_scores,
)

__all__ = ["pad_softmaxes", "rewrite_of"]

REWRITES: list[Callable[[Node, Surroundings], Rewrite | None]] = [
    pick_as_sum,
    softmax_from_half_result,
    softmax_of_half_scores,
    sums_in_one_pass,
]


def rewrite_of(node: Node, around: Surroundings) -> Rewrite | None:
    """Returns the leaner form of a node; None if it is bound as it is."""
    return next(filter(None, (rewrite(node, around) for rewrite in REWRITES)), None)
