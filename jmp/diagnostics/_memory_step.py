"""What a memory report measures: a step as a function of arrays, without remat, and compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmp import _jax_compat
from jmp._calls import cotangent, vjp_at
from jmp.diagnostics._places import with_places
from jmp.diagnostics._replay import HANDLERS, inline, replay
from jmp.loss_scaling._gradients import pair_of
from jmp.trees import is_array

Function = Callable[..., Any]  # of flat arrays
Traced = jax.stages.Traced


def with_arrays_of_aux(function: Function, has_aux: bool) -> Function:
    """Returns a function of a pair: the result, and the arrays of what is not differentiated."""

    def pair(*arrays: Any) -> tuple[Any, list[Any]]:
        result = function(*arrays)
        result, aux = pair_of(result, "(loss, aux)") if has_aux else (result, None)
        return result, [leaf for leaf in jax.tree.leaves(aux) if is_array(leaf)]

    return pair


def without_checkpoint(function: Function, arrays: Sequence[Any]) -> Function | None:
    """Returns the function without `jax.checkpoint`; None if it has none."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arrays)
    placed = with_places(_jax_compat.open_jaxpr(closed)[0])
    if not any(equation.primitive.name in _jax_compat.REMAT for equation, *_ in placed):
        return None
    structure = jax.tree.structure(result)
    handlers = {**HANDLERS, **dict.fromkeys(_jax_compat.REMAT, inline)}
    flat: Function = lambda *operands: replay(closed, operands, handlers=handlers)
    return lambda *operands: jax.tree.unflatten(structure, flat(*operands))


def value_and_gradients(function: Function, arrays: Sequence[Any], moving: Sequence[int]) -> Traced:
    """Traces a step: the value, gradients at the positions `moving`, what is not differentiated."""

    def step(*arrays: Any) -> Any:
        result, vjp, aux = vjp_at(function, arrays, moving, has_aux=True)
        return result, vjp(jax.tree.map(lambda x: cotangent(x, 1), result)), aux

    return jax.jit(step).trace(*arrays)


def xla_bytes(traced: Traced) -> tuple[int | None, int | None]:
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
