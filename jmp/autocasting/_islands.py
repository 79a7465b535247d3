"""Islands: float32 arithmetic between half values.

An island is a connected set of fusible nodes of one level that holds a *seed*: a node that insists
on float32. It reads half values, computes in float32 inside one fusion, and writes half values
where a product follows. Islands come from the dataflow alone; no module's name is asked.

How an island runs:
  - PLAIN: its float32 values may be kept for the backward pass. For small ones, and for those that
    normalise over the batch, where the backward pass needs two passes anyway.
  - RECOMPUTE: it keeps only its half inputs and is computed again in the backward pass. For softmax
    (XLA computes a whole row in one kernel) and for expensive functions (gelu): what they would
    keep is larger than what they read, and a fused island costs no time beside its traffic.
  - RECOMPUTE_BUT_SUMS: the same, but the results of its sums are kept. For norms (LayerNorm,
    RMSNorm, GroupNorm): the sums are small, and adding up again reads everything once more.
"""

import enum
from collections.abc import Iterable

import numpy as np

from jmp.autocasting._flow import REDUCTIONS, is_row_reduction
from jmp.autocasting._graph import Node
from jmp.autocasting._registry import Category
from jmp.autocasting._values import Value

# Islands whose largest value has fewer elements run plain: a recomputation would launch kernels to
# save less than 32 KiB.
SMALL = 1 << 14
# Operations that may be moved in front of an island: a half result loses what storing it would.
LINEAR = frozenset({"add", "sub"})
MOVES = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "name", "copy", "copy_p"})
PARTS = frozenset({"split", "slice"})
# Operations cheap enough to be done again inside an island rather than read from memory.
CHEAP = frozenset({
    "broadcast_in_dim", "iota", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "add", "sub", "mul", "neg", "select_n",
    "copy_p",
})  # fmt: skip


class Mode(enum.Enum):
    """How an island runs; see the module's docstring."""

    PLAIN = "plain"
    RECOMPUTE = "recompute"
    RECOMPUTE_BUT_SUMS = "recompute but sums"


class Island:
    """A set of nodes computed in float32, as one step.

    Attributes:
      nodes: in program order.
      clones: neutral nodes that it computes for itself, before its own; they may stand outside too.
      inputs: values read from outside, each once.
      outputs: values read outside.
      mode: how it runs.
    """

    def __init__(self, nodes: list[Node], graph_outputs: set[Value]) -> None:
        self.nodes = nodes
        self.clones: list[Node] = []
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.mode = Mode.PLAIN
        self.connect(graph_outputs)

    @property
    def shares_casts(self) -> bool:
        """Whether all readers of an input share one cast, so that its cotangents add up in float32.

        So for norms over rows (4 % of the gradient error of an RMSNorm transformer). Elsewhere each
        reader has its own, and the cotangents add up in half: XLA takes a pair of casts away, and
        would store the float32 sum (3 % of a U-Net's bytes, 8 % of a GPT's).
        """
        is_cut = any(node.is_cut for node in self.nodes)
        return self.mode is Mode.RECOMPUTE_BUT_SUMS and not is_cut

    def connect(self, graph_outputs: set[Value]) -> None:
        """Finds inputs and outputs anew from the nodes."""
        inside = {*self.clones, *self.nodes}
        self.inputs = list(
            dict.fromkeys(
                value
                for node in (*self.clones, *self.nodes)
                for value in node.inputs
                if value.producer not in inside and value.literal is None
            )
        )
        self.outputs = [
            value
            for node in self.nodes
            for value in node.outputs
            if value in graph_outputs or any(user not in inside for user in value.users)
        ]


def group(nodes: Iterable[Node]) -> list[list[Node]]:
    """Returns the connected components of fusible, non-neutral nodes of equal level."""
    leader: dict[Node, Node] = {}

    def find(node: Node) -> Node:
        while leader[node] is not node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for node in nodes:
        leader[node] = node
        for value in node.inputs:
            other = value.producer
            if other in leader and value.level == node.level:
                leader[find(other)] = find(node)
    components: dict[Node, list[Node]] = {}
    for node in leader:
        components.setdefault(find(node), []).append(node)
    return list(components.values())


def _is_softmax(nodes: Iterable[Node]) -> bool:
    return any(node.name == "reduce_max" and is_row_reduction(node) for node in nodes)


def choose_mode(island: Island, recompute: str, repeats: int) -> Mode:
    """Decides how an island runs, from its reductions and its largest value.

    Inside a loop what is kept is kept for every turn, so that sizes count `repeats` times.
    """
    largest = repeats * max((v.size for node in island.nodes for v in node.outputs), default=0)
    if recompute == "none":
        return Mode.PLAIN
    if recompute == "all":
        return Mode.RECOMPUTE
    if largest < SMALL:
        return Mode.PLAIN
    sums = [node for node in island.nodes if node.name == "reduce_sum"]
    if any(node.is_cut for node in island.nodes):
        over_batch = any(0 in node.params["axes"] for node in sums if not is_row_reduction(node))
        return Mode.PLAIN if over_batch else Mode.RECOMPUTE_BUT_SUMS
    if any(node.name in REDUCTIONS and is_row_reduction(node) for node in island.nodes):
        return Mode.RECOMPUTE if _is_softmax(island.nodes) or not sums else Mode.RECOMPUTE_BUT_SUMS
    expensive = any(
        node.rule.expensive and any(repeats * v.size >= SMALL for v in node.outputs)
        for node in island.nodes
    )
    return Mode.RECOMPUTE if expensive else Mode.PLAIN


def peel(nodes: list[Node], half: np.dtype) -> tuple[list[Node], list[Node]]:
    """Splits linear nodes off the entry of an island where no more values enter the rest then.

    A residual addition in front of a LayerNorm: two half values enter before, their sum after; and
    the sum is needed in half anyway, for the next addition. A bias in front of a gelu: as many
    values enter, and the cotangent is rounded before the bias adds it up, so that XLA need not
    store it in float32 for two readers (14 % of a U-Net's bytes).

    Returns: the nodes in front, to run in half, and the rest.
    """
    inside = set(nodes)
    # What is added to the scores of an attention may be a mask over the keys.
    takes_biases = not (_is_softmax(nodes) and any(v.feeds for n in nodes for v in n.outputs))
    # For each node that is a linear function of what enters: the nodes it takes, and the values.
    cones: dict[Node, tuple[frozenset[Node], frozenset[Value]]] = {}
    front: frozenset[Node] = frozenset()
    for node in nodes:
        cone = _linear_cone(node, inside, cones, half, takes_biases)
        if cone is None:
            continue
        cones[node] = cone
        members, entering = cone
        ends_here = [
            value
            for value in entering
            if all(user in members or user not in inside for user in value.users)
        ]
        if node.name in LINEAR and sum(v.size for v in ends_here) >= node.outputs[0].size:
            front |= members
    return [n for n in nodes if n in front], [n for n in nodes if n not in front]


def _linear_cone(
    node: Node,
    inside: set[Node],
    cones: dict[Node, tuple[frozenset[Node], frozenset[Value]]],
    half: np.dtype,
    takes_biases: bool,
) -> tuple[frozenset[Node], frozenset[Value]] | None:
    if node.name not in LINEAR | MOVES | PARTS:
        return None
    if node.region.is_full or not node.outputs[0].is_float32:
        return None
    if node.rule.category is Category.FULL:
        return None
    members: set[Node] = {node}
    entering: set[Value] = set()
    for value in node.inputs:
        if value.producer in inside:
            cone = cones.get(value.producer)
            if cone is None:
                return None
            members |= cone[0]
            # A part of a value counts as a value by itself: the gates of an LSTM.
            entering |= {value} if value.producer.name in PARTS else cone[1]
        elif value.neutral:
            # A bias may go along. A mask, or an input as large as the result, may not.
            if value.constant is not None or not (value.is_vector and takes_biases):
                return None
            if value.source_size >= node.outputs[0].size:
                return None
        elif value.dtype != half:
            return None
        else:
            entering.add(value)
    return frozenset(members), frozenset(entering)


def clone_cheap(island: Island) -> None:
    """Lets an island compute masks and broadcasts for itself rather than keep them as residuals."""
    clones: dict[Node, None] = {}
    for value in island.inputs:
        if value.neutral and value.size >= SMALL:
            clones.update(dict.fromkeys(_cheap_producers(value)))
    if clones:
        island.clones = sorted(clones, key=lambda node: node.index)
        island.connect(set(island.outputs))


def _cheap_producers(value: Value) -> list[Node]:
    """Returns the nodes that compute `value` from small values; none if that is not cheap."""
    found: dict[Node, None] = {}

    def is_cheap(value: Value) -> bool:
        node = value.producer
        if value.literal is not None or node in found:
            return True
        if node is None or node.name not in CHEAP:
            return value.size < SMALL
        if not all(is_cheap(operand) for operand in node.inputs):
            return value.size < SMALL
        found[node] = None
        return True

    return list(found) if is_cheap(value) else []
