"""Axes by what they are made of: in whatever order they come, and with heads split or merged.

Each axis of the scores that is longer than one has a *label*, a number where einsum has a letter.
So has an axis that a product brings in. An axis of any other array is a tuple of labels, slowest
first: the scores' own axes are `((0,), (1,), (2,))`; with the first two merged, `((0, 1), (2,))`.
An axis of length one, or one along which an array only repeats, is `()`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp
import numpy as np

from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._numbers import shape_of

Labels = tuple[int, ...]  # what one axis is made of
Axes = tuple[Labels, ...]
Sizes = Mapping[int, int]  # how long the axis of each label is


class Labelled(NamedTuple):
    """A value, and what its axes are made of."""

    value: Value
    axes: Axes


def labels_of(axes: Axes) -> list[int]:
    """Returns the labels of all axes in their order."""
    return [label for axis in axes for label in axis]


def own_axes(shape: Sequence[int]) -> Axes:
    """Returns the axes of the array that the labels count."""
    return tuple((i,) if n != 1 else () for i, n in enumerate(shape))


# What a node does with the numbers of an operand.


def is_identity(node: Node) -> bool:
    """Returns whether a node is the identity, its derivative too: a name, a cast to its dtype."""
    if node.name == "convert_element_type":
        return node.inputs[0].dtype == node.outputs[0].dtype
    moves = node.name == "transpose" or node.name == "rev"
    return node.rule.permutes and not moves and node.name != "stop_gradient"


def keeps_places(node: Node) -> bool:
    """Returns whether the numbers of a node's result are those of its operand, in their places."""
    return is_identity(node) or node.name == "stop_gradient"


def is_pointwise(node: Node) -> bool:
    """Returns whether each number of the result is made of those in its place."""
    rule, rank = node.rule, len(shape_of(node.outputs[0]))
    is_one_by_one = rule.fusible and (rule.cheap or rule.elementwise)
    return is_one_by_one and all(len(shape_of(value)) in (rank, 0) for value in node.inputs)


def moves_axes(node: Node) -> bool:
    """Returns whether `axes_after` and `axes_before` may follow axes through a node."""
    moves = node.rule.reshapes or node.rule.repeats or node.name == "transpose"
    return moves or is_identity(node)


# Axes followed through nodes.


def axes_after(node: Node, axes: Axes, sizes: Sizes) -> Axes | None:
    """Returns the axes of the result of a node that moves data, given those of its operand.

    Returns: None if the node repeats or drops numbers, or if the axis of one label would be split.
    """
    shape = shape_of(node.outputs[0])
    if node.name == "transpose":
        return tuple(axes[i] for i in node.params["permutation"])
    if node.rule.reshapes or (node.rule.repeats and node.outputs[0].size == node.inputs[0].size):
        return _regrouped(axes, shape, sizes)
    return axes if is_identity(node) else None


def axes_before(node: Node, axes: Axes, sizes: Sizes) -> Axes | None:
    """Returns the axes of the operand of a node that moves data, given those of its result.

    What the node repeats has no labels in the operand.
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
    return axes if is_identity(node) else None


def _regrouped(axes: Axes, shape: Sequence[int], sizes: Sizes) -> Axes | None:
    """Returns the labels in the same order, as the axes of another shape."""
    labels = labels_of(axes)
    regrouped: list[Labels] = []
    for length in shape:
        taken: Labels = ()
        # Symbols can be told equal, and not which is larger.
        while math.prod(sizes[label] for label in taken) != length:
            if not labels:
                return None
            taken = (*taken, labels.pop(0))
        regrouped.append(taken)
    return None if labels else tuple(regrouped)


def source_of(value: Value, axes: Axes, sizes: Sizes) -> Labelled:
    """Goes back from a value over what only repeats and moves it."""
    node = value.producer
    while node is not None and moves_axes(node):
        before = axes_before(node, axes, sizes)
        if before is None:
            break
        value, axes = node.inputs[0], before
        node = value.producer
    return Labelled(value, axes)


# Along which axes a value only repeats, as a mask over keys does along the heads.


def differing_labels(value: Value, axes: Axes, sizes: Sizes) -> set[int]:
    """Returns the labels along which entries of a value are not known to be equal."""

    def operands(source: Labelled) -> list[Labelled]:
        if not _is_in_place(source.value.producer):
            return []
        pairs = ((v, source.axes if shape_of(v) else ()) for v in source.value.producer.inputs)
        return [_origin_of(value, axes, sizes) for value, axes in pairs]

    sources = reached([_origin_of(value, axes, sizes)], operands)
    ends = (source for source in sources if not _is_in_place(source.value.producer))
    return {label for source in ends for label in labels_of(source.axes)}


def _origin_of(value: Value, axes: Axes, sizes: Sizes) -> Labelled:
    source = source_of(value, axes, sizes)
    while source.value.origin is not source.value:
        source = source_of(source.value.origin, source.axes, sizes)
    return source


def _is_in_place(node: Node | None) -> TypeGuard[Node]:
    """Returns whether a node makes each number of those in its place alone."""
    return node is not None and bool(node.inputs) and (is_pointwise(node) or keeps_places(node))


# Arrays laid out anew.


class Layout(NamedTuple):
    """How an array is laid out anew: reshaped to `split`, transposed, reshaped to `shape`."""

    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def between(cls, axes: Axes, wanted: Axes, sizes: Sizes) -> "Layout":
        """Returns how an array with `axes` becomes one with the axes `wanted`."""
        labels = labels_of(axes)
        return cls(
            tuple(sizes[label] for label in labels),
            tuple(map(labels.index, labels_of(wanted))),
            tuple(math.prod(sizes[label] for label in axis) for axis in wanted),
        )

    def __call__(self, array: Any) -> Any:
        """Returns the array laid out anew."""
        return array.reshape(self.split).transpose(self.order).reshape(self.shape)


def spread(array: Any, axes: Axes, wanted: Axes, sizes: Sizes) -> Any:
    """Lays out an array that lacks some labels; along an axis that it has in part it is repeated.

    Along an axis without labels all entries are equal, and the first is taken.

    Returns: an array, of NumPy if it was one, with the axes `wanted`, of length one where it has
      none of their labels.
    """
    present = set(labels_of(axes))
    array = array[tuple(slice(None) if axis else slice(1) for axis in axes)]
    labels = [(label, bool(present.intersection(axis))) for axis in wanted for label in axis]
    moved = tuple((label,) for label, _ in labels if label in present)
    array = Layout.between(axes, moved, sizes)(array)
    array = array.reshape([sizes[label] if label in present else 1 for label, _ in labels])
    shape = [sizes[label] if in_part else 1 for label, in_part in labels]
    repeat = np.broadcast_to if isinstance(array, np.ndarray) else jnp.broadcast_to
    return repeat(array, shape).reshape(
        [math.prod(sizes[x] for x in axis) if present.intersection(axis) else 1 for axis in wanted]
    )
