"""Custom derivatives: the function and its rule are both planned.

A `custom_jvp` keeps its rule: primal and tangents are planned as one program, and tangents that are
zero stay symbolic zeros. A `custom_vjp` runs as written, because its rule was written for the
dtypes it was traced with; `inside_custom_vjp=True` goes inside, forward and backward. Its rule is
told which arguments are differentiated and which cotangents are zero, as JAX would tell it.

The rules are traced and planned when a derivative is asked for, and not before.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn
from jax.tree_util import Partial

from jmp import _jax_compat
from jmp._array_calls import replaced
from jmp.autocasting._casts import cast
from jmp.autocasting._facts import Destination, Info
from jmp.autocasting._flatten import graph_of
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._kinds import Arrays, Kind, Level, register_kind
from jmp.autocasting._numbers import is_inexact
from jmp.autocasting._propagation import inner_equations
from jmp.autocasting._registry import Category, Rule
from jmp.autocasting._request import Settings
from jmp.autocasting._steps import Context, Function, Nested, Plan, RunPlan
from jmp.dtypes import FLOAT32

WHY_AS_WRITTEN = "inside a custom_vjp, which runs as written (inside_custom_vjp=True lowers it)"


class _Traced(NamedTuple):
    """A planned function that was traced on nominal types."""

    plan: Plan
    structure: Any  # of its result

    def run(self, run_plan: RunPlan, arrays: Sequence[Any]) -> Any:
        """Returns the result."""
        leaves = run_plan(self.plan, [*self.plan.graph.constants, *arrays])
        return jax.tree.unflatten(self.structure, leaves)


class CustomJvpKind(Kind):
    """`jax.custom_jvp`, where it holds a product or stands outside an island."""

    runs_as_written = False  # in the dtypes it was traced with
    is_transposed = True  # JAX transposes the tangents of its rule

    def rule(self, equation: JaxprEqn, rule: Rule, settings: Settings) -> Rule:
        """One without products is one operation: float32 if something inside is."""
        inner = list(inner_equations(equation))
        rules = [settings.rule_for(e.primitive.name) for e in inner]
        if equation.effects or any(
            r.category is Category.LOW or not (r.fusible or _jax_compat.is_jit(e))
            for r, e in zip(rules, inner, strict=True)
        ):
            return rule
        is_full = self.runs_as_written or any(r.category is Category.FULL for r in rules)
        return Rule(
            Category.FULL if is_full else Category.FOLLOW,
            "a custom derivative: one operation, " + ("float32" if is_full else "as its inside"),
            fusible=True,
            expensive=any(r.expensive for r in rules),
        )

    def context_inside(self, level: Level) -> Context:
        """Returns what holds in the function and in its rule."""
        is_transposed = self.is_transposed or level.context.is_transposed
        return level.context._replace(is_transposed=is_transposed)

    def plan(self, node: Node, level: Level) -> Nested:
        """Results that feed products are half; the rule will give tangents of the same dtype."""
        (inside,) = node.insides
        plan = level.plan_called(inside, node, self.context_inside(level))
        stores = level.common_stores(node, [plan])
        derivative = functools.partial(self.plan_derivative, node, level, stores)
        return level.nested(node, [plan.storing(stores), derivative], stores)

    def plan_derivative(
        self, node: Node, level: Level, stores: Sequence[np.dtype | None], run_plan: RunPlan
    ) -> Callable[..., Any]:
        """Returns the rule, a function of primals and tangents that plans when it is called."""

        def derivative(primals: Any, tangents: Any) -> Any:
            moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

            def nominal_rule(*flat: Any) -> Any:
                fixed, moved = flat[: len(primals)], flat[len(primals) :]
                along = _of_some(node, fixed, moving)
                return jax.jvp(along, [fixed[i] for i in moving], list(moved))

            changes = [(node.inputs[i], primals[i].dtype) for i in moving]
            # The tangent of an integer has no dtype that could be chosen.
            pairs = zip(node.outputs, stores, strict=True)
            spaces = [dtype if is_inexact(value) else None for value, dtype in pairs]
            given = list(zip(node.inputs, map(level.storage.info, node.inputs), strict=True))
            dtypes = [*stores, *spaces]
            traced = self._trace_and_plan(nominal_rule, node, level, given, changes, dtypes)
            moved = [cast(tangents[i], primals[i].dtype) for i in moving]
            return traced.run(run_plan, [*primals, *moved])

        return derivative

    def _trace_and_plan(
        self,
        function: Callable[..., Any],
        node: Node,
        level: Level,
        given: Sequence[tuple[Value, Info]],
        changes: Sequence[tuple[Value, np.dtype | None]],
        dtypes: Sequence[np.dtype | None],
    ) -> _Traced:
        """Traces `function` on nominal types and plans it.

        Args:
          given: what it is given first, as it is known and stored outside.
          changes: what comes after that, tangents or cotangents: whose, and the dtype they come in.
          dtypes: what the first results are read in. Results after them stay as they are computed:
            who reads a residual is not known here, and a sum of squares does not fit into float16.
        """
        values = [value for value, _ in given]
        types = [value.aval for value in (*values, *(value for value, _ in changes))]
        with jax.default_matmul_precision(None):
            closed, result = jax.make_jaxpr(function, return_shape=True)(*types)
        jaxpr, constants = _jax_compat.open_jaxpr(closed)
        anything = [None] * (len(jaxpr.invars) - len(values))
        request = level.context.request
        graph = graph_of(jaxpr, constants, [*values, *anything], node, request)
        infos = [info for _, info in given] + [Info(dtype, False) for _, dtype in changes]
        stores = (*dtypes, *[None] * (len(graph.outputs) - len(dtypes)))
        goes = [Destination(d == level.half, d == FLOAT32, rounded=d == level.half) for d in stores]
        plan = level.plan_graph(graph, infos, goes, self.context_inside(level))
        return _Traced(plan.storing(stores), jax.tree.structure(result))

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `jax.custom_jvp`, given the primal function and its rule."""
        primal, derivative = functions
        function = jax.custom_jvp(lambda *args: primal(*args))
        function.defjvp(derivative, symbolic_zeros=True)
        return function(*operands)


class CustomVjpKind(CustomJvpKind):
    """`jax.custom_vjp`, gone into on request; otherwise it is bound as written."""

    runs_as_written = True
    is_transposed = False

    def goes_inside(self, settings: Settings) -> bool:
        """On request."""
        return settings.inside_custom_vjp

    def rule(self, equation: JaxprEqn, rule: Rule, settings: Settings) -> Rule:
        """One without products is one operation, in float32."""
        return super().rule(equation, dataclasses.replace(rule, reason=WHY_AS_WRITTEN), settings)

    def plan_derivative(
        self, node: Node, level: Level, stores: Sequence[np.dtype | None], run_plan: RunPlan
    ) -> Callable[..., Any]:
        """Returns the forward function: of closed-over arrays, and arguments that may move."""
        n_closed = _jax_compat.closed_over(node.params)
        infos = list(map(level.storage.info, node.inputs))

        def forward(closed: Arrays, args: Sequence[Any]) -> Any:
            moving = [i for i, arg in enumerate(args, n_closed) if arg.perturbed]

            def nominal_forward(*flat: Any) -> Any:
                return jax.vjp(_of_some(node, flat, moving), *(flat[i] for i in moving))

            given = list(zip(node.inputs, infos, strict=True))
            traced = self._trace_and_plan(nominal_forward, node, level, given, [], stores)
            results, vjp = traced.run(run_plan, [*closed, *(arg.value for arg in args)])
            residuals, structure = jax.tree.flatten(vjp)
            known = list(zip(traced.plan.graph.outputs, traced.plan.infos, strict=True))
            saved = known[len(stores) :]

            def pull_back(*passed: Any) -> Any:
                *arrays, cotangents = passed
                some = [i for i, ct in enumerate(cotangents) if not isinstance(ct, SymbolicZero)]

                def nominal_backward(*flat: Any) -> Any:
                    following = iter(flat[len(arrays) :])
                    filled = [
                        next(following) if i in some else _jax_compat.zero_cotangent(ct)
                        for i, ct in enumerate(cotangents)
                    ]
                    return jax.tree.unflatten(structure, flat[: len(arrays)])(filled)

                changes = [(node.outputs[i], stores[i]) for i in some]
                stored = [infos[i].dtype for i in moving]
                traced = self._trace_and_plan(nominal_backward, node, level, saved, changes, stored)
                gradients = traced.run(run_plan, [*arrays, *(cotangents[i] for i in some)])
                nonzero = {
                    i: gradient
                    for i, gradient, value in zip(
                        moving, gradients, traced.plan.graph.outputs, strict=True
                    )
                    if value.constant != 0  # what stands for a gradient that the rule left out
                }
                return tuple(map(nonzero.get, range(n_closed, len(node.inputs))))

            return results, Partial(pull_back, *residuals)

        return forward

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `jax.custom_vjp`, given the primal function and the forward one."""
        primal, forward = functions
        # The arrays that the function closes over come first; its rule has no gradient for them.
        n_closed = _jax_compat.closed_over(equation.params)
        closed, operands = operands[:n_closed], operands[n_closed:]
        function = jax.custom_vjp(lambda *args: primal(*closed, *args))
        function.defvjp(
            lambda *args: forward(closed, args), lambda rule, cts: rule(cts), symbolic_zeros=True
        )
        return function(*operands)


def _of_some(node: Node, operands: Sequence[Any], moving: Sequence[int]) -> Callable[..., Any]:
    """Returns the node, bound as written, as a function of the operands that are `moving`."""

    def call(*values: Any) -> list[Any]:
        whole = replaced(operands, moving, values)
        return _jax_compat.bind(node.equation.primitive, whole, node.params)

    return call


register_kind(["custom_jvp_call"], CustomJvpKind())
register_kind(["custom_vjp_call"], CustomVjpKind())
