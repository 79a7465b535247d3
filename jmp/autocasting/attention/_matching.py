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
(`_axes`), so they may come in any order, and heads may be split or merged. `find_attention` walks
back: from the second product, whose weights give the labels, to the division of a softmax, and from
there to the first product.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp.autocasting._facts import Softmax
from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._numbers import shape_of
from jmp.autocasting.attention._axes import Axes, Label, Labelled, Labels, moves_axes
from jmp.autocasting.attention._constants import constant_of

# The largest number that a mask may put in place of a score: beside any score that is left its
# exponential is zero.
LARGEST_FILL = -1e4
# Beside such a number a score or a bias is lost: the next float32 is 8 away.
LOWERED = -1e8
# Numbers of labels that are none of the weights': the width of queries and keys, and of values.
WIDTH, VALUE_WIDTH = -1, -2


class NotFused(Exception):
    """Why an attention is left as it is."""


class Bias(NamedTuple):
    """A value that is added to the scores, times `factor`."""

    source: Labelled
    factor: float

    def kept(self, numbers: Any) -> Any:
        """Returns which scores it does not hide, given its numbers, an array of NumPy."""
        return numbers.astype(np.float64) * self.factor > LARGEST_FILL


class Mask(NamedTuple):
    """A boolean value: scores stay if it equals `keeps`, and become `fill` otherwise."""

    source: Labelled
    keeps: bool
    fill: float

    def kept(self, numbers: Any) -> Any:
        """Returns which scores it does not hide, given its numbers."""
        return numbers == self.keeps


class Attention(NamedTuple):
    """An attention that was found. Labels number the axes of the weights that `result` reads."""

    scores: Node  # the first product
    result: Node  # the second one
    nodes: tuple[Node, ...]  # the products, and the nodes that were recognised between them
    argument: Value  # of the softmax, from which nothing is subtracted yet
    scale: float
    terms: tuple[Bias | Mask, ...]  # the biases, then the masks, in program order
    query: Labelled
    key: Labelled
    are_queries_left: bool  # of the keys, in the first product
    values: Labelled
    result_axes: Axes
    keys: Label  # of the axis over which the softmax sums

    @property
    def batch(self) -> Labels:
        """The labels that queries, keys and values share, in the queries' order."""
        of_key = self.key.labels
        return tuple(x for x in self.query.labels if x in of_key and x.number != WIDTH)

    @property
    def rows(self) -> Labels:
        """The labels that only the queries have, in their order."""
        of_key = self.key.labels
        return tuple(label for label in self.query.labels if label not in of_key)


def find_attention(result: Node, softmaxes: Iterable[Softmax]) -> Attention | None:
    """Returns the attention that ends with the product `result`; None if there is no softmax.

    Args:
      softmaxes: those of the level.

    Raises: NotFused if there is a softmax, but no attention that a kernel computes.
    """
    if result.name != "dot_general":
        return None
    paths = [_to_division(operand) for operand in result.inputs]
    for side, path in enumerate(paths):
        for softmax in softmaxes:
            if softmax.division is not None and softmax.division is path[-1].value.producer:
                return _attention(result, side, softmax, path)
    powers = {softmax.exp for softmax in softmaxes}
    for *_, (value, _) in paths:
        if value.producer is not None and not powers.isdisjoint(_makers(value)):
            raise NotFused(f"{value.producer.name} stands between its softmax and the values")
    return None


def _attention(result: Node, side: int, softmax: Softmax, path: list[Labelled]) -> Attention:
    """Returns the attention of a softmax.

    Args:
      result: the product that reads the weights.
      side: which of its operands they are.
      path: from the weights to what the softmax returns.
    """
    weights, quotient = path[0], path[-1]
    summed = [label for axis in softmax.total.params["axes"] for label in quotient.axes[axis]]
    if len(softmax.total.params["axes"]) != 1 or len(summed) != 1:
        raise NotFused("its softmax is not over one axis of keys longer than one")
    (keys,) = summed
    values, result_axes = _values(result, side, weights.axes, keys)
    argument = _without_shifts(Labelled(softmax.argument, quotient.axes), keys)
    path += [Labelled(softmax.exp.outputs[0], quotient.axes), argument]
    scores, scale, terms = _to_scores(path)
    if {*path[-1].labels} != {*weights.labels}:
        raise NotFused("its scores or its weights are repeated")
    left, right = _operands(scores, path[-1].axes)
    are_queries_left = keys in right.labels
    query, key = (left, right) if are_queries_left else (right, left)
    if {*key.labels} - {*query.labels} != {keys}:
        raise NotFused("its keys have an axis that neither queries nor values have")
    nodes = (passed.value.producer for passed in reversed(path))
    attention = Attention(
        scores=scores,
        result=result,
        nodes=(*filter(None, nodes), result),
        argument=argument.value,
        scale=scale,
        terms=terms,
        query=query,
        key=key,
        are_queries_left=are_queries_left,
        values=values,
        result_axes=result_axes,
        keys=keys,
    )
    others = {label for label in values.labels if label.number != VALUE_WIDTH}
    if others != {*attention.batch, keys}:
        raise NotFused("its values have other batch axes than its keys")
    return attention


# From the second product back to the softmax.


def _to_division(weights: Value) -> list[Labelled]:
    """Returns weights, and what they are before they are moved or multiplied by ones."""
    path = [Labelled.own(weights)]
    while (operand := _handed_on(path[-1].value)) and (before := path[-1].before(operand)):
        path.append(before)
    return path


def _handed_on(value: Value) -> Value | None:
    """Returns what a value is, before it is moved or multiplied by ones; None if it is computed."""
    node = value.producer
    if node is not None and moves_axes(node):
        return node.inputs[0]
    if node is not None and node.name == "mul":  # such as by the mask of a model's heads
        for operand, other in (node.inputs, node.inputs[::-1]):
            factor = constant_of(other)
            if factor is not None and (factor == 1).all():
                return operand
    return None


def _makers(value: Value) -> list[Node]:
    """Returns the nodes that make a value, back to those that are not fusible, in program order."""

    def inputs(value: Value) -> Sequence[Value]:
        node = value.producer
        return node.inputs if node is not None and _is_passed(node) else ()

    nodes = {value.producer for value in reached([value], inputs)}
    return sorted(filter(None, nodes), key=lambda node: node.index)


def _is_passed(node: Node) -> bool:
    return node.is_fusible or moves_axes(node)


# From the softmax back to the first product.


def _without_shifts(argument: Labelled, keys: Label) -> Labelled:
    """Returns what a softmax is of, without numbers that all keys of a row subtract.

    They cancel. The row's maximum is one.
    """
    while (shift := argument.value.producer) is not None and shift.name == "sub":
        before, subtracted = (Labelled.repeated(x, argument.axes) for x in shift.inputs)
        if keys in subtracted.differing_labels():
            break
        argument = before
    return argument


def _to_scores(path: list[Labelled]) -> tuple[Node, float, tuple[Bias | Mask, ...]]:
    """Adds the values from the softmax's argument to the scores to a path, which ends with it.

    Returns: the first product, and the scale, biases and masks of its result.
    Raises: NotFused if a node changes scores otherwise than by adding, scaling and choosing.
    """
    made_of_products = _made_of_products(path[-1].value)
    scale, biases, masks = 1.0, list[Bias](), list[Mask]()
    while (node := path[-1].value.producer) is not None and path[-1].value in made_of_products:
        if _is_product(node):
            return node, scale, (*biases, *masks)
        operands = {"div": node.inputs[:1], "select_n": node.inputs[1:]}.get(node.name, node.inputs)
        scores = next((x for x in operands if x in made_of_products), node.inputs[0])
        if node.name == "select_n":
            masks = [*_masks_of(node, scores, path[-1].axes, scale), *masks]
            if biases and masks[0].fill > LOWERED * scale:
                raise NotFused("a bias is added after a mask of more than -1e8, and may undo it")
        elif node.name in ("mul", "div"):
            scale *= _factor_of(node, scores)
        elif node.rule.linear:
            biases = [_bias_of(node, scores, path[-1].axes, scale), *biases]
        elif not moves_axes(node):
            raise NotFused(f"{node.name} changes its scores")
        before = path[-1].before(scores)
        if before is None:
            raise NotFused(f"{node.name} mixes the axes of its scores")
        path.append(before)
    raise NotFused("no product is found in front of its softmax")


def _is_product(node: Node) -> bool:
    return node.is_product and node.name == "dot_general"


def _made_of_products(value: Value) -> set[Value]:
    """Returns those of the values which a value is made of that a product goes into."""
    found: set[Value] = set()
    for node in _makers(value):
        if _is_product(node) or (_is_passed(node) and not found.isdisjoint(node.inputs)):
            found.update(node.outputs)
    return found


def _other(node: Node, scores: Value) -> Value:
    """Returns the operand of a node that is not the scores."""
    others = [value for value in node.inputs if value is not scores]
    if len(others) != 1:
        raise NotFused(f"{node.name} reads its scores twice")
    return others[0]


def _factor_of(node: Node, scores: Value) -> float:
    constant = _other(node, scores).constant
    if constant is None or not constant > 0:
        raise NotFused("its scores are scaled by a number that is not a positive constant")
    return 1 / constant if node.name == "div" else constant


def _bias_of(node: Node, scores: Value, axes: Axes, scale: float) -> Bias:
    """Returns the bias that a node adds to scores, which are multiplied by `scale` afterwards."""
    bias = _other(node, scores)
    if node.name == "sub" and node.inputs[0] is bias:
        raise NotFused("its scores are subtracted from a bias")
    return Bias(_differing_part(bias, axes), -scale if node.name == "sub" else scale)


def _masks_of(node: Node, scores: Value, axes: Axes, scale: float) -> Iterator[Mask]:
    """Yields the masks that a node joins; scores are multiplied by `scale` afterwards."""
    which, *cases = node.inputs
    if which.dtype != bool:
        raise NotFused("its mask is not a choice between the scores and a number")
    keeps = cases[1] is scores
    fill = cases[not keeps].constant
    if fill is None or fill * scale > LARGEST_FILL:
        raise NotFused("its mask puts in numbers that are not a constant of -1e4 or below")
    for mask in _joined_masks(which, axes, keeps):
        yield Mask(_differing_part(*mask), keeps, fill * scale)


def _joined_masks(value: Value, axes: Axes, keeps: bool) -> Iterator[Labelled]:
    """Yields the masks that a mask joins: `a` and `b` of `a & b`, if true keeps a score."""
    mask = Labelled.repeated(value, axes).source()
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
    numbers, axes = Labelled(node.inputs[0], mask.axes).source()
    node = numbers.producer
    if node is None or node.name != "convert_element_type" or node.inputs[0].dtype != bool:
        return None
    return Labelled(node.inputs[0], axes).source()


def _differing_part(value: Value, axes: Axes) -> Labelled:
    """Returns the value that a bias or a mask repeats, with labels only of axes that matter to it.

    Args:
      axes: of the scores, to which the bias or mask is repeated.
    """
    source = Labelled.repeated(value, axes).source()
    differing = source.differing_labels()
    kept = tuple(() if differing.isdisjoint(axis) else axis for axis in source.axes)
    return Labelled(source.value, kept)


# The operands of the two products.


def _operands(scores: Node, axes: Axes) -> tuple[Labelled, Labelled]:
    """Returns what the first product reads, given the axes of its result."""
    (summed, _), _ = scores.params["dimension_numbers"]
    if len(summed) != 1:
        raise NotFused("its first product sums over more than one axis")
    width = (Label(WIDTH, shape_of(scores.inputs[0])[summed[0]]),)
    return _operand(scores, 0, width, axes), _operand(scores, 1, width, axes)


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
