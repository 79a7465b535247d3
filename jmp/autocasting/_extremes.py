"""The extremes of elementwise functions of one number: they are tried at every bfloat16 number."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value
from jmp.dtypes import FLOAT32


class Extremes(NamedTuple):
    """What is known of a function of one number."""

    largest: float  # magnitude of its results
    at_zero: float  # magnitude of its result for zero
    steepest: float  # magnitude of its slope


class Equation(NamedTuple):
    """One equation of a function of one number; all of it can be hashed."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    # Of each operand the place among the values so far, of which 0 is the argument; or a constant.
    reads: tuple[int | tuple[float], ...]


def equation_of(node: Node, places: Mapping[Value, int]) -> Equation | None:
    """Returns a node as an equation; None unless it is elementwise, and reads what has a place."""
    rule = node.rule
    if not (node.is_fusible and (rule.elementwise or rule.expensive or rule.casts or rule.cheap)):
        return None
    reads: list[int | tuple[float]] = []
    for value in node.inputs:
        if value in places:
            reads.append(places[value])
        elif value.constant is not None:
            reads.append((value.constant,))
        else:
            return None
    return Equation(node.equation.primitive, tuple(sorted(node.params.items())), tuple(reads))


@functools.lru_cache(maxsize=256)
def extremes_of(equations: tuple[Equation, ...], place: int) -> Extremes:
    """Returns the extremes of a function, whose result has a place among its equations' values.

    Where the function or its slope is NaN a result, or a cotangent, is NaN too: it is left out.
    """
    numbers = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).astype(FLOAT32)
    numbers = numbers[np.isfinite(numbers)]

    def function(argument: Any) -> Any:
        values = [argument]
        for primitive, params, reads in equations:
            operands = [
                values[x] if isinstance(x, int) else np.full(numbers.shape, x[0], FLOAT32)
                for x in reads
            ]
            values += _jax_compat.bind(primitive, operands, dict(params))
        return values[place]

    # Run now, whatever is being traced; NaN is expected.
    with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
        pair = jax.jvp(function, (numbers,), (np.ones_like(numbers),))
    results, slopes = (np.abs(np.asarray(array)) for array in pair)
    at_zero = results[numbers == 0].max()
    return Extremes(*map(float, (np.nanmax(results), at_zero, np.nanmax(slopes))))
