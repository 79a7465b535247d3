"""Joins before a scan the constants that its body joins.

The LSTM of Flax joins the kernels of its gates in each turn. Joined before the loop they are one
weight: it is rounded once, and its gradient is one product (`_weight_sums`).
"""

from collections.abc import Iterable
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from jmp import _jax_compat
from jmp.autocasting._kinds import kind_of
from jmp.autocasting._numbers import dtype_of
from jmp.autocasting._registry import rule_for
from jmp.dtypes import FLOAT32


def joined_constants(equation: JaxprEqn) -> list[JaxprEqn]:
    """Returns the equations in the body of a scan that join its constants, in order.

    Those that slice, transpose or reshape what is joined are among them. A slice by itself stays in
    the loop: before the loop it would be a copy. An equation that is no scan has none.
    """
    if equation.primitive.name != "scan" or equation.effects:
        return []
    scan = _jax_compat.Scan.of(equation.params)
    body, _ = _jax_compat.open_jaxpr(scan.body)
    constants, found = set(body.invars[: scan.n_consts]), []
    for inner in body.eqns:
        read = _variables_of(inner)
        if read and read <= constants and _arranges(inner):
            found.append(inner)
            constants.update(inner.outvars)
    kept: list[JaxprEqn] = []
    joined: set[Any] = set()
    for inner in reversed(found):
        if rule_for(inner.primitive.name).rearranges or not joined.isdisjoint(inner.outvars):
            kept.append(inner)
            joined |= _variables_of(inner)
    return kept[::-1]


def _variables_of(equation: JaxprEqn) -> set[Any]:
    return {atom for atom in equation.invars if not isinstance(atom, Literal)}


def _arranges(equation: JaxprEqn) -> bool:
    rule = rule_for(equation.primitive.name)
    does_more = rule.repeats or rule.sums_backward or rule.looks_up or rule.sends or rule.writes
    is_float32 = dtype_of(equation.outvars[0]) == FLOAT32
    return is_float32 and (rule.hands_on or rule.rearranges) and not does_more


def scan_after(joined: Iterable[JaxprEqn], equation: JaxprEqn, *operands: Any) -> Any:
    """Returns the results of a scan; `joined` equations of its body stand before it."""
    scan = _jax_compat.Scan.of(equation.params)
    body, held = _jax_compat.open_jaxpr(scan.body)
    constants, _, _ = scan.split(operands)
    known = _run(joined, dict(zip(body.invars, constants, strict=False)))
    rest = [inner for inner in body.eqns if known.keys().isdisjoint(inner.outvars)]

    def turn(*arrays: Any) -> list[Any]:
        own = zip((*body.constvars, *body.invars), (*held, *arrays), strict=True)
        values = _run(rest, {**known, **dict(own)})
        return [x.val if isinstance(x, Literal) else values[x] for x in body.outvars]

    return kind_of("scan").emit(equation, operands, [turn])


def _run(equations: Iterable[JaxprEqn], values: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the values, and the results of equations among them."""
    for equation in equations:
        operands = [x.val if isinstance(x, Literal) else values[x] for x in equation.invars]
        with _jax_compat.place_of(equation, equation.source_info.name_stack):
            results = _jax_compat.bind(equation.primitive, operands, equation.params)
        values.update(zip(equation.outvars, results, strict=True))
    return values
