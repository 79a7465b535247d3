"""`lax.while_loop`. Its condition runs as it was written.

A carry keeps its nominal dtype, unless it loses nothing in half (`_carries`), and the condition
does not read it.

A loop whose condition depends on floating numbers runs to a tolerance, and it runs in float32, as
it was written: a fixed point iterated in half may end in a cycle whose steps are longer than the
tolerance, and its loop would never end. The condition may read the numbers themselves, or integers
and booleans that the body computes from them, such as a flag that says "done". So does beam search,
which a score ends: `follow=["while"]` lowers it.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._carries import carried_in_half, dtypes_of_carries, find_weights
from jmp.autocasting._casts import cast_all
from jmp.autocasting._graph import Carry, Node
from jmp.autocasting._kinds import Arrays, InnerCall, Kind, register_kind
from jmp.autocasting._level import Level
from jmp.autocasting._numbers import dtype_of, is_inexact
from jmp.autocasting._precision import as_written
from jmp.autocasting._propagation import Propagation, WayInside
from jmp.autocasting._registry import Category, Rule, rule_for
from jmp.autocasting._request import Settings
from jmp.autocasting._sending import may_part
from jmp.autocasting._steps import Function, Nested


def has_many_conditions(equation: JaxprEqn) -> bool:
    """Returns whether a while loop has a condition for each element, which only vmap can write."""
    condition, _ = _jax_compat.open_jaxpr(_jax_compat.While.of(equation.params).condition)
    return bool(condition.outvars[0].aval.shape)


def runs_to_tolerance(equation: JaxprEqn) -> bool:
    """Returns whether the condition of a while loop depends on floating numbers."""
    floating = list(map(is_inexact, equation.invars))
    join = lambda choices, deciding: any((*choices, *deciding))
    decides, _ = Propagation(_depend, join, is_inexact).through_while(equation, floating)
    return decides


def _depend(
    equation: JaxprEqn, _: tuple[JaxprEqn, ...], operands: list[bool], inside: WayInside[bool]
) -> Sequence[bool]:
    """Returns for each result whether it is floating, or depends on what is."""
    if rule_for(equation.primitive.name).chooses:
        # Which entry is the largest is no distance that shrinks: a text is generated up to the
        # token that ends it.
        return [False] * len(equation.outvars)
    found = inside() or [any(operands)] * len(equation.outvars)
    pairs = zip(found, equation.outvars, strict=True)
    return [depends or is_inexact(variable) for depends, variable in pairs]


class WhileKind(Kind):
    """A condition and a body."""

    def rule(self, equation: JaxprEqn, rule: Rule, settings: Settings) -> Rule:
        """Two sorts of loops are float32."""
        is_asked_for = equation.primitive.name in settings.overrides
        if not is_asked_for and runs_to_tolerance(equation):
            return Rule(Category.FULL, "in a loop that runs to a tolerance")
        if has_many_conditions(equation):
            return Rule(Category.FULL, "in a loop that vmap gave a condition for each element")
        return rule

    def functions(self, equation: JaxprEqn) -> Sequence[ClosedJaxpr]:
        """The condition, then the body."""
        loop = _jax_compat.While.of(equation.params)
        return loop.condition, loop.body

    def calls(self, node: Node) -> Sequence[InnerCall]:
        """With what each closes over, and the carries; no result of the node is the condition's."""
        asked, closed, carries = _jax_compat.While.of(node.params).split(node.inputs)
        numbered = [Carry(value, index) for index, value in enumerate(carries)]
        return [([*asked, *numbered], ()), ([*closed, *numbered], node.outputs)]

    def plan(self, node: Node, level: Level) -> Nested:
        """Plans the body."""
        loop, (condition, inside) = _jax_compat.While.of(node.params), node.insides
        asked, closed, _ = loop.split(node.inputs)
        infos = list(map(level.info, closed))
        in_half, _ = carried_in_half(inside, node, level, condition=condition)
        stores, carries, goes = dtypes_of_carries(node.outputs, in_half, level.half)
        (is_on,) = loop.condition.out_avals
        parts = level.context.devices_part or may_part(node, is_on)
        # Nothing is saved for a backward pass, because there is none.
        context = level.context._replace(prevent_cse=False, devices_part=parts, has_gradient=False)
        body = level.plan_graph(inside.graph, [*infos, *carries], goes, context)
        condition_as_written = as_written(loop.condition, node, level.context.request)
        run_condition = lambda run_plan: _jax_compat.as_function(condition_as_written)
        weights = find_weights(body, in_half, level).intersection(inside.inputs[: len(closed)])
        body = body.storing(stores).taking_as_is(weights)
        is_weight = [value in weights for value in inside.inputs]
        reads = [
            *(value.dtype for value in asked),
            *(None if w else i.dtype for w, i in zip(is_weight, infos, strict=False)),
            *stores,
        ]
        nested = level.nested(node, [run_condition, body], stores, reads)
        return nested.rounding([*(False for _ in asked), *is_weight], level.half)

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `lax.while_loop`."""
        asked, closed, carries = _jax_compat.While.of(equation.params).split(operands)
        condition, body = functions
        dtypes = list(map(dtype_of, equation.outvars))

        def is_on(carry: list[Any]) -> Any:
            # It reads none of those that are half, but may hand them to a function inside.
            return condition(*asked, *cast_all(carry, dtypes))[0]

        return lax.while_loop(is_on, lambda carry: body(*closed, *carry), carries)


register_kind(["while"], WhileKind())
