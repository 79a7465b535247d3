"""Lookups that take no row twice: their derivative adds up nothing, so that it is half.

Each row is then read once, and so its gradient has one term. Other lookups read float32, and add up
the gradients of rows that repeat in float32.
"""

import numpy as np

from jmp.autocasting._graph import Node
from jmp.autocasting._level import Level
from jmp.autocasting._numbers import LOOKED_AT, has_symbols, shape_of, size_of
from jmp.autocasting._steps import Arithmetic, Read, Single, on
from jmp.autocasting.attention._constants import constant_of

WHY_ONCE = "its indices are constants that differ, so that its derivative adds up nothing"


@on(Single)
def look_up_once(step: Single, level: Level) -> Single:
    """Returns a step; a lookup by constant indices that differ reads and writes half."""
    node, is_rounded = step.node, step.arithmetic is Arithmetic.ROUNDED
    if not is_rounded or node.name != "gather" or node in level.facts.embeddings:
        return step
    if not takes_each_once(node):
        return step
    return step._replace(
        arithmetic=Arithmetic.HALF,
        why=WHY_ONCE,
        reads=tuple(Read(v, level.half if v.is_float32 else None) for v in node.inputs),
        params={**step.params, "unique_indices": True},
    )


def takes_each_once(gather: Node) -> bool:
    """Returns whether a gather takes each number once at most: constant indices that differ.

    These are, for instance, those of a triangle, or `jnp.arange`.
    """
    table, indices = gather.inputs
    params, shapes = gather.params, (shape_of(table), shape_of(indices))
    axes = params["dimension_numbers"].start_index_map
    if not axes or params["dimension_numbers"].operand_batching_dims:  # an element of each row
        return False
    if any(map(has_symbols, shapes)) or any(params["slice_sizes"][axis] != 1 for axis in axes):
        return False
    numbers = constant_of(indices) if size_of(shapes[1]) <= LOOKED_AT else None
    if numbers is None:
        return False
    places = np.broadcast_to(numbers, shapes[1]).reshape(-1, len(axes))
    lengths = [shapes[0][axis] for axis in axes]
    if np.any(places < 0) or np.any(places >= lengths):
        return False  # what lies beyond the end may be taken for the last one
    return len(np.unique(np.ravel_multi_index(tuple(places.T), lengths))) == len(places)
