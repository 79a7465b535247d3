"""Loss scales as other libraries have them: their defaults, and the state of torch's GradScaler.

Each function of defaults takes `enabled`: False gives a `NoOpLossScale`, so that one switch turns
scaling off and the rest of the script stays as it is.
"""

import dataclasses
from collections.abc import Mapping

from jmp._messages import described, wrong
from jmp.loss_scaling._base import LossScale, concrete_number
from jmp.loss_scaling._dynamic import DynamicLossScale
from jmp.loss_scaling._no_op import NoOpLossScale
from jmp.loss_scaling._static import StaticLossScale

CALLER = "from_torch_state_dict"
_STATE_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


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


def to_torch_state_dict(loss_scale: LossScale) -> dict[str, float | int]:
    """Returns what `torch.amp.GradScaler.load_state_dict` reads; waits for the device.

    A `NoOpLossScale` gives {}, as a disabled GradScaler does. The layout has no place for a floor,
    a ceiling or a hysteresis: `from_torch_state_dict(state, like=...)` brings them back.

    Raises: TypeError for a `StaticLossScale`, which torch does not have.

    >>> to_torch_state_dict(DynamicLossScale(2.0**16))["growth_interval"]
    2000
    """
    if isinstance(loss_scale, NoOpLossScale):
        return {}
    if not isinstance(loss_scale, DynamicLossScale):
        expected = "a dynamic or no-op scale: torch's GradScaler has no static one"
        raise wrong(TypeError, "to_torch_state_dict", loss_scale, expected)
    growth, backoff = loss_scale.growth_factor, loss_scale.backoff_factor
    return {
        "scale": float(loss_scale.loss_scale),
        "growth_factor": float(loss_scale.factor if growth is None else growth),
        "backoff_factor": float(1 / loss_scale.factor if backoff is None else backoff),
        "growth_interval": loss_scale.whole_period,
        "_growth_tracker": int(loss_scale.counter),
    }


def from_torch_state_dict(
    state: Mapping[str, float | int], *, like: LossScale | None = None
) -> LossScale:
    """Returns the loss scale that a GradScaler's `state_dict()` describes.

    Args:
      state: a dictionary in torch's layout; {} is a disabled scaler.
      like: a scale whose class, floor, ceiling and hysteresis the result takes; by default a
        `DynamicLossScale` without floor, as torch's.

    Returns: the scale, brought between the floor and the ceiling of `like`.

    Raises:
      ValueError: keys are missing or unknown, or a scaler could not go on with a value, such
        as a scale that is NaN or not positive, or a negative count.
      TypeError: `state` is no dictionary; `like` is no loss scale, or a static one, which holds no
        such state; or a value is no number.

    >>> from_torch_state_dict(to_torch_state_dict(DynamicLossScale(1024.0))).period
    2000
    """
    if isinstance(like, StaticLossScale) or not (like is None or isinstance(like, LossScale)):
        expected = "a dynamic or no-op scale, or no `like` at all"
        raise wrong(TypeError, CALLER, like, expected, name="like")
    if not isinstance(state, Mapping):
        expected = "the dictionary that a GradScaler's state_dict() returns"
        raise wrong(TypeError, CALLER, state, expected)
    if not state:
        return NoOpLossScale()
    if set(state) != set(_STATE_KEYS):
        raise ValueError(
            f"{CALLER} got the keys {described(sorted(state))}; expected torch "
            f"GradScaler's {list(_STATE_KEYS)}."
        )
    if not isinstance(like, DynamicLossScale):
        like = DynamicLossScale(min_loss_scale=0.0)
    try:
        return dataclasses.replace(
            like,
            loss_scale=concrete_number(state["scale"], "scale"),
            counter=concrete_number(state["_growth_tracker"], "_growth_tracker"),
            period=state["growth_interval"],
            growth_factor=state["growth_factor"],
            backoff_factor=state["backoff_factor"],
        )
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{CALLER} got a state with which no scaler can go on. {error} Or take the state of an "
            "earlier checkpoint."
        ) from error
