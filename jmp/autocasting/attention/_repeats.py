"""Along which axes a value only repeats, as a mask over keys does along the heads."""

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
