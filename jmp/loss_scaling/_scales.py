"""The loss scales: none, for float32 and bfloat16, a constant one, and dynamic ones.

A dynamic scale backs off on overflow and grows after a period of finite steps. Then come those with
the defaults of other libraries. Each of these functions takes `enabled`: False gives a
`NoOpLossScale`, so that one switch turns scaling off and the rest of the script stays.
"""

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp._messages import check_number, wrong
from jmp.loss_scaling import _base
from jmp.loss_scaling._base import LARGEST_SCALE, LossScale, register_state, within_scales

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


# Dynamic scales.

_LARGEST_FACTOR = 2.0**127  # the largest power of two that float32 has
_LARGEST_COUNT = 2**31 - 1  # of int32
# A scale that a checkpoint brought as NaN, zero or the like goes on from here: if it is too large,
# a few steps are skipped; if it is too small, gradients underflow for thousands of steps.
_RESTART = 2.0**15


@register_state
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
        own["period"] = check_number(
            self.period, "period", "a number of steps of at least 1", lambda n: n >= 1
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
            expected = (
                "a number between 0 and 1, such as 0.5: the scale is multiplied by it after an "
                "overflow"
            )
            own["backoff_factor"] = check_number(
                self.backoff_factor, "backoff_factor", expected, lambda n: 0 < n < 1
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
        scale, counter = self._next(finite, ~finite)
        return _base.replace_leaves(self, loss_scale=scale, counter=counter)

    def _next(self, finite: jax.Array, backs_off: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the next scale and count."""
        counted = jnp.clip(self.counter, 0, _LARGEST_COUNT - 1) + 1
        whole_period = math.ceil(min(self.period, _LARGEST_COUNT))
        grows = finite & (counted >= whole_period) & (self.period <= _LARGEST_COUNT)

        is_valid = jnp.isfinite(self.loss_scale) & (self.loss_scale > 0)
        scale = jnp.where(is_valid, self.loss_scale, _RESTART)
        growth = self.factor if self.growth_factor is None else self.growth_factor
        grown = scale * min(growth, _LARGEST_FACTOR)
        if self.backoff_factor is None:
            backed_off = scale / min(self.factor, _LARGEST_FACTOR)
        else:
            backed_off = scale * self.backoff_factor
        changed = jnp.where(grows, grown, jnp.where(backs_off, backed_off, scale))
        # Infinity, from growing near float32's maximum, comes back to the ceiling.
        within_bounds = jnp.clip(changed, self.min_loss_scale, self.max_loss_scale)
        return within_bounds, jnp.where(finite & ~grows, counted, 0)


def _growth(value: Any, name: str) -> float:
    expected = (
        "a finite number above 1, such as 2: the scale is multiplied by it after enough finite "
        "steps"
    )
    return check_number(value, name, expected, lambda n: 1 < n < math.inf)


@register_state
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
        expected = "a whole number of overflows, at least 1 and fewer than 2**31"
        is_right = lambda n: 1 <= n < 2**31 and n % 1 == 0
        hysteresis = check_number(self.hysteresis, "hysteresis", expected, is_right)
        left = hysteresis if self.tolerance is None else self.tolerance
        vars(self).update(hysteresis=int(hysteresis), tolerance=_base.step_count(left, "tolerance"))

    def adjust(self, grads_finite: ArrayLike) -> "HysteresisLossScale":
        """Returns the scale for the next step; an overflow may leave it unchanged.

        Raises: as `DynamicLossScale.adjust`.
        """
        finite = _base.finite_flag(grads_finite, self.loss_scale)
        tolerance = jnp.clip(self.tolerance, 0, self.hysteresis)
        left = jnp.where(finite, tolerance, jnp.maximum(tolerance - 1, 0))
        scale, counter = self._next(finite, ~finite & (left == 0))
        grew = finite & (counter == 0)  # after a finite step the count is at least one
        tolerance = jnp.where(grew, self.hysteresis, left)
        return _base.replace_leaves(self, loss_scale=scale, counter=counter, tolerance=tolerance)


# The defaults of other libraries.


def deepmind_loss_scale(enabled: bool = True) -> LossScale:
    """DeepMind jmp's defaults: start at 2**15, factor 2, period 2000, floor 1.

    Returns: a `DynamicLossScale`, or a `NoOpLossScale` if it is not enabled.
    Raises: TypeError if `enabled` is no bool.

    >>> deepmind_loss_scale().period
    2000
    """
    return _if_enabled(DynamicLossScale(2.0**15), enabled, "deepmind_loss_scale")


def torch_loss_scale(
    enabled: bool = True,
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> LossScale:
    """`torch.amp.GradScaler`'s defaults: start at 2**16, growth 2, backoff 0.5, interval 2000.

    torch has no floor; here it is 2**-126, the smallest scale with a float32 reciprocal.

    Args:
      enabled: whether to scale at all; the others are checked with False too.
      init_scale: the first scale.
      growth_factor: the factor of the scale after `growth_interval` finite steps.
      backoff_factor: the factor of the scale after an overflow.
      growth_interval: a number of finite steps in a row.

    Returns: a `DynamicLossScale`, or a `NoOpLossScale` if it is not enabled.
    Raises: TypeError if `enabled` is no bool; otherwise as `DynamicLossScale`.

    >>> float(torch_loss_scale().loss_scale)
    65536.0
    >>> torch_loss_scale(init_scale=2.0**10, growth_interval=100).period
    100
    """
    scale = DynamicLossScale(
        init_scale,
        period=growth_interval,
        min_loss_scale=0.0,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
    )
    return _if_enabled(scale, enabled, "torch_loss_scale", "init_scale=2.0**16")


def apex_loss_scale(enabled: bool = True) -> LossScale:
    """Apex amp's defaults: as torch's, with a ceiling of 2**24.

    Returns: a `DynamicLossScale`, or a `NoOpLossScale` if it is not enabled.
    Raises: TypeError if `enabled` is no bool.

    >>> apex_loss_scale().max_loss_scale == 2.0**24
    True
    """
    scale = DynamicLossScale(2.0**16, min_loss_scale=0.0, max_loss_scale=2.0**24)
    return _if_enabled(scale, enabled, "apex_loss_scale")


def fastai_loss_scale(enabled: bool = True) -> LossScale:
    """The defaults of fastai's `NonNativeMixedPrecision`: start at 2**24, factor 2, period 500.

    Its parameter is called `max_loss_scale`, yet it *starts* at 2**24: the first steps are expected
    to overflow until the scale has come down, and nothing stops it from growing past that start
    later. Here an overflow resets the count of finite steps, so that growth needs 500 finite steps
    in a row; fastai's count is not reset by a skipped step.

    Returns: a `DynamicLossScale`, or a `NoOpLossScale` if it is not enabled.
    Raises: TypeError if `enabled` is no bool.

    >>> float(fastai_loss_scale().loss_scale) == 2.0**24, fastai_loss_scale().period
    (True, 500)
    """
    scale = DynamicLossScale(2.0**24, period=500, min_loss_scale=0.0)
    return _if_enabled(scale, enabled, "fastai_loss_scale")


def _if_enabled(scale: LossScale, enabled: object, caller: str, keywords: str = "") -> LossScale:
    """Returns the scale, or one that does nothing if it is not enabled.

    Refuses what torch's GradScaler takes first: a device, or a scale.
    """
    if not isinstance(enabled, bool):
        way_out = f"{caller}({keywords})" if keywords else "jmp.DynamicLossScale(2.0**16)"
        expected = f"True or False. For a scale that starts elsewhere write {way_out}"
        raise wrong(TypeError, caller, enabled, expected, name="enabled")
    return scale if enabled else NoOpLossScale()
