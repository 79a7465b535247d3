"""What a memory report measures: a step as a function of arrays, without remat, and compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmp import _jax_compat
from jmp._calls import cotangent, vjp_at
from jmp.diagnostics._places import with_places
from jmp.diagnostics._replay import HANDLERS, inline, replay
from jmp.trees import is_array


def with_arrays_of_aux(function: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Returns a function of a pair: the result, and the arrays of what is not differentiated."""

    def pair(*arrays: Any) -> tuple[Any, list[Any]]:
        result, aux = function(*arrays) if has_aux else (function(*arrays), None)
        return result, [leaf for leaf in jax.tree.leaves(aux) if is_array(leaf)]

    return pair


def without_checkpoint(
    function: Callable[..., Any], arrays: Sequence[Any]
) -> Callable[..., Any] | None:
    """Returns the function without `jax.checkpoint`; None if it has none."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arrays)
    equations = with_places(_jax_compat.open_jaxpr(closed)[0])
    if not any(placed.equation.primitive.name in _jax_compat.REMAT for placed in equations):
        return None
    structure = jax.tree.structure(result)
    handlers = {**HANDLERS, **dict.fromkeys(_jax_compat.REMAT, inline)}
    return lambda *operands: jax.tree.unflatten(
        structure, replay(closed, operands, handlers=handlers)
    )


def value_and_gradients(
    function: Callable[..., Any], arrays: Sequence[Any], moving: Sequence[int]
) -> jax.stages.Traced:
    """Traces the whole step, whose results are in three parts.

    They are the value, the gradients at the positions `moving`, and what is not differentiated.
    """

    def step(*arrays: Any) -> Any:
        result, vjp, aux = vjp_at(function, arrays, moving, has_aux=True)
        return result, vjp(jax.tree.map(lambda x: cotangent(x, 1), result)), aux

    return jax.jit(step).trace(*arrays)


def xla_bytes(traced: jax.stages.Traced) -> tuple[int | None, int | None]:
    """Compiles and returns XLA's temp and peak; None for both if its backend does not say."""
    compiled = traced.lower().compile()
    try:
        found = compiled.memory_analysis()
    except NotImplementedError:
        found = None
    if found is None:
        return None, None
    # Not XLA's own peak, which leaves temp out on a CPU.
    temp = found.temp_size_in_bytes
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return temp, held + temp
