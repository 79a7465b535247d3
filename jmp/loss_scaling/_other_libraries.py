"""The defaults of other libraries' loss scales.

Each function takes `enabled`: False gives a `NoOpLossScale`, so that one switch turns
scaling off and the rest of the script stays as it is.
"""

from jmp._messages import wrong
from jmp.loss_scaling._base import LossScale
from jmp.loss_scaling._dynamic import DynamicLossScale
from jmp.loss_scaling._no_op import NoOpLossScale


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
