"""`mixed_precision`: loss scaling and master parameters in one call, as a policy asks for them."""

import jax.numpy as jnp
import optax

from jmp.dtypes import is_half
from jmp.loss_scaling import LossScale, NoOpLossScale, torch_loss_scale
from jmp.policy import Policy, get_policy, refuse_float8
from jmp.sharding._axes import AxisName
from jmp.transforms._half_parameters import refusing_half
from jmp.transforms._inner import Transformation
from jmp.transforms._loss_scaling import WithLossScaleState, with_loss_scale
from jmp.transforms._master_params import with_master_params

_UNSCALED = "__jmp_made_without_a_scale_for__"


def mixed_precision(
    inner: optax.GradientTransformation | optax.MultiSteps,
    policy: str | Policy,
    loss_scale: LossScale | None = None,
    *,
    axis_name: AxisName = "auto",
) -> Transformation[WithLossScaleState]:
    """Wraps an optimizer with what `policy` needs.

    Float32 masters are kept if the policy stores parameters in half; loss scaling goes around
    everything.

    Args:
      inner: any optax transformation, or a `MultiSteps` object.
      policy: a policy or its name.
      loss_scale: by default torch's dynamic scale if the policy computes in float16, and none for
        bfloat16 and float32, whose range needs none. Without a scale no gradient is checked and no
        step is skipped; `jmp.StaticLossScale(1.0)` checks and skips. The adapters' steps refuse an
        optimizer made here without a scale for a model that computes in float16, unless
        `jmp.NoOpLossScale()` is given; of other optimizers they warn (`UnscaledLossWarning`).
      axis_name: as in `with_loss_scale`.

    Returns: a transformation whose state is a `WithLossScaleState`.
    Raises:
      TypeError: `inner` is no optax transformation, `policy` no policy, or `loss_scale` no loss
        scale.
      ValueError: an unknown policy, or one with a float8 other than that of its products; a static
        scale of zero; in `init` and `update`, half parameters under a policy whose parameters are
        float32, but those that `optax.set_to_zero` freezes; and as `with_loss_scale` and
        `with_master_params`.

    >>> import optax
    >>> tx = mixed_precision(optax.adam(1e-3), "mixed_float16")
    >>> float(tx.init(jnp.ones(2)).loss_scale.loss_scale)
    65536.0
    """
    policy = get_policy(policy)
    refuse_float8(policy, "mixed_precision")
    needs_scale = policy.compute_dtype == jnp.float16
    scale = loss_scale
    if scale is None:
        scale = torch_loss_scale() if needs_scale else NoOpLossScale()
    if is_half(policy.param_dtype):
        inner = with_master_params(inner)
    tx = refusing_half(with_loss_scale(inner, scale, axis_name=axis_name), policy)
    if loss_scale is None and not needs_scale:
        setattr(tx.update, _UNSCALED, policy)
    return tx


def unscaled_policy(tx: optax.GradientTransformation) -> Policy | None:
    """Returns the policy for which `mixed_precision` made `tx` without a scale, if it did."""
    policy: Policy | None = getattr(tx.update, _UNSCALED, None)
    return policy
