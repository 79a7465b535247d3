"""Atomic steps: what a training step changes moves together with the parameters, or not at all."""

from typing import Any, TypeVar

from jmp import transforms
from jmp.loss_scaling import LossScale, NoOpLossScale
from jmp.trees import select_tree

T = TypeVar("T")


def loss_scale_in(opt_state: Any) -> LossScale:
    """Returns the loss scale in force inside an optimizer's state; a no-op if there is none."""
    scaling = transforms.loss_scale_state(opt_state)
    return NoOpLossScale() if scaling is None else scaling.loss_scale


def keep_if_skipped(opt_state: Any, after: T, before: T) -> T:
    """Returns `after`, or `before` if the optimizer has skipped this step.

    Args:
      opt_state: the optimizer's state after the step.
      after, before: what the step would have changed beside the parameters: statistics, counts.
    """
    scaling = transforms.loss_scale_state(opt_state)
    if scaling is None or isinstance(scaling.loss_scale, NoOpLossScale):
        return after
    return select_tree(scaling.grads_finite, after, before)
