"""The extremes of elementwise functions of one number: they are tried at every bfloat16 number.

They are tried in float32, and with each step rounded to bfloat16, as a plan may compute it: where
large numbers cancel, as in `(x + 1000) - 1000`, results and slopes differ.
"""

import concurrent.futures
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value
from jmp.dtypes import FLOAT32


class Extremes(NamedTuple):
    """What is known of a function f of one number x: |f(x)| <= min(largest, offset + slope |x|)."""

    largest: float
    offset: float  # |f(0)|, or more where f jumps, as a step does
    slope: float  # no magnitude of f's derivative exceeds it


class Equation(NamedTuple):
    """One equation of a function of one number; all of it can be hashed."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    # Of each operand the place among the values so far, of which 0 is the argument; or a constant.
    reads: tuple[int | tuple[float], ...]


def equation_of(node: Node, places: Mapping[Value, int]) -> Equation | None:
    """Returns a node as an equation; None unless it is elementwise, and reads what has a place."""
    rule = node.rule
    if any(_jax_compat.inner_jaxprs(node.equation)):  # a custom derivative, of a shape of its own
        return None
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

    def function(argument: Any, is_rounded: bool) -> Any:
        values = [argument]
        for primitive, params, reads in equations:
            operands = [
                values[x] if isinstance(x, int) else np.full(numbers.shape, x[0], FLOAT32)
                for x in reads
            ]
            (value,) = _jax_compat.bind(primitive, operands, dict(params))
            is_rounded_here = is_rounded and value.dtype == FLOAT32
            values.append(lax.reduce_precision(value, 8, 7) if is_rounded_here else value)
        return values[place]

    def values_and_slopes() -> list[Any]:
        forms = [functools.partial(function, is_rounded=is_rounded) for is_rounded in (False, True)]
        # NaN is expected.
        with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
            return [jax.jvp(form, (numbers,), (np.ones_like(numbers),)) for form in forms]

    # In a thread of its own nothing is being traced, and no mesh of other devices is set.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        pairs = thread.submit(values_and_slopes).result()
    results, slopes = (
        np.fmax(*(np.abs(np.asarray(x)) for x in both)) for both in zip(*pairs, strict=True)
    )
    sizes = np.abs(numbers)
    is_far, is_near = (sizes > 2.0**64) & (sizes < 2.0**100), sizes < 2.0**100
    # Of what jumps at every turn, as rounding does, no slope says how it grows.
    growth = _largest(results[is_far] / sizes[is_far])
    slope = max(_largest(slopes), growth)
    with np.errstate(invalid="ignore"):  # infinite, the slope of what is not finite
        offset = _largest(results[is_near] - slope * sizes[is_near])
    return Extremes(_largest(results), offset, slope)


def _largest(numbers: Any) -> float:
    """Returns the largest of some numbers, those that are NaN left out; at least zero."""
    return float(np.nanmax(numbers, initial=0.0))
