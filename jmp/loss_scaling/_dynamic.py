"""The dynamic loss scale: back off on overflow, grow after a period of finite steps."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmp.loss_scaling import _base
from jmp.loss_scaling._base import LARGEST_SCALE, LossScale

_LARGEST_FACTOR = 2.0**127  # the largest power of two that float32 has
_LARGEST_COUNT = 2**31 - 1  # of int32
# A scale that a checkpoint brought as NaN, zero or the like goes on from here: if it is too large,
# a few steps are skipped; if it is too small, gradients underflow for thousands of steps.
_RESTART = 2.0**15
_GROWTH = (
    "a finite number above 1, such as 2: the scale is multiplied by it after enough finite steps"
)
_BACKOFF = "a number between 0 and 1, such as 0.5: the scale is multiplied by it after an overflow"


@_base.register_state
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A loss scale that comes down after an overflow and grows after `period` finite steps.

    After an overflow the scale is multiplied by the backoff factor and the count restarts; after
    `period` finite steps in a row it is multiplied by the growth factor and the count restarts::

        finite and count + 1 == period:   scale = min(scale * growth, ceiling);  count = 0
        finite:                           count = count + 1
        not finite:                       scale = max(scale * backoff, floor);   count = 0

    (Micikevicius et al. 2018, section 3.2; arguments in the order of DeepMind's `jmp`.)

    The scale is float32. With factors that are powers of two it is exact; with others it is rounded
    at each change, and drifts by units in the last place from torch's, which is computed in double.

    Values that were restored from a checkpoint are checked by the next `adjust`. It sets a scale
    beyond the floor or the ceiling to that bound; one that is NaN, infinite, zero or negative to
    2**15, the start of a new scale; and a negative count to zero. The count stops at 2**31 - 1.

    Attributes:
      loss_scale: float32 scalar, a leaf. Brought into [min_loss_scale, max_loss_scale].
      counter: int32 scalar, a leaf: finite steps since the last change.
      period: finite steps between two growths, at least 1; above 2**31 - 1, such as infinity, the
        scale never grows.
      factor: growth, and the inverse of the backoff, unless these are given on their own. Above 1.
      min_loss_scale: floor; 0 means the smallest there is, 2**-126.
      growth_factor: replaces `factor` for growth; above 1.
      backoff_factor: replaces 1 / `factor` for backoff; between 0 and 1.
      max_loss_scale: ceiling, at most 2**126.

    Raises:
      ValueError: a scale that is zero, negative or not finite; a period below 1; a factor not above
        1; a backoff not between 0 and 1; a floor above the ceiling.
      TypeError: a tracer instead of a plain number (only the two leaves may be traced).

    >>> scale = DynamicLossScale(2.0**15)
    >>> float(scale.adjust(False).loss_scale), float(scale.adjust(True).loss_scale)
    (16384.0, 32768.0)
    """

    loss_scale: Any = dataclasses.field(default=2.0**15, metadata={"leaf": jnp.dtype("float32")})
    counter: Any = dataclasses.field(default=0, metadata={"leaf": jnp.dtype("int32")})
    period: float = 2000
    factor: float = 2
    min_loss_scale: float = 1.0
    growth_factor: float | None = dataclasses.field(default=None, kw_only=True)
    backoff_factor: float | None = dataclasses.field(default=None, kw_only=True)
    max_loss_scale: float = dataclasses.field(default=LARGEST_SCALE, kw_only=True)

    def __post_init__(self) -> None:
        own = vars(self)  # the fields of a frozen class
        own["period"] = _base.plain_number(
            self.period, "period", lambda n: n >= 1, "a number of steps of at least 1"
        )
        own["factor"] = _growth(self.factor, "factor")
        floor = own["min_loss_scale"] = _base.scale_bound(self.min_loss_scale, "min_loss_scale")
        ceiling = _base.scale_bound(self.max_loss_scale, "max_loss_scale")
        if self.max_loss_scale == 0:
            raise ValueError("max_loss_scale got 0; expected a ceiling above zero.")
        if floor > ceiling:
            raise ValueError(
                f"min_loss_scale {floor} lies above max_loss_scale {ceiling}; expected a floor "
                "below the ceiling."
            )
        own["max_loss_scale"] = ceiling
        if self.growth_factor is not None:
            own["growth_factor"] = _growth(self.growth_factor, "growth_factor")
        if self.backoff_factor is not None:
            own["backoff_factor"] = _base.plain_number(
                self.backoff_factor, "backoff_factor", lambda n: 0 < n < 1, _BACKOFF
            )
        own["loss_scale"] = _base.dynamic_scale(self.loss_scale, floor, ceiling)
        own["counter"] = _base.step_count(self.counter, "counter")

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """Returns the scale for the next step: grown, backed off or unchanged.

        Args:
          grads_finite: bool scalar; under vmap one for each scale.

        Raises: TypeError for a flag that is not boolean, ValueError for one of another shape.
        """
        finite = _base.finite_flag(grads_finite, self.loss_scale)
        counted = jnp.clip(self.counter, 0, _LARGEST_COUNT - 1) + 1
        whole_period = math.ceil(min(self.period, _LARGEST_COUNT))
        grow = finite & (counted >= whole_period) & (self.period <= _LARGEST_COUNT)
        after_finite = jnp.where(grow, self._grown(), self.unchanged)
        return _base.replace_leaves(
            self,
            loss_scale=jnp.where(finite, after_finite, self._backed_off()),
            counter=jnp.where(finite & ~grow, counted, 0),
        )

    @property
    def unchanged(self) -> jax.Array:
        """The scale as the next step uses it, if this one changes nothing."""
        return self._clipped(self._sane)

    @property
    def _sane(self) -> ArrayLike:
        """The scale, or that of a new one if a checkpoint brought no valid scale."""
        is_sane = jnp.isfinite(self.loss_scale) & (self.loss_scale > 0)
        return jnp.where(is_sane, self.loss_scale, _RESTART)

    def _grown(self) -> jax.Array:
        factor = self.factor if self.growth_factor is None else self.growth_factor
        return self._clipped(self._sane * min(factor, _LARGEST_FACTOR))

    def _backed_off(self) -> jax.Array:
        if self.backoff_factor is None:
            return self._clipped(self._sane / min(self.factor, _LARGEST_FACTOR))
        return self._clipped(self._sane * self.backoff_factor)

    def _clipped(self, scale: ArrayLike) -> jax.Array:
        # Infinity, from growing near float32's maximum, comes back to the ceiling.
        return jnp.clip(scale, self.min_loss_scale, self.max_loss_scale)


def _growth(value: Any, name: str) -> float:
    return _base.plain_number(value, name, lambda n: 1 < n < math.inf, _GROWTH)
