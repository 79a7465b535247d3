"""jmp: mixed precision for JAX.

The idea in four words: *policy* (which dtype where), *loss scale* (so that small gradients do not
become zero in float16), *transforms* (optax: unscale, check, skip, float32 masters), *adapters* (so
that an unmodified model of Flax, Equinox or Haiku computes in half and its norms in float32).

`import jmp` loads the names below, imports only jax and numpy, and touches no device. Everything
else is loaded at its first use, so that each part needs only its own framework:
  - `jmp.transforms` (needs optax);
  - `jmp.adapters.linen` and `jmp.adapters.nnx` (need flax), `jmp.adapters.equinox`,
    `jmp.adapters.haiku`;
  - `jmp.diagnostics`, which answers what ran where, what underflows, what made the NaN.
"""

from typing import TYPE_CHECKING

from jmp import _lazy, _messages
from jmp._messages import PrecisionWarning
from jmp.autocasting import (
    Float16OnTpuWarning,
    HalfReductionWarning,
    NoHalfProductWarning,
    autocast,
    full_precision,
)
from jmp.dtypes import dtype_to_names as dtype_to_names  # DeepMind's tests read it here
from jmp.dtypes import half_dtype
from jmp.loss_scaling._accumulating import accumulated_value_and_grad
from jmp.loss_scaling._gradients import UnscaledLossWarning, scaled_value_and_grad
from jmp.loss_scaling._scales import (
    DynamicLossScale,
    HysteresisLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    apex_loss_scale,
    deepmind_loss_scale,
    fastai_loss_scale,
    torch_loss_scale,
)
from jmp.policy import Policy, get_policy
from jmp.rules import PolicyRules, UnusedRuleWarning
from jmp.sharding import gather_params
from jmp.trees import all_finite, cast_floating, cast_to_full, cast_to_half, select_tree

if TYPE_CHECKING:
    from jmp import adapters as adapters
    from jmp import diagnostics as diagnostics
    from jmp import transforms as transforms
else:  # type checkers would take every misspelt name for an attribute
    __getattr__, __dir__ = _lazy.loaded_when_touched(
        __name__, {"adapters": "", "diagnostics": "optax", "transforms": "optax"}
    )

__version__ = "1.0.0rc1"

_messages.warn_of_mixed_files(__path__[0])

__all__ = [
    "DynamicLossScale",
    "Float16OnTpuWarning",
    "HalfReductionWarning",
    "HysteresisLossScale",
    "LossScale",
    "NoHalfProductWarning",
    "NoOpLossScale",
    "Policy",
    "PolicyRules",
    "PrecisionWarning",
    "StaticLossScale",
    "UnscaledLossWarning",
    "UnusedRuleWarning",
    "accumulated_value_and_grad",
    "all_finite",
    "apex_loss_scale",
    "autocast",
    "cast_floating",
    "cast_to_full",
    "cast_to_half",
    "deepmind_loss_scale",
    "fastai_loss_scale",
    "full_precision",
    "gather_params",
    "get_policy",
    "half_dtype",
    "scaled_value_and_grad",
    "select_tree",
    "torch_loss_scale",
]
