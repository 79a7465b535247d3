"""Lookups that take each row a few times at most: they are half, and so is their derivative.

The derivative of a lookup adds up the gradients of rows that repeat. Where many repeat, a half sum
stops growing, so that other lookups read float32 and add up in float32. Here the sum has no more
terms than that of a residual stream, and is half as that is; where no row repeats it has one.
"""

import numpy as np

from jmp.autocasting._graph import Node
from jmp.autocasting._level import Level
from jmp.autocasting._numbers import LOOKED_AT, has_symbols, shape_of, size_of
from jmp.autocasting._steps import Arithmetic, Read, Single, on
from jmp.autocasting.attention._constants import constant_of

WHY_FEW = "its indices are constants that repeat few times, so that its derivative has few terms"
# An image that is enlarged to the double of both its sides has each of its numbers four times.
FEW_TIMES = 4


@on(Single)
def look_up_in_half(step: Single, level: Level) -> Single:
    """Returns a step; a lookup of few repeated rows reads and writes half."""
    node, is_rounded = step.node, step.arithmetic is Arithmetic.ROUNDED
    if not is_rounded or node.name != "gather" or node in level.facts.embeddings:
        return step
    times = times_taken(node)
    if times is None or times > FEW_TIMES:
        return step
    return step._replace(
        arithmetic=Arithmetic.HALF,
        why=WHY_FEW,
        reads=tuple(Read(v, level.half if v.is_float32 else None) for v in node.inputs),
    )


def times_taken(gather: Node) -> int | None:
    """Returns how often a gather takes the number that it takes most often.

    Returns: None if its indices depend on an argument, are many, or lie beyond the ends.
    """
    table, indices = gather.inputs
    params, shapes = gather.params, (shape_of(table), shape_of(indices))
    axes = params["dimension_numbers"].start_index_map
    if not axes or params["dimension_numbers"].operand_batching_dims:  # an element of each row
        return None
    if any(map(has_symbols, shapes)) or any(params["slice_sizes"][axis] != 1 for axis in axes):
        return None
    numbers = constant_of(indices) if 0 < size_of(shapes[1]) <= LOOKED_AT else None
    if numbers is None:
        return None
    places = np.broadcast_to(numbers, shapes[1]).reshape(-1, len(axes))
    lengths = [shapes[0][axis] for axis in axes]
    if np.any(places < 0) or np.any(places >= lengths):
        return None  # what lies beyond the end may be taken for the last one
    _, counts = np.unique(np.ravel_multi_index(tuple(places.T), lengths), return_counts=True)
    return int(counts.max())
