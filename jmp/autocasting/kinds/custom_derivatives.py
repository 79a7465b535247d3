"""Custom derivatives.

A `custom_jvp` keeps its rule: primal and tangents are planned as one program, and tangents that are
zero stay symbolic zeros. The rule is traced and planned when a derivative is asked for, and not
before. A `custom_vjp` runs as written, because its rule was written for the dtypes it was traced
with: who wrote it may call autocast inside.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from jmp import _jax_compat
from jmp._array_calls import replaced
from jmp.autocasting._facts import Destination, Info
from jmp.autocasting._flatten import graph_of
from jmp.autocasting._graph import Node
from jmp.autocasting._kinds import Arrays, Kind, register_kind
from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import cast
from jmp.autocasting._numbers import is_inexact
from jmp.autocasting._propagation import inner_equations
from jmp.autocasting._registry import Category, Rule
from jmp.autocasting._request import Settings
from jmp.autocasting._steps import Context, Function, Nested, RunPlan
from jmp.dtypes import FLOAT32

WHY_AS_WRITTEN = "inside a custom_vjp, which runs as written (an autocast inside it lowers it)"


class CustomJvpKind(Kind):
    """`jax.custom_jvp`, where it holds a product or stands outside an island."""

    def rule(self, equation: JaxprEqn, rule: Rule, settings: Settings) -> Rule:
        """One without products is one operation: float32 if something inside is."""
        return _as_one_operation(equation, settings, Category.FOLLOW) or rule

    def context_inside(self, node: Node, level: Level) -> Context:
        """JAX transposes the tangents of its rule."""
        return level.context._replace(is_transposed=True)

    def plan(self, node: Node, level: Level) -> Nested:
        """Results that feed products are half; the rule will give tangents of the same dtype."""
        primal = super().plan(node, level)
        derivative = functools.partial(self.plan_derivative, node, level, primal.stores)
        return primal._replace(insides=(*primal.insides, derivative))

    def plan_derivative(
        self, node: Node, level: Level, stores: Sequence[np.dtype | None], run_plan: RunPlan
    ) -> Callable[..., Any]:
        """Returns the rule, a function of primals and tangents that plans when it is called."""

        def derivative(primals: Any, tangents: Any) -> Any:
            moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

            def nominal_rule(*flat: Any) -> Any:
                fixed, moved = flat[: len(primals)], flat[len(primals) :]

                def along(*some: Any) -> list[Any]:
                    operands = replaced(fixed, moving, some)
                    return _jax_compat.bind(node.equation.primitive, operands, node.params)

                return jax.jvp(along, [fixed[i] for i in moving], list(moved))

            changing = [node.inputs[i] for i in moving]
            with jax.default_matmul_precision(None):
                types = [value.aval for value in (*node.inputs, *changing)]
                closed, result = jax.make_jaxpr(nominal_rule, return_shape=True)(*types)
            jaxpr, constants = _jax_compat.open_jaxpr(closed)
            given = [*node.inputs, *[None] * len(changing)]
            graph = graph_of(jaxpr, constants, given, node, level.context.request)
            infos = list(map(level.info, node.inputs))
            infos += [Info(primals[i].dtype, False) for i in moving]
            # The tangent of an integer has no dtype that could be chosen.
            pairs = zip(node.outputs, stores, strict=True)
            dtypes = [*stores, *(dtype if is_inexact(value) else None for value, dtype in pairs)]
            goes = [
                Destination(d == level.half, d == FLOAT32, rounded=d == level.half) for d in dtypes
            ]
            context = self.context_inside(node, level)
            plan = level.plan_graph(graph, infos, goes, context).storing(dtypes)
            moved = [cast(tangents[i], primals[i].dtype) for i in moving]
            leaves = run_plan(plan, [*graph.constants, *primals, *moved])
            return jax.tree.unflatten(jax.tree.structure(result), leaves)

        return derivative

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `jax.custom_jvp`, given the primal function and its rule."""
        primal, derivative = functions
        function = jax.custom_jvp(lambda *args: primal(*args))
        function.defjvp(derivative, symbolic_zeros=True)
        return function(*operands)


class CustomVjpKind(Kind):
    """`jax.custom_vjp`, which is bound as it was written."""

    runs_as_written = True

    def rule(self, equation: JaxprEqn, rule: Rule, settings: Settings) -> Rule:
        """One without products is one operation, in float32."""
        found = _as_one_operation(equation, settings, Category.FULL)
        return found or dataclasses.replace(rule, reason=WHY_AS_WRITTEN)


def _as_one_operation(equation: JaxprEqn, settings: Settings, default: Category) -> Rule | None:
    """Returns the rule of a custom derivative without products: float32 if something inside is.

    Args:
      default: its category if nothing inside is float32.

    Returns: None for one with products or effects, or with anything that XLA does not fuse.
    """
    inner = list(inner_equations(equation))
    rules = [settings.rule_for(e.primitive.name) for e in inner]
    pairs = zip(rules, inner, strict=True)
    are_fusible = all(r.fusible or _jax_compat.is_jit(e) for r, e in pairs)
    if equation.effects or not are_fusible or any(r.category is Category.LOW for r in rules):
        return None
    is_full = default is Category.FULL or any(r.category is Category.FULL for r in rules)
    return Rule(
        Category.FULL if is_full else default,
        "a custom derivative: one operation, " + ("float32" if is_full else "as its inside"),
        fusible=True,
        expensive=any(r.expensive for r in rules),
    )


register_kind(["custom_jvp_call"], CustomJvpKind())
register_kind(["custom_vjp_call"], CustomVjpKind())
