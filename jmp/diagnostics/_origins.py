"""Who made a value non-finite: origins, and how operations hand them on.

A value is *held* with its state (finite, infinite, NaN) and its *origin*: the operation that turned
finite inputs into it, or the argument or constant that was given. Origins follow the data, so that
an infinity that a `where` throws away blames nobody.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core
from jax.extend.source_info_util import NameStack

from jmp import _jax_compat
from jmp.diagnostics._places import module_path, users_line
from jmp.diagnostics._states import FINITE, NAN, Operand, state_of, tamed

Call = Callable[..., list[Any]]


class Place(NamedTuple):
    """Where an operation stands: the equations from the outermost level down, and what they are."""

    equations: tuple[core.JaxprEqn, ...] = ()
    inside: tuple[str, ...] = ()

    def at(self, equation: core.JaxprEqn) -> "Place":
        """The place of an equation of this level."""
        return Place((*self.equations, equation), self.inside)

    def within(self, label: str) -> "Place":
        """The level inside the equation."""
        return Place(self.equations, (*self.inside, label))

    @property
    def stack(self) -> NameStack:
        """The name scopes of all levels."""
        stacks = (equation.source_info.name_stack for equation in self.equations)
        return sum(stacks, start=_jax_compat.empty_name_stack())

    @property
    def module(self) -> str:
        """The path of modules or name scopes."""
        return module_path(self.stack)

    @property
    def is_backward(self) -> bool:
        """Whether it stands in a backward pass."""
        return _jax_compat.is_backward(self.stack)

    @property
    def source(self) -> str:
        """The user's line; an equation that has none has that of the call."""
        return next(filter(None, map(users_line, reversed(self.equations))), "")


class Origin(NamedTuple):
    """Who made a value non-finite.

    Attributes:
      order: position in the order of execution; `math.inf` for an infinity that was given, which is
        to blame only if nobody else is.
      kind: "operation"; "whole", a loop or kernel inside which nobody was found; "argument" or
        "constant".
      name: the primitive; of an argument its path.
      dtype, state: of what came out.
      params: of the primitive.
      place: where it stands.
      operands: the floating ones, or what was given itself.
    """

    order: float
    kind: str
    name: str
    dtype: str
    state: int
    params: dict[str, Any]
    place: Place
    operands: tuple[Operand, ...]

    @property
    def is_nan(self) -> bool:
        """Whether it made a NaN, and no infinity."""
        return self.state == NAN

    @property
    def may_be_meant(self) -> bool:
        """Whether this is an infinity that was given, such as a mask."""
        return self.order == math.inf


class Held(NamedTuple):
    """A value, its state, and who made it non-finite."""

    value: Any
    state: int = FINITE
    origin: Origin | None = None


def held(
    results: Iterable[Any], states: Iterable[int], origins: Iterable[Origin | None]
) -> list[Held]:
    """Holds results; those that are finite have no origin."""
    return [
        Held(result, state, origin) if state else Held(result)
        for result, state, origin in zip(results, states, origins, strict=True)
    ]


def handed_on(call: Call | None, inputs: Sequence[Held], state: int) -> Origin | None:
    """Returns the earliest origin that an operation hands on; None if it is to blame itself.

    Args:
      call: runs the operation again; None if that would have effects. With the inputs of one
        origin left as they are and all others tamed it shows who counts: a `where` reads one side.
      inputs: of the operation.
      state: the worst state of its results, which is not finite.
    """
    origins = {x.origin.order: x.origin for x in inputs if x.origin is not None}
    first = earliest(origins.values())
    if first is None or call is None:
        return first
    if first.may_be_meant:
        # inf - inf and 0 * inf; or infinite also where nothing was given, as exp under a mask.
        is_to_blame = state == NAN or not is_finite_of(call, inputs)
        return None if is_to_blame else first
    if len(origins) == 1:
        return first
    count = (o for o in origins.values() if not is_finite_of(call, inputs, kept=o.order))
    return earliest(count) or first


def is_finite_of(call: Call, inputs: Sequence[Held], kept: float | None = None) -> bool:
    """Returns whether results are finite with all inputs tamed that are not, but those of one."""
    values = [
        x.value if x.origin is None or x.origin.order == kept else tamed(x.value) for x in inputs
    ]
    return not any(map(state_of, call(*values)))


def earliest(origins: Iterable[Origin | None]) -> Origin | None:
    """Returns the first in the order of execution; None if there is none."""
    return min(filter(None, origins), key=lambda origin: origin.order, default=None)
