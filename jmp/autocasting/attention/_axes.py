"""Along which axes a value only repeats, as a mask over keys does along the heads.

Axes by where they come from: which axes of the scores an axis of another array is made of.

An *atom* is an axis of the scores longer than one, or another axis that a product brings in. Each
axis of an array is a tuple of atoms, slowest first: of the scores' own layout `((0,), (1,), (2,))`;
with the first two merged `((0, 1), (2,))`. An axis of length one, or one that only repeats, is
`()`.

Queries, keys and values: which axes of the two products of an attention are which.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp.autocasting._graph import Node, Value
from jmp.autocasting._numbers import shape_of


def repeating(value: Value) -> tuple[bool, ...]:
    """Returns for each axis of a value whether all entries along it are known to be equal."""
    return _repeating(value, {})


def _repeating(value: Value, found: dict[Node, tuple[bool, ...]]) -> tuple[bool, ...]:
    value = value.origin
    shape, node = shape_of(value), value.producer
    of_length_one = tuple(n == 1 for n in shape)
    if node is None or not node.inputs or len(node.outputs) != 1:
        return of_length_one
    if node not in found:
        found[node] = _of_result(node, found)
    return tuple(one or repeats for one, repeats in zip(of_length_one, found[node], strict=True))


def _of_result(node: Node, found: dict[Node, tuple[bool, ...]]) -> tuple[bool, ...]:
    rank = len(shape_of(node.outputs[0]))
    if node.rule.repeats:
        repeats = [True] * rank
        places = node.params["broadcast_dimensions"]
        for place, own in zip(places, _repeating(node.inputs[0], found), strict=True):
            repeats[place] = own
        return tuple(repeats)
    if node.name == "transpose":
        before = _repeating(node.inputs[0], found)
        return tuple(before[i] for i in node.params["permutation"])
    if keeps_places(node):
        return _repeating(node.inputs[0], found)
    if is_pointwise(node):
        arrays = [_repeating(v, found) for v in node.inputs if shape_of(v)]
        return tuple(all(axis) for axis in zip(*arrays, strict=True)) or (True,) * rank
    return (False,) * rank


def is_pointwise(node: Node) -> bool:
    """Returns whether each number of the result is made of those in its place."""
    rule, rank = node.rule, len(shape_of(node.outputs[0]))
    is_one_by_one = rule.fusible and (rule.cheap or rule.elementwise)
    return is_one_by_one and all(len(shape_of(value)) in (rank, 0) for value in node.inputs)


def hands_on(node: Node) -> bool:
    """Returns whether a node is the identity, its derivative too: a name, a cast to its dtype."""
    if node.name == "convert_element_type":
        return node.inputs[0].dtype == node.outputs[0].dtype
    moves = node.name == "transpose" or node.name == "rev"
    return node.rule.permutes and not moves and node.name != "stop_gradient"


def keeps_places(node: Node) -> bool:
    """Returns whether the numbers of a node's result are those of its operand, in their places."""
    return hands_on(node) or node.name == "stop_gradient"


Axes = tuple[tuple[int, ...], ...]
Sizes = Mapping[int, int]  # how long each atom is


def own_axes(shape: Sequence[int]) -> Axes:
    """Returns the axes of the array whose axes are the atoms."""
    return tuple((i,) if n != 1 else () for i, n in enumerate(shape))


def after(node: Node, axes: Axes, sizes: Sizes, side: int = 0) -> Axes | None:
    """Returns the axes of the result of a node, given those of the operand that it hands on.

    Args:
      side: which operand that is; the other one multiplies it.

    Returns: None if the node repeats, drops or adds up numbers, or if an atom would be split.
    """
    shape = shape_of(node.outputs[0])
    if node.name == "transpose":
        return tuple(axes[i] for i in node.params["permutation"])
    if node.name == "dot_general":
        return _after_product(node, axes, side)
    if node.rule.reshapes or (node.rule.repeats and node.outputs[0].size == node.inputs[0].size):
        return _regrouped(axes, shape, sizes)
    return axes if hands_on(node) or shape == shape_of(node.inputs[side]) else None


def _after_product(node: Node, axes: Axes, side: int) -> Axes | None:
    contracted, batched = node.params["dimension_numbers"]
    other = shape_of(node.inputs[1 - side])
    of_other: Axes = ((),) * (len(other) - len(batched[1 - side]))
    if contracted[side] or any(n != 1 for i, n in enumerate(other) if i not in batched[1 - side]):
        return None
    own = tuple(axis for i, axis in enumerate(axes) if i not in batched[side])
    shared = tuple(axes[i] for i in batched[side])
    return (*shared, *own, *of_other) if side == 0 else (*shared, *of_other, *own)


def before(node: Node, axes: Axes, sizes: Sizes) -> Axes | None:
    """Returns the axes of the operand of a node that moves data, given those of its result.

    What the node repeats has no atoms in the operand.
    """
    shape = shape_of(node.inputs[0])
    if node.name == "transpose":
        places = node.params["permutation"]
        return tuple(axes[places.index(i)] for i in range(len(axes)))
    if node.rule.repeats:
        places = node.params["broadcast_dimensions"]
        return tuple(axes[i] if n != 1 else () for n, i in zip(shape, places, strict=True))
    if node.rule.reshapes:
        return _regrouped(axes, shape, sizes)
    return axes if hands_on(node) else None


def moves_axes(node: Node) -> bool:
    """Returns whether `after` and `before` may follow axes through a node."""
    moves = node.rule.reshapes or node.rule.repeats or node.name == "transpose"
    return moves or hands_on(node)


def _regrouped(axes: Axes, shape: Sequence[int], sizes: Sizes) -> Axes | None:
    """Returns the atoms in the same order, as the axes of another shape."""
    atoms = [atom for axis in axes for atom in axis]
    regrouped: list[tuple[int, ...]] = []
    for length in shape:
        taken: tuple[int, ...] = ()
        # Symbols can be told equal, and not which is larger.
        while math.prod(sizes[atom] for atom in taken) != length:
            if not atoms:
                return None
            taken = (*taken, atoms.pop(0))
        regrouped.append(taken)
    return None if atoms else tuple(regrouped)


class Layout(NamedTuple):
    """How an array is laid out anew: reshaped to `split`, transposed, reshaped to `shape`."""

    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def __call__(self, array: Any) -> Any:
        """Returns the array laid out anew."""
        return array.reshape(self.split).transpose(self.order).reshape(self.shape)


Group = tuple[int, ...]  # atoms that one axis of another array is made of
Groups = Sequence[Group]


def layout(axes: Axes, groups: Groups, sizes: Sizes) -> Layout:
    """Returns how an array with `axes` becomes one whose axes are `groups` of atoms."""
    atoms = [atom for axis in axes for atom in axis]
    wanted = [atom for group in groups for atom in group]
    return Layout(
        tuple(sizes[atom] for atom in atoms),
        tuple(atoms.index(atom) for atom in wanted),
        tuple(math.prod(sizes[atom] for atom in group) for group in groups),
    )


def spread(array: Any, axes: Axes, groups: Groups, sizes: Sizes) -> Any:
    """Lays out an array that lacks some atoms; a group that it has in part is repeated.

    Along an axis without atoms all entries are equal, and the first is taken.

    Returns: an array, of NumPy if it was one, of one axis for each group, of length one where it
      has none of its atoms.
    """
    present = {atom for axis in axes for atom in axis}
    atoms = [(atom, bool(present.intersection(group))) for group in groups for atom in group]
    array = array[tuple(slice(None) if axis else slice(1) for axis in axes)]
    array = layout(axes, [(atom,) for atom, _ in atoms if atom in present], sizes)(array)
    array = array.reshape([sizes[atom] if atom in present else 1 for atom, _ in atoms])
    shape = [sizes[atom] if in_part else 1 for atom, in_part in atoms]
    repeat = np.broadcast_to if isinstance(array, np.ndarray) else jnp.broadcast_to
    return repeat(array, shape).reshape(
        [math.prod(sizes[a] for a in g) if present.intersection(g) else 1 for g in groups]
    )


class Placed(NamedTuple):
    """A value, and which atoms its axes are."""

    value: Value
    axes: Axes


def core_of(value: Value, axes: Axes, sizes: Sizes) -> Placed:
    """Goes back from a value over what only repeats and moves it.

    An axis along which the value that is left repeats has no atoms, whatever its length.
    """
    value, axes = source_of(value, axes, sizes)
    pairs = zip(axes, repeating(value), strict=True)
    return Placed(value, tuple(() if repeats else axis for axis, repeats in pairs))


def source_of(value: Value, axes: Axes, sizes: Sizes) -> Placed:
    """Goes back from a value as `core_of` does, and leaves to each axis its atoms."""
    node = value.producer
    while node is not None and moves_axes(node):
        inner = before(node, axes, sizes)
        if inner is None:
            break
        value, axes = node.inputs[0], inner
        node = value.producer
    return Placed(value, axes)


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
