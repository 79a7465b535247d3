"""What nests: jit with shardings, remat, shard_map, loops, branches, custom derivatives.

Each is planned as a level of its own and emitted through JAX's public function for it, which sees
to effects, shardings and caches. A kind is a class with two functions:
  - `plan(node, context, make_plan)` plans what is inside, writes `node.inner` and the dtypes that
    the outputs are stored in;
  - `run(node, operands, tools)` emits it. Operands come in the dtypes they are stored in.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp import _jax_compat
from jmp.autocasting._graph import Graph, Node, flatten
from jmp.autocasting._values import Value

MakePlan = Callable[..., Any]
RunPlan = Callable[[Any, Sequence[Any]], list[Any]]


class Info(NamedTuple):
    """What an outer level knows of a value: its stored dtype; whether it is neutral, and fixed."""

    dtype: Any
    neutral: bool
    fixed: bool = False


class Tools(NamedTuple):
    """What a kind needs of the files above this one, to emit."""

    run_plan: RunPlan
    make_plan: MakePlan
    context: Any


class Inner(NamedTuple):
    """A planned inner jaxpr and the constants it holds."""

    plan: Any
    constants: list[Any]

    def run(self, operands: Sequence[Any], run_plan: RunPlan) -> list[Any]:
        """Returns the outputs in the dtypes the plan stores them in."""
        return run_plan(self.plan, [*self.constants, *operands])


def open_level(
    jaxpr: Any, node: Node, context: Any, operands: Sequence[Value | None] = ()
) -> tuple[Graph, list[Any]]:
    """Flattens a jaxpr inside `node`; its own constants are the graph's first inputs."""
    inner, constants = _jax_compat.open_jaxpr(jaxpr)
    graph = flatten(inner, constants, operands, node.scope, context.settings, context.regions)
    return graph, constants


def nominal(value: Value) -> Any:
    """Returns the dtype a value was traced with; None for what has none."""
    return getattr(value.aval, "dtype", None)


def info_of(value: Value) -> Info:
    """Returns what an inner level needs to know of an operand."""
    dtype = nominal(value) if value.dtype is None else value.dtype
    return Info(dtype, value.neutral, value.fixed)


def constant_infos(graph: Graph, constants: Sequence[Any]) -> list[Info]:
    """Returns the infos of the constants a level holds by itself."""
    return [Info(nominal(value), True, True) for value in graph.inputs[: len(constants)]]


def plan_inner(
    jaxpr: Any,
    node: Node,
    operands: Sequence[Value],
    context: Any,
    make_plan: MakePlan,
) -> Inner:
    """Plans a jaxpr that is called once with `operands`."""
    graph, constants = open_level(jaxpr, node, context, operands)
    infos = [*constant_infos(graph, constants), *map(info_of, operands)]
    feeds = [value.feeds for value in node.outputs]
    kept = [value.kept for value in node.outputs]
    return Inner(make_plan(graph, infos, feeds, kept, context), constants)


def store(node: Node, dtypes: Sequence[Any]) -> None:
    """Writes what the outputs of a nesting node are stored in."""
    node.mode = "nested"
    node.why = "planned inside"
    for value, dtype in zip(node.outputs, dtypes, strict=True):
        value.dtype = dtype


class CalledOnce:
    """A jaxpr that is called once, with all the operands."""

    @staticmethod
    def plan(node: Node, context: Any, make_plan: MakePlan) -> None:
        """Outputs come back as the inside leaves them."""
        node.inner = plan_inner(node.params["jaxpr"], node, node.inputs, context, make_plan)
        store(node, node.inner.plan.output_dtypes)


class Jit(CalledOnce):
    """A jit that pins something down: shardings, donation, compiler options."""

    @staticmethod
    def run(node: Node, operands: list[Any], tools: Tools) -> list[Any]:
        """Emits `jax.jit` with the same shardings, donation and options."""

        def call(*args: Any) -> list[Any]:
            return node.inner.run(args, tools.run_plan)

        params = node.params
        call.__name__ = params["name"]
        donated = [i for i, donate in enumerate(params["donated_invars"]) if donate]
        return jax.jit(
            call,
            in_shardings=tuple(params["in_shardings"]),
            out_shardings=list(params["out_shardings"]),
            donate_argnums=donated,
            keep_unused=params["keep_unused"],
            compiler_options=dict(params["compiler_options_kvs"]) or None,
        )(*operands)


class Remat(CalledOnce):
    """`jax.checkpoint` of the user's, with its policy and names."""

    @staticmethod
    def plan(node: Node, context: Any, make_plan: MakePlan) -> None:
        """Islands inside are kept apart from the forward pass they repeat."""
        CalledOnce.plan(node, context._replace(prevent_cse=True), make_plan)

    @staticmethod
    def run(node: Node, operands: list[Any], tools: Tools) -> list[Any]:
        """Emits `jax.checkpoint`; a recomputation that stands in a gradient already is rebound."""

        def call(*args: Any) -> list[Any]:
            return node.inner.run(args, tools.run_plan)

        params = node.params
        if params["differentiated"]:
            closed = jax.make_jaxpr(call)(*operands)
            jaxpr, constants = _jax_compat.open_jaxpr(closed)
            if not constants:
                return node.equation.primitive.bind(*operands, **{**params, "jaxpr": jaxpr})
        return jax.checkpoint(call, prevent_cse=params["prevent_cse"], policy=params["policy"])(
            *operands
        )


class ShardMap(CalledOnce):
    """`jax.shard_map`: the inside is planned on the shards."""

    @staticmethod
    def run(node: Node, operands: list[Any], tools: Tools) -> list[Any]:
        """Emits `jax.shard_map` over the same mesh axes."""
        params = node.params
        return jax.shard_map(
            lambda *args: node.inner.run(args, tools.run_plan),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=set(params["newly_manual_axes"]),
        )(*operands)


def half_or_nominal(value: Value, dtype: Any, half: np.dtype) -> Any:
    """Returns `half` if the float32 value is stored in it, else its nominal dtype."""
    return half if value.is_float32 and dtype == half else nominal(value)
