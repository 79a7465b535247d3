"""Islands: float32 arithmetic between half values.

An island is a connected set of fusible nodes of one depth that holds a *seed*: a node that requires
float32. It reads half values, computes in float32 inside one fusion, and writes half values
where a product follows. Islands come from the dataflow; no module's name is asked.

Most islands are recomputed: they keep only their half inputs, and are computed again in the
backward pass. Such are norms and softmax (XLA computes a whole row in one kernel) and expensive
functions (gelu): what they would keep is larger than what they read, and a fused island costs no
time beside its traffic. Others may keep their float32 values: small ones, and those that normalise
over the batch, where the backward pass needs two passes anyway.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from jmp import _jax_compat
from jmp.autocasting._facts import is_row_reduction
from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._level import LARGE_INPUT, Level, why_digits
from jmp.autocasting._numbers import has_symbols, shape_of
from jmp.autocasting._registry import Category
from jmp.autocasting._steps import Fused, Island, S, Step

# Islands whose largest value has fewer elements run plain: a recomputation would launch kernels to
# save less than 32 KiB.
# A small GPT's step moves 4 % fewer bytes in 11 % more kernels with 2**8 (width 64, 32 tokens), and
# 5 % more bytes in 8 % fewer kernels with 2**16 (width 128, 2 x 64 tokens).
SMALL = 1 << 14


def group(nodes: Iterable[Node], cuts: Set[Node]) -> list[list[Node]]:
    """Returns the connected components of fusible, non-neutral nodes of one depth.

    Args:
      nodes: in program order.
    """
    touching: dict[Node, set[Node]] = {node: set() for node in nodes}
    for node in touching:
        # Places that are computed together do not join what is looked up there.
        values = node.inexact if node.rule.looks_up else node.inputs
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
            components.append([node for node in touching if node in component])  # in order
    return components


def _is_softmax(nodes: Iterable[Node]) -> bool:
    return any(node.name == "reduce_max" and is_row_reduction(node) for node in nodes)


def normalises_rows(nodes: Iterable[Node], cuts: Set[Node]) -> bool:
    """Returns whether an island adds up rows as a LayerNorm does: no softmax, and without cuts."""
    sums = any(node.name == "reduce_sum" and is_row_reduction(node) for node in nodes)
    return sums and cuts.isdisjoint(nodes) and not _is_softmax(nodes)


def is_small(nodes: Iterable[Node], level: Level) -> bool:
    """Returns whether an island is too small to save much in another form.

    Inside a loop what is kept is kept for every turn, so that sizes count so many times.
    """
    return level.context.times * max(v.size for node in nodes for v in node.outputs) < SMALL


def feed(nodes: Iterable[Node], level: Level) -> bool:
    """Returns whether a product follows nodes: they are not the end of a network."""
    return any(not level.facts.feeds.isdisjoint(node.outputs) for node in nodes)


def choose_recompute(nodes: Sequence[Node], level: Level) -> bool:
    """Decides if an island is computed again, from its reductions and sizes (see `is_small`)."""
    asked, times, cuts = level.recompute, level.context.times, level.facts.cuts
    # Each order of derivatives would compute again what is part of one.
    if any(_jax_compat.is_differentiated(node.stack) for node in nodes):
        return False
    reduces_rows = any(node.rule.reduces and is_row_reduction(node) for node in nodes)
    expensive = [node for node in nodes if node.rule.expensive]
    if asked == "all":
        # An island that is computed again keeps what it reads. XLA would write looked-up rows for
        # it, which it otherwise looks up in each reader: a graph network moves 65 % more.
        producers = (value.producer for value in entering(nodes))
        reads_rows = any(node and node.rule.looks_up for node in producers)
        return reduces_rows or bool(expensive) or not reads_rows
    if asked == "none" or is_small(nodes, level):
        return False
    sums = [node for node in nodes if node.name == "reduce_sum"]
    if not cuts.isdisjoint(nodes):
        over_batch = any(0 in node.params["axes"] for node in sums if not is_row_reduction(node))
        return not over_batch
    return reduces_rows or any(times * v.size >= SMALL for x in expensive for v in x.outputs)


def entering(nodes: Sequence[Node]) -> list[Value]:
    """Returns the values that nodes read from outside, each once."""
    inside = set(nodes)
    values = dict.fromkeys(value for node in nodes for value in node.inputs)
    return [v for v in values if v.producer not in inside and v.literal is None]


def half_between(nodes: Sequence[Node], why: Mapping[Node, str], level: Level) -> set[Node]:
    """Returns the large nodes of a component that are better computed by themselves, in half.

    An island hands its results on rounded. If another island reads one, it widens it again: XLA
    takes that pair of casts away, and writes float32 numbers. A half operation leaves no pair. So
    these are half operations, as they are by hand:

    - The sum of a residual stream, which was read in front of a barrier too, and a branch that ends
      in tanh, say. The next norm reads it, and the next such sum. Without this, 8 such layers move
      35 % more bytes, and hold 43 % more memory. It does not matter who reads the sum, so that a
      prefill, which needs only caches, is rounded as in training. A stream may begin with an input.
    - What the component and, behind a barrier, more than products read, such as a mean and a gate.

    Operands are rounded once more for it: not statistics, such as a mean, nor a bias, nor what
    nothing bounds.

    Args:
      nodes: of the component, in program order.
      why: reasons of those that require float32.
      level: what is decided of values from outside.
    """
    inside, found = set(nodes), set[Node]()
    least = SMALL if level.recompute == "auto" else 0  # which depends on sizes

    def may_be_half(value: Value, result: Value) -> bool:
        is_whole = value.source_size >= result.size
        if value.producer in found:
            return True
        if value.producer in inside:
            return is_whole and not level.is_out_of_range(value, value.users)
        is_input = value not in level.facts.dependent and value.varies
        return not value.is_float32 or level.is_half(value) or (is_input and is_whole)

    def is_stream(node: Node) -> bool:
        depths = level.facts.depths
        earlier = (u for v in node.inputs for u in v.users if depths.get(u, 0) < depths[node])
        return node.rule.linear and any(user in depths for user in earlier)

    def crosses(result: Value) -> bool:
        others = [user for user in result.users if user not in inside]
        return len(others) < len(result.users) and not level.is_multiplied(result, others)

    for node in nodes:
        if len(node.outputs) != 1:
            continue
        (result,) = node.outputs
        if result.size < least or not level.leaves_half(result, inside):
            continue
        is_half = node.rule.affine and why.get(node) in (None, LARGE_INPUT)
        is_half = is_half and (is_stream(node) or crosses(result))
        if is_half and all(may_be_half(value, result) for value in node.inputs):
            found.add(node)
    return found


def stages(nodes: Sequence[Node], single: Set[Node]) -> list[list[Node]]:
    """Returns the nodes of a component by how many single ones stand in front of them."""
    numbers: dict[Node, int] = {}
    found: list[list[Node]] = []
    for node in nodes:
        before = (value.producer for value in node.inputs if value.producer in numbers)
        number = max((numbers[p] + (p in single) for p in before if p is not None), default=0)
        numbers[node] = number
        found += [[] for _ in range(number + 1 - len(found))]
        found[number].append(node)
    return found


def repeated_numbers(values: Iterable[Value]) -> list[Value]:
    """Returns the large arrays of one number among those that enter, such as the zeros of an elu.

    The island makes them itself: a recomputation would read them from memory.
    """
    return [
        value
        for value in values
        if value.constant is not None
        and value.is_float32
        and not has_symbols(shape_of(value))
        and not _jax_compat.has_named_axes(value)
        and value.size >= SMALL
    ]


def with_front(nodes: Sequence[Node], level: Level) -> tuple[Sequence[Node], Sequence[Node], bool]:
    """Returns the nodes of an island that run before it in half, the rest, and if it is recomputed.

    See `peel`. Where an island is kept, is large and a product follows, only a bias is better added
    in half: XLA would store its cotangent in float32. An island that is linear throughout stays
    what it is.
    """
    is_recomputed = choose_recompute(nodes, level)
    if is_recomputed or (feed(nodes, level) and not is_small(nodes, level)):
        front, rest = peel(nodes, level)
        added = {value for node in front for value in node.inputs} - level.facts.dependent
        if front and rest and (is_recomputed or any(value.varies for value in added)):
            return front, rest, is_recomputed
    return [], nodes, is_recomputed


class Cone(NamedTuple):
    """A linear function: the nodes that compute it, and the values that enter."""

    nodes: frozenset[Node]
    entering: frozenset[Value]


def peel(nodes: Sequence[Node], level: Level) -> tuple[list[Node], list[Node]]:
    """Splits linear nodes off the entry of an island where no more values enter the rest then.

    A residual addition in front of a LayerNorm: two half values enter before, their sum after; and
    the sum is needed in half anyway, for the next addition. A bias in front of a gelu: as many
    values enter, and the cotangent is rounded before the bias adds it up, so that XLA need not
    store it in float32 for two readers. Without peeling a U-Net moves 18 % more bytes, a GPT 14 %.

    Args:
      nodes: of the island, in program order.
      level: what is decided of values from outside.

    Returns: the nodes in front, to run in half, and the rest.
    """
    inside = set(nodes)
    # An addend of an attention's scores may be a mask over the keys.
    takes_biases = not (_is_softmax(nodes) and feed(nodes, level))
    cones: dict[Node, Cone | None] = {}
    front: frozenset[Node] = frozenset()
    for node in nodes:
        cone = None
        if not why_digits(node, inside, level):
            cone = _linear_cone(node, cones, level, takes_biases)
        cones[node] = cone
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


def _linear_cone(
    node: Node, cones: Mapping[Node, Cone | None], level: Level, takes_biases: bool
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
        elif value not in level.facts.dependent:
            # A bias may go along. A mask, a row that no gradient flows into, such as a target of a
            # loss, or an input as large as the result may not.
            if not (value.varies and value.is_vector and takes_biases):
                return None
            held = level.magnitude(value)  # of `1 / scale`, say
            if held.exceeds_half or held.degree < 0:
                return None
            if value.source_size >= result.size:
                return None
        elif level.is_half(value):
            entering.add(value)
        else:
            return None
    return Cone(frozenset(nodes), frozenset(entering))


def common_scopes_of(nodes: Sequence[Node]) -> int:
    """Returns how many name scopes all nodes stand in together."""
    stacks = [node.stack.stack for node in nodes]
    count = len(stacks[0])
    while any(stack[:count] != stacks[0][:count] for stack in stacks):
        count -= 1
    return count


def with_keys(steps: Iterable[Step]) -> list[Step]:
    """Returns steps whose recomputed islands share a trace with those that are alike.

    JAX traces what is under `jax.checkpoint`, its derivative and its transpose once for each
    function object. So islands that agree in all but the values that enter, and the scope that they
    stand in, such as those of the layers of a deep network, are emitted through one function.
    """

    def with_key(step: S) -> S:
        if isinstance(step, Fused):
            return step._replace(plain=tuple(map(with_key, step.plain)))
        if isinstance(step, Island) and step.is_recomputed:
            return step._replace(key=_key_of(step))
        return step

    return list(map(with_key, steps))


def _key_of(island: Island) -> Hashable:
    numbers: dict[Value, int] = {}

    def name(value: Value) -> Hashable:
        if value.literal is None:
            return numbers.setdefault(value, len(numbers))
        if np.ndim(value.literal) == 0 and value.dtype is not None and value.dtype.kind in "biufc":
            return str(value.aval), np.asarray(value.literal).tobytes()
        return "literal", id(value.literal)

    def describe(node: Node) -> Hashable:
        rewrite, equation = island.rewrites.get(node), node.equation
        return (
            equation.primitive,
            tuple(sorted(node.params.items())),
            node.stack.stack[island.common_scopes :],
            (equation.source_info.traceback, equation.ctx),
            tuple(map(name, node.inputs)),
            tuple(map(name, node.outputs)),
            rewrite and (rewrite.why, *((name(v), v.constant) for v in rewrite.reads)),
        )

    return (
        tuple((name(value), value.aval, dtype) for value, dtype, *_ in island.reads),
        tuple(map(describe, island.nodes)),
        tuple((name(value), dtype, saturates) for value, dtype, saturates in island.writes),
        tuple((name(value), value.aval, repr(value.constant)) for value in island.numbers),
        (island.is_recomputed, island.prevent_cse, island.shares_casts),
    )
