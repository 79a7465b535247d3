"""What some devices of a mapped mesh run and others may not: branches, and turns of a while loop.

Nothing may be sent there but what the user sends. The maximum of a float8 array over all devices
would wait for ever for those that went another way.
"""

from typing import Any

from jmp.autocasting._graph import Node
from jmp.autocasting._sending import WHY_SENT
from jmp.autocasting._steps import (
    Fused,
    InFloat8,
    Inside,
    Nested,
    Plan,
    Single,
    Step,
    Unplanned,
)
from jmp.sharding._axes import varying_axes


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


def apart(inside: Inside) -> Inside:
    """Returns a function inside in which each device has float8 scales of its own."""
    return inside._replace(plan=_plan_apart(inside.plan))


def _any_apart(inside: Inside | Unplanned) -> Inside | Unplanned:
    if isinstance(inside, Inside):
        return apart(inside)
    return lambda run_plan: inside(lambda plan, arrays: run_plan(_plan_apart(plan), arrays))


def _plan_apart(plan: Plan) -> Plan:
    return plan._replace(steps=tuple(map(_step_apart, plan.steps)))


def _step_apart(step: Step) -> Step:
    if isinstance(step, Nested):
        return step._replace(insides=tuple(map(_any_apart, step.insides)))
    if isinstance(step, Fused):
        return step._replace(plain=tuple(map(_step_apart, step.plain)))
    if not isinstance(step, Single):
        return step
    if step.moves_float8:  # numbers in float8 are sent with a scale for all
        return step._replace(moves_float8=False, why=WHY_SENT)
    if step.in_float8 is None:
        return step
    # Without bounds, which are one number for all devices.
    return step._replace(in_float8=InFloat8(step.in_float8.is_shared, is_apart=True))
