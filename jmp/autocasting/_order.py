"""The order of a plan's steps: what each one needs, then the order of the program."""

import graphlib
import heapq
from collections.abc import Sequence

from jmp.autocasting._equations import is_marker
from jmp.autocasting._graph import Value
from jmp.autocasting._steps import Island, Step, nodes_of


def in_order(steps: Sequence[Step], outputs: Sequence[Value]) -> list[Step]:
    """Sorts steps; those that neither an output nor a marker needs are left out."""
    producers = {
        value: index
        for index, step in enumerate(steps)
        for node in nodes_of(step)
        for value in node.outputs
    }
    place = [nodes_of(step)[-1].index for step in steps]
    effects = sorted(
        (i for i, step in enumerate(steps) if _has_effects(step)), key=place.__getitem__
    )
    needs = [
        {producers.get(read.value, index) for read in step.reads} - {index}
        for index, step in enumerate(steps)
    ]
    for before, after in zip(effects, effects[1:], strict=False):
        needs[after].add(before)
    ends = [producers[value] for value in outputs if value in producers]
    needed = _closure([*ends, *effects], needs)
    unread = (index for index in range(len(steps)) if index not in needed)
    needed |= _closure([index for index in unread if _has_marker(steps[index])], needs)
    sorter = graphlib.TopologicalSorter({index: needs[index] for index in needed})
    sorter.prepare()  # it raises if an island is not convex, which depths rule out
    ready: list[tuple[int, int]] = []
    order = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, (place[index], index))
        _, first = heapq.heappop(ready)
        order.append(steps[first])
        sorter.done(first)
    return order


def _has_effects(step: Step) -> bool:
    return not isinstance(step, Island) and bool(step.node.equation.effects)


def _has_marker(step: Step) -> bool:
    return any(is_marker(node.equation) for node in nodes_of(step))


def _closure(ends: Sequence[int], needs: Sequence[set[int]]) -> set[int]:
    """Returns all that `ends` need, themselves included."""
    found = set(ends)
    stack = list(found)
    while stack:
        for other in needs[stack.pop()] - found:
            found.add(other)
            stack.append(other)
    return found
