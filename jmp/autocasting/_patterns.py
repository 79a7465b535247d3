"""Softmaxes of a level, found once for all passes that lower them.

A softmax, or a log-sum-exp, adds up powers along some axes. Mostly their maximum is subtracted
before, and the powers are divided by their sum afterwards. All powers that are added up together
are a row here; mostly rows are along the last axis.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from jmp.autocasting._facts import is_row_reduction
from jmp.autocasting._graph import Node, Value, downstream, source_through


class Shift(NamedTuple):
    """A number that is subtracted from each row before its powers are taken."""

    sub: Node
    rows: Value
    maxima: Node  # of the rows; the number subtracted is made of them
    number: Value  # one a row


class Softmax(NamedTuple):
    """Sums of powers of rows, and what stands around them."""

    exp: Node
    total: Node  # the sums of the rows
    shift: Shift | None  # None where the maxima are not subtracted
    division: Node | None  # of the powers by their sums

    @property
    def argument(self) -> Value:
        """The operand of `exp`."""
        return self.exp.inputs[0]


def softmaxes_of(nodes: Iterable[Node]) -> list[Softmax]:
    """Returns the softmaxes among the nodes of a level, over any axes."""
    found = []
    for total in nodes:
        if total.name == "reduce_sum":
            exp = total.inputs[0].producer
            if exp is not None and exp.name == "exp":
                found.append(Softmax(exp, total, _shift(exp, total), _division(exp, total)))
    return found


def softmaxes_within(softmaxes: Iterable[Softmax], nodes: Set[Node]) -> Iterator[Softmax]:
    """Yields what of each softmax is computed by some nodes that are fused.

    One whose sums are not among these, or not of float32 rows along the last axes, is left out.
    """
    for softmax in softmaxes:
        total, shift, division = softmax.total, softmax.shift, softmax.division
        is_of_rows = total.inputs[0].is_float32 and is_row_reduction(total)
        if is_of_rows and {total, softmax.exp} <= nodes:
            is_shifted = shift is not None and {shift.sub, shift.maxima} <= nodes
            yield softmax._replace(
                shift=shift if is_shifted else None,
                division=division if division in nodes else None,
            )


def _division(exp: Node, total: Node) -> Node | None:
    """Returns the node that divides the powers by the sums of their rows."""
    (powers,), (sums,) = exp.outputs, total.outputs
    for node in powers.users:
        if node.name == "div" and node.inputs[0] is powers:
            number = _one_a_row(node.inputs[1], powers, total.params["axes"])
            if number is None:
                continue
            if source_through(number, lambda n: n.rule.reshapes or n.rule.repeats) is sums:
                return node
    return None


def _shift(exp: Node, total: Node) -> Shift | None:
    sub = exp.inputs[0].producer
    if sub is None or sub.name != "sub":
        return None
    rows, subtracted = sub.inputs
    axes = sorted(total.params["axes"])
    shift = _one_a_row(subtracted, rows, axes)
    if shift is None:
        return None
    is_small = lambda n: n.is_fusible and len(n.outputs) == 1 and n.outputs[0].size <= shift.size
    for node in rows.users:
        if node.name == "reduce_max" and sorted(node.params["axes"]) == axes:
            if shift in downstream(node.outputs[0], is_small):
                return Shift(sub, rows, node, shift)
    return None


def _one_a_row(value: Value, rows: Value, axes: Sequence[int]) -> Value | None:
    """Returns what `value` repeats along the rows of an array, if it has one number for each.

    Args:
      rows: the array.
      axes: along which a row lies.
    """
    shape = rows.aval.shape
    left = [axis for axis in range(len(shape)) if axis not in axes]
    of_rows = tuple(n if axis in left else 1 for axis, n in enumerate(shape))
    if value.aval.shape == of_rows:
        return value
    node = value.producer
    if value.aval.shape != shape or node is None or node.name != "broadcast_in_dim":
        return None
    source, places = node.inputs[0], tuple(node.params["broadcast_dimensions"])
    with_axes = {tuple(range(len(shape))): of_rows, tuple(left): tuple(shape[i] for i in left)}
    return source if source.aval.shape == with_axes.get(places) else None
