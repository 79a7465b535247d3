"""Which values reach an equation of some sort, such as a sine, with no product between."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._numbers import is_inexact
from jmp.autocasting._precision import is_low

Ends = Callable[[JaxprEqn], bool]


def reaching_values(nodes: Sequence[Node], ends: Ends, outputs: Iterable[Value] = ()) -> set[Value]:
    """Returns the values of a level that reach an equation that `ends` accepts, also one inside.

    Args:
      outputs: values that count as if they did.
    """
    found = set(outputs)
    for node in reversed(nodes):
        if is_low(node.equation):
            continue
        if ends(node.equation) or not found.isdisjoint(node.outputs):
            found.update(filter(is_inexact, node.inputs))
        else:
            found.update(_reaching_inside(node.equation, node.inputs, ends))
    return found


def _reaching_inside(equation: JaxprEqn, operands: Sequence[Any], ends: Ends) -> Iterable[Any]:
    """Yields the operands that reach such an equation in the functions of this one."""
    for function in _jax_compat.inner_jaxprs(equation):
        # The last operands are its own: those before say which branch is taken, or belong to the
        # condition of a loop.
        inside = zip(reversed(operands), reversed(_reaching_inputs(function, ends)), strict=False)
        yield from (operand for operand, reaches in inside if reaches)


def _reaching_inputs(jaxpr: Jaxpr, ends: Ends) -> list[bool]:
    found: set[Any] = set()
    for equation in reversed(jaxpr.eqns):
        if is_low(equation):
            continue
        if ends(equation) or not found.isdisjoint(equation.outvars):
            reaching: Iterable[Any] = filter(is_inexact, equation.invars)
        else:
            reaching = _reaching_inside(equation, equation.invars, ends)
        found.update(atom for atom in reaching if not hasattr(atom, "val"))  # no literals
    return [variable in found for variable in jaxpr.invars]
