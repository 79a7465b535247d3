"""Why an operation that is no product is computed in float32, in words; "" where it need not be.

Reasons of products are in `_precision.py`, `_products.py` and `_equations.py`.
"""

from collections.abc import Sequence, Set

from jmp.autocasting._graph import Node, Value, are_same, downstream, root
from jmp.autocasting._level import Level
from jmp.autocasting._numbers import fits
from jmp.autocasting._precision import NEVER_HALF
from jmp.autocasting._registry import Category
from jmp.dtypes import FLOAT32

OFFSET = "beside the number that is added a half type has few digits left"
TAKEN_AWAY = "what is added is taken away again"
LARGE_INPUT = "an operand is a float32 input as large as the result"
UNBOUNDED = "nothing bounds the size of an operand: a half type may not hold it"


def why_region(node: Node) -> str:
    """Returns what the user said of the place a node stands in."""
    if node.region.is_decided:
        return "an inner autocast decided here"
    return "the user asked for float32 here" if node.region.in_float32 else ""


def reasons_for(nodes: Sequence[Node], level: Level) -> dict[Node, str]:
    """Returns the nodes of a component that require float32, each with the reason."""
    inside, found = set(nodes), dict[Node, str]()
    for node in nodes:
        if why := why_float32(node, inside, level):
            found[node] = why
    return found


def why_float32(node: Node, inside: Set[Node], level: Level) -> str:
    """Returns why a node requires float32.

    Args:
      inside: the nodes of its component, whose results are not decided yet.
      level: what is decided of values from outside.
    """
    rule = node.rule
    if node.region.in_float32:
        return why_region(node)
    if rule.category is Category.FULL:
        return rule.reason
    if rule.category is Category.AS_WRITTEN:
        return rule.reason if node.outputs[0].is_float32 else ""
    if rule.category is Category.WIDEST:  # else the user said otherwise
        if node.name == "mul" and are_same(*node.inputs):
            return "a square, whose range a half type does not hold"
        if _cancels(node):
            return "near its bound, 1 minus a bounded function has few digits left"
    for value in node.inputs:
        if why := _why_operand(value, node, inside, level):
            return why
    if rule.category is not Category.WIDEST or not rule.linear:
        return ""
    if level.magnitude(node.outputs[0]).has_large_offset:
        return OFFSET
    return TAKEN_AWAY if _is_taken_away(node, inside, level) else ""


def _why_operand(value: Value, node: Node, inside: Set[Node], level: Level) -> str:
    """Returns why an operand makes a node float32."""
    half, facts = level.half, level.facts
    if not value.is_float32:
        has_no_half = str(value.dtype) in NEVER_HALF and any(v.is_float32 for v in node.outputs)
        return f"an operand is {value.dtype}" if has_no_half else ""
    if value.producer in inside:
        return ""
    if value.is_extreme:
        return f"{half} does not hold an array of the program"
    if value.constant is not None:
        is_held = fits(value.constant, half)
        return "" if is_held else f"{half} does not hold the constant {value.constant:g}"
    if value in facts.dependent:
        return "an operand is float32" if level.dtype(value) == FLOAT32 else ""
    if value.fits_half:
        return ""
    magnitude = level.magnitude(value)
    if magnitude.exceeds_half or magnitude.degree < 0:
        return UNBOUNDED
    if node.name == "div" and value is node.inputs[1] and magnitude.degree > 0:
        return "it divides by an input, whose size nothing bounds"
    # A callback has no result.
    if value.source_size >= max((result.size for result in node.outputs), default=0):
        return LARGE_INPUT
    if facts.feeds.isdisjoint(node.outputs):
        return "an operand is a float32 input, and no product reads the result"
    return ""


def _cancels(node: Node) -> bool:
    """Returns whether a bounded function's result is added to one, or subtracted.

    Near the end of its range nothing is left of that: float16's 1 - tanh(4) is off by a quarter,
    bfloat16's is zero. So are derivatives written, such as s * (1 - s).
    """
    is_one = [value.constant in (1, -1) for value in node.inputs]
    made_by = (root(value).producer for value in node.inputs)
    is_bounded = (n is not None and n.rule.bounded and n.is_fusible for n in made_by)
    return node.rule.linear and any(is_one) and any(is_bounded)


def _is_taken_away(node: Node, inside: Set[Node], level: Level) -> bool:
    """Returns whether an input that a node adds is subtracted elsewhere in its component.

    So data are denormalised and normalised again. Nobody subtracts a bias.
    """
    dependent = level.facts.dependent
    added = node.inputs if node.name == "add" and not dependent.isdisjoint(node.inputs) else ()
    return any(
        reader.name == "sub" and reader.inputs[1] is moved and reader in inside
        for value in added
        if value not in dependent and value.constant is None
        for moved in downstream(root(value), lambda node: node.rule.moves)
        for reader in moved.users
    )
