"""Parameters that devices send each other: which of them are rounded before they are sent.

A parameter that is gathered, permuted or laid out anew, and that only products read afterwards,
is rounded first: half the bytes go over the wire. The numbers are the same, because moving rounds
nothing; its gradient is added up over devices in half, as that of a product on one device is.

In branches, and in the turns of a while loop, devices of a mapped mesh may go different ways. There
nothing may be sent but what the user sends: the maximum of a float8 array over all devices would
wait for ever for those that went another way. So products there are not float8.
"""

from collections.abc import Set
from typing import Any

import numpy as np

from jmp._jax_compat import varying_axes
from jmp.autocasting._facts import only_read_by
from jmp.autocasting._graph import Carry, Graph, Node, Value, value_of
from jmp.autocasting._level import Level
from jmp.autocasting._precision import why_not_lowered
from jmp.autocasting._registry import Category

WHY_SENT = "only products read it afterwards: rounded before it is sent"


def find_sent(level: Level) -> set[Node]:
    """Returns the neutral nodes that send parameters, or hand on what was sent, in half."""
    readers = level.graph, level.facts.embeddings, level.half
    found: set[Node] = set()
    for node in level.graph.nodes:
        is_first = sends(node) and not node.region.in_float32
        if not (is_first or (found and any(v.producer in found for v in node.inputs))):
            continue
        if (
            node.rule.category is not Category.FULL  # by the user's word
            and level.facts.dependent.isdisjoint(node.outputs)
            and all(v.is_float32 and _only_products_read(v, *readers) for v in node.outputs)
        ):
            found.add(node)
    return found


def sends(node: Node) -> bool:
    """Returns whether an equation sends an array between devices of one mesh.

    An equation that changes how a mesh is read (`auto_axes`) has operands of the other mesh,
    which cannot be rounded where it stands. An operand of no mesh has not been placed yet.
    """
    if not node.rule.sends:
        return False
    before, after = mesh_of(node.inputs[0]), mesh_of(node.outputs[0])
    return bool(before.empty or before == after)


def mesh_of(value: Value) -> Any:
    """Returns the mesh that the type of a value names; an empty one if it names none."""
    return value.aval.sharding.mesh


def _only_products_read(value: Value, graph: Graph, lookups: Set[Node], half: np.dtype) -> bool:
    """Returns whether products that are computed in half are all that reads a value of a level.

    Args:
      lookups: those of the level whose rows go to products.
    """

    def is_product(user: Node) -> bool:
        if user.is_product:
            return not why_not_lowered(user, half)
        if user.goes_inside:
            inner = [
                _only_products_read(own, inside.graph, frozenset(), half)
                for inside in user.insides
                for argument, own in zip(inside.arguments, inside.inputs, strict=True)
                if value_of(argument) is value and not isinstance(argument, Carry)
            ]
            # Fewer than operands: one of them is the carry of a loop.
            return len(inner) >= user.inputs.count(value) and all(inner)
        if user.name == "gather" and value is user.inputs[0]:  # rows go to a product
            return user in lookups
        is_full = user.rule.category is Category.FULL
        hands_on = (user.rule.hands_on or user.rule.sends) and not is_full
        return hands_on and all(_only_products_read(v, graph, lookups, half) for v in user.outputs)

    return bool(value.users) and only_read_by(value, graph, is_product)


def may_part(node: Node, choice: Any) -> bool:
    """Returns whether devices may go different ways at a node.

    Args:
      choice: the type of what says which way.
    """
    types = [choice, *(value.aval for value in node.inputs)]
    if not any(_is_mapped(aval) for aval in types):
        return False
    # With `check_vma=False` no type varies, and the choice may.
    return not any(map(varying_axes, types)) or bool(varying_axes(choice))


def _is_mapped(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and bool(sharding.mesh.manual_axes)
