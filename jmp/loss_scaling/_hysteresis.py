"""A dynamic loss scale that tolerates a few overflows before it backs off."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from jmp.loss_scaling import _base
from jmp.loss_scaling._dynamic import DynamicLossScale


@_base.register_state
@dataclasses.dataclass(frozen=True)
class HysteresisLossScale(DynamicLossScale):
    """A dynamic loss scale that backs off only after `hysteresis` overflows since it last grew.

    Follows Megatron-LM's `DynamicGradScaler`: each overflow lowers `tolerance` by one and restarts
    the count of finite steps; at zero, each further overflow backs off; growth after `period`
    finite steps restores it. DeepSpeed's `DynamicLossScaler` does so by default, and grows one step
    later; with `consecutive_hysteresis` it restores the tolerance after every finite step, which
    this class does not.
    The step itself is skipped on every overflow.

    Attributes, in addition to `DynamicLossScale`'s:
      hysteresis: overflows until the scale backs off, at least 1; with 1 this is
        `DynamicLossScale`.
      tolerance: int32 scalar, a leaf: how many of them are left. A value from a checkpoint that
        is not between 0 and `hysteresis` counts as the nearer of the two.

    Raises: as `DynamicLossScale`; ValueError for a hysteresis below 1.

    >>> scale = HysteresisLossScale(1024.0, hysteresis=2)
    >>> once = scale.adjust(False)
    >>> float(once.loss_scale), float(once.adjust(False).loss_scale)
    (1024.0, 512.0)
    """

    hysteresis: int = dataclasses.field(default=2, kw_only=True)
    tolerance: Any = dataclasses.field(
        default=None, kw_only=True, metadata={"leaf": jnp.dtype("int32")}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        hysteresis = _base.plain_number(
            self.hysteresis,
            "hysteresis",
            lambda n: 1 <= n < 2**31 and n.is_integer(),
            "a whole number of overflows, at least 1 and fewer than 2**31",
        )
        left = hysteresis if self.tolerance is None else self.tolerance
        vars(self).update(hysteresis=int(hysteresis), tolerance=_base.step_count(left, "tolerance"))

    def adjust(self, grads_finite: ArrayLike) -> "HysteresisLossScale":
        """Returns the scale for the next step; an overflow may leave it unchanged.

        Raises: as `DynamicLossScale.adjust`.
        """
        finite = _base.finite_flag(grads_finite, self.loss_scale)
        adjusted = super().adjust(finite)
        grew = finite & (adjusted.counter == 0)  # after a finite step the count is at least one
        tolerance = jnp.clip(self.tolerance, 0, self.hysteresis)
        left = jnp.where(finite, tolerance, jnp.maximum(tolerance - 1, 0))
        is_tolerated = ~finite & (left > 0)
        return _base.replace_leaves(
            self,
            loss_scale=jnp.where(is_tolerated, self.unchanged, adjusted.loss_scale),
            counter=adjusted.counter,
            tolerance=jnp.where(grew, self.hysteresis, left),
        )
