"""What the dataflow says by itself: which values feed products, which are neutral, their levels.

- A value *feeds* if it reaches a product, or an output that does. What does not is on the way to
  the loss (or is a statistic) and stays float32. So does what reaches a product only through a
  barrier that reads float32 anyway (a linear solver, a product with precision HIGHEST).
- A value is *kept* if it reaches the float32 carry of a loop, and no product lies between. Rounded
  on the way, it would be rounded at every turn: the carry would lose what small steps add to it.
- A value is *neutral* if no product lies before it: parameters, inputs, constants, and what is
  computed from them alone. Neutral values have no vote: they stay as they are and are cast at
  each use, so that gradients add up in float32. A neutral value is *fixed* if no floating input
  lies before it (masks, tables of sines): no gradient flows into it.
- The *level* of a node is the largest number of barriers on a path to it. A barrier is anything
  XLA does not fuse (a product, a sort, a loop), an embedding's gather, and the end of a batch
  or group normalisation. Nodes of one level that touch each other can be computed as one: a
  path that leaves such a set and comes back would cross a barrier, and so end on a higher level.
"""

from collections.abc import Iterable
from typing import Any

from jmp.autocasting._graph import REPEATS, SHUFFLES, Graph, Node
from jmp.autocasting._registry import Category
from jmp.autocasting._values import Value, is_inexact
from jmp.autocasting.rules.follow import BOUNDED

AFFINE = frozenset({"add", "sub", "mul", "div"})
REDUCTIONS = frozenset({"reduce_sum", "reduce_prod", "reduce_max", "reduce_min"})


def mark_destinations(
    graph: Graph, outputs_feed: Iterable[bool], outputs_kept: Iterable[bool]
) -> None:
    """Walks backwards from the products and the outputs: which values feed, which are kept."""
    feeding = feeding_values(graph, outputs_feed)
    kept = {
        v for v, keep in zip(graph.outputs, outputs_kept, strict=True) if keep and is_inexact(v)
    }
    for node in reversed(graph.nodes):
        if not node.is_product and not kept.isdisjoint(node.outputs):
            kept.update(filter(is_inexact, node.inputs))
    for value in (*graph.inputs, *(value for node in graph.nodes for value in node.outputs)):
        value.feeds = value in feeding
        value.kept = value in kept


def feeding_values(graph: Graph, outputs_feed: Iterable[bool]) -> set[Value]:
    """Returns the values that reach a product, or an output that feeds one outside."""
    feeding = {value for value, feeds in zip(graph.outputs, outputs_feed, strict=True) if feeds}
    for node in reversed(graph.nodes):
        ends_here = node.reads_float32 and not node.fusible
        if node.has_products or not (ends_here or feeding.isdisjoint(node.outputs)):
            # Indices, masks and sizes carry no precision from one side to the other.
            feeding.update(filter(is_inexact, node.inputs))
    return feeding


def mark_neutral(graph: Graph, infos: Iterable[Any]) -> None:
    """Walks forwards from the inputs; `infos` say which of them are neutral and fixed."""
    for value, info in zip(graph.inputs, infos, strict=True):
        value.neutral = info.neutral
        value.fixed = info.fixed or not is_inexact(value)
    for node in graph.nodes:
        neutral = (
            not node.has_products
            and not node.is_embedding
            and not node.region.as_written
            and node.region.output_dtype is None
            and all(value.neutral for value in node.inputs)
        )
        fixed = neutral and all(value.fixed for value in node.inputs)
        for value in node.outputs:
            value.neutral = neutral
            value.fixed = fixed


def mark_levels(graph: Graph) -> None:
    """Walks forwards and counts barriers; neutral nodes are free and stay on level 0."""
    for value in graph.inputs:
        value.level = 0
    for node in graph.nodes:
        if node.outputs and all(value.neutral for value in node.outputs):
            continue
        node.level = max((value.level for value in node.inputs), default=0)
        barrier = not node.fusible or node.is_cut
        for value in node.outputs:
            value.level = node.level + barrier


# Normalisation over leading or spatial axes.


def is_row_reduction(node: Node) -> bool:
    """Returns whether a reduction is over trailing axes, as in softmax and LayerNorm."""
    rank = len(node.inputs[0].aval.shape)
    axes = sorted(node.params["axes"])
    return axes == list(range(rank - len(axes), rank)) and len(axes) < rank


def mark_cuts(graph: Graph) -> None:
    """Marks the end of each normalisation over leading or spatial axes (BatchNorm, GroupNorm).

    There the normalised value goes back to half, and what follows (relu, the residual addition) is
    half too: the backward pass of such a norm reads its cotangent twice, and would store it in
    float32 otherwise.
    """
    statistics: set[Value] = set()
    normalised: set[Value] = set()
    for node in graph.nodes:
        node.is_cut = False
        if not node.fusible or len(node.outputs) != 1:
            continue
        (output,) = node.outputs
        if output.neutral:
            continue
        if node.name == "reduce_sum" and _reduces_before_last(node):
            statistics.add(output)
        elif all(v in statistics or v.neutral for v in node.inputs):
            statistics.add(output)
        elif node.name in AFFINE and _is_normalising(node, statistics, normalised):
            normalised.add(output)
    for value in normalised:
        node = value.producer
        if node is not None:
            node.is_cut = not any(
                user.name in AFFINE and user.outputs[0] in normalised for user in value.users
            )


def _reduces_before_last(node: Node) -> bool:
    size = node.outputs[0].size
    return size > 1 and not is_row_reduction(node)


def _is_normalising(node: Node, statistics: set[Value], normalised: set[Value]) -> bool:
    """An affine step whose other operand is a statistic, or a parameter after such a step."""
    large = [v for v in node.inputs if not v.neutral and v not in statistics]
    others = [v for v in node.inputs if v.neutral or v in statistics]
    if len(large) != 1 or len(others) != 1:
        return False
    if others[0] in statistics:
        return True
    return large[0] in normalised and others[0].source_size < node.outputs[0].size


def is_full_seed(node: Node) -> bool:
    """Returns whether a node insists on float32 by what it is, whatever its operands are."""
    if node.region.is_full or node.rule.category is Category.FULL:
        return True
    if node.rule.category is not Category.WIDEST:  # the user said otherwise
        return False
    is_square = node.name == "mul" and node.inputs[0] is node.inputs[1]
    return is_square or _cancels(node)


def _cancels(node: Node) -> bool:
    """Returns whether a bounded function's result is added to one, or subtracted.

    Near the end of its range nothing is left of that: float16's 1 - tanh(4) is off by a quarter,
    bfloat16's is zero. So are derivatives written, such as s * (1 - s).
    """
    if node.name not in ("add", "sub"):
        return False
    is_one = [value.constant is not None and abs(value.constant) == 1 for value in node.inputs]
    return any(is_one) and any(_is_bounded(value) for value in node.inputs)


def _is_bounded(value: Value) -> bool:
    node = value.producer
    while node is not None and (node.name in REPEATS or node.name in SHUFFLES):
        node = node.inputs[0].producer
    return node is not None and node.name in BOUNDED and node.fusible
