"""Optax transformations for mixed precision; each wraps any optax optimizer.

`with_loss_scale` takes scaled gradients, unscales and checks them, and skips bad steps.
`with_master_params` keeps float32 masters of half parameters. `mixed_precision` combines them by
policy. `loss_scale_state` and `masters` read an optimizer's state.
"""

import optax

from jmp.transforms._flat_masters import FlatMasters
from jmp.transforms._loss_scaling import WithLossScaleState, with_loss_scale
from jmp.transforms._master_params import (
    WithMasterParamsState,
    collect_masters,
    with_master_params,
)
from jmp.transforms._mixed_precision import mixed_precision
from jmp.transforms._states import check_order, find_states

__all__ = [
    "FlatMasters",
    "WithLossScaleState",
    "WithMasterParamsState",
    "check_optimizer_state",
    "loss_scale_state",
    "masters",
    "mixed_precision",
    "with_loss_scale",
    "with_master_params",
]


def check_optimizer_state(opt_state: optax.OptState) -> None:
    """Raises ValueError if an optimizer combines these transformations in an order that fails.

    Those orders are: loss scaling twice, anything chained after masters, and `MultiSteps` around
    loss scaling. The adapters' training states call it; with plain optax call it once after `init`.

    >>> check_optimizer_state(())
    """
    check_order(opt_state, WithMasterParamsState, WithLossScaleState)


def loss_scale_state(opt_state: optax.OptState) -> WithLossScaleState | None:
    """Returns the `WithLossScaleState` inside an optimizer's state, or None where there is none.

    Raises: ValueError if the optimizer's order is at fault; see `check_optimizer_state`.

    >>> loss_scale_state(()) is None
    True
    """
    check_optimizer_state(opt_state)
    return next(iter(find_states(opt_state, WithLossScaleState)), None)


def masters(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """Returns the parameters as the optimizer knows them: the float32 masters.

    Args:
      opt_state: the state of an optimizer, chained, partitioned or masked.
      params: the parameters. Leaves that need no master (float32) are taken from here; half leaves
        without one (frozen groups) come back cast to float32.

    Raises: ValueError if the optimizer's order is at fault; see `check_optimizer_state`.

    >>> masters((), {"w": jnp.ones(2, jnp.float16)})["w"].dtype
    dtype('float32')
    """
    check_optimizer_state(opt_state)
    return collect_masters(opt_state, params)
