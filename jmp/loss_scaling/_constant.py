"""Loss scales that never change: none, for float32 and bfloat16, and a constant one."""

import dataclasses
import math
from typing import TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from jmp._messages import check_number
from jmp.loss_scaling._base import LossScale, register_state, within_scales

T = TypeVar("T")


@register_state
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(LossScale):
    """Scales by one: trees come back as the very same object. A pytree without leaves.

    >>> NoOpLossScale().scale(3.0)
    3.0
    """

    @property
    def loss_scale(self) -> float:
        """Always 1.0."""
        return 1.0

    def scale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> "NoOpLossScale":
        """Returns itself, whatever the flag is."""
        del grads_finite
        return self


@register_state
@dataclasses.dataclass(frozen=True)
class StaticLossScale(LossScale):
    """Scales by a constant, such as 8, 32, 128 or 512 (Micikevicius et al. 2018, section 3.2).

    A pytree without leaves: the constant is part of the compiled program, and a scale that jit
    returns equals the one that it was given.

    Attributes:
      loss_scale: the constant, a Python float, brought into [2**-126, 2**126], where its float32
        reciprocal exists. Zero is accepted here, as in DeepMind's class, and refused at its first
        use: it would make every gradient zero, and unscaling divides by it.

    Raises:
      TypeError: not one number, or a tracer (its value must be known when the step is compiled).
      ValueError: negative, infinite or NaN; zero at its first use.

    >>> scale = StaticLossScale(512)
    >>> float(scale.unscale(scale.scale(jnp.float16(3.0))))
    3.0
    """

    loss_scale: float

    def __post_init__(self) -> None:
        if isinstance(self.loss_scale, jax.core.Tracer):
            raise TypeError(
                "StaticLossScale got a traced value; expected a plain number, which is part of the "
                "compiled program. A scale that changes from step to step is a DynamicLossScale."
            )
        expected = "a finite number that is not negative, such as 512"
        is_right = lambda number: 0 <= number < math.inf
        number = check_number(self.loss_scale, "StaticLossScale", expected, is_right)
        in_float32 = float(np.float32(within_scales(number)))  # it multiplies in float32
        object.__setattr__(self, "loss_scale", in_float32 if number else 0.0)

    def check_not_zero(self) -> None:
        """Raises ValueError for a scale of zero, by which nothing can be scaled."""
        if self.loss_scale == 0:
            raise ValueError(
                "StaticLossScale(0) multiplies every gradient by zero, and unscaling divides by "
                "it; expected a positive number such as 512. To switch loss scaling off use "
                "NoOpLossScale()."
            )

    def scale(self, tree: T) -> T:
        """Multiplies floating and complex leaves by the constant, in at least float32.

        Raises: ValueError for a scale of zero.
        """
        self.check_not_zero()
        return super().scale(tree)

    def unscale(self, tree: T) -> T:
        """Casts floating leaves to at least float32 and divides them by the constant.

        Raises: ValueError for a scale of zero.
        """
        self.check_not_zero()
        return super().unscale(tree)

    def adjust(self, grads_finite: ArrayLike) -> "StaticLossScale":
        """Returns itself, whatever the flag is."""
        del grads_finite
        return self
