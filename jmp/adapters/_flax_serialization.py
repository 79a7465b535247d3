"""Teaches `flax.serialization` the loss scales, so that a saved TrainState holds its scale."""

from typing import Any

import jax
from flax import serialization

from jmp.loss_scaling import DynamicLossScale, HysteresisLossScale, NoOpLossScale, StaticLossScale


def _to_state_dict(loss_scale: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(loss_scale)
    return {path[0].name: leaf for path, leaf in leaves}


def _from_state_dict(loss_scale: Any, state: dict[str, Any]) -> Any:
    names = list(_to_state_dict(loss_scale))
    if set(names) != set(state):
        raise ValueError(
            f"A checkpoint holds {sorted(state)} for a {type(loss_scale).__name__}; expected "
            f"{sorted(names)}. Restore into the class of loss scale that was saved."
        )
    return jax.tree.unflatten(jax.tree.structure(loss_scale), [state[name] for name in names])


def register() -> None:
    """Registers every loss scale; harmless when called again."""
    for cls in (NoOpLossScale, StaticLossScale, DynamicLossScale, HysteresisLossScale):
        serialization.register_serialization_state(
            cls, _to_state_dict, _from_state_dict, override=True
        )
