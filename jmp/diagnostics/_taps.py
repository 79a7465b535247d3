"""Counts of a program's activations and of their gradients, taken while it is differentiated.

Products, reductions and exponentials are followed by a *tap*: the identity, whose backward pass
hands the cotangent on and gives the counts of both, value and cotangent, as the gradient of a
*probe*, an argument of zeros. Turns of loops, the branch that is taken, remat, jit and shardings
then come out right by themselves, because gradients with respect to one argument add up.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp._calls import vjp_at
from jmp.autocasting._equations import inner_equations
from jmp.diagnostics._histograms import DIGITS, digits, exponents, from_digits, length
from jmp.diagnostics._places import users_line
from jmp.diagnostics._replay import HANDLERS, Site, replay
from jmp.diagnostics._rows import kind_of


class Place(NamedTuple):
    """What taps are merged by: an operation on a source line of a module."""

    path: str
    operation: str
    source: str
    dtype: str


Position = tuple[int, ...]  # of a site, and of the result among those of its equation
Places = dict[Position, Place]
Tap = Callable[[Position, Place, Any], Any]  # (position, place, value) -> value


class Counts(NamedTuple):
    """What `exponents` gives: for parameters, for gradients, for values and cotangents by place."""

    parameters: list[np.ndarray]
    gradients: list[np.ndarray]
    activations: dict[Place, tuple[np.ndarray, np.ndarray]]


def count(closed: Any, arrays: list[Any], positions: list[int], dtype: Any = None) -> Counts:
    """Runs a traced loss of `arrays` and its gradient once, and counts.

    The arrays at `positions` are the parameters. Of the activations those that are stored in
    `dtype` are counted; None for all.
    """
    step, probes = counting_step(closed, arrays, positions, dtype)
    own, gradients, sums = jax.device_get(jax.jit(step)(arrays, probes))
    found = {place: tuple(from_digits(sums[place])) for place in probes}
    return Counts(own, gradients, found)


def counting_step(
    closed: Any, arrays: list[Any], positions: list[int], dtype: Any = None
) -> tuple[Callable[..., Any], dict[Place, jax.Array]]:
    """Returns what `count` compiles, a function of (arrays, probes), and the probes.

    It returns the counts of parameters, those of their gradients, and sums of digits by place.
    """
    places = _places(closed, arrays, positions, dtype)
    probes = {p: jnp.zeros((DIGITS, 2, length(p.dtype)), np.float32) for p in places.values()}

    def loss(*operands: Any) -> Any:
        *arrays, probes = operands

        def tap(position: Position, place: Place, value: Any) -> Any:
            return _tap(value, probes[place]) if position in places else value

        return _tapped(closed, tap, dtype)(*arrays)

    def step(arrays: Any, probes: Any) -> Any:
        *gradients, sums = jax.grad(loss, (*positions, len(arrays)))(*arrays, probes)
        return [exponents(arrays[i]) for i in positions], list(map(exponents, gradients)), sums

    return step, probes


@jax.custom_vjp
def _tap(value: Any, probe: Any) -> Any:
    return value


def _forward(value: Any, probe: Any) -> tuple[Any, Any]:
    # The counts are kept and not the value: a tap makes nothing live longer than it did.
    return value, exponents(value)


def _backward(counted: Any, cotangent: Any) -> tuple[Any, Any]:
    return cotangent, digits(jnp.stack([counted, exponents(cotangent)]))


_tap.defvjp(_forward, _backward)


def _tapped(closed: Any, tap: Tap, dtype: Any) -> Callable[..., Any]:
    """Returns the loss with taps behind what precision reports have rows of, stored in `dtype`.

    What is bound as a whole (a custom derivative, a kernel, shard_map) is tapped at its outputs if
    such an operation stands inside.
    """

    def on_results(site: Site, results: list[Any]) -> list[Any]:
        equation = site.equation
        name = equation.primitive.name
        is_whole = name not in HANDLERS and any(map(kind_of, inner_equations(equation)))
        if kind_of(equation) is None and not is_whole:
            return results
        operation = _jax_compat.name_of(equation) if is_whole else name
        tapped = []
        for index, result in enumerate(results):
            if jnp.issubdtype(result.dtype, jnp.inexact) and dtype in (None, result.dtype):
                place = Place(site.path, operation, users_line(equation), str(result.dtype))
                result = tap((*site.position, index), place, result)
            tapped.append(result)
        return tapped

    return lambda *arrays: replay(closed, arrays, on_results)[0]


def _places(closed: Any, arrays: list[Any], positions: list[int], dtype: Any) -> Places:
    """Returns where the values are that depend on the parameters, in the program's order.

    A tap makes all behind it depend on its probe. Anywhere else it would send a backward pass
    where there is none, and where there may be none, as through a while loop.
    """
    order: Places = {}
    found = set()

    def tap(position: Position, place: Place, value: Any) -> Any:
        @jax.custom_jvp
        def look(value: Any) -> Any:
            return value

        @look.defjvp
        def rule(primals: Any, tangents: Any) -> Any:  # called where there is a tangent
            found.add(position)
            return primals[0], tangents[0]

        order[position] = place
        return look(value)

    loss = _tapped(closed, tap, dtype)
    jax.eval_shape(lambda *arrays: vjp_at(loss, arrays, positions)[0], *arrays)
    return {position: place for position, place in order.items() if position in found}
