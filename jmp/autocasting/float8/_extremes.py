"""The elementwise functions between float8 products, and their extremes.

A function is computed of every bfloat16 number, in float32, and with each step rounded to bfloat16,
as a plan may compute it. If large numbers cancel, as in `(x + 1000) - 1000`, results and slopes
differ.
"""

import concurrent.futures
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value
from jmp.dtypes import FLOAT32


class Extremes(NamedTuple):
    """Bounds of a function f of one number x: |f(x)| <= min(largest, offset + slope |x|)."""

    largest: float
    offset: float  # |f(0)|, or more if f jumps, as a step does
    slope: float  # no magnitude of f's derivative exceeds it


class ScalarEquation(NamedTuple):
    """One equation of a function of one number. It can be hashed."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    # Of each operand the index among the values so far, of which 0 is the argument; or a constant.
    reads: tuple[int | tuple[float | None], ...]


class FunctionOfProduct(NamedTuple):
    """How a value is computed, number by number, from one product's result."""

    product: Value
    added: tuple[Value, ...]  # vectors that are added to the result first, such as a bias
    argument: Value  # the sum
    nodes: tuple[Node, ...]  # that compute the value from the argument, in order

    @property
    def extremes(self) -> Extremes:
        """The extremes of the function of the argument."""
        return extremes_of(self.equations())

    def equations(self) -> tuple[ScalarEquation, ...]:
        """Returns the nodes as equations, without those that reshape, which keep their order."""
        slots = {self.argument: 0}
        equations: list[ScalarEquation] = []
        for node in self.nodes:
            if node.rule.reshapes:
                slots[node.outputs[0]] = slots[node.inputs[0]]
                continue
            reads = tuple(slots[v] if v in slots else (v.constant,) for v in node.inputs)
            params = tuple(sorted(node.params.items()))
            equations.append(ScalarEquation(node.equation.primitive, params, reads))
            slots[node.outputs[0]] = len(equations)
        return tuple(equations)


@functools.lru_cache(maxsize=256)
def extremes_of(equations: tuple[ScalarEquation, ...]) -> Extremes:
    """Returns the extremes of a function, whose result is the last value of its equations.

    Numbers for which the function or its slope is NaN are left out: a result, or a cotangent, is
    NaN too.
    """
    numbers = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).astype(FLOAT32)
    numbers = numbers[np.isfinite(numbers)]
    # In a thread of its own nothing is being traced, and no mesh of other devices is set.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        run = functools.partial(_results_and_slopes, equations, numbers)
        pairs = list(thread.map(run, (False, True)))
    results, slopes = (np.fmax(*map(np.abs, both)) for both in zip(*pairs, strict=True))
    sizes = np.abs(numbers)
    is_far, is_near = (sizes > 2.0**64) & (sizes < 2.0**100), sizes < 2.0**100
    # The slope of a function that jumps often, such as rounding, does not say how it grows.
    growth = _largest_number(results[is_far] / sizes[is_far])
    slope = max(_largest_number(slopes), growth)
    with np.errstate(invalid="ignore"):  # infinite, the slope of what is not finite
        offset = _largest_number(results[is_near] - slope * sizes[is_near])
    return Extremes(_largest_number(results), offset, slope)


def _results_and_slopes(
    equations: Sequence[ScalarEquation], numbers: Any, is_rounded: bool
) -> tuple[Any, Any]:
    """Returns a function of numbers, and its slopes.

    Args:
      is_rounded: whether the result of each equation is rounded to bfloat16.
    """

    def function(argument: Any) -> Any:
        values = [argument]
        for primitive, params, reads in equations:
            operands = [
                values[x] if isinstance(x, int) else np.full(numbers.shape, x[0], FLOAT32)
                for x in reads
            ]
            (value,) = _jax_compat.bind(primitive, operands, dict(params))
            is_rounded_here = is_rounded and value.dtype == FLOAT32
            values.append(lax.reduce_precision(value, 8, 7) if is_rounded_here else value)
        return values[-1]

    # NaN is expected.
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        return jax.jvp(function, (numbers,), (np.ones_like(numbers),))


def _largest_number(numbers: Any) -> float:
    """Returns the largest of some numbers, without those that are NaN; at least zero."""
    return float(np.nanmax(numbers, initial=0.0))
