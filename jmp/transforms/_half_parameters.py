"""Parameters narrower than float32 that an optimizer would train without masters.

1000 updates of 1e-4 leave a bfloat16 1.0 where it is. Nothing else says so: losses are finite, and
fall as far as the float32 parameters of the tree let them. So such parameters are refused where
they are seen, in `init` and in `update` (they may be loaded after `init`), unless no update moves
them: a half backbone that `optax.set_to_zero` freezes needs no master.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp.dtypes import is_half
from jmp.policy import Policy
from jmp.transforms._frozen import frozen_leaves
from jmp.transforms._loss_scaling import WithLossScaleState
from jmp.transforms._master_params import shapes_with_master
from jmp.transforms._typed import Transformation
from jmp.trees import leaves_by_path


def refusing_half(
    tx: Transformation[WithLossScaleState], policy: Policy
) -> Transformation[WithLossScaleState]:
    """Returns `tx` that raises ValueError for parameters it would train without masters.

    Args:
      tx: an optimizer under loss scaling.
      policy: the policy that it was made for.
    """
    frozen_by_types: dict[Any, frozenset[str]] = {}

    def frozen(params: optax.Params, extra_args: dict[str, Any]) -> frozenset[str]:
        """Returns the paths of what no update moves.

        Traced once for each structure and types of `params`, and names of extra arguments.
        """
        leaves, structure = jax.tree.flatten(params)
        types = (structure, *((np.shape(leaf), _dtype_of(leaf)) for leaf in leaves))
        types += tuple(sorted(extra_args))
        if types not in frozen_by_types:
            frozen_by_types[types] = frozen_leaves(tx, params, extra_args)
        return frozen_by_types[types]

    def check(params: optax.Params, state: Any, extra_args: dict[str, Any]) -> None:
        if not any(map(_is_narrow, jax.tree.leaves(params))):
            return
        with_master = shapes_with_master(state)
        bare = {
            path: leaf.dtype
            for path, leaf in leaves_by_path(params).items()
            if _is_narrow(leaf) and path not in with_master
        }
        trained = bare.keys() - frozen(params, extra_args) if bare else ()
        if trained:
            raise ValueError(_message({p: bare[p] for p in bare if p in trained}, policy))

    def init(params: optax.Params) -> WithLossScaleState:
        state = tx.init(params)
        check(params, state, {})
        return state

    def update(
        updates: optax.Updates,
        state: WithLossScaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScaleState]:
        check(params, state, extra_args)
        return tx.update(updates, state, params, **extra_args)

    checked: Transformation[WithLossScaleState] = optax.GradientTransformationExtraArgs(
        init, update
    )
    return checked


def _dtype_of(leaf: Any) -> Any:
    return getattr(leaf, "dtype", type(leaf))


def _is_narrow(leaf: Any) -> bool:
    """Returns whether a leaf, abstract ones too, holds real floats of less than 32 bits."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _message(trained: dict[str, Any], policy: Policy) -> str:
    path, dtype = next(iter(trained.items()))
    more = f" and {len(trained) - 1} more" if len(trained) > 1 else ""
    cast = "policy.cast_to_param(params) or jmp.cast_to_full(params)"
    ways = f"params.astype('float32') of each {dtype} leaf"
    if is_half(dtype):
        in_half = dataclasses.replace(policy, param_dtype=dtype)
        ways = (
            f"{cast}; or, to store them in half, a policy with half parameters, '{in_half}', which "
            "keeps a float32 master of each"
        )
    return (
        f"mixed_precision(..., '{policy}') got params{path} of dtype {dtype}{more}, which it would "
        "train without masters: updates below the spacing of that dtype are lost. Expected "
        f"parameters in float32: {ways}. What optax.set_to_zero freezes may stay as it is."
    )
