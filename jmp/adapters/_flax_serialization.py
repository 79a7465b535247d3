"""Teaches `flax.serialization` the classes of ours that a saved TrainState holds."""

from typing import Any

import jax
from flax import serialization

from jmp.loss_scaling import DynamicLossScale, HysteresisLossScale, NoOpLossScale, StaticLossScale
from jmp.transforms import FlatMasters
from jmp.trees import PyTree


def _to_state_dict(node: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(node)
    return {path[0].name: leaf for path, leaf in leaves}


def _from_state_dict(node: PyTree, state: dict[str, Any]) -> PyTree:
    names = list(_to_state_dict(node))
    if set(names) != set(state):
        raise ValueError(
            f"A checkpoint holds {sorted(state)} for a {type(node).__name__}; expected "
            f"{sorted(names)}. Restore into the class that was saved."
        )
    return jax.tree.unflatten(jax.tree.structure(node), [state[name] for name in names])


def register() -> None:
    """Registers them; harmless when called again."""
    loss_scales = (NoOpLossScale, StaticLossScale, DynamicLossScale, HysteresisLossScale)
    for cls in (*loss_scales, FlatMasters):
        serialization.register_serialization_state(
            cls, _to_state_dict, _from_state_dict, override=True
        )
