"""`lax.cond`, `lax.switch` and `lax.platform_dependent`. Branches join to the widest dtype."""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._graph import Argument, Node
from jmp.autocasting._kinds import Arrays, Kind, Level, register_kind
from jmp.autocasting._sending import may_part
from jmp.autocasting._steps import Function, Nested


class CondKind(Kind):
    """One of several functions runs."""

    def functions(self, equation: JaxprEqn) -> Sequence[ClosedJaxpr]:
        """The branches."""
        return _jax_compat.branches(equation.params)

    def arguments(self, node: Node) -> Sequence[Sequence[Argument]]:
        """All operands but the number of the branch."""
        return [node.inputs[1:] for _ in self.functions(node.equation)]

    def plan(self, node: Node, level: Level) -> Nested:
        """A result is half if every branch leaves it in half."""
        parts = level.context.devices_part or may_part(node, node.inputs[0].aval)
        context = level.context._replace(devices_part=parts)
        plans = [level.plan_called(branch, node, context) for branch in node.insides]
        stores = level.common_stores(node, plans)
        return level.nested(node, [plan.storing(stores) for plan in plans], stores)

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `lax.switch`, or what chooses by the platform when the program is lowered."""
        index, *rest = operands
        platforms = _jax_compat.branches_platforms(equation.params)
        if platforms is None:
            return lax.switch(index, list(functions), *rest)
        choices: dict[str, Function] = {}
        for names, function in zip(platforms, functions, strict=True):
            choices |= dict.fromkeys(names, function)
        return lax.platform_dependent(*rest, **choices)


register_kind(["cond"], CondKind())
