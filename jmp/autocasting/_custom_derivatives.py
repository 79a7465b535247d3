"""Custom derivatives: the function and its rule are both interpreted.

A `custom_jvp` keeps its rule: primal and tangents are planned as one program, and tangents that are
zero stay symbolic zeros. A `custom_vjp` runs as written, because its rule was written for the
dtypes it was traced with; `inside_custom_vjp=True` goes inside, forward and backward.

The rules are traced when a derivative is asked for, and not before.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jmp import _jax_compat
from jmp.autocasting._graph import Node
from jmp.autocasting._loops import cast, cast_all
from jmp.autocasting._nesting import (
    Info,
    Inner,
    MakePlan,
    Tools,
    constant_infos,
    half_or_nominal,
    open_level,
    plan_inner,
    store,
)


def trace_and_plan(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, Any]],
    node: Node,
    tools: Tools,
    kept: Sequence[bool] = (),
) -> tuple[Inner, Any]:
    """Traces `function` on nominal types and plans it.

    Args:
      arguments: for each one its nominal shape and dtype, and the dtype it is stored in.
      kept: which of the first outputs reach the float32 carry of a loop.

    Returns: the plan, whose outputs may all be half, and the structure of what `function` returns.
    """
    structs = [struct for struct, _ in arguments]
    closed, result = jax.make_jaxpr(function, return_shape=True)(*structs)
    graph, constants = open_level(closed, node, tools.context)
    infos = [*constant_infos(graph, constants), *(Info(dtype, False) for _, dtype in arguments)]
    feeds = [True] * len(graph.outputs)
    kept = [*kept, *([False] * (len(feeds) - len(kept)))]
    plan = tools.make_plan(graph, infos, feeds, kept, tools.context)
    return Inner(plan, constants), jax.tree.structure(result)


def _argument(value: Any, stored: Any) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype), stored.dtype


class CustomJvp:
    """`jax.custom_jvp`, where it holds a product or stands outside an island."""

    @staticmethod
    def plan(node: Node, context: Any, make_plan: MakePlan) -> None:
        """Outputs that feed products are half; the rule will give tangents of the same dtype."""
        half = context.settings.compute_dtype
        node.inner = plan_inner(node.params["call_jaxpr"], node, node.inputs, context, make_plan)
        dtypes = node.inner.plan.output_dtypes
        store(
            node,
            [half_or_nominal(v, d, half) for v, d in zip(node.outputs, dtypes, strict=True)],
        )

    @staticmethod
    def run(node: Node, operands: list[Any], tools: Tools) -> list[Any]:
        """Emits `jax.custom_jvp` whose primal and rule are planned."""
        dtypes = [value.dtype for value in node.outputs]

        @jax.custom_jvp
        def function(*args: Any) -> list[Any]:
            return cast_all(node.inner.run(args, tools.run_plan), dtypes)

        def rule(primals: Any, tangents: Any) -> Any:
            moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

            def nominal_rule(*flat: Any) -> Any:
                fixed, moved = list(flat[: len(primals)]), flat[len(primals) :]

                def along(*values: Any) -> list[Any]:
                    arguments = list(fixed)
                    for i, value in zip(moving, values, strict=True):
                        arguments[i] = value
                    return _jax_compat.bind(node.equation.primitive, arguments, node.params)

                return jax.jvp(along, [fixed[i] for i in moving], list(moved))

            arguments = [_argument(v, x) for v, x in zip(node.inputs, primals, strict=True)]
            arguments += [arguments[i] for i in moving]
            kept = [value.kept for value in node.outputs]
            inner, structure = trace_and_plan(nominal_rule, arguments, node, tools, kept * 2)
            moved = [cast(tangents[i], primals[i].dtype) for i in moving]
            results = inner.run([*primals, *moved], tools.run_plan)
            primals_out, tangents_out = jax.tree.unflatten(structure, results)
            primals_out = cast_all(primals_out, dtypes)
            return primals_out, [
                cast(t, x.dtype) if t.dtype != jax.dtypes.float0 else t
                for t, x in zip(tangents_out, primals_out, strict=True)
            ]

        function.defjvp(rule, symbolic_zeros=True)
        return function(*operands)


class CustomVjp:
    """`jax.custom_vjp`, gone into on request; otherwise it is bound as written."""

    @staticmethod
    def plan(node: Node, context: Any, make_plan: MakePlan) -> None:
        """As for `CustomJvp`."""
        CustomJvp.plan(node, context, make_plan)

    @staticmethod
    def run(node: Node, operands: list[Any], tools: Tools) -> list[Any]:
        """Emits `jax.custom_vjp` whose primal, forward and backward functions are planned."""
        dtypes = [value.dtype for value in node.outputs]
        # What the function closes over comes first; its rule has no gradient for that.
        n_closed = node.params["num_consts"]
        closed, operands = operands[:n_closed], operands[n_closed:]
        all_arguments = [
            _argument(v, x) for v, x in zip(node.inputs, [*closed, *operands], strict=True)
        ]
        arguments = all_arguments[n_closed:]

        def nominal_forward(*args: Any) -> Any:
            held, args = args[:n_closed], args[n_closed:]
            return jax.vjp(
                lambda *a: _jax_compat.bind(node.equation.primitive, [*held, *a], node.params),
                *args,
            )

        @jax.custom_vjp
        def function(*args: Any) -> list[Any]:
            return cast_all(node.inner.run([*closed, *args], tools.run_plan), dtypes)

        def forward(*args: Any) -> Any:
            kept = [value.kept for value in node.outputs]
            inner, structure = trace_and_plan(nominal_forward, all_arguments, node, tools, kept)
            results = inner.run([*closed, *args], tools.run_plan)
            outputs, vjp = jax.tree.unflatten(structure, results)
            return cast_all(outputs, dtypes), vjp

        def backward(vjp: Any, cotangents: Any) -> Any:
            residuals, structure = jax.tree.flatten(vjp)
            # The rule was written for nominal dtypes; half residuals and cotangents stand for them.
            nominal_dtypes = _nominal_residuals(nominal_forward, all_arguments)

            def nominal_backward(*flat: Any) -> Any:
                rule = jax.tree.unflatten(structure, flat[: len(residuals)])
                return rule(list(flat[len(residuals) :]))

            given = [
                (jax.ShapeDtypeStruct(x.shape, dtype), x.dtype)
                for x, dtype in zip(residuals, nominal_dtypes, strict=True)
            ]
            given += [_argument(v, ct) for v, ct in zip(node.outputs, cotangents, strict=True)]
            inner, out = trace_and_plan(nominal_backward, given, node, tools)
            gradients = jax.tree.unflatten(
                out, inner.run([*residuals, *cotangents], tools.run_plan)
            )
            return tuple(
                cast(g, stored) if g.dtype != jax.dtypes.float0 else None
                for g, (_, stored) in zip(gradients, arguments, strict=True)
            )

        function.defvjp(forward, backward)
        return function(*operands)


def _nominal_residuals(forward: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    _, residuals = jax.eval_shape(forward, *[struct for struct, _ in arguments])
    return [leaf.dtype for leaf in jax.tree.leaves(residuals)]
