"""The axes of arrays, described by labels, so that transposed and reshaped arrays can be compared.

Each axis of the scores that is longer than one has a `Label`, as it has a letter in an einsum. So
has each axis that a product adds. An axis of another array is a tuple of labels, slowest first. If
a, b and c label the scores' axes, these are `((a,), (b,), (c,))`; with the first two merged they
are `((a, b), (c,))`. An axis of length one is `()`, and so is an axis along which an array only
repeats.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp
import numpy as np

from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._numbers import shape_of
from jmp.autocasting.attention._constants import is_identity, is_pointwise, keeps_places


class Label(NamedTuple):
    """An axis of the scores, or one that a product adds."""

    number: int
    length: Any  # an integer or a symbol


Labels = tuple[Label, ...]  # of one axis
Axes = tuple[Labels, ...]


def labels_of(axes: Axes) -> list[Label]:
    """Returns the labels of all axes in their order."""
    return [label for axis in axes for label in axis]


class Labelled(NamedTuple):
    """A value with its axes."""

    value: Value
    axes: Axes

    @classmethod
    def own(cls, value: Value) -> "Labelled":
        """Returns the value whose axes the labels number."""
        lengths = enumerate(shape_of(value))
        return cls(value, tuple((Label(i, n),) if n != 1 else () for i, n in lengths))

    @classmethod
    def repeated(cls, value: Value, axes: Axes) -> "Labelled":
        """Returns a value, given the axes of the array that it is repeated to."""
        shape = shape_of(value)  # () of a number
        return cls(value, tuple(x if n != 1 else () for n, x in zip(shape, axes, strict=False)))

    @property
    def labels(self) -> list[Label]:
        """The labels of all axes in their order."""
        return labels_of(self.axes)

    def before(self, operand: Value) -> "Labelled | None":
        """Returns an operand of the node that makes the value.

        The node moves axes, or computes each number from the numbers in its place. Axes along which
        it repeats the operand have no labels in it.

        Returns: None if the node merges two axes of the operand to one that has a single label.
        """
        node, axes = self.value.producer, self.axes
        assert node is not None
        if node.rule.reshapes:
            regrouped = _regrouped(axes, shape_of(operand))
            return None if regrouped is None else Labelled(operand, regrouped)
        if node.name == "transpose":
            axes = tuple(axes[node.params["permutation"].index(i)] for i in range(len(axes)))
        elif node.rule.repeats:
            axes = tuple(axes[i] for i in node.params["broadcast_dimensions"])
        return Labelled.repeated(operand, axes)

    def source(self) -> "Labelled":
        """Returns what the value repeats and moves; repeated axes have no labels in it."""
        source = self
        while (node := source.value.producer) is not None and moves_axes(node):
            before = source.before(node.inputs[0])
            if before is None:
                break
            source = before
        return source

    def origin(self) -> "Labelled":
        """Returns the source of the value, on whatever level it is."""
        source = self.source()
        while source.value.origin is not source.value:
            source = Labelled(source.value.origin, source.axes).source()
        return source

    def differing_labels(self) -> set[Label]:
        """Returns the labels along which entries of the value are not known to be equal.

        Along others it only repeats, as a mask over keys does along the heads.
        """

        def operands(source: Labelled) -> list[Labelled]:
            node = source.value.producer
            inputs = node.inputs if _is_in_place(node) else ()
            return [Labelled.repeated(value, source.axes).origin() for value in inputs]

        sources = reached([self.origin()], operands)
        ends = (source for source in sources if not _is_in_place(source.value.producer))
        return {label for source in ends for label in source.labels}


def moves_axes(node: Node) -> bool:
    """Returns whether a node only moves or repeats the numbers of its operand."""
    moves = node.rule.reshapes or node.rule.repeats or node.name == "transpose"
    return moves or is_identity(node)


def _is_in_place(node: Node | None) -> TypeGuard[Node]:
    """Returns whether a node computes each number only from the numbers in its place."""
    return node is not None and bool(node.inputs) and (is_pointwise(node) or keeps_places(node))


def _regrouped(axes: Axes, shape: Sequence[Any]) -> Axes | None:
    """Returns the labels in the same order, as the axes of an array of another shape."""
    labels = labels_of(axes)
    regrouped: list[Labels] = []
    for length in shape:
        taken: Labels = ()
        # Symbols can be told equal, and not which is larger.
        while math.prod(label.length for label in taken) != length:
            if not labels:
                return None
            taken = (*taken, labels.pop(0))
        regrouped.append(taken)
    return None if labels else tuple(regrouped)


# Arrays with other axes.


class Layout(NamedTuple):
    """How the axes of an array change: it is reshaped to `split`, transposed, reshaped to `shape`.

    >>> rows, keys = Label(0, 2), Label(1, 3)
    >>> Layout.between(((rows, keys),), ((keys,), (rows,)))(np.arange(6)).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def between(cls, axes: Axes, wanted: Axes) -> "Layout":
        """Returns how an array with `axes` becomes one with the axes `wanted`."""
        labels = labels_of(axes)
        return cls(
            tuple(label.length for label in labels),
            tuple(map(labels.index, labels_of(wanted))),
            tuple(math.prod(label.length for label in axis) for axis in wanted),
        )

    def __call__(self, array: Any) -> Any:
        """Returns the array with its axes changed."""
        return array.reshape(self.split).transpose(self.order).reshape(self.shape)


def spread(array: Any, axes: Axes, wanted: Axes) -> Any:
    """Returns an array with the axes `wanted`, some of whose labels it need not have.

    Along an axis of which it has some labels it is repeated; one of which it has none has length
    one. Along its own axes without labels all entries are equal, and the first is taken.

    Returns: an array of NumPy if it was one.
    """
    present, labels = set(labels_of(axes)), labels_of(wanted)
    repeated = {label for axis in wanted if present.intersection(axis) for label in axis}
    array = array[tuple(slice(None) if axis else slice(1) for axis in axes)]
    array = Layout.between(axes, tuple((label,) for label in labels if label in present))(array)
    array = array.reshape([label.length if label in present else 1 for label in labels])
    repeat = np.broadcast_to if isinstance(array, np.ndarray) else jnp.broadcast_to
    array = repeat(array, [label.length if label in repeated else 1 for label in labels])
    return array.reshape([math.prod(x.length for x in axis if x in repeated) for axis in wanted])
