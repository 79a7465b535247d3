"""The elementwise functions between float8 products, and their extremes.

A function is computed of every bfloat16 number, in float32, and with each step rounded to bfloat16,
as a plan may compute it. If large numbers cancel, as in `(x + 1000) - 1000`, results and slopes
differ.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Hashable
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


# The extremes of this process, by function. A model has few functions, such as gelu.
_FOUND: dict[Hashable, Extremes] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionOfProduct:
    """How a value is computed, number by number, from one product's result.

    Attributes:
      product: the result.
      added: vectors that are added to it first, such as a bias.
      argument: the sum.
      nodes: what computes the value from the argument, in program order.
    """

    product: Value
    added: tuple[Value, ...]
    argument: Value
    nodes: tuple[Node, ...] = ()

    @property
    def extremes(self) -> Extremes:
        """The extremes of the function of the argument, which are found once for equal functions.

        Numbers for which the function or its slope is NaN are left out: a result, or a cotangent,
        is NaN too.
        """
        if self._key not in _FOUND:
            _FOUND[self._key] = self._found_extremes()
        return _FOUND[self._key]

    @functools.cached_property
    def _key(self) -> Hashable:
        """The function, without the names of its values: layers that are alike have one."""
        places = {self.argument: 0}
        equations: list[Hashable] = []
        for node in self.nodes:
            reads = tuple((places.get(value), value.constant) for value in node.inputs)
            params = tuple(sorted(node.params.items()))
            equations.append((node.equation.primitive, node.rule.reshapes, params, reads))
            places[node.outputs[0]] = len(equations)
        return tuple(equations)

    def _found_extremes(self) -> Extremes:
        numbers = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).astype(FLOAT32)
        numbers = numbers[np.isfinite(numbers)]
        # In a thread of its own nothing is being traced, and no mesh of other devices is set.
        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
            run = functools.partial(self._results_and_slopes, numbers)
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

    def _results_and_slopes(self, numbers: Any, is_rounded: bool) -> tuple[Any, Any]:
        """Returns the function of numbers, and its slopes.

        Args:
          is_rounded: whether the result of each node is rounded to bfloat16.
        """

        def function(argument: Any) -> Any:
            values, result = {self.argument: argument}, argument
            read = lambda x: values[x] if x in values else np.full_like(numbers, x.constant)
            for node in self.nodes:
                operands = list(map(read, node.inputs))
                if node.rule.reshapes:  # which keeps the numbers in their order
                    (result,) = operands
                else:
                    (result,) = _jax_compat.bind(node.equation.primitive, operands, node.params)
                    if is_rounded and result.dtype == FLOAT32:
                        result = lax.reduce_precision(result, 8, 7)
                values[node.outputs[0]] = result
            return result

        # NaN is expected.
        with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
            return jax.jvp(function, (numbers,), (np.ones_like(numbers),))


def _largest_number(numbers: Any) -> float:
    """Returns the largest of some numbers, without those that are NaN; at least zero."""
    return float(np.nanmax(numbers, initial=0.0))
