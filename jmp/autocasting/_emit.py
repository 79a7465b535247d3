"""Runs a plan: binds its steps in order, each value cast to the dtype it is read in.

Values are kept in the dtype the plan stores them in. A float32 parameter is cast where it is used,
each time: XLA merges the casts and takes them out of loops, and gradients add up in float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting import _plan
from jmp.autocasting._flow import AFFINE
from jmp.autocasting._graph import HALF, Node
from jmp.autocasting._islands import Island, Mode
from jmp.autocasting._kinds import KINDS
from jmp.autocasting._loops import cast
from jmp.autocasting._nesting import Tools, nominal
from jmp.autocasting._picks import is_pick, pick
from jmp.autocasting._plan import Plan
from jmp.autocasting._precision import with_default
from jmp.autocasting._softmaxes import KEPT, Softmax, odd_softmax, softmax
from jmp.autocasting._values import FLOAT32, Value

Environment = dict[Value, Any]

# How masks are applied. A product with a large number may overflow, and loss scaling must see it.
MASKING = frozenset({"add", "sub", "select_n", "max", "min", "concatenate"})
# Elementwise operations that JAX lets repeat an operand along axes of size one.
ELEMENTWISE = frozenset({
    *AFFINE, "rem", "max", "min", "atan2", "eq", "ne", "lt", "le", "gt", "ge",
})  # fmt: skip


def run_plan(plan: Plan, arguments: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a level, in the dtypes the plan stores them in."""
    environment: Environment = dict(zip(plan.graph.inputs, arguments, strict=True))
    for step in plan.steps:
        if isinstance(step, Island):
            _run_island(step, environment, plan)
        else:
            _run_node(step, environment, plan)
    return [
        _read(value, environment, value.dtype or nominal(value)) for value in plan.graph.outputs
    ]


def _read(value: Value, environment: Environment, dtype: Any) -> Any:
    """Returns a value in `dtype`, if it is a float32 one; any other as it is."""
    array = value.literal if value.literal is not None else environment[value]
    if not value.is_float32:
        return array
    if value.literal is not None and _jax_compat.is_concrete(array) and np.ndim(array) == 0:
        return array if dtype == FLOAT32 else np.asarray(array).astype(dtype)
    return cast(array, dtype)


def _write(node: Node, results: Sequence[Any], environment: Environment) -> None:
    for value, result in zip(node.outputs, results, strict=True):
        environment[value] = cast(result, value.dtype) if value.is_float32 else result


def _run_node(node: Node, environment: Environment, plan: Plan) -> None:
    with _jax_compat.place_of(node.equation, node.stack):
        if node.mode == "nested":
            results = _run_nested(node, environment, plan)
        elif node.mode == HALF:
            results = _run_half(node, environment, plan)
        else:
            operands = [_read(value, environment, FLOAT32) for value in node.inputs]
            params = with_default(node.name, node.params)
            results = _jax_compat.bind(node.equation.primitive, operands, params)
        _write(node, results, environment)


def _run_nested(node: Node, environment: Environment, plan: Plan) -> list[Any]:
    operands = [_read(value, environment, value.dtype or FLOAT32) for value in node.inputs]
    for position, value in enumerate(node.inputs):
        if value.literal is not None:  # a Python or NumPy number
            operands[position] = jnp.asarray(operands[position], nominal(value))
    tools = Tools(run_plan, _plan.make_plan, plan.context)
    return KINDS[node.name].run(node, operands, tools)


def _run_half(node: Node, environment: Environment, plan: Plan) -> list[Any]:
    half = plan.context.settings.compute_dtype
    params = node.params
    if any(value.is_float32 for value in node.outputs):
        params = node.rule.params_in_half(params, half)
    operands = [_read_half(node, value, environment, half) for value in node.inputs]
    return _jax_compat.bind(node.equation.primitive, operands, params)


def _read_half(node: Node, value: Value, environment: Environment, half: Any) -> Any:
    """Reads an operand in half.

    One that the operation repeats is repeated in float32 first: the derivative of that is a sum,
    and were the operand rounded before, a bias would add up its gradient in half (16384 ones give
    2048 in float16). One that may be a mask is then held within float16's range, so that -1e9 does
    not become -inf.
    """
    shape = node.outputs[0].aval.shape
    repeats = node.name in ELEMENTWISE and value.size < node.outputs[0].size
    if not value.is_float32 or value.literal is not None and not repeats:
        return _read(value, environment, half)
    wide = _read(value, environment, value.dtype or FLOAT32)
    if repeats and not value.fixed:
        wide = jnp.asarray(wide, np.float32)
        axes = range(len(shape) - wide.ndim, len(shape))
        wide = lax.broadcast_in_dim(wide, shape, tuple(axes))
    if node.name in MASKING and _may_be_mask(value, half):
        wide = _saturated(wide)  # after the repetition, where it fuses
    return cast(wide, half)


def _may_be_mask(value: Value, half: Any) -> bool:
    """Whether a value may hold -1e9: it is known to, or is an input of more than one axis."""
    if not value.is_float32 or half != np.float16:  # bfloat16 holds what float32 holds
        return False
    if value.constant is not None:
        return value.exceeds(half)
    return value.is_hard or (value.neutral and not value.is_vector and not value.is_exact)


@jax.custom_jvp
def _saturated(array: Any) -> Any:
    """Holds finite numbers within float16's range: a row masked throughout stays finite.

    Its derivative is that of the identity, so that it costs the backward pass nothing.
    """
    limit = float(jnp.finfo(np.float16).max)
    return jnp.where(jnp.isinf(array), array, jnp.clip(array, -limit, limit))


_saturated.defjvp(lambda primals, tangents: (_saturated(*primals), *tangents))


def _run_island(island: Island, environment: Environment, plan: Plan) -> None:
    def run(*arrays: Any) -> list[Any]:
        inside: Environment = dict(zip(island.inputs, arrays, strict=True))
        if island.shares_casts:
            inside = {v: cast(x, FLOAT32) if v.is_float32 else x for v, x in inside.items()}
        for node in (*island.clones, *island.nodes):
            with _jax_compat.place_of(node.equation, node.stack):
                operands = [_read(value, inside, FLOAT32) for value in node.inputs]
                if is_pick(node):
                    results = [pick(node, *operands)]
                elif node in softmaxes:
                    shifted, rows = softmaxes[node]
                    results = [softmax(_read(shifted, inside, FLOAT32), rows, half)]
                else:
                    results = _jax_compat.bind(node.equation.primitive, operands, node.params)
            for value, result in zip(node.outputs, results, strict=True):
                inside[value] = result
        return [leave(value, inside) for value in island.outputs]

    def leave(value: Value, inside: Environment) -> Any:
        masks = value.producer.name in MASKING and any(
            _may_be_mask(operand, half) for operand in value.producer.inputs
        )
        if masks and value.dtype == half:
            return _saturated(inside[value]).astype(half)
        return _read(value, inside, value.dtype)

    half = plan.context.settings.compute_dtype
    softmaxes = _odd_softmaxes(island, half)
    arrays = [_read(value, environment, value.dtype or FLOAT32) for value in island.inputs]
    if island.mode is not Mode.PLAIN:
        policy = _keep_sums if island.mode is Mode.RECOMPUTE_BUT_SUMS else None
        if softmaxes:
            policy = jax.checkpoint_policies.save_only_these_names(KEPT)
        run = jax.checkpoint(run, prevent_cse=plan.context.prevent_cse, policy=policy)
    for value, result in zip(island.outputs, run(*arrays), strict=True):
        environment[value] = result


def _odd_softmaxes(island: Island, half: Any) -> dict[Node, Softmax]:
    """Returns the last steps of softmaxes whose half results are kept, and what they are of."""
    if island.mode is not Mode.RECOMPUTE:
        return {}
    inside = frozenset(island.nodes)
    found = {n: odd_softmax(n, inside) for n in island.nodes if n.outputs[0].dtype == half}
    return {node: softmax for node, softmax in found.items() if softmax is not None}


def _keep_sums(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive is lax.reduce_sum_p
