"""Ways through a jaxpr: a walk over its equations, and what is followed through them.

  - `walk` yields the equations at any depth, each with those around it and its number of turns;
  - a `Propagation` follows what is known of values forwards, from the inputs to the outputs. The
    turns of a loop are followed until nothing new is found.

`_facts.reaching` goes backwards, through graphs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jmp import _jax_compat
from jmp.autocasting._numbers import length_of

T = TypeVar("T")


class Visit(NamedTuple):
    """An equation on a walk."""

    equation: JaxprEqn
    around: tuple[JaxprEqn, ...]  # the equations that hold it, the outermost first
    times: int  # how often it runs: once for each turn of the scans around it

    @property
    def is_innermost(self) -> bool:
        """Whether the equation holds no functions."""
        return not _jax_compat.holds_functions(self.equation)


def walk(jaxpr: Jaxpr, around: tuple[JaxprEqn, ...] = (), times: int = 1) -> Iterator[Visit]:
    """Yields the equations of an open jaxpr at any depth, each before those inside it.

    >>> def three_sines(x):
    ...     return -jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), x, None, length=3)[0]
    >>> for visit in walk(jax.make_jaxpr(three_sines)(1.0).jaxpr):
    ...     print(len(visit.around), visit.equation.primitive.name, visit.times)
    0 scan 1
    1 sin 3
    0 neg 1
    """
    for equation in jaxpr.eqns:
        yield Visit(equation, around, times)
        yield from walk_inside(equation, around, times)


def walk_inside(
    equation: JaxprEqn, around: tuple[JaxprEqn, ...] = (), times: int = 1
) -> Iterator[Visit]:
    """Yields the equations inside one, at any depth; of itself what is around it and its times."""
    for jaxpr in _jax_compat.inner_jaxprs(equation):
        yield from walk(jaxpr, (*around, equation), times * turns_of(equation))


def inner_equations(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields the equations inside one, at any depth."""
    return (visit.equation for visit in walk_inside(equation))


def scope_of(equations: Sequence[JaxprEqn], outer: Any) -> Any:
    """Returns the name stack of the last of equations that hold one another, the outermost first.

    Args:
      outer: the stack around the first.
    """
    return functools.reduce(lambda stack, e: stack + e.source_info.name_stack, equations, outer)


def turns_of(equation: JaxprEqn) -> int:
    """Returns how often the inside of an equation runs: of a scan its length, of any other once."""
    is_scan = equation.primitive.name == "scan"
    return length_of(_jax_compat.Scan.of(equation.params).length) if is_scan else 1


# Follows what is known of an equation's operands through the functions inside it: returns what is
# known of the results, or None if it holds no function that it calls.
WayInside = Callable[[], list[T] | None]
# Given an equation, the equations that hold it, the outermost first, what is known of its operands,
# and a way inside it, returns what is known of its results.
Transfer = Callable[[JaxprEqn, tuple[JaxprEqn, ...], list[T], WayInside[T]], Sequence[T]]
# Joins what is known of a value that is one of several: the results of branches, or a carry after a
# turn and before it. The second argument has what decides which: the index of a branch, or the
# condition of a loop; it is empty for a scan. Turns are followed until this finds nothing new.
Join = Callable[[Sequence[T], Sequence[T]], T]
# Returns what is known of a literal, or of an array that a jaxpr holds by itself.
OfConstant = Callable[[Any], T]


@dataclasses.dataclass(frozen=True)
class Propagation(Generic[T]):
    """An analysis that follows what is known of values forwards through jaxprs.

    Calls, branches, scans and while loops are gone into where `transfer` asks for it. Any other
    equation that holds functions counts as one that holds none.

    Attributes:
      transfer: see `Transfer`.
      join: see `Join`.
      of_constant: see `OfConstant`.

    Which outputs depend on the first input:

    >>> def depends(equation, around, operands, inside):
    ...     return inside() or [any(operands)] * len(equation.outvars)
    >>> def either(choices, deciding):
    ...     return any((*choices, *deciding))
    >>> def sums(a, b, c):
    ...     return jax.lax.fori_loop(0, 4, lambda _, carry: (carry[0], sum(carry)), (a, b)), c
    >>> closed = jax.make_jaxpr(sums)(1.0, 2.0, 3.0)
    >>> Propagation(depends, either, lambda atom: False).through(closed, [True, False, False])
    [True, True, False]
    """

    transfer: Transfer[T]
    join: Join[T]
    of_constant: OfConstant[T]

    def through(
        self, jaxpr: Any, inputs: Sequence[T], around: tuple[JaxprEqn, ...] = ()
    ) -> list[T]:
        """Returns what is known of the outputs of a jaxpr.

        Args:
          jaxpr: open or closed.
          inputs: what is known of each input, constants of a closed jaxpr left out.
          around: the equations that hold it, the outermost first.
        """
        inner, _ = _jax_compat.open_jaxpr(jaxpr)
        known = dict(zip(inner.invars, inputs, strict=True))

        def read(atom: Any) -> T:
            is_constant = isinstance(atom, Literal) or atom not in known
            return self.of_constant(atom) if is_constant else known[atom]

        for equation in inner.eqns:
            operands = list(map(read, equation.invars))
            inside = functools.partial(self._inside, equation, around, operands)
            results = self.transfer(equation, around, operands, inside)
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, inner.outvars))

    def through_while(
        self, equation: JaxprEqn, operands: Sequence[T], around: tuple[JaxprEqn, ...] = ()
    ) -> tuple[T, list[T]]:
        """Returns what is known of a while loop's condition, and of its carries at any turn.

        It does not count for the carries what decides the turns.
        """
        loop = _jax_compat.While.of(equation.params)
        asked, closed, carries = loop.split(operands)
        within = (*around, equation)
        carries, _ = self._after_turns(loop.body, closed, carries, [], within)
        (decides,) = self.through(loop.condition, [*asked, *carries], within)
        return decides, carries

    def _inside(
        self, equation: JaxprEqn, around: tuple[JaxprEqn, ...], operands: list[T]
    ) -> list[T] | None:
        within = (*around, equation)
        name = equation.primitive.name
        if name == "while":
            decides, carries = self.through_while(equation, operands, around)
            return [self.join([carry], [decides]) for carry in carries]
        if name == "scan":
            scan = _jax_compat.Scan.of(equation.params)
            carries, results = self._after_turns(scan.body, *scan.split(operands), within)
            return [*carries, *results[scan.n_carry :]]
        if name == "cond":
            index, *arguments = operands
            branches = _jax_compat.branches(equation.params)
            results_of_each = (self.through(branch, arguments, within) for branch in branches)
            return [self.join(choices, [index]) for choices in zip(*results_of_each, strict=True)]
        for function in _jax_compat.inner_jaxprs(equation):
            sizes = len(function.invars), len(function.outvars)
            if sizes == (len(operands), len(equation.outvars)):  # called once, as a jit is
                return self.through(function, operands, within)
        return None

    def _after_turns(
        self,
        body: Any,
        constants: list[T],
        carries: list[T],
        rows: list[T],
        around: tuple[JaxprEqn, ...],
    ) -> tuple[list[T], list[T]]:
        """Returns what is known of a loop's carries at any turn, and of all results of a turn."""
        while True:
            results = self.through(body, [*constants, *carries, *rows], around)
            pairs = zip(results, carries, strict=False)
            again = [self.join([after, before], []) for after, before in pairs]
            if again == carries:
                return carries, results
            carries = again
