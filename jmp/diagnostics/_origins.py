"""Who made a value non-finite: origins, and how operations hand them on.

A value is *held* with its state (finite, infinite, NaN) and its *origin*: the operation that turned
finite inputs into it, or the argument or constant that was given. Origins follow the data, so that
an infinity that a `where` discards has no origin.
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
    """Who made a value non-finite."""

    # In the order of execution; `math.inf` for an infinity that was given, which is the origin only
    # if there is no other.
    order: float
    # "operation"; "whole", a loop or kernel inside which none was found; "argument", "constant".
    kind: str
    name: str  # the primitive; of an argument its path
    dtype: str  # of what came out, and so is the state
    state: int
    params: dict[str, Any]  # of the primitive
    place: Place
    operands: tuple[Operand, ...]  # the floating ones, or what was given itself
    given: tuple[str, ...] = ()  # arguments whose infinities it read

    @property
    def is_nan(self) -> bool:
        """Whether it made a NaN, and no infinity."""
        return self.state == NAN

    @property
    def may_be_meant(self) -> bool:
        """Whether this is an infinity that was given, such as a mask."""
        return self.order == math.inf


class Held(NamedTuple):
    """A value, its state, and the origin that made it non-finite: None, if it is finite."""

    value: Any
    state: int = FINITE
    origin: Origin | None = None


def handed_on(
    call: Call | None, inputs: Sequence[Held], state: int, is_product: bool = False
) -> Origin | None:
    """Returns the earliest origin that an operation hands on; None if it is the origin itself.

    `state` is the worst of its results. `call` runs it again; None if that would have effects. With
    the inputs of one origin left as they are and all others tamed it shows who counts: a `where`
    reads one side. No mask is multiplied by weights, so an infinity that was given and that a
    product reads is the origin itself.
    """
    origins = {x.origin.order: x.origin for x in inputs if x.origin is not None}
    first = earliest(origins.values())
    if first is None or call is None:
        return first
    if first.may_be_meant:
        # inf - inf and 0 * inf; or infinite also where nothing was given, as exp under a mask.
        came_as_nan = any(x.state == NAN for x in inputs if x.origin is first)
        if came_as_nan or (is_product and is_finite_of(call, inputs)):
            return first
        is_to_blame = state == NAN or not is_finite_of(call, inputs)
        return None if is_to_blame else first
    if len(origins) == 1:
        return first
    count = (o for o in origins.values() if not is_finite_of(call, inputs, kept=o.order))
    return earliest(count) or first


def is_finite_of(call: Call, inputs: Sequence[Held], kept: float | None = None) -> bool:
    """Returns whether results are finite with all inputs tamed that are not, but those of one."""
    values = (tamed(x.value) if x.origin and x.origin.order != kept else x.value for x in inputs)
    return not any(map(state_of, call(*values)))


def earliest(origins: Iterable[Origin | None]) -> Origin | None:
    """Returns the first in the order of execution; None if there is none."""
    return min(filter(None, origins), key=lambda origin: origin.order, default=None)
