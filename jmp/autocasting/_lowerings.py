"""How the planner's own steps are lowered, where a primitive is not bound as it is.

A lowering is a small class with `bind` (`_steps.Lowering`). Passes define others beside themselves.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting._casts import masked
from jmp.autocasting._steps import Environment, Single
from jmp.autocasting._wide_gradients import (
    Parts,
    move_rounded,
    multiply_rounded,
    multiply_to_float32,
)
from jmp.dtypes import FLOAT32


def as_it_is(step: Single) -> Callable[..., list[Any]]:
    """Returns a function of operands that binds a step's primitive."""
    primitive, params = step.node.equation.primitive, step.params
    return lambda operands, params=params: _jax_compat.bind(primitive, operands, params)


@dataclasses.dataclass(frozen=True)
class MaskedSum:
    """A sum with what may be a mask, on its way to a softmax.

    Attributes:
      masks: which operands may be one.
    """

    masks: tuple[int, ...]

    def bind(self, step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
        """Returns the sum, held above -inf where a mask carried it there."""
        results = as_it_is(step)(operands)
        for mask in self.masks:
            others = [x for i, x in enumerate(operands) if i != mask]
            results = [masked(result, operands[mask], *others) for result in results]
        return results


@dataclasses.dataclass(frozen=True)
class SentInHalf:
    """A move between devices, of an array that is rounded before."""

    def bind(self, step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
        """Sends from behind a barrier.

        Without it XLA may round what was sent: under jit it reads a constraint on the rounded
        parameter as one on the parameter, and gathers that.
        """
        return as_it_is(step)(lax.optimization_barrier(operands))


@dataclasses.dataclass(frozen=True)
class MovedWithWideGradient:
    """A move of the first operand in half, with a float32 gradient.

    Attributes:
      half: the dtype that it moves.
      parts: see `move_rounded`.
      is_sent: whether devices send it each other.
    """

    half: np.dtype
    parts: Parts | None = None
    is_sent: bool = False

    def bind(self, step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
        """Returns what is moved."""
        move = as_it_is(step)
        run = (lambda arrays: move(lax.optimization_barrier(arrays))) if self.is_sent else move
        return move_rounded(run, operands, step.stores, self.half, self.parts)


@dataclasses.dataclass(frozen=True)
class MultipliedInHalf:
    """A half product that reads, or returns, float32 besides; see `multiply_rounded`."""

    half: np.dtype

    def bind(self, step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
        """Returns the product."""
        if step.node.name != "dot_general":
            return multiply_to_float32(as_it_is(step), operands, step.params)
        result = self.half if step.stores == (self.half,) else FLOAT32
        return multiply_rounded(operands, step.params, self.half, result)
