"""A loss scale that stays what it is."""

import dataclasses
from typing import TypeVar

import jax
from jax.typing import ArrayLike

from jmp.loss_scaling._base import LossScale, static_scale
from jmp.trees import register_for_export

T = TypeVar("T")


@register_for_export
@jax.tree_util.register_dataclass
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

    loss_scale: float = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_scale", static_scale(self.loss_scale))

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
