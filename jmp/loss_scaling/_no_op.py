"""A loss scale that does nothing: for float32 and bfloat16, or to switch scaling off."""

import dataclasses
from typing import TypeVar

import jax
from jax.typing import ArrayLike

from jmp.loss_scaling._base import LossScale
from jmp.trees import register_for_export

T = TypeVar("T")


@register_for_export
@jax.tree_util.register_dataclass
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
