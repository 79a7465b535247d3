"""Optax transformations for mixed precision; each wraps any optax optimizer.

`with_loss_scale` takes scaled gradients, unscales and checks them, and skips bad steps.
`with_master_params` keeps float32 masters of half parameters. `mixed_precision` combines them by
policy. `loss_scale_state` and `masters` read an optimizer's state; `replace_loss_scale` gives it
another scale, and `reset_masters` takes masters from parameters that were loaded. `state_shardings`
says on which devices a state belongs. `clip_by_global_norm` is optax's for gradients in shards.
"""

from jmp.transforms._clipping import clip_by_global_norm
from jmp.transforms._flat_masters import FlatMasters
from jmp.transforms._loss_scaling import (
    WithLossScaleState,
    check_order,
    find_loss_scaling,
    with_loss_scale,
)
from jmp.transforms._master_params import WithMasterParamsState, with_master_params
from jmp.transforms._masters import collect_masters, reset_masters
from jmp.transforms._mixed_precision import mixed_precision
from jmp.transforms._placement import state_shardings
from jmp.transforms._replacing import replace_loss_scale
from jmp.transforms._states import check_nothing_changes_masters
from jmp.trees import PyTree

__all__ = [
    "FlatMasters",
    "WithLossScaleState",
    "WithMasterParamsState",
    "check_optimizer_state",
    "clip_by_global_norm",
    "loss_scale_state",
    "masters",
    "mixed_precision",
    "replace_loss_scale",
    "reset_masters",
    "state_shardings",
    "with_loss_scale",
    "with_master_params",
]


def check_optimizer_state(opt_state: PyTree) -> None:
    """Raises ValueError if an optimizer combines these transformations in an order that fails.

    Those orders are: anything before loss scaling in a chain, which would see scaled gradients;
    a transformation with a state after it, which a skip would not stop; loss scaling twice, or
    inside `partition`, `masked`, `apply_if_finite`, `MultiSteps` and the like; anything chained
    after masters, or masters inside `lookahead` and others that change updates. `named_chain` is
    a chain.

    A transformation sees its own part of the state, so neither `init` nor `update` can refuse these
    orders in a training step of your own: call this once, with `tx.init(params)`. `masters` checks
    the orders of masters, `loss_scale_state` all. The adapters call it too. They accept
    transformations after loss scaling, because their steps undo on a skip what these changed.

    Raises: ValueError for such an order; TypeError for an optimizer where its state belongs.

    >>> check_optimizer_state(())
    """
    check_order(opt_state)


def loss_scale_state(opt_state: PyTree) -> WithLossScaleState | None:
    """Returns the `WithLossScaleState` inside an optimizer's state, or None where there is none.

    Raises: as `check_optimizer_state`.

    >>> loss_scale_state(()) is None
    True
    """
    check_optimizer_state(opt_state)
    return find_loss_scaling(opt_state)


def masters(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters that the optimizer updates: the float32 masters.

    Args:
      opt_state: the state of an optimizer, chained, partitioned or masked.
      params: the parameters. Leaves that need no master (float32) are taken from here; half leaves
        without one (frozen groups) come back cast to float32.

    Raises: ValueError if something changes the masters' updates, see `check_optimizer_state`, or if
      a parameter that has a master is missing here, as those are that `optax.flatten` made one of;
      TypeError for an optimizer in the place of its state, or a state in the place of parameters.

    >>> masters((), {"w": jnp.ones(2, jnp.float16)})["w"].dtype
    dtype('float32')
    """
    check_nothing_changes_masters(opt_state, WithMasterParamsState)
    return collect_masters(opt_state, params)
