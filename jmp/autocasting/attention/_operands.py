"""Queries, keys and values: which axes of the two products of an attention are which."""

from collections.abc import Sequence
from typing import NamedTuple

from jmp.autocasting._graph import Node
from jmp.autocasting._numbers import shape_of
from jmp.autocasting.attention._axes import Axes, Group, Placed, own_axes

# Atoms that are no axes of the scores: the heads' width, of queries and keys, and of values.
WIDTH, VALUE_WIDTH = -1, -2


class NotFused(Exception):
    """Why an attention is left as it is."""


class Operands(NamedTuple):
    """What an attention reads, and the axes of what it returns."""

    query: Placed
    key: Placed
    values: Placed
    result: Axes
    batch: Group  # atoms that queries, keys and values share, in the queries' order
    rows: Group  # atoms of the queries alone, in their order
    keys: int  # the atom of the keys, over which the softmax sums up


def operands_of(
    scores: Node, result: Node, side: int, weights: Axes, keys: int, sizes: dict[int, int]
) -> Operands:
    """Returns what the products `scores` and `result` read.

    Args:
      side: which operand of `result` the weights are.
      weights: their axes.
      keys: the atom that the softmax sums up over.
      sizes: of the atoms; those of the widths are added.

    Raises: NotFused if an axis is not where an attention has it.
    """
    first, second = _scores_operands(scores)
    query, key = (second, first) if keys in _atoms(first) else (first, second)
    own, shared = _atoms(query), _atoms(key)
    batch = tuple(atom for atom in own if atom in shared and atom != WIDTH)
    rows = tuple(atom for atom in own if atom not in shared)
    if keys in own or set(shared) != {*batch, keys, WIDTH}:
        raise NotFused("its keys have an axis that neither queries nor values have")
    sizes[WIDTH] = shape_of(query.value)[query.axes.index((WIDTH,))]
    values, axes = _values(result, side, weights, keys, sizes)
    if set(_atoms(values)) != {*batch, keys, VALUE_WIDTH}:
        raise NotFused("its values have other batch axes than its keys")
    return Operands(query, key, values, axes, batch, rows, keys)


def _atoms(placed: Placed) -> list[int]:
    return [atom for axis in placed.axes for atom in axis]


def _scores_operands(scores: Node) -> list[Placed]:
    contracted, batched = scores.params["dimension_numbers"]
    if len(contracted[0]) != 1:
        raise NotFused("its first product sums over more than one axis")
    result = own_axes(shape_of(scores.outputs[0]))
    first = len(batched[0])
    operands = []
    for value, width, batch in zip(scores.inputs, contracted, batched, strict=True):
        axes: list[tuple[int, ...]] = []
        for i in range(len(shape_of(value))):
            if i in width:
                axes.append((WIDTH,))
            elif i in batch:
                axes.append(result[list(batch).index(i)])
            else:
                axes.append(result[first])
                first += 1
        operands.append(Placed(value, tuple(axes)))
    return operands


def _values(
    result: Node, side: int, weights: Axes, keys: int, sizes: dict[int, int]
) -> tuple[Placed, Axes]:
    """Returns the values, and the axes of the result."""
    contracted, batched = result.params["dimension_numbers"]
    if [weights[i] for i in contracted[side]] != [(keys,)]:
        raise NotFused("its second product does not sum over the keys alone")
    value = result.inputs[1 - side]
    axes: list[tuple[int, ...]] = []
    for i, length in enumerate(shape_of(value)):
        if i in contracted[1 - side]:
            axes.append((keys,))
        elif i in batched[1 - side]:
            axes.append(weights[batched[side][list(batched[1 - side]).index(i)]])
        else:
            axes.append((VALUE_WIDTH,))
            sizes[VALUE_WIDTH] = length
    if axes.count((VALUE_WIDTH,)) != 1:
        raise NotFused("its values have more than one axis of their own")
    shared = [weights[i] for i in batched[side]]
    free = [axis for i, axis in enumerate(weights) if i not in (*contracted[side], *batched[side])]
    parts: Sequence[Sequence[tuple[int, ...]]] = (free, [(VALUE_WIDTH,)])
    first, second = parts if side == 0 else parts[::-1]
    return Placed(value, tuple(axes)), (*shared, *first, *second)
