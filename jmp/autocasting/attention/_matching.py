"""Finds attention in the dataflow: product, scale, bias and mask, softmax, product.

It goes back from the second product, and names no module: through what only moves numbers to the
division of a softmax, and from there to the first product. Axes are followed by what they are made
of (`_axes`), so that any order of them, and heads that are split or merged, come out alike.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._numbers import shape_of
from jmp.autocasting.attention._axes import (
    Axes,
    Labelled,
    Labels,
    axes_after,
    differing_labels,
    labels_of,
    moves_axes,
    own_axes,
    source_of,
)
from jmp.autocasting.attention._constants import constant_of

# What a mask puts in place of a score: exp of it is zero beside any score that is left.
LARGEST_FILL = -1e4
# Beside such a number a score or a bias is lost: the next float32 is 8 away.
LOWERED = -1e8
# Labels of axes that are none of the scores': the heads' width, of queries and keys, and of values.
WIDTH, VALUE_WIDTH = -1, -2

NO_MASK = "its mask puts in numbers that are not a constant of -1e4 or below"


class NotFused(Exception):
    """Why an attention is left as it is."""


class Bias(NamedTuple):
    """What is added to the scores: `factor` times a value."""

    source: Labelled
    factor: float


class Mask(NamedTuple):
    """A boolean value: where it equals `keeps` the score stays, elsewhere it is `fill`."""

    source: Labelled
    keeps: bool
    fill: float


class Operands(NamedTuple):
    """What an attention reads, and the axes of what it returns."""

    query: Labelled
    key: Labelled
    values: Labelled
    result: Axes
    batch: Labels  # those that queries, keys and values share, in the queries' order
    rows: Labels  # those of the queries alone, in their order
    keys: int  # that of the keys, over which the softmax sums up


class Attention(NamedTuple):
    """What was found; labels are those of the scores' axes."""

    scores: Node  # the first product
    result: Node  # the second
    nodes: tuple[Node, ...]  # both, and what was recognised between
    operands: Operands
    sizes: dict[int, int]
    scale: float
    biases: tuple[Bias, ...]
    masks: tuple[Mask, ...]


class _Softmax(NamedTuple):
    nodes: tuple[Node, ...]  # that it is known by
    to_weights: tuple[Node, ...]  # what moves the weights afterwards, or multiplies them by ones
    argument: Value
    axis: int  # of the argument


def find_attention(result: Node) -> Attention | None:
    """Returns the attention that ends with the product `result`; None if there is no softmax.

    Raises: NotFused if there is one, but not as an attention has it.
    """
    if result.name != "dot_general":
        return None
    for side in (0, 1):
        softmax = _softmax_of(result.inputs[side])
        if softmax is not None:
            return _attention(result, side, softmax)
    for value in result.inputs:
        if blocking := _before_softmax(value):
            raise NotFused(f"{blocking.name} stands between its softmax and the values")
    return None


def _softmax_of(weights: Value) -> _Softmax | None:
    to_weights: list[Node] = []
    node = weights.producer
    while node is not None and (handed_on := _handed_on(node)) is not None:
        to_weights.insert(0, node)
        node = handed_on.producer
    if node is None or node.name != "div":
        return None
    exp, axis = node.inputs[0].producer, _summed_axis(node)
    if exp is None or exp.name != "exp" or axis is None:
        return None
    argument = exp.inputs[0]
    own, sizes = own_axes(shape_of(argument)), dict(enumerate(shape_of(argument)))
    # What is the same for all keys, such as the row's maximum, may be subtracted: it cancels.
    while (shift := argument.producer) is not None and shift.name == "sub":
        subtracted = shift.inputs[1]
        if axis in differing_labels(subtracted, _axes_repeated_to(own, subtracted), sizes):
            break
        argument = shift.inputs[0]
    return _Softmax((node, exp), tuple(to_weights), argument, axis)


def _summed_axis(division: Node) -> int | None:
    """Returns the axis along which a division makes its first operand add up to one, if any."""
    powers, divisor = division.inputs
    shape = shape_of(powers)
    if len(shape_of(divisor)) != len(shape) or shape_of(division.outputs[0]) != shape:
        return None
    own = own_axes(shape)
    total, axes = source_of(divisor, _axes_repeated_to(own, divisor), dict(enumerate(shape)))
    node = total.producer
    if node is None or node.name != "reduce_sum" or node.inputs[0] is not powers:
        return None
    summed = node.params["axes"]
    if len(summed) != 1 or axes != tuple(a for i, a in enumerate(own) if i not in summed):
        return None
    return int(summed[0])


def _handed_on(node: Node) -> Value | None:
    """Returns the operand that a node moves, or multiplies by ones; None if it computes."""
    if moves_axes(node):
        return node.inputs[0]
    if node.name == "mul":
        for value, other in (node.inputs, node.inputs[::-1]):
            factor = constant_of(other)
            if factor is not None and (factor == 1).all():
                return value
    return None


def _before_softmax(value: Value) -> Node | None:
    """Returns what stands between a softmax of scores and a value, if there is such a softmax."""
    first: Node | None = None
    for node in _producers(value):
        if node.is_fusible and first is None and not moves_axes(node):
            first = node
        if node.is_fusible and node.name == "exp" and _leads_to_product(node.inputs[0]):
            return first
    return None


def _leads_to_product(value: Value) -> bool:
    return any(node.name == "dot_general" and node.is_product for node in _producers(value))


def _producers(value: Value) -> Iterator[Node]:
    """Yields the nodes that a value is made of, back to those that are not fusible."""

    def inputs(value: Value) -> Sequence[Value]:
        node = value.producer
        return node.inputs if node is not None and node.is_fusible else ()

    return filter(None, (value.producer for value in reached([value], inputs)))


# From the softmax back to the first product.


def _attention(result: Node, side: int, softmax: _Softmax) -> Attention:
    path = _path_to_product(softmax.argument)
    if path is None:
        raise NotFused("no product is found in front of its softmax")
    scores, *between = path
    sizes = dict(enumerate(shape_of(scores.outputs[0])))
    axes = own_axes(shape_of(scores.outputs[0]))
    scale, biases, masks = 1.0, list[Bias](), list[Mask]()
    on_path = {scores.outputs[0]}
    for node in between:
        if moves_axes(node):
            axes = _followed(node, axes, sizes)
        elif node.name == "select_n":
            masks += _masks_of(node, on_path, axes, sizes)
        elif node.rule.linear:
            if any(mask.fill > LOWERED for mask in masks):
                raise NotFused("a bias is added after a mask of more than -1e8, and may undo it")
            biases.append(_bias_of(node, on_path, axes, sizes))
        else:
            factor = _factor_of(node, on_path)
            scale *= factor
            biases = [bias._replace(factor=bias.factor * factor) for bias in biases]
            masks = [mask._replace(fill=mask.fill * factor) for mask in masks]
        on_path.add(node.outputs[0])
    keys = axes[softmax.axis]
    for node in filter(moves_axes, softmax.to_weights):
        axes = _followed(node, axes, sizes)
    if not all(mask.fill <= LARGEST_FILL for mask in masks):
        raise NotFused(NO_MASK)
    if len(keys) != 1:
        raise NotFused("its softmax is not over one axis of keys longer than one")
    nodes = (scores, *between, *softmax.nodes, *softmax.to_weights, result)
    operands = _operands(scores, result, side, axes, keys[0], sizes)
    return Attention(scores, result, nodes, operands, sizes, scale, tuple(biases), tuple(masks))


def _followed(node: Node, axes: Axes, sizes: dict[int, int]) -> Axes:
    followed = axes_after(node, axes, sizes)
    if followed is None:
        raise NotFused(f"{node.name} mixes the axes of its scores")
    return followed


def _path_to_product(value: Value) -> list[Node] | None:
    """Returns the nodes from the product that makes the scores to `value`; the first found."""
    readers: dict[Value, Node | None] = {value: None}  # of each value on the way, who reads it
    stack = [value]
    while stack:
        current = stack.pop()
        node = current.producer
        if node is None:
            continue
        if node.is_product and node.name == "dot_general":
            path = [node]
            while reader := readers[path[-1].outputs[0]]:
                path.append(reader)
            return path
        for operand in reversed(_on_the_way(node)):
            if operand not in readers:
                readers[operand] = node
                stack.append(operand)
    return None


def _on_the_way(node: Node) -> Sequence[Value]:
    """Returns the operands of a node through which scores may come to an attention's maximum.

    Raises: NotFused for a node that changes scores otherwise than by adding, scaling and choosing.
    """
    if moves_axes(node):
        return node.inputs[:1]
    if node.name == "dot_general" or not node.is_fusible:
        return ()
    if node.name == "div":
        return node.inputs[:1]
    if node.name == "select_n":
        return node.inputs[1:]
    if node.rule.linear or node.name == "mul":
        return node.inputs
    if any(map(_leads_to_product, node.outputs)):
        raise NotFused(f"{node.name} changes its scores")
    return ()


def _other(node: Node, on_path: set[Value]) -> Value:
    others = [value for value in node.inputs if value not in on_path]
    if len(others) != 1:
        raise NotFused(f"{node.name} reads its scores twice")
    if any(shape_of(v) != shape_of(node.outputs[0]) for v in node.inputs if v in on_path):
        raise NotFused(f"{node.name} repeats its scores")
    return others[0]


def _factor_of(node: Node, on_path: set[Value]) -> float:
    constant = _other(node, on_path).constant
    if constant is None or not constant > 0:
        raise NotFused("its scores are scaled by a number that is not a positive constant")
    return 1 / constant if node.name == "div" else constant


def _bias_of(node: Node, on_path: set[Value], axes: Axes, sizes: dict[int, int]) -> Bias:
    bias = _other(node, on_path)
    if node.name == "sub" and node.inputs[0] is bias:
        raise NotFused("its scores are subtracted from a bias")
    return Bias(_labelled(bias, axes, sizes), -1.0 if node.name == "sub" else 1.0)


def _masks_of(node: Node, on_path: set[Value], axes: Axes, sizes: dict[int, int]) -> Iterator[Mask]:
    which, *cases = node.inputs
    kept = [case in on_path for case in cases]
    if which.dtype != bool or sum(kept) != 1 or which in on_path:
        raise NotFused("its mask is not a choice between the scores and a number")
    (fill,) = [case.constant for case, keeps in zip(cases, kept, strict=True) if not keeps]
    if fill is None:
        raise NotFused(NO_MASK)
    for mask in _factors(which, axes, kept[1], sizes):
        yield Mask(_labelled(*mask, sizes), kept[1], fill)


def _factors(value: Value, axes: Axes, keeps: bool, sizes: dict[int, int]) -> Iterator[Labelled]:
    """Yields masks that together keep what one does where it equals `keeps`: `a & b` is two."""
    mask = source_of(value, _axes_repeated_to(axes, value), sizes)
    while (written := _as_numbers(mask, sizes)) is not None:
        mask = written
    node = mask.value.producer
    if node is not None and node.name == ("and" if keeps else "or"):
        for operand in node.inputs:
            yield from _factors(operand, mask.axes, keeps, sizes)
    else:
        yield mask


def _as_numbers(mask: Labelled, sizes: dict[int, int]) -> Labelled | None:
    """Returns the mask that was written as zeros and ones, of which one asks what is not zero."""
    node = mask.value.producer
    if node is None or node.name != "ne" or node.inputs[1].constant != 0:
        return None
    numbers, axes = source_of(node.inputs[0], mask.axes, sizes)
    node = numbers.producer
    if node is None or node.name != "convert_element_type" or node.inputs[0].dtype != bool:
        return None
    return source_of(node.inputs[0], axes, sizes)


def _labelled(value: Value, axes: Axes, sizes: dict[int, int]) -> Labelled:
    """Returns what a bias or a mask repeats; where that repeats itself, its axes have no labels."""
    value, axes = source_of(value, _axes_repeated_to(axes, value), sizes)
    differing = differing_labels(value, axes, sizes)
    return Labelled(value, tuple(() if differing.isdisjoint(axis) else axis for axis in axes))


def _axes_repeated_to(axes: Axes, value: Value) -> Axes:
    """Returns the axes of an operand, given those of the result that it is repeated to."""
    shape = shape_of(value)  # () of a number
    return tuple(axis if n != 1 else () for n, axis in zip(shape, axes, strict=False))


# What the two products read.


def _operands(
    scores: Node, result: Node, side: int, weights: Axes, keys_label: int, sizes: dict[int, int]
) -> Operands:
    """Returns what the products `scores` and `result` read.

    Args:
      side: which operand of `result` the weights are.
      weights: their axes.
      keys_label: that of the axis that the softmax sums up over.
      sizes: of the labels' axes; those of the widths are added.

    Raises: NotFused if an axis is not where an attention has it.
    """
    query, key = _operands_of_scores(scores)
    if keys_label in labels_of(query.axes):
        query, key = key, query
    of_query, of_key = labels_of(query.axes), labels_of(key.axes)
    batch = tuple(label for label in of_query if label in of_key and label != WIDTH)
    rows = tuple(label for label in of_query if label not in of_key)
    if keys_label in of_query or set(of_key) != {*batch, keys_label, WIDTH}:
        raise NotFused("its keys have an axis that neither queries nor values have")
    sizes[WIDTH] = shape_of(query.value)[query.axes.index((WIDTH,))]
    values, axes = _values(result, side, weights, keys_label, sizes)
    if set(labels_of(values.axes)) != {*batch, keys_label, VALUE_WIDTH}:
        raise NotFused("its values have other batch axes than its keys")
    return Operands(query, key, values, axes, batch, rows, keys_label)


def _operands_of_scores(scores: Node) -> tuple[Labelled, Labelled]:
    contracted, batched = scores.params["dimension_numbers"]
    if len(contracted[0]) != 1:
        raise NotFused("its first product sums over more than one axis")
    # The scores have the axes of the batch, those left of one operand, and those of the other.
    axes = own_axes(shape_of(scores.outputs[0]))
    n_shared = len(batched[0])
    end_of_left = len(shape_of(scores.inputs[0])) - 1  # all of its axes but the one that is summed
    shared, left, right = axes[:n_shared], axes[n_shared:end_of_left], axes[end_of_left:]
    return _operand(scores, 0, (WIDTH,), shared, left), _operand(scores, 1, (WIDTH,), shared, right)


def _values(
    result: Node, side: int, weights: Axes, keys_label: int, sizes: dict[int, int]
) -> tuple[Labelled, Axes]:
    """Returns the values, and the axes of the result."""
    contracted, batched = result.params["dimension_numbers"]
    if [weights[i] for i in contracted[side]] != [(keys_label,)]:
        raise NotFused("its second product does not sum over the keys alone")
    shared = [weights[i] for i in batched[side]]
    values = _operand(result, 1 - side, (keys_label,), shared, itertools.repeat((VALUE_WIDTH,)))
    if values.axes.count((VALUE_WIDTH,)) != 1:
        raise NotFused("its values have more than one axis of their own")
    sizes[VALUE_WIDTH] = shape_of(values.value)[values.axes.index((VALUE_WIDTH,))]
    free = [axis for i, axis in enumerate(weights) if i not in (*contracted[side], *batched[side])]
    first, second = (free, [(VALUE_WIDTH,)]) if side == 0 else ([(VALUE_WIDTH,)], free)
    return values, (*shared, *first, *second)


def _operand(
    product: Node, side: int, summed: Labels, shared: Sequence[Labels], free: Iterable[Labels]
) -> Labelled:
    """Returns an operand of a product.

    Args:
      summed: what the axis is made of that the product sums over.
      shared: what the axes of the batch are made of.
      free: what the other axes are made of, in their order.
    """
    contracted, batched = product.params["dimension_numbers"]
    value = product.inputs[side]
    positions = range(len(shape_of(value)))
    axes = dict(zip(batched[side], shared, strict=True)) | dict.fromkeys(contracted[side], summed)
    others = [position for position in positions if position not in axes]
    axes |= zip(others, free, strict=False)  # `free` may repeat one without end
    return Labelled(value, tuple(axes[position] for position in positions))
