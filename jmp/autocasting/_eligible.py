"""Which products in half may be float8, where the policy asks for it."""

import collections
import math

from jmp.autocasting._flow import Facts
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._numbers import MadeOf, shape_of, size_of

WHY_FLOAT8 = "a parameter's product on the way to another: its operands are rounded to float8"
# Counted by benchmarks/float8_convolutions.py; the figures stand in docs/float8.md.
WHY_CONVOLUTION = (
    "a convolution: in float8 it moves more bytes, and XLA computes the gradient of its kernel in "
    "bfloat16"
)

# Multiplications. Three products of so many (its own and those of two gradients) take 1.6 us in
# half at the rate of an H200's data sheet (989e12 operations a second), and half of that in float8:
# less is saved than the launch of one kernel takes (about 2 us), and some seven more are launched.
# Not timed: where float8 begins to pay is to be measured on a device, and lies above this.
SMALL = 2**28
# Tensor cores multiply float8 in pieces of 16; what is thinner is padded to that.
THIN = 16


def why_not_float8(node: Node, facts: Facts, which: str, is_transposed: bool) -> str:
    """Returns why a product in half is not float8; "" if it is.

    Args:
      which: "weights" or "all", as in `autocast`.
      is_transposed: as in `Level.plan_opened`.
    """
    if node.name == "conv_general_dilated":
        return WHY_CONVOLUTION
    if node.name != "dot_general":
        return f"{node.name} has no float8 form yet"
    if is_transposed:
        return "it stands in a custom_jvp, whose rule JAX transposes"
    if which == "weights" and not any(
        value not in facts.dependent and value.made_of > MadeOf.INTEGERS for value in node.inputs
    ):
        return "it multiplies two activations (float8='all' takes such products)"
    if not facts.kept.isdisjoint(node.outputs):
        return "a loop carries its result in float32"
    if not _feeds(node, facts):
        return "its result feeds no other product, as that of a head"
    if min(sizes_of(node)) < THIN:
        return f"it is thinner than {THIN}"
    if math.prod(sizes_of(node)) < SMALL:
        return f"it is small: fewer than 2**{SMALL.bit_length() - 1} multiplications"
    return ""


def _feeds(node: Node, facts: Facts) -> bool:
    """Returns whether a product's result goes to another, added up over devices on the way or not.

    Sums over devices are float32, so that nothing `feeds` by them; but the result of a product
    whose rows are split over devices is one of their parts.
    """
    stack, seen = list(node.outputs), set(node.outputs)
    while stack:
        value = stack.pop()
        if value in facts.feeds:
            return True
        users = (u for u in value.users if u.is_fusible or u.rule.sums_devices)
        new = {result for user in users for result in user.outputs} - seen
        stack += new
        seen |= new
    return False


def sizes_of(node: Node) -> tuple[int, int, int]:
    """Returns rows (with batches), columns and summed elements of a `dot_general`."""
    (summed, right_summed), (_, right_batch) = node.params["dimension_numbers"]
    left, right = (shape_of(value) for value in node.inputs)
    inner = size_of(tuple(left[axis] for axis in summed))
    others = {*right_summed, *right_batch}
    columns = size_of(tuple(size for axis, size in enumerate(right) if axis not in others))
    return node.outputs[0].size // max(1, columns), columns, inner


def root(value: Value) -> Value:
    """Returns what a value was before it was only moved: reshaped, transposed, broadcast."""
    while value.producer is not None and value.producer.rule.moves:
        value = value.producer.inputs[0]
    return value


def shared_factors(graph: Graph) -> set[Value]:
    """Returns the roots that several products read, on this level or on the outermost."""
    factors = (value for node in graph.nodes if node.is_product for value in node.inputs)
    counts = collections.Counter(map(root, factors))
    return {v for v, count in counts.items() if count > 1 or _readers(v.origin) > 1}


def _readers(value: Value) -> int:
    return sum(node.has_products for node in value.users)
