"""Loss scales named for the systems whose defaults people know.

Each takes `enabled`: False gives a `NoOpLossScale`, so that one switch turns scaling off and the
rest of the script stays as it is.
"""

from jmp.loss_scaling._base import LossScale
from jmp.loss_scaling._dynamic import DynamicLossScale
from jmp.loss_scaling._no_op import NoOpLossScale


def deepmind_loss_scale(enabled: bool = True) -> LossScale:
    """DeepMind jmp's defaults: start at 2**15, factor 2, period 2000, floor 1.

    >>> deepmind_loss_scale().period
    2000
    """
    return DynamicLossScale(2.0**15) if enabled else NoOpLossScale()


def torch_loss_scale(enabled: bool = True) -> LossScale:
    """`torch.amp.GradScaler`'s defaults: start at 2**16, growth 2, backoff 0.5, interval 2000.

    torch has no floor; ours is 2**-126, the smallest scale with a float32 reciprocal.

    >>> float(torch_loss_scale().loss_scale)
    65536.0
    """
    return DynamicLossScale(2.0**16, min_loss_scale=0.0) if enabled else NoOpLossScale()


def apex_loss_scale(enabled: bool = True) -> LossScale:
    """Apex amp's defaults: as torch's, with a ceiling of 2**24.

    >>> apex_loss_scale().max_loss_scale == 2.0**24
    True
    """
    if not enabled:
        return NoOpLossScale()
    return DynamicLossScale(2.0**16, min_loss_scale=0.0, max_loss_scale=2.0**24)


def fastai_loss_scale(enabled: bool = True) -> LossScale:
    """The defaults of fastai's `MixedPrecision` callback: start at 2**24, factor 2, wait 500.

    Its parameter is called `max_loss_scale`, yet 2**24 is where it *starts*: the first steps are
    expected to overflow until the scale has come down, and nothing stops it from growing past that
    start later. Here an overflow resets the count of finite steps, so that growth needs 500 finite
    steps in a row; fastai's count goes on over a skipped step.

    >>> float(fastai_loss_scale().loss_scale) == 2.0**24, fastai_loss_scale().period
    (True, 500)
    """
    if not enabled:
        return NoOpLossScale()
    return DynamicLossScale(2.0**24, period=500, min_loss_scale=0.0)
