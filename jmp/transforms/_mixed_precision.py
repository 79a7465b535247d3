"""`mixed_precision`: loss scaling and master parameters in one call, as a policy asks for them."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
import optax

from jmp._messages import listed, wrong
from jmp.dtypes import is_half
from jmp.loss_scaling._scales import LossScale, NoOpLossScale, torch_loss_scale
from jmp.policy import Policy, get_policy, mark_lowered, refuse_float8
from jmp.sharding._axes import AxisName
from jmp.transforms import _half_parameters
from jmp.transforms._loss_scaling import WithLossScaleState, with_loss_scale
from jmp.transforms._wrapping import Transformation, as_transformation
from jmp.trees import leaves_by_path

Inner: TypeAlias = optax.GradientTransformation | optax.MultiSteps
Store: TypeAlias = Callable[[Inner], Any]


STORED: dict[str, Store] = {
    "full": _half_parameters.with_master_params,
    "split": _half_parameters.with_split_masters,
    "stochastic": _half_parameters.with_stochastic_rounding,
    "kahan": _half_parameters.with_kahan_summation,
    "none": lambda inner: inner,
}


def mixed_precision(
    inner: optax.GradientTransformation | optax.MultiSteps,
    policy: str | Policy,
    loss_scale: LossScale | None = None,
    *,
    masters: str | Store | None = None,
    axis_name: AxisName = "auto",
) -> Transformation[WithLossScaleState]:
    """Wraps an optimizer with what `policy` needs.

    Float32 masters are kept if the policy stores parameters in half; loss scaling goes around
    everything. Other ways to store half parameters, in less memory, are chosen by `masters`.
    Parameters narrower than float32 that are stored in none of them are refused, also those that
    were loaded after `init`: 1000 updates of 1e-4 leave a bfloat16 1.0 where it is, and losses fall
    as far as the float32 parameters of the tree let them. If leaves are frozen in half, give it the
    tree of the others, or write `with_loss_scale(optax.partition(...), loss_scale)`, which refuses
    no dtype.

    Args:
      inner: any optax transformation, or a `MultiSteps` object.
      policy: a policy or its name.
      loss_scale: by default torch's dynamic scale if the policy computes in float16, and none for
        bfloat16 and float32, whose range needs none. Without a scale no gradient is checked and no
        step is skipped; `jmp.StaticLossScale(1.0)` checks and skips. The adapters' steps warn of an
        optimizer without a scale for a model that computes in float16 (`UnscaledLossWarning`).
      masters: how half parameters are stored, whatever the policy says: "full"
        (`with_master_params`), "split" (`with_split_masters`), "stochastic"
        (`with_stochastic_rounding`), "kahan" (`with_kahan_summation`), or "none": updates below
        their spacing are lost. Or a function that wraps `inner`, as
        `partial(with_stochastic_rounding, seed=1)`. None is "full" for a policy whose parameters
        are half, and refuses them for any other.
      axis_name: as in `with_loss_scale`.

    Returns: a transformation whose state is a `WithLossScaleState`.
    Raises:
      TypeError: `inner` is no optax transformation, `policy` no policy, or `loss_scale` no loss
        scale.
      ValueError: an unknown policy or way to store parameters, or a policy with a float8 dtype for
        anything but products; a static scale of zero; in `init` and `update`, parameters narrower
        than float32 without a master; and as `with_loss_scale` and `with_master_params`.

    >>> import optax
    >>> tx = mixed_precision(optax.adam(1e-3), "mixed_float16")
    >>> float(tx.init(jnp.ones(2)).loss_scale.loss_scale)
    65536.0
    """
    inner = as_transformation(inner, "mixed_precision")
    policy = get_policy(policy)
    refuse_float8(policy, "mixed_precision")
    if loss_scale is None:
        needs_scale = policy.compute_dtype == jnp.float16
        loss_scale = torch_loss_scale() if needs_scale else NoOpLossScale()
    if masters is None:
        store = STORED["full" if is_half(policy.param_dtype) else "none"]
    elif callable(masters):
        store = masters
    elif isinstance(masters, str) and masters in STORED:
        store = STORED[masters]
    else:
        expected = f"None, a function that wraps an optimizer, or one of {listed(STORED)}"
        raise wrong(ValueError, "mixed_precision", masters, expected, name="masters")
    tx = with_loss_scale(store(inner), loss_scale, axis_name=axis_name)
    if masters == "none":
        mark_lowered(tx.update, policy.compute_dtype)
        return tx

    def init(params: optax.Params) -> WithLossScaleState:
        state = tx.init(params)
        _refuse_without_master(params, state, policy)
        return state

    def update(
        updates: Any, state: WithLossScaleState, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, WithLossScaleState]:
        _refuse_without_master(params, state, policy)
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, mark_lowered(update, policy.compute_dtype))


def _refuse_without_master(params: optax.Params, state: WithLossScaleState, policy: Policy) -> None:
    """Raises ValueError for parameters, abstract ones too, that would lose small updates."""
    with_master = _half_parameters.kept_by_path(state)
    for path, leaf in leaves_by_path(params).items():
        dtype: Any = getattr(leaf, "dtype", np.dtype(np.float32))
        if path in with_master or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
            continue
        ways = f"leaf.astype('float32') of each {dtype} leaf"
        if is_half(dtype):
            in_half = dataclasses.replace(policy, param_dtype=dtype)
            ways = (
                "policy.cast_to_param(params) or jmp.cast_to_full(params); or, to store them in "
                f"half, a policy with half parameters, '{in_half}', which keeps a float32 master "
                "of each, or mixed_precision(..., masters=...) with 'full', 'split' (bfloat16), "
                "'stochastic', 'kahan' or 'none', which say how half parameters are stored. If "
                "leaves are frozen in half, give it the tree of the others, or write "
                "with_loss_scale(optax.partition({'train': adam, 'freeze': optax.set_to_zero()}, "
                "labels), loss_scale)"
            )
        raise ValueError(
            f"mixed_precision(..., '{policy}') got params{path} of dtype {dtype}, which it would "
            "train without masters: updates below the spacing of that dtype are lost. Expected "
            f"parameters in float32: {ways}."
        )
