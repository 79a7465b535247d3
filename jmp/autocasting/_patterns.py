"""Softmaxes of a level, found once for all passes that lower them.

A softmax, or a log-sum-exp, adds up powers of each row. Mostly the row's maximum is subtracted
before, and the powers are divided by their sum afterwards.
"""

from collections.abc import Iterable, Set
from typing import NamedTuple

from jmp.autocasting._facts import is_row_reduction
from jmp.autocasting._graph import Node, Value, downstream, source_through
from jmp.autocasting._numbers import Shape


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

    def within(self, nodes: Set[Node]) -> "Softmax | None":
        """Returns what of it is computed by some nodes that are fused; None if no sum is."""
        if self.total not in nodes or self.exp not in nodes:
            return None
        shift, division = self.shift, self.division
        is_shifted = shift is not None and {shift.sub, shift.maxima} <= nodes
        return self._replace(
            shift=shift if is_shifted else None, division=division if division in nodes else None
        )


def softmaxes_of(nodes: Iterable[Node]) -> list[Softmax]:
    """Returns the softmaxes among the nodes of a level."""
    found = []
    for total in nodes:
        if total.name == "reduce_sum" and total.inputs[0].is_float32 and is_row_reduction(total):
            exp = total.inputs[0].producer
            if exp is not None and exp.name == "exp":
                found.append(Softmax(exp, total, _shift(exp, total), _division(exp, total)))
    return found


def _division(exp: Node, total: Node) -> Node | None:
    """Returns the node that divides the powers by the sums of their rows, in the rows' order."""
    (powers,), (sums,) = exp.outputs, total.outputs
    shape = powers.aval.shape
    for node in powers.users:
        if node.name != "div" or node.inputs[0] is not powers:
            continue
        divisor = node.inputs[1]
        rank = len(sums.aval.shape)
        if divisor.aval.shape == (*shape[:rank], *(1 for _ in shape[rank:])):
            if source_through(divisor, lambda n: n.rule.reshapes or n.rule.repeats) is sums:
                return node
    return None


def _shift(exp: Node, total: Node) -> Shift | None:
    sub = exp.inputs[0].producer
    if sub is None or sub.name != "sub":
        return None
    rows, subtracted = sub.inputs
    shift = _one_a_row(subtracted, rows.aval.shape, len(total.outputs[0].aval.shape))
    if shift is None:
        return None
    is_small = lambda n: n.is_fusible and len(n.outputs) == 1 and n.outputs[0].size <= shift.size
    axes = sorted(total.params["axes"])
    for node in rows.users:
        if node.name == "reduce_max" and sorted(node.params["axes"]) == axes:
            if shift in downstream(node.outputs[0], is_small):
                return Shift(sub, rows, node, shift)
    return None


def _one_a_row(value: Value, shape: Shape, rank: int) -> Value | None:
    """Returns what `value` repeats along the rows of an array, if it has one number for each.

    Args:
      shape: of the array, the first `rank` axes of which count the rows.
    """
    of_rows = (*shape[:rank], *(1 for _ in shape[rank:]))
    if value.aval.shape == of_rows:
        return value
    node = value.producer
    if value.aval.shape != shape or node is None or node.name != "broadcast_in_dim":
        return None
    source, axes = node.inputs[0], node.params["broadcast_dimensions"]
    is_of_rows = source.aval.shape in (of_rows, shape[:rank])
    return source if is_of_rows and tuple(axes) == tuple(range(len(axes))) else None
