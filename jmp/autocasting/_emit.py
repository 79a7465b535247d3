"""Runs a plan: binds its steps in order, each value cast to the dtype it is read in.

Nothing is decided here. Values are kept in the dtype the plan stores them in. A float32 parameter
is cast where it is used, each time: XLA merges the casts, and gradients add up in float32. XLA does
not take casts out of loops: there the plan says so, see `Nested.rounding`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._kinds import kind_of
from jmp.autocasting._lowerings import as_it_is, cast, cast_all, jvp, repeated, saturated
from jmp.autocasting._steps import (
    Environment,
    Function,
    Fused,
    Island,
    Nested,
    Plan,
    Read,
    Single,
    Step,
    Unplanned,
)
from jmp.dtypes import FLOAT32


def run_plan(plan: Plan, arguments: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a level, given its inputs in the dtypes of `plan.reads`."""
    environment: Environment = dict(zip(plan.graph.inputs, arguments, strict=True))
    run_steps(plan.steps, environment)
    pairs = zip(plan.graph.outputs, plan.stores, strict=True)
    return [read_value(Read(value, dtype), environment) for value, dtype in pairs]


def run_steps(steps: Sequence[Step], environment: Environment) -> None:
    """Adds what the steps compute to the environment."""
    for step in steps:
        if isinstance(step, Island):
            _run_island(step, environment)
        elif isinstance(step, Fused):
            _run_fused(step, environment)
        else:
            with _jax_compat.place_of(step.node.equation, step.node.stack):
                if isinstance(step, Single):
                    results = _run_single(step, environment)
                else:
                    results = cast_all(_run_nested(step, environment), step.stores)
            environment.update(zip(step.node.outputs, results, strict=True))


def _read_by(read: Read, step: Single | Nested, environment: Environment) -> Any:
    array = read_value(read, environment)
    if _jax_compat.is_jax_array(array):
        return array
    if np.ndim(array) == 0 and not step.node.holds_functions:
        return array
    # A function inside, or a rule of a derivative, may index it by a tracer.
    return jnp.asarray(array, read.dtype or read.value.dtype)


def _run_shared(step: Single | Island, make: Callable[[], Function], arrays: Any) -> Any:
    """Runs a step through the function that steps alike share; the first to run makes it."""
    # NumPy casts arrays of its own, while the program is traced.
    if step.shared is None or not all(map(_jax_compat.is_jax_array, arrays)):
        return make()(*arrays)
    # A pass over a level outside may have changed the lowering of some that were alike.
    lowering = step.lowering if isinstance(step, Single) else None
    if lowering not in step.shared:
        is_cached = isinstance(step, Island) and step.is_recomputed
        # Inline, so that the program has the same equations.
        step.shared[lowering] = make() if is_cached else jax.jit(make(), inline=True)
    return step.shared[lowering](*arrays)


def _run_single(step: Single, environment: Environment) -> list[Any]:
    """Returns the results of one equation."""

    def run(environment: Environment) -> list[Any]:
        operands = [_read_by(read, step, environment) for read in step.reads]
        if step.lowering is None:
            return cast_all(as_it_is(step)(operands), step.stores)
        return cast_all(step.lowering(step, operands, environment), step.stores)

    if step.shared is None:
        return run(environment)
    entering = dict.fromkeys(read.value for read in step.reads if read.value.literal is None)
    of_arrays = lambda *arrays: run(dict(zip(entering, arrays, strict=True)))
    return _run_shared(step, lambda: of_arrays, [environment[value] for value in entering])


# While it is true, loops are traced in the form that is differentiated: for `gradient_report`.
as_if_differentiated = jax.make_user_context(default_value=False)


def _run_nested(step: Nested, environment: Environment) -> Any:
    """Returns the results of an equation that is planned inside.

    A loop may have two forms: one for where no derivative is taken, one for where it is. The
    gradient of what it closes over, or keeps in a buffer, adds up turn by turn, in the dtype that
    it has there. Where none is taken, as in generation, float32 is twice the bytes.
    """
    wide = step.differentiated or step
    operands = [_read_by(read, step, environment) for read in wide.reads]
    if wide is step or as_if_differentiated.value:
        return _bound(wide, operands)

    @jax.custom_jvp
    def in_half(*operands: Any) -> Any:
        return _bound(step, cast_all(operands, [read.dtype for read in step.reads]))

    in_float32 = lambda *operands: cast_all(_bound(wide, operands), step.stores)
    in_half.defjvp(partial(jvp, in_float32), symbolic_zeros=True)
    return in_half(*operands)


def _bound(step: Nested, operands: Sequence[Any]) -> Any:
    """Returns the results of one form of a nested equation."""
    functions = list(map(_as_function, step.insides))
    if step.lowering is not None:
        return step.lowering(step, operands, functions)
    return kind_of(step.node.name).emit(step.node.equation, operands, functions)


def _run_island(island: Island, environment: Environment) -> None:
    """Adds what leaves an island to the environment."""
    arrays = [read_value(read, environment) for read in island.reads]
    first = island.nodes[0]
    with _jax_compat.place_of(first.equation, first.stack[: island.common_scopes]):
        results = _run_shared(island, lambda: _function_of(island), arrays)
    environment.update(zip((write.value for write in island.writes), results, strict=True))


def _run_fused(step: Fused, environment: Environment) -> None:
    """Runs both forms of fused steps, of which a program keeps that of its platform."""
    entering = [read.value for read in step.reads]

    def plain(*arrays: Any) -> list[Any]:
        inside: Environment = dict(zip(entering, arrays, strict=True))
        run_steps(step.plain, inside)
        return [inside[value] for value in step.node.outputs]

    def fused(*arrays: Any) -> list[Any]:
        inside: Environment = dict(zip(entering, arrays, strict=True))
        with _jax_compat.place_of(step.node.equation, step.node.stack):
            return [step.lowering(inside)]

    arrays = [environment[value] for value in entering]
    results = lax.platform_dependent(*arrays, **{step.platform: fused}, default=plain)
    environment.update(zip(step.node.outputs, results, strict=True))


def _as_function(inside: Plan | Unplanned) -> Function:
    if not isinstance(inside, Plan):
        return inside(run_plan)

    def function(*arrays: Any) -> list[Any]:
        return run_plan(inside, cast_all([*inside.graph.constants, *arrays], inside.reads))

    return function


# Islands.


def _function_of(island: Island) -> Function:
    entering = [read.value for read in island.reads]
    nodes = _nodes_to_run(island)
    as_stored = any(rewrite.as_stored for rewrite in island.rewrites.values())

    def run_island(*arrays: Any) -> list[Any]:
        environment: Environment = dict(zip(entering, arrays, strict=True))
        if as_stored:
            environment = {value: _rounded_again(array) for value, array in environment.items()}
        if island.shares_casts:
            environment = {value: _in_float32(value, environment) for value in entering}
        for value in island.numbers:
            environment[value] = lax.full(value.aval.shape, np.float32(value.constant), FLOAT32)
        for node in nodes:
            with _jax_compat.place_of(node.equation, node.stack[island.common_scopes :]):
                results = _run_node(node, island, environment)
            environment.update(zip(node.outputs, results, strict=True))
        pairs = [(environment[write.value], write) for write in island.writes]
        return [cast(saturated(x) if write.saturates else x, write.dtype) for x, write in pairs]

    if not island.is_recomputed:
        return run_island
    kept = [rewrite.keeps for rewrite in island.rewrites.values() if rewrite.keeps]
    policy = jax.checkpoint_policies.save_only_these_names(*kept) if kept else None
    return jax.checkpoint(run_island, prevent_cse=island.prevent_cse, policy=policy)


def _nodes_to_run(island: Island) -> list[Node]:
    """Returns markers, and nodes that the results need: a rewrite may read less than its node."""
    found, needed = list[Node](), {write.value for write in island.writes}
    for node in reversed(island.nodes):
        if node.is_marker or not needed.isdisjoint(node.outputs):
            rewrite = island.rewrites.get(node)
            needed.update(node.inputs if rewrite is None else rewrite.reads)
            found.insert(0, node)
    return found


def _run_node(node: Node, island: Island, environment: Environment) -> list[Any]:
    rewrite = island.rewrites.get(node)
    if rewrite is not None:
        return [rewrite.run(*(_in_float32(value, environment) for value in rewrite.reads))]
    operands = [_in_float32(value, environment) for value in node.inputs]
    return _jax_compat.bind(node.equation.primitive, operands, node.params)


def _rounded_again(array: Any) -> Any:
    """Returns an array that enters an island; XLA may not read it as it was before its rounding.

    On a CPU it would, in bfloat16 and only in the forward pass: the sums that are kept of a
    softmax would not be those of the powers that the backward pass computes (up to 1.9 times the
    error of a gradient).
    """
    if getattr(array, "dtype", None) != jnp.bfloat16:
        return array
    return cast(lax.reduce_precision(cast(array, FLOAT32), 8, 7), array.dtype)


# Reading and writing values.


def _in_float32(value: Value, environment: Environment) -> Any:
    return read_value(Read(value, FLOAT32), environment)


def read_value(read: Read, environment: Environment) -> Any:
    """Returns a value of a level, read as `read` says."""
    value, dtype, shape, saturates, repeat = read
    array = environment[value] if value.literal is None else value.literal
    if dtype is None or not value.is_float32:
        return array
    if repeat is not None:
        return repeat(array, shape, dtype)
    if shape is not None:
        array = repeated(array, shape)
    if saturates:
        array = saturated(array)  # after the repetition, where it fuses
    if value.literal is not None and shape is None and not saturates and np.ndim(array) == 0:
        return array if dtype == FLOAT32 else np.asarray(array).astype(dtype)
    return cast(array, dtype)
