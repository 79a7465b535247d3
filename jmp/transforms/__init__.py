"""Optax transformations for mixed precision; each wraps any optax optimizer.

`with_loss_scale` takes scaled gradients, unscales and checks them, and skips bad steps.
`with_master_params` keeps float32 masters of half parameters. `mixed_precision` combines them by
policy. In less memory half parameters are stored by `with_split_masters`,
`with_stochastic_rounding` and `with_kahan_summation`, and the state of any optimizer by
`with_stored_state`. `loss_scale_state`, `masters` and `decode_state` read an optimizer's state;
`set_loss_scale` gives it another scale, `set_masters` other values, and `reset_masters` takes
masters from parameters that were loaded. `state_shardings` says on which devices a state belongs.
`clip_by_global_norm` is optax's for gradients in shards.

The files, in an order in which to read them:

1. `_loss_scaling`: `with_loss_scale`, a step from its scaled gradients to the next scale;
   `mixed_precision`, which chooses what a policy needs; how to read and replace the scale in an
   optimizer's state.
2. `_wrapping`: what each transformation here does with the optimizer inside it, how our states are
   found inside of others, and the orders of transformations that fail. `_placement` puts a new
   state on the devices of the parameters.
3. `_parameter_storage`: how a half parameter stores a float32 value: the interface, and the step.
   `_half_parameters` has the four ways to do so; `_masters` reads and sets the values.
4. `_stored_state`: moments in one or two bytes a number; `_encodings` has the arithmetic.
5. `_rounding`: rounding to fewer bits, and random bits. `_few_kernels`: the forms of a step that
   compile to few kernels. `_clipping` stands by itself.
"""

from jmp.transforms._clipping import clip_by_global_norm
from jmp.transforms._encodings import StoredArray
from jmp.transforms._half_parameters import (
    WithKahanSummationState,
    WithMasterParamsState,
    WithSplitMastersState,
    WithStochasticRoundingState,
    with_kahan_summation,
    with_master_params,
    with_split_masters,
    with_stochastic_rounding,
)
from jmp.transforms._loss_scaling import (
    WithLossScaleState,
    loss_scale_state,
    mixed_precision,
    set_loss_scale,
    with_loss_scale,
)
from jmp.transforms._masters import masters, reset_masters, set_masters
from jmp.transforms._placement import state_shardings
from jmp.transforms._stored_state import (
    WithStoredStateState,
    decode_state,
    encode_state,
    with_stored_state,
)
from jmp.transforms._wrapping import check_optimizer_state

__all__ = [
    "StoredArray",
    "WithKahanSummationState",
    "WithLossScaleState",
    "WithMasterParamsState",
    "WithSplitMastersState",
    "WithStochasticRoundingState",
    "WithStoredStateState",
    "check_optimizer_state",
    "clip_by_global_norm",
    "decode_state",
    "encode_state",
    "loss_scale_state",
    "masters",
    "mixed_precision",
    "reset_masters",
    "set_loss_scale",
    "set_masters",
    "state_shardings",
    "with_kahan_summation",
    "with_loss_scale",
    "with_master_params",
    "with_split_masters",
    "with_stochastic_rounding",
    "with_stored_state",
]
