"""Loss scales: immutable pytrees that scale a loss, unscale gradients and adjust inside jit.

One strategy a file: no-op, static, dynamic, dynamic with hysteresis. The order of use is
`scaled_value_and_grad`, or `accumulated_value_and_grad` for a batch in parts, then
`jmp.transforms.with_loss_scale`, which unscales, checks, skips and adjusts.
"""

from jmp.loss_scaling._accumulating import accumulated_value_and_grad
from jmp.loss_scaling._base import LossScale
from jmp.loss_scaling._dynamic import DynamicLossScale
from jmp.loss_scaling._gradients import UnscaledLossWarning, scaled_value_and_grad
from jmp.loss_scaling._hysteresis import HysteresisLossScale
from jmp.loss_scaling._no_op import NoOpLossScale
from jmp.loss_scaling._other_libraries import (
    apex_loss_scale,
    deepmind_loss_scale,
    fastai_loss_scale,
    torch_loss_scale,
)
from jmp.loss_scaling._static import StaticLossScale

__all__ = [
    "DynamicLossScale",
    "HysteresisLossScale",
    "LossScale",
    "NoOpLossScale",
    "StaticLossScale",
    "UnscaledLossWarning",
    "accumulated_value_and_grad",
    "apex_loss_scale",
    "deepmind_loss_scale",
    "fastai_loss_scale",
    "scaled_value_and_grad",
    "torch_loss_scale",
]
