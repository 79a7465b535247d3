"""Loss scales as plain dictionaries in the layout of torch's `GradScaler.state_dict()`."""

import dataclasses
from collections.abc import Mapping

from jmp._messages import described, wrong
from jmp.loss_scaling._base import LossScale, concrete_number
from jmp.loss_scaling._dynamic import DynamicLossScale
from jmp.loss_scaling._no_op import NoOpLossScale
from jmp.loss_scaling._static import StaticLossScale

CALLER = "from_torch_state_dict"
_STATE_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


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
