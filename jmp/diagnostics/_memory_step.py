"""What a memory report measures: a step as a function of arrays, without remat, and compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp.diagnostics._places import with_places
from jmp.diagnostics._replay import HANDLERS, inline, replay
from jmp.diagnostics._residuals import linearise
from jmp.trees import is_array


def flat_function(
    fun: Callable[..., Any], args: Sequence[Any], has_aux: bool
) -> tuple[Callable[..., Any], list[Any], list[int]]:
    """Returns `fun` as a function of arrays alone, the arrays, and whose argument each is.

    It returns a pair: the result, and the arrays of what is not differentiated.
    """
    leaves, structure = jax.tree.flatten(args)
    is_given = [is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
    owners = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]

    def function(*arrays: Any) -> tuple[Any, list[Any]]:
        following = iter(arrays)
        filled = [next(following) if g else x for x, g in zip(leaves, is_given, strict=True)]
        result = fun(*jax.tree.unflatten(structure, filled))
        result, aux = result if has_aux else (result, None)
        return result, [leaf for leaf in jax.tree.leaves(aux) if is_array(leaf)]

    arrays = [leaf for leaf, given in zip(leaves, is_given, strict=True) if given]
    return function, arrays, [o for o, given in zip(owners, is_given, strict=True) if given]


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
        result, vjp, aux = linearise(function, arrays, moving)
        return result, vjp(jax.tree.map(_cotangent, result)), aux

    return jax.jit(step).trace(*arrays)


def xla_bytes(traced: jax.stages.Traced) -> tuple[int, int] | None:
    """Compiles and returns XLA's temp and peak; None where its backend does not say."""
    compiled = traced.lower().compile()
    try:
        found = compiled.memory_analysis()
    except NotImplementedError:
        found = None
    if found is None:
        return None
    # Not XLA's own peak, which leaves temp out on a CPU.
    temp = found.temp_size_in_bytes
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return temp, held + temp


def _cotangent(result: jax.Array) -> jax.Array | np.ndarray:
    if jnp.issubdtype(result.dtype, jnp.inexact):
        return jnp.ones_like(result)
    return np.zeros(result.shape, jax.dtypes.float0)
