"""Custom derivatives: the function and its rule are both interpreted.

A `custom_jvp` keeps its rule: primal and tangents are planned as one program, and tangents that are
zero stay symbolic zeros. A `custom_vjp` runs as written, because its rule was written for the
dtypes it was traced with; `inside_custom_vjp=True` goes inside, forward and backward. Its rule is
told which arguments are differentiated and which cotangents are zero, as JAX would tell it.

The rules are traced when a derivative is asked for, and not before.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

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
    info_of,
    open_level,
    plan_inner,
    store,
)
from jmp.autocasting._values import FLOAT32, Value


def trace_and_plan(
    function: Callable[..., Any],
    values: Sequence[Value],
    changes: Sequence[tuple[Value, Any]],
    dtypes: Sequence[Any],
    node: Node,
    tools: Tools,
) -> tuple[Callable[..., Any], list[Value]]:
    """Traces `function` on nominal types and plans it.

    Args:
      values: what it is given first, as they are known and stored outside.
      changes: what comes after them, tangents or cotangents: whose, and the dtype they come in.
      dtypes: what the first results are read in. What comes after them stays as it is computed:
        who reads a residual is not known here, and a sum of squares does not fit into float16.

    Returns: the planned function, and the leaves of its result as values.
    """
    types = [value.aval for value in (*values, *(value for value, _ in changes))]
    with _jax_compat.without_default_precision():
        closed, result = jax.make_jaxpr(function, return_shape=True)(*types)
    graph, constants = open_level(closed, node, tools.context, values)
    infos = [*constant_infos(graph, constants), *map(info_of, values)]
    infos += [Info(dtype, False) for _, dtype in changes]
    dtypes = [*dtypes, *[None] * (len(graph.outputs) - len(dtypes))]
    feeds = [dtype == tools.context.settings.compute_dtype for dtype in dtypes]
    kept = [dtype == FLOAT32 for dtype in dtypes]
    inner = Inner(tools.make_plan(graph, infos, feeds, kept, tools.context), constants)
    structure = jax.tree.structure(result)

    def run(*arrays: Any) -> Any:
        results = inner.run(arrays, tools.run_plan)
        return jax.tree.unflatten(structure, cast_all(results, dtypes))

    return run, graph.outputs


def _of_some(node: Node, operands: Sequence[Any], moving: Sequence[int]) -> Callable[..., Any]:
    """Returns the node, bound as written, as a function of the operands that are `moving`."""

    def call(*values: Any) -> list[Any]:
        filled = list(operands)
        for i, value in zip(moving, values, strict=True):
            filled[i] = value
        return _jax_compat.bind(node.equation.primitive, filled, node.params)

    return call


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
                fixed, moved = flat[: len(primals)], flat[len(primals) :]
                along = _of_some(node, fixed, moving)
                return jax.jvp(along, [fixed[i] for i in moving], list(moved))

            changes = [(node.inputs[i], primals[i].dtype) for i in moving]
            # The tangent of an integer has no dtype that could be chosen.
            spaces = [dtype if jnp.issubdtype(dtype, jnp.inexact) else None for dtype in dtypes]
            run, _ = trace_and_plan(
                nominal_rule, node.inputs, changes, [*dtypes, *spaces], node, tools
            )
            moved = [cast(tangents[i], primals[i].dtype) for i in moving]
            return run(*primals, *moved)

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

        @jax.custom_vjp
        def function(*args: Any) -> list[Any]:
            return cast_all(node.inner.run([*closed, *args], tools.run_plan), dtypes)

        def forward(*args: Any) -> Any:
            moving = [i for i, arg in enumerate(args, n_closed) if arg.perturbed]

            def nominal_forward(*flat: Any) -> Any:
                return jax.vjp(_of_some(node, flat, moving), *(flat[i] for i in moving))

            run, outputs = trace_and_plan(nominal_forward, node.inputs, [], dtypes, node, tools)
            results, vjp = run(*closed, *(arg.value for arg in args))
            residuals, structure = jax.tree.flatten(vjp)
            kept = outputs[len(dtypes) :]

            def pull_back(*given: Any) -> Any:
                *arrays, cotangents = given
                some = [i for i, ct in enumerate(cotangents) if not isinstance(ct, SymbolicZero)]

                def nominal_backward(*flat: Any) -> Any:
                    following = iter(flat[len(arrays) :])
                    filled = [
                        next(following) if i in some else _jax_compat.zero_cotangent(ct)
                        for i, ct in enumerate(cotangents)
                    ]
                    return jax.tree.unflatten(structure, flat[: len(arrays)])(filled)

                changes = [(node.outputs[i], dtypes[i]) for i in some]
                stored = [info_of(node.inputs[i]).dtype for i in moving]
                run, found = trace_and_plan(nominal_backward, kept, changes, stored, node, tools)
                gradients = run(*arrays, *(cotangents[i] for i in some))
                nonzero = {
                    i: gradient
                    for i, gradient, value in zip(moving, gradients, found, strict=True)
                    if value.constant != 0  # what stands for a gradient that the rule left out
                }
                return tuple(map(nonzero.get, range(n_closed, len(node.inputs))))

            return results, Partial(pull_back, *residuals)

        function.defvjp(forward, lambda rule, cts: rule(cts), symbolic_zeros=True)
        return function(*operands)
