"""`lax.cond`, `lax.switch` and `lax.platform_dependent`. Branches join to the widest dtype."""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._graph import Node
from jmp.autocasting._kinds import Arrays, InnerCall, Kind, Level, register_kind
from jmp.autocasting._sending import may_part
from jmp.autocasting._steps import Context, Function


class CondKind(Kind):
    """One of several functions runs."""

    def functions(self, equation: JaxprEqn) -> Sequence[ClosedJaxpr]:
        """The branches."""
        return _jax_compat.branches(equation.params)

    def calls(self, node: Node) -> Sequence[InnerCall]:
        """With all operands but the number of the branch."""
        return [(node.inputs[1:], node.outputs) for _ in self.functions(node.equation)]

    def context_inside(self, node: Node, level: Level) -> Context:
        """Devices may take different branches."""
        parts = level.context.devices_part or may_part(node, node.inputs[0].aval)
        return level.context._replace(devices_part=parts)

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
