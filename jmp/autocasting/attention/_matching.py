"""Finds attention in the dataflow. It needs no names of modules.

An attention is matched if it is computed like this, each line any number of times and in any order
between its neighbours:

    scores = queries @ keys             a product over one axis, the width of a head
    scores = scores * c                 or scores / c, with a positive constant
    scores = scores + bias              or scores - bias
    scores = where(mask, scores, fill)  with a constant fill of -1e4 or below
    powers = exp(scores - shift)        the shift is the same for all keys, such as the maximum
    weights = powers / sum(powers)      over one axis, the keys
    weights = weights * 1
    result = weights @ values           a product over the keys

Scores and weights may be transposed and reshaped on the way. Axes are compared by their labels
(`_axes`), so they may come in any order, and heads may be split or merged. `find_attention` starts
at the second product, goes back to the division of a softmax, and from there to the first product.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jmp.autocasting._facts import Softmax
from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._numbers import shape_of
from jmp.autocasting.attention._axes import (
    Axes,
    Label,
    Labelled,
    Labels,
    axes_after,
    axes_repeated_to,
    differing_labels,
    labels_of,
    moves_axes,
    own_axes,
    source_of,
)
from jmp.autocasting.attention._constants import constant_of

# The largest number that a mask may put in place of a score: beside any score that is left its
# exponential is zero.
LARGEST_FILL = -1e4
# Beside such a number a score or a bias is lost: the next float32 is 8 away.
LOWERED = -1e8
# Numbers of labels that are none of the scores': the width of queries and keys, and of values.
WIDTH, VALUE_WIDTH = -1, -2

NOT_OVER_KEYS = "its softmax is not over one axis of keys longer than one"
NO_MASK = "its mask puts in numbers that are not a constant of -1e4 or below"


class NotFused(Exception):
    """Why an attention is left as it is."""


class Bias(NamedTuple):
    """A value that is added to the scores, times `factor`."""

    source: Labelled
    factor: float


class Mask(NamedTuple):
    """A boolean value: scores stay if it equals `keeps`, and become `fill` otherwise."""

    source: Labelled
    keeps: bool
    fill: float


class Attention(NamedTuple):
    """An attention that was found. Labels number the scores' axes."""

    scores: Node  # the first product
    result: Node  # the second one
    nodes: tuple[Node, ...]  # the products, and the nodes that were recognised between them
    argument: Value  # of the softmax, from which nothing is subtracted yet
    scale: float
    biases: tuple[Bias, ...]
    masks: tuple[Mask, ...]
    query: Labelled
    key: Labelled
    values: Labelled
    result_axes: Axes
    keys: Label  # of the axis over which the softmax sums

    @property
    def batch(self) -> Labels:
        """The labels that queries, keys and values share, in the queries' order."""
        of_key = labels_of(self.key.axes)
        shared = (label for label in labels_of(self.query.axes) if label in of_key)
        return tuple(label for label in shared if label.number != WIDTH)

    @property
    def rows(self) -> Labels:
        """The labels that only the queries have, in their order."""
        of_key = labels_of(self.key.axes)
        return tuple(label for label in labels_of(self.query.axes) if label not in of_key)


def find_attention(result: Node, softmaxes: Iterable[Softmax]) -> Attention | None:
    """Returns the attention that ends with the product `result`; None if there is no softmax.

    Args:
      softmaxes: those of the level.

    Raises: NotFused if there is a softmax, but no attention that a kernel computes.
    """
    if result.name != "dot_general":
        return None
    for side in (0, 1):
        division, to_weights = _from_division(result.inputs[side])
        for softmax in softmaxes:
            if division is not None and softmax.division is division:
                return _attention(result, side, softmax, division, to_weights)
    for value in result.inputs:
        if blocking := _before_softmax(value):
            raise NotFused(f"{blocking.name} stands between its softmax and the values")
    return None


# From the second product back to the softmax.


def _from_division(weights: Value) -> tuple[Node | None, list[Node]]:
    """Returns the node that makes weights, and those that move them or multiply them by ones."""
    to_weights: list[Node] = []
    node = weights.producer
    while node is not None and (operand := _handed_on(node)) is not None:
        to_weights.insert(0, node)
        node = operand.producer
    return node, to_weights


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
    """Returns the node between a softmax of scores and a value, if there is such a softmax."""
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


def _attention(
    result: Node, side: int, softmax: Softmax, division: Node, to_weights: Sequence[Node]
) -> Attention:
    """Returns the attention of a softmax.

    Args:
      result: the product that reads the weights.
      side: which of its operands they are.
      division: of the softmax.
      to_weights: what moves the weights on their way to the product.
    """
    if len(softmax.total.params["axes"]) != 1:
        raise NotFused(NOT_OVER_KEYS)
    (axis,) = softmax.total.params["axes"]
    argument = _without_shifts(softmax.argument, axis)
    scores, *between = _path_from_product(argument)
    axes, scale, biases, masks = _applied(scores, between)
    summed = axes[axis]
    for node in filter(moves_axes, to_weights):
        axes = _followed(node, axes)
    if not all(mask.fill <= LARGEST_FILL for mask in masks):
        raise NotFused(NO_MASK)
    if len(summed) != 1:
        raise NotFused(NOT_OVER_KEYS)
    (keys,) = summed
    query, key = _queries_and_keys(scores, keys)
    values, result_axes = _values(result, side, axes, keys)
    attention = Attention(
        scores=scores,
        result=result,
        nodes=(scores, *between, softmax.exp, division, *to_weights, result),
        argument=argument,
        scale=scale,
        biases=biases,
        masks=masks,
        query=query,
        key=key,
        values=values,
        result_axes=result_axes,
        keys=keys,
    )
    others = {label for label in labels_of(values.axes) if label.number != VALUE_WIDTH}
    if others != {*attention.batch, keys}:
        raise NotFused("its values have other batch axes than its keys")
    return attention


def _without_shifts(argument: Value, axis: int) -> Value:
    """Returns what a softmax along an axis is of, without numbers that all of its row subtract.

    They cancel. The row's maximum is one.
    """
    own = own_axes(argument)
    while (shift := argument.producer) is not None and shift.name == "sub":
        subtracted = shift.inputs[1]
        differing = differing_labels(subtracted, axes_repeated_to(own, subtracted))
        if axis in (label.number for label in differing):
            break
        argument = shift.inputs[0]
    return argument


def _path_from_product(value: Value) -> list[Node]:
    """Returns the nodes from the product that makes the scores to `value`; the first found.

    Raises: NotFused if there is none.
    """
    readers: dict[Value, Node | None] = {value: None}  # of each value on the way, who reads it
    stack = [value]
    while stack:
        node = stack.pop().producer
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
    raise NotFused("no product is found in front of its softmax")


def _on_the_way(node: Node) -> Sequence[Value]:
    """Returns the operands of a node through which scores may come to an attention's softmax.

    Raises: NotFused if a node changes scores otherwise than by adding, scaling and choosing.
    """
    if node.name == "dot_general" or not (node.is_fusible or moves_axes(node)):
        return ()
    if moves_axes(node) or node.name == "div":
        return node.inputs[:1]
    if node.name == "select_n":
        return node.inputs[1:]
    if node.rule.linear or node.name == "mul":
        return node.inputs
    if any(map(_leads_to_product, node.outputs)):
        raise NotFused(f"{node.name} changes its scores")
    return ()


# Scale, biases and masks: the nodes between the scores and the softmax.


def _applied(
    scores: Node, nodes: Sequence[Node]
) -> tuple[Axes, float, tuple[Bias, ...], tuple[Mask, ...]]:
    """Returns the axes of scores behind some nodes, and the scale, biases and masks of these."""
    axes = own_axes(scores.outputs[0])
    scale, biases, masks = 1.0, list[Bias](), list[Mask]()
    on_path = {scores.outputs[0]}
    for node in nodes:
        if moves_axes(node):
            axes = _followed(node, axes)
        elif node.name == "select_n":
            masks += _masks_of(node, on_path, axes)
        elif node.rule.linear:
            if any(mask.fill > LOWERED for mask in masks):
                raise NotFused("a bias is added after a mask of more than -1e8, and may undo it")
            biases.append(_bias_of(node, on_path, axes))
        else:
            factor = _factor_of(node, on_path)
            scale *= factor
            biases = [bias._replace(factor=bias.factor * factor) for bias in biases]
            masks = [mask._replace(fill=mask.fill * factor) for mask in masks]
        on_path.add(node.outputs[0])
    return axes, scale, tuple(biases), tuple(masks)


def _followed(node: Node, axes: Axes) -> Axes:
    followed = axes_after(node, axes)
    if followed is None:
        raise NotFused(f"{node.name} mixes the axes of its scores")
    return followed


def _other(node: Node, on_path: set[Value]) -> Value:
    """Returns the operand of a node that is not the scores."""
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


def _bias_of(node: Node, on_path: set[Value], axes: Axes) -> Bias:
    bias = _other(node, on_path)
    if node.name == "sub" and node.inputs[0] is bias:
        raise NotFused("its scores are subtracted from a bias")
    return Bias(_differing_part(bias, axes), -1.0 if node.name == "sub" else 1.0)


def _masks_of(node: Node, on_path: set[Value], axes: Axes) -> Iterator[Mask]:
    which, *cases = node.inputs
    kept = [case in on_path for case in cases]
    if which.dtype != bool or sum(kept) != 1 or which in on_path:
        raise NotFused("its mask is not a choice between the scores and a number")
    (fill,) = [case.constant for case, keeps in zip(cases, kept, strict=True) if not keeps]
    if fill is None:
        raise NotFused(NO_MASK)
    for mask in _joined_masks(which, axes, kept[1]):
        yield Mask(_differing_part(*mask), kept[1], fill)


def _joined_masks(value: Value, axes: Axes, keeps: bool) -> Iterator[Labelled]:
    """Yields the masks that a mask joins: `a` and `b` of `a & b`, if true keeps a score."""
    mask = source_of(value, axes_repeated_to(axes, value))
    while (written := _as_numbers(mask)) is not None:
        mask = written
    node = mask.value.producer
    if node is not None and node.name == ("and" if keeps else "or"):
        for operand in node.inputs:
            yield from _joined_masks(operand, mask.axes, keeps)
    else:
        yield mask


def _as_numbers(mask: Labelled) -> Labelled | None:
    """Returns the mask that was cast to zeros and ones, if `mask` asks which of these are not 0."""
    node = mask.value.producer
    if node is None or node.name != "ne" or node.inputs[1].constant != 0:
        return None
    numbers, axes = source_of(node.inputs[0], mask.axes)
    node = numbers.producer
    if node is None or node.name != "convert_element_type" or node.inputs[0].dtype != bool:
        return None
    return source_of(node.inputs[0], axes)


def _differing_part(value: Value, axes: Axes) -> Labelled:
    """Returns the value that a bias or a mask repeats, with labels only of axes that matter to it.

    Args:
      axes: of the scores, to which the bias or mask is repeated.
    """
    value, axes = source_of(value, axes_repeated_to(axes, value))
    differing = differing_labels(value, axes)
    return Labelled(value, tuple(() if differing.isdisjoint(axis) else axis for axis in axes))


# The operands of the two products.


def _queries_and_keys(scores: Node, keys: Label) -> tuple[Labelled, Labelled]:
    """Returns what the first product reads.

    Raises: NotFused if an axis is not where an attention has it.
    """
    (summed, _), _ = scores.params["dimension_numbers"]
    if len(summed) != 1:
        raise NotFused("its first product sums over more than one axis")
    width = (Label(WIDTH, shape_of(scores.inputs[0])[summed[0]]),)
    axes = own_axes(scores.outputs[0])
    query, key = (_operand(scores, side, width, axes) for side in (0, 1))
    if keys in labels_of(query.axes):
        query, key = key, query
    if {*labels_of(key.axes)} - {*labels_of(query.axes)} != {keys}:
        raise NotFused("its keys have an axis that neither queries nor values have")
    return query, key


def _values(result: Node, side: int, weights: Axes, keys: Label) -> tuple[Labelled, Axes]:
    """Returns the values that the second product reads, and the axes of its result.

    Args:
      side: which operand the weights are.
      weights: their axes.

    Raises: NotFused if an axis is not where an attention has it.
    """
    summed, shared = (sides[side] for sides in result.params["dimension_numbers"])
    if [weights[i] for i in summed] != [(keys,)]:
        raise NotFused("its second product sums over more than the keys")
    of_batch = [weights[i] for i in shared]
    own = [axis for i, axis in enumerate(weights) if i not in (*summed, *shared)]
    shape = shape_of(result.outputs[0])
    if len(shape) != len(weights):
        raise NotFused("its values have more than one axis of their own")
    width = (Label(VALUE_WIDTH, shape[-1 if side == 0 else len(of_batch)]),)
    axes = (*of_batch, *own, width) if side == 0 else (*of_batch, width, *own)
    return _operand(result, 1 - side, (keys,), axes), axes


def _operand(product: Node, side: int, summed: Labels, result: Axes) -> Labelled:
    """Returns an operand of a product that sums over one axis.

    Args:
      summed: that axis.
      result: the axes of the result: those of the batch, then what is left of the first operand and
        of the second one.
    """
    contracted, batched = (sides[side] for sides in product.params["dimension_numbers"])
    value = product.inputs[side]
    known = {contracted[0]: summed, **dict(zip(batched, result, strict=False))}
    places = range(len(shape_of(value)))
    n_free = len(places) - len(known)
    free = iter(result[len(batched) :][:n_free] if side == 0 else result[len(result) - n_free :])
    return Labelled(value, tuple(known[i] if i in known else next(free) for i in places))
