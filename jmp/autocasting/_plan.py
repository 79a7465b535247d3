"""The plan of one level of nesting: the dtype of every value, and the steps that compute them.

Planning traces nothing. Level by level, each connected component of fusible nodes becomes either an
island (see `_islands`) or, where no node insists on float32, a run of single half operations; each
barrier is decided by its rule; what nests is planned by `_nesting` and handed back its dtypes.
"""

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp.autocasting import _flow, _islands
from jmp.autocasting._graph import FULL, HALF, ROUNDED, Graph, Node, descends
from jmp.autocasting._islands import Island, Mode
from jmp.autocasting._kinds import KINDS
from jmp.autocasting._nesting import Info, nominal
from jmp.autocasting._precision import names_algorithm
from jmp.autocasting._regions import RegionRules
from jmp.autocasting._registry import Category
from jmp.autocasting._settings import Settings
from jmp.autocasting._values import FLOAT32, Value, fits

WIDE = (np.complex64, np.complex128, np.float64)


class Context(NamedTuple):
    """What is the same all over one program; and how often this level runs, as far as known."""

    settings: Settings
    regions: RegionRules
    repeats: int = 1
    # Whether a recomputation must be kept apart from the forward pass it repeats: XLA would merge
    # the two and keep the float32 values. In a loop the two stand in different loops anyway,
    # unless the body is itself recomputed.
    prevent_cse: bool = True


class Plan:
    """Steps in an order that can be run; each step is a `Node` or an `Island`."""

    def __init__(self, graph: Graph, context: Context, steps: list[Node | Island]) -> None:
        self.graph = graph
        self.context = context
        self.steps = steps

    @property
    def output_dtypes(self) -> list[Any]:
        """What the outputs are stored in, where the level is left to itself."""
        return [value.dtype or value.aval.dtype for value in self.graph.outputs]


def make_plan(
    graph: Graph,
    infos: Sequence[Info],
    outputs_feed: Sequence[bool],
    outputs_kept: Sequence[bool],
    context: Context,
) -> Plan:
    """Plans one level.

    Args:
      graph: the level, as flattened.
      infos: what comes in, input by input.
      outputs_feed: whether each output reaches a product outside.
      outputs_kept: whether each output reaches the float32 carry of a loop.
      context: see `Context`.
    """
    for value, info in zip(graph.inputs, infos, strict=True):
        value.dtype = info.dtype
    _flow.mark_destinations(graph, outputs_feed, outputs_kept)
    _flow.mark_neutral(graph, infos)
    _flow.mark_cuts(graph)
    _flow.mark_levels(graph)
    steps: list[Node | Island] = []
    fusible: dict[int, list[Node]] = {}
    barriers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.outputs and all(value.neutral for value in node.outputs):
            _store(node, FULL)
            if node.region.is_full:
                node.why = _why_region(node)
            steps.append(node)
        elif node.fusible:
            fusible.setdefault(node.level, []).append(node)
        else:
            barriers.setdefault(node.level, []).append(node)
    outputs = set(graph.outputs)
    for level in sorted({*fusible, *barriers}):
        for nodes in _islands.group(fusible.get(level, [])):
            steps += _plan_component(nodes, outputs, context)
        for node in barriers.get(level, []):
            _plan_barrier(node, context)
            steps.append(node)
    return Plan(graph, context, _in_order(steps, graph))


def _store(node: Node, mode: str, half: Any = None) -> None:
    node.mode = mode
    for value in node.outputs:
        value.dtype = half if mode != FULL and value.is_float32 else nominal(value)


# Components of fusible nodes.


def _plan_component(
    nodes: list[Node], outputs: set[Value], context: Context
) -> list[Node | Island]:
    half = context.settings.compute_dtype
    inside = set(nodes)
    seeds = [(node, why) for node in nodes if (why := _why_float32(node, inside, half))]
    if not seeds:
        for node in nodes:
            _plan_light(node, context)
        return list(nodes)
    for node in nodes:
        _store(node, FULL)
    for node, why in seeds:
        node.why = why
    island = Island(nodes, outputs)
    island.mode = _islands.choose_mode(island, context.settings.recompute, context.repeats)
    front: list[Node] = []
    if island.mode is not Mode.PLAIN:
        peeled, rest = _islands.peel(nodes, half)
        if peeled and rest:  # an island that is linear throughout stays what it is, float32
            front, island.nodes = peeled, rest
            island.connect(outputs)
            for node in front:
                _plan_light(node, context)
        _islands.clone_cheap(island)
    for value in island.outputs:
        if not value.is_float32:
            continue
        if _leaves_rounded(value) or _leaves_in_half(value, set(island.nodes)):
            value.dtype = half
    return [*front, island]


def _why_float32(node: Node, inside: set[Node], half: np.dtype) -> str:
    """Returns why a node insists on float32, or nothing if it does not."""
    if _flow.is_full_seed(node):
        return _why_region(node) if node.region.is_full else node.rule.reason
    if node.rule.category is Category.AS_WRITTEN:
        return node.rule.reason if any(v.is_float32 for v in node.outputs) else ""
    size = max((value.size for value in node.outputs), default=0)
    feeds = any(value.feeds for value in node.outputs)
    for value in node.inputs:
        if not value.is_float32:
            if nominal(value) in WIDE and any(v.is_float32 for v in node.outputs):
                return f"an operand is {nominal(value)}"
            continue
        if value.producer in inside:
            continue
        if value.is_hard:
            return f"{half} does not hold an array of the program"
        if value.constant is not None:
            if not fits(value.constant, half):
                return f"{half} does not hold the constant {value.constant:g}"
        elif value.neutral:
            if not value.is_exact and value.source_size >= size:
                return "an operand is a float32 input as large as the result"
            if not value.is_exact and not feeds:
                return "an operand is a float32 input, and no product reads the result"
        elif value.dtype == FLOAT32:
            return "an operand is float32"
    return ""


def _why_region(node: Node) -> str:
    if node.region.as_written:
        return "an inner autocast decided here"
    return "the user asked for float32 here"


def _plan_light(node: Node, context: Context) -> None:
    half = context.settings.compute_dtype
    if node.rule.category is Category.AS_WRITTEN:
        _store(node, FULL)
    elif node.name == "custom_jvp_call":
        KINDS[node.name].plan(node, context, make_plan)
    else:
        _store(node, ROUNDED if node.rule.exact else HALF, half)


def _leaves_in_half(value: Value, inside: set[Node]) -> bool:
    readers = [user for user in value.users if user not in inside]
    read_wide = readers and all(user.reads_float32 for user in readers)
    return value.feeds and not value.kept and not read_wide


def _leaves_rounded(value: Value) -> bool:
    """Whether a rule's output dtype rounds it: where it leaves the rule's region."""
    region = value.producer.region if value.producer else None
    return (
        region is not None
        and region.output_dtype is not None
        and all(user.region != region for user in value.users)
    )


# Barriers.


def _plan_barrier(node: Node, context: Context) -> None:
    half = context.settings.compute_dtype
    if node.region.is_full:
        node.why = _why_region(node)
        _store(node, FULL)
        for value in node.outputs:
            if value.is_float32 and _leaves_rounded(value):
                value.dtype = half
    elif descends(node, context.settings):
        KINDS[node.name].plan(node, context, make_plan)
    elif node.is_embedding:
        node.why = "rows of a float32 table, rounded after the lookup"
        _store(node, ROUNDED, half)
    elif node.rule.category is Category.LOW:
        _store(node, HALF if _may_lower(node, half) else FULL, half)
    elif node.rule.category in (Category.WIDEST, Category.FOLLOW):
        stored = {v.dtype for v in node.inputs if v.is_float32 and not v.neutral}
        light = half in stored and FLOAT32 not in stored and not _why_float32(node, set(), half)
        _store(node, (ROUNDED if node.rule.exact else HALF) if light else FULL, half)
    else:
        _store(node, FULL)


def _may_lower(node: Node, half: np.dtype) -> bool:
    """Whether a product's operands are float32, or of the compute dtype already."""
    dtypes = {v.aval.dtype for v in node.inputs if jnp.issubdtype(v.aval.dtype, jnp.inexact)}
    if names_algorithm(node.params):
        node.why = "the user named the algorithm"
    elif not dtypes <= {FLOAT32, half} or not node.outputs[0].is_float32:
        node.why = "the user chose other dtypes"
    elif FLOAT32 not in dtypes:
        node.why = "the user chose half operands and a float32 result"
    else:
        return True
    return False


# Order.


def _in_order(steps: list[Node | Island], graph: Graph) -> list[Node | Island]:
    """Sorts steps by what they need, in the order of the program where that leaves a choice."""
    producer: dict[Value, int] = {}
    firsts: list[int] = []
    for position, step in enumerate(steps):
        nodes = step.nodes if isinstance(step, Island) else [step]
        firsts.append(max(node.index for node in nodes))
        for value in (value for node in nodes for value in node.outputs):
            producer[value] = position
    needs: list[set[int]] = []
    last_effect: int | None = None
    by_program = sorted(range(len(steps)), key=firsts.__getitem__)
    effects_before: dict[int, int] = {}
    for position in by_program:
        step = steps[position]
        if isinstance(step, Node) and step.equation.effects:
            if last_effect is not None:
                effects_before[position] = last_effect
            last_effect = position
    for position, step in enumerate(steps):
        need = {producer[value] for value in step.inputs if value in producer} - {position}
        if position in effects_before:
            need.add(effects_before[position])
        needs.append(need)
    needed = {producer[value] for value in graph.outputs if value in producer}
    needed |= {i for i, s in enumerate(steps) if isinstance(s, Node) and s.equation.effects}
    stack = list(needed)
    while stack:
        for other in needs[stack.pop()]:
            if other not in needed:
                needed.add(other)
                stack.append(other)
    waiting = {position: len(needs[position]) for position in needed}
    users: dict[int, list[int]] = {}
    for position in needed:
        for other in needs[position]:
            users.setdefault(other, []).append(position)
    ready = [(firsts[position], position) for position, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, position = heapq.heappop(ready)
        order.append(steps[position])
        for user in users.get(position, ()):
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (firsts[user], user))
    if len(order) != len(needed):
        raise AssertionError("an island is not convex")  # unreachable, by the levels
    return order
