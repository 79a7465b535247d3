"""Which loops run to a tolerance: those whose number of turns depends on floating numbers.

A fixed point iterated in half may end in a cycle whose steps are longer than the tolerance, and its
loop would never end. So such loops run in float32, as they were written. The condition may read the
numbers themselves, or integers and booleans that the body computes from them (a flag that says
"done"): each is followed through the body, turn after turn, and through whatever nests in it.

`lax.while_loop`. Its carry keeps its nominal dtypes; its condition runs as it was written.

One whose condition depends on floating numbers is not gone into: see `_tolerances`.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._flow import Destination, Info
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._kinds import Arrays, Kind, Level, register_kind
from jmp.autocasting._numbers import is_inexact
from jmp.autocasting._precision import as_written
from jmp.autocasting._registry import Category, Rule, rule_for
from jmp.autocasting._sending import apart, may_part
from jmp.autocasting._settings import Settings
from jmp.autocasting._steps import Function, Nested, RunPlan


def has_many_conditions(equation: Any) -> bool:
    """Returns whether a while loop has a condition for each element, which vmap alone can write."""
    condition, _ = _jax_compat.open_jaxpr(_jax_compat.While.of(equation.params).condition)
    return bool(condition.outvars[0].aval.shape)


def runs_to_tolerance(equation: Any) -> bool:
    """Returns whether the condition of a while loop depends on floating numbers."""
    return _through_while(equation.params, [False] * len(equation.invars))[0]


def _through(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Returns for each output whether it is floating, or depends on what is.

    Args:
      jaxpr: open or closed.
      inputs: for each input whether it depends on a floating number; one that is floating does.
    """
    jaxpr, _ = _jax_compat.open_jaxpr(jaxpr)
    found = {variable for variable, depends in zip(jaxpr.invars, inputs, strict=True) if depends}

    def depends(atom: Any) -> bool:
        return is_inexact(atom) or (not hasattr(atom, "val") and atom in found)

    for equation in jaxpr.eqns:
        outputs = _through_equation(equation, list(map(depends, equation.invars)))
        found.update(v for v, marked in zip(equation.outvars, outputs, strict=True) if marked)
    return list(map(depends, jaxpr.outvars))


def _through_equation(equation: Any, inputs: list[bool]) -> list[bool]:
    name = equation.primitive.name
    if rule_for(name).chooses:
        # Which entry is the largest is no distance that shrinks: a text is generated up to the
        # token that ends it.
        return [False]
    inner = list(_jax_compat.inner_jaxprs(equation))
    if name == "while":
        decides, carry = _through_while(equation.params, inputs)
        return [decides or depends for depends in carry]
    if name == "scan":
        scan = _jax_compat.Scan.of(equation.params)
        return _through_loop(scan.body, *scan.split(inputs))
    if name == "cond":
        branches = [_through(branch, inputs[1:]) for branch in inner]
        return [inputs[0] or any(outputs) for outputs in zip(*branches, strict=True)]
    for called in inner:
        sizes = len(called.invars), len(called.outvars)
        if sizes == (len(inputs), len(equation.outvars)):  # called once, as a jit is
            return _through(called, inputs)
    return [any(inputs)] * len(equation.outvars)


def _through_while(params: _jax_compat.Params, inputs: list[bool]) -> tuple[bool, list[bool]]:
    """Returns whether the condition depends on floating numbers, and for each carry whether."""
    loop = _jax_compat.While.of(params)
    asked, closed, carries = loop.split(inputs)
    carry = _through_loop(loop.body, closed, carries, [])
    (decides,) = _through(loop.condition, [*asked, *carry])
    return decides, carry


def _through_loop(body: Any, consts: list[bool], carry: list[bool], xs: list[bool]) -> list[bool]:
    """Returns it for the carries after any number of turns, then for what is stacked."""
    while True:
        outputs = _through(body, [*consts, *carry, *xs])
        again = [a or b for a, b in zip(carry, outputs, strict=False)]
        if again == carry:
            return [*carry, *outputs[len(carry) :]]
        carry = again


class While(Kind):
    """A condition and a body."""

    def rule(self, equation: JaxprEqn, rule: Rule, settings: Settings) -> Rule:
        """Two sorts of loops are float32."""
        is_asked_for = settings.overrides_rule(equation.primitive.name)
        if runs_to_tolerance(equation) and not is_asked_for:
            return Rule(Category.FULL, "in a loop that runs to a tolerance")
        if has_many_conditions(equation):
            return Rule(Category.FULL, "in a loop that vmap gave a condition for each element")
        return rule

    def functions(self, equation: JaxprEqn) -> Sequence[ClosedJaxpr]:
        """The condition, then the body."""
        loop = _jax_compat.While.of(equation.params)
        return loop.condition, loop.body

    def arguments(self, node: Node) -> Sequence[Sequence[Value | None]]:
        """What the body closes over: the carries change, and the condition runs as written."""
        loop = _jax_compat.While.of(node.params)
        asked, closed, carries = loop.split(node.inputs)
        unknown = [None] * len(carries)
        return [[*[None] * len(asked), *unknown], [*closed, *unknown]]

    def plan(self, node: Node, level: Level) -> Nested:
        """Plans the body."""
        loop = _jax_compat.While.of(node.params)
        asked, closed, _ = loop.split(node.inputs)
        infos = list(map(level.storage.info, closed))
        stores = tuple(value.dtype for value in node.outputs)
        carries = [Info(dtype, False) for dtype in stores]
        outputs = [Destination(feeds=False, kept=True)] * len(stores)
        opened = level.open(loop.body, node, closed)
        # Nothing is saved for a backward pass, because there is none.
        body = level.plan_opened(opened, [*infos, *carries], outputs, prevent_cse=False)
        (is_on,) = loop.condition.out_avals
        if may_part(node, is_on):
            body = apart(body)
        asked_as_written = as_written(loop.condition, node, level.context.words)
        condition = functools.partial(_unplanned, asked_as_written)
        reads = [*(value.dtype for value in asked), *(info.dtype for info in infos), *stores]
        return level.nested(node, [condition, body._replace(stores=stores)], stores, reads)

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `lax.while_loop`."""
        loop = _jax_compat.While.of(equation.params)
        asked, closed, carries = loop.split(operands)
        condition, body = functions
        return lax.while_loop(
            lambda carry: condition(*asked, *carry)[0],
            lambda carry: body(*closed, *carry),
            carries,
        )


def _unplanned(condition: ClosedJaxpr, run_plan: RunPlan) -> Function:
    return _jax_compat.as_function(condition)


register_kind(["while"], While())
