"""Islands: float32 arithmetic between half values.

An island is a connected set of fusible nodes of one depth that holds a *seed*: a node that requires
float32. It reads half values, computes in float32 inside one fusion, and writes half values
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

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from jmp.autocasting._flow import Facts, is_row_reduction
from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._numbers import is_inexact
from jmp.autocasting._registry import Category
from jmp.autocasting._steps import Island, Recompute, Storage

# Islands whose largest value has fewer elements run plain: a recomputation would launch kernels to
# save less than 32 KiB.
# A small GPT's step moves 4 % fewer bytes in 11 % more kernels with 2**8 (width 64, 32 tokens), and
# 5 % more bytes in 8 % fewer kernels with 2**16 (width 128, 2 x 64 tokens).
SMALL = 1 << 14

# Numbers that a loop keeps, in all its turns, of an array that an island takes apart. Below this it
# keeps parts (`peel_splits`), from this on the whole. The whole takes 4 to 28 % more cycles (LSTMs,
# XLA's estimate), but such large ones take 0.81 to 1.06 of the memory with it on a v5e, and 1.00 to
# 1.07 on a v6e.
WHOLE = 1 << 24


def group(nodes: Iterable[Node], cuts: Set[Node]) -> list[list[Node]]:
    """Returns the connected components of fusible, non-neutral nodes of one depth."""
    touching: dict[Node, set[Node]] = {node: set() for node in nodes}
    for node in touching:
        # Places that are computed together do not join what is looked up there.
        values = filter(is_inexact, node.inputs) if node.rule.looks_up else node.inputs
        for producer in (value.producer for value in values):
            if producer in touching and producer not in cuts:
                touching[node].add(producer)
                touching[producer].add(node)
    components: list[list[Node]] = []
    grouped: set[Node] = set()
    for node in touching:
        if node not in grouped:
            component = set(reached([node], touching.__getitem__))
            grouped |= component
            components.append(sorted(component, key=lambda node: node.index))
    return components


def _is_softmax(nodes: Iterable[Node]) -> bool:
    return any(node.name == "reduce_max" and is_row_reduction(node) for node in nodes)


def choose_recompute(nodes: Sequence[Node], cuts: Set[Node], asked: str, times: int) -> Recompute:
    """Decides what an island keeps, from its reductions and its largest value.

    Inside a loop what is kept is kept for every turn, so that sizes count so many `times`.
    """
    largest = times * max(v.size for node in nodes for v in node.outputs)
    if asked == "all":
        return Recompute.RECOMPUTE
    if asked == "none" or largest < SMALL:
        return Recompute.PLAIN
    sums = [node for node in nodes if node.name == "reduce_sum"]
    if not cuts.isdisjoint(nodes):
        over_batch = any(0 in node.params["axes"] for node in sums if not is_row_reduction(node))
        return Recompute.PLAIN if over_batch else Recompute.RECOMPUTE_BUT_SUMS
    if any(node.rule.reduces and is_row_reduction(node) for node in nodes):
        keeps_sums = sums and not _is_softmax(nodes)
        return Recompute.RECOMPUTE_BUT_SUMS if keeps_sums else Recompute.RECOMPUTE
    expensive = any(
        node.rule.expensive and any(times * v.size >= SMALL for v in node.outputs) for node in nodes
    )
    return Recompute.RECOMPUTE if expensive else Recompute.PLAIN


def entering(nodes: Sequence[Node]) -> list[Value]:
    """Returns the values that nodes read from outside, each once."""
    inside = set(nodes)
    values = dict.fromkeys(value for node in nodes for value in node.inputs)
    return [v for v in values if v.producer not in inside and v.held is None]


class Cone(NamedTuple):
    """What a node is a linear function of: the nodes on the way, and the values that enter."""

    nodes: frozenset[Node]
    entering: frozenset[Value]


def peel(nodes: Sequence[Node], storage: Storage) -> tuple[list[Node], list[Node]]:
    """Splits linear nodes off the entry of an island where no more values enter the rest then.

    A residual addition in front of a LayerNorm: two half values enter before, their sum after; and
    the sum is needed in half anyway, for the next addition. A bias in front of a gelu: as many
    values enter, and the cotangent is rounded before the bias adds it up, so that XLA need not
    store it in float32 for two readers. Without peeling a U-Net moves 18 % more bytes, a GPT 14 %.

    Args:
      nodes: of the island, in program order.
      storage: what is decided of values from outside.

    Returns: the nodes in front, to run in half, and the rest.
    """
    inside = set(nodes)
    # What is added to the scores of an attention may be a mask over the keys.
    feeds = any(not storage.facts.feeds.isdisjoint(node.outputs) for node in nodes)
    takes_biases = not (_is_softmax(nodes) and feeds)
    cones: dict[Node, Cone | None] = {}
    front: frozenset[Node] = frozenset()
    for node in nodes:
        cones[node] = cone = _linear_cone(node, cones, storage, takes_biases)
        if cone is None:
            continue
        ends_here = [
            value
            for value in cone.entering
            if all(user in cone.nodes or user not in inside for user in value.users)
        ]
        if node.rule.linear and sum(v.size for v in ends_here) >= node.outputs[0].size:
            front |= cone.nodes
    return [n for n in nodes if n in front], [n for n in nodes if n not in front]


def peel_splits(
    nodes: Sequence[Node], why: Collection[Node], storage: Storage, times: int
) -> tuple[list[Node], list[Node]]:
    """Moves splits of what enters an island out of it, for a loop on a TPU.

    A loop keeps what enters an island for its backward pass. Where that is a whole array, XLA for
    TPUs copies each turn's rows before it takes parts of them. Parts are read where they lie. No
    number changes: the array and each part have one reader, as the gates of an LSTM have, and
    islands with reductions stay as they are.

    Args:
      nodes: of the island, in program order.
      why: those that require float32.
      storage: what is decided of values from outside.
      times: how often the level runs.

    Returns: the splits, to run in half, and the rest.
    """
    if any(node.rule.reduces for node in nodes):
        return [], list(nodes)
    inside = set(nodes)

    def is_taken_apart(node: Node) -> bool:
        if node.name != "split" or node in why:
            return False
        (value,) = node.inputs
        enters = value.producer not in inside and storage.is_half(value)
        have_one_reader = all(len(v.users) == 1 for v in (value, *node.outputs))
        return enters and have_one_reader and times * value.size < WHOLE

    splits = {node for node in nodes if is_taken_apart(node)}
    return [n for n in nodes if n in splits], [n for n in nodes if n not in splits]


def _linear_cone(
    node: Node, cones: Mapping[Node, Cone | None], storage: Storage, takes_biases: bool
) -> Cone | None:
    """Returns the cone of a node of an island, given those of the nodes before; None for none."""
    rule, result = node.rule, node.outputs[0]
    is_float32 = rule.category is Category.FULL or node.region.in_float32
    if is_float32 or not (rule.linear or rule.hands_on):
        return None
    nodes: set[Node] = {node}
    entering: set[Value] = set()
    for value in node.inputs:
        producer = value.producer
        if producer is not None and producer in cones:
            cone = cones[producer]
            if cone is None:
                return None
            nodes |= cone.nodes
            # A part of a value counts as a value by itself: the gates of an LSTM.
            entering |= {value} if producer.rule.selects else cone.entering
        elif value not in storage.facts.dependent:
            # A bias may go along. A mask, a row that no gradient flows into, such as a target of a
            # loss, or an input as large as the result may not.
            if not (value.varies and value.is_vector and takes_biases):
                return None
            if value.source_size >= result.size:
                return None
        elif storage.is_half(value):
            entering.add(value)
        else:
            return None
    return Cone(frozenset(nodes), frozenset(entering))


def clones_for(entering: Iterable[Value], facts: Facts) -> list[Node]:
    """Returns nodes that an island computes for itself rather than keep their results.

    They make masks and broadcasts, large neutral values, from small ones.
    """
    clones: dict[Node, None] = {}
    for value in entering:
        if value not in facts.dependent and value.size >= SMALL:
            clones.update(dict.fromkeys(_cheap_producers(value)))
    return sorted(clones, key=lambda node: node.index)


def _cheap_producers(value: Value) -> list[Node]:
    """Returns the nodes that compute `value` from small values; none if that is not cheap."""

    def is_cheap(node: Node | None) -> bool:
        return node is not None and (node.rule.cheap or node.rule.reshapes or node.rule.repeats)

    def operands(value: Value) -> tuple[Value, ...]:
        node = value.producer
        return node.inputs if node is not None and is_cheap(node) else ()

    found: dict[Node, None] = {}
    for read in reached([value], operands):
        if read.producer is not None and is_cheap(read.producer):
            found[read.producer] = None
        elif read.held is None and read.size >= SMALL:
            return []
    return list(found)


def common_scopes_of(nodes: Sequence[Node]) -> int:
    """Returns how many name scopes all nodes stand in together."""
    stacks = [node.stack.stack for node in nodes]
    count = len(stacks[0])
    while any(stack[:count] != stacks[0][:count] for stack in stacks):
        count -= 1
    return count


def key_of(island: Island) -> Hashable:
    """Returns what islands that are alike, as those of the layers of a deep network, agree in.

    JAX traces what is under `jax.checkpoint`, its derivative and its transpose once for each
    function object. So islands that agree in all but the values that enter, and the scope that they
    stand in, are emitted through one function.
    """
    numbers: dict[Value, int] = {}

    def name(value: Value) -> Hashable:
        if value.held is None:
            return numbers.setdefault(value, len(numbers))
        if np.ndim(value.held) == 0 and value.dtype is not None and value.dtype.kind in "biufc":
            return str(value.aval), np.asarray(value.held).tobytes()
        return "held", id(value.held)

    def describe(node: Node) -> Hashable:
        rewrite, equation = island.rewrites.get(node), node.equation
        return (
            equation.primitive,
            tuple(sorted(node.params.items())),
            str(node.stack[island.common_scopes :]),
            (equation.source_info.traceback, equation.ctx),
            tuple(map(name, node.inputs)),
            tuple(map(name, node.outputs)),
            () if rewrite is None else (rewrite.why, *map(name, rewrite.reads)),
            () if rewrite is None else tuple(value.constant for value in rewrite.reads),
        )

    return (
        tuple((name(value), value.aval, dtype) for value, dtype, *_ in island.reads),
        tuple(map(describe, (*island.clones, *island.nodes))),
        tuple((name(value), dtype, saturates) for value, dtype, saturates in island.writes),
        (len(island.clones), island.recompute, island.prevent_cse, island.shares_casts),
        None if island.padded is None else name(island.padded),
    )
