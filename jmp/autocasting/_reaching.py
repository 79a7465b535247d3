"""Which values reach an equation of some sort, such as a sine, with no product between.

They are followed through the functions of equations: loops (around, through carries), branches,
remat, custom derivatives.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._numbers import is_inexact
from jmp.autocasting._precision import is_low

Ends = Callable[[JaxprEqn], bool]
Flags = Sequence[bool]


def reaching_values(nodes: Sequence[Node], ends: Ends, outputs: Iterable[Value] = ()) -> set[Value]:
    """Returns the values of a level that reach an equation that `ends` accepts, also one inside.

    Args:
      outputs: values that reach one outside.
    """
    found = set(outputs)
    for node in reversed(nodes):
        results = [value in found for value in node.outputs]
        found.update(_reaching_operands(node.equation, node.inputs, results, ends))
    return found


def reaching_results(equation: JaxprEqn, function: Jaxpr, results: Flags, ends: Ends) -> Flags:
    """Returns which results of a function inside an equation reach such an equation.

    Args:
      results: which results of the equation do. Those of a loop may do so in the next turn, too.
    """
    first, n_carry = _carries(equation, function)
    found = list(results)
    while n_carry:
        inside = _reaching_inputs(function, ends, found)
        carried = [*inside[first : first + n_carry], *[False] * (len(found) - n_carry)]
        again = [a or b for a, b in zip(found, carried, strict=True)]
        if again == found:
            break
        found = again
    return found


def _carries(equation: JaxprEqn, function: Jaxpr) -> tuple[int, int]:
    """Returns where the carries stand among the inputs of a loop's body, and how many they are."""
    if equation.primitive.name == "scan":
        scan = _jax_compat.Scan.of(equation.params)
        return scan.n_consts, scan.n_carry
    n_carry = len(function.outvars) if equation.primitive.name == "while" else 0
    return len(function.invars) - n_carry, n_carry


def _reaching_operands(
    equation: JaxprEqn, operands: Sequence[Any], results: Flags, ends: Ends
) -> Iterator[Any]:
    """Yields the floating operands that reach such an equation; `results`: the results that do."""
    if is_low(equation):
        return
    functions = list(_jax_compat.inner_jaxprs(equation))
    if ends(equation) or (any(results) and not functions):
        yield from filter(is_inexact, operands)
    for function in functions:
        # Not so the condition of a loop. (One of a loop with one carry is taken for the body: more
        # values count as reaching than do.)
        is_called = len(function.outvars) == len(results)
        inner = reaching_results(equation, function, results, ends) if is_called else ()
        inside = _reaching_inputs(function, ends, inner)
        # The last operands are its own: those before say which branch is taken, or belong to
        # another function, as those of a loop's condition and of a linear solver do.
        pairs = zip(reversed(operands), reversed(inside), strict=False)
        yield from (operand for operand, reaches in pairs if reaches and is_inexact(operand))


def _reaching_inputs(jaxpr: Jaxpr, ends: Ends, results: Flags) -> Flags:
    pairs = zip(jaxpr.outvars, results, strict=False)
    found = {atom for atom, reaches in pairs if reaches and not hasattr(atom, "val")}
    for equation in reversed(jaxpr.eqns):
        flags = [variable in found for variable in equation.outvars]
        reaching = _reaching_operands(equation, equation.invars, flags, ends)
        found.update(atom for atom in reaching if not hasattr(atom, "val"))  # no literals
    return [variable in found for variable in jaxpr.invars]
