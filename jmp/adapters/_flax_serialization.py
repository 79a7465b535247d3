"""Teaches `flax.serialization` the classes of ours that a saved TrainState holds.

What a checkpoint holds is looked at here, where its values are known: a NaN for a scale would make
every gradient NaN. A restore that cannot be right says what to do instead; docs/checkpoints.md has
the lines for every change of a training.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import serialization

from jmp._describe import listed
from jmp.loss_scaling import (
    DynamicLossScale,
    HysteresisLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
)
from jmp.transforms import FlatMasters
from jmp.trees import PyTree, is_array


def _to_state_dict(node: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(node)
    return {path[0].name: leaf for path, leaf in leaves}


def _from_state_dict(node: PyTree, state: dict[str, Any]) -> PyTree:
    expected = _to_state_dict(node)
    if not isinstance(state, dict) or set(expected) != set(state):
        held = listed(sorted(state)) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"A checkpoint holds {held} for a {type(node).__name__}; expected "
            f"{listed(sorted(expected))}. Restore into the class that was saved, and "
            f"{_afterwards(node)}"
        )
    state = {n: np.asarray(v) if isinstance(v, (int, float)) else v for n, v in state.items()}
    restored = jax.tree.unflatten(jax.tree.structure(node), [state[name] for name in expected])
    # Elsewhere leaves may be anything, such as shardings.
    if all(map(is_array, state.values())):
        _check_shapes(node, expected, state)
        if isinstance(node, LossScale):
            return _within_bounds(restored)
    return restored


def _afterwards(node: PyTree) -> str:
    if isinstance(node, LossScale):
        return (
            "change its class afterwards: jmp.transforms.replace_loss_scale(opt_state, new_scale)."
        )
    return (
        "make flat masters of it afterwards, as docs/checkpoints.md says under flat masters: "
        "moments and masters change their form together."
    )


def _check_shapes(node: PyTree, expected: dict[str, Any], state: dict[str, Any]) -> None:
    for name, leaf in expected.items():
        if is_array(leaf) and leaf.shape != state[name].shape:
            raise ValueError(
                f"A checkpoint holds {name} of shape {state[name].shape} for a "
                f"{type(node).__name__}; expected {leaf.shape}. Restore into a state of the same "
                "parameters and as many members."
            )


def _within_bounds(loss_scale: LossScale) -> LossScale:
    """Returns the scale between floor and ceiling of the one that it was restored into."""
    if not jax.tree.leaves(loss_scale):
        return loss_scale
    try:
        # The constructor looks at values, which unflattening must not.
        return dataclasses.replace(loss_scale)  # type: ignore[type-var]  # each is a dataclass
    except ValueError as error:
        raise ValueError(
            f"A checkpoint holds a {type(loss_scale).__name__} that cannot be used: {error} "
            "Restore an earlier checkpoint; or read it by flax.serialization.msgpack_restore, put "
            "a number there, and give it to from_state_dict."
        ) from error


def _fields(node: PyTree) -> list[str]:
    fields = dataclasses.fields(node)
    return [field.name for field in fields if field.metadata.get("pytree_node", True)]


def _train_state_to_dict(node: PyTree) -> dict[str, Any]:
    return {name: serialization.to_state_dict(getattr(node, name)) for name in _fields(node)}


def _restore_train_state(node: PyTree, state: dict[str, Any]) -> PyTree:
    fields = _fields(node)
    if getattr(node, "batch_stats", ()) is None:  # Flax's TrainState does not have this field
        state = {"batch_stats": None, **state}
    if set(state) != set(fields):
        raise ValueError(
            f"A checkpoint holds {listed(sorted(state))} for a {type(node).__name__}; expected "
            f"{listed(sorted(fields), most=16)}. Restore into the class that was saved, and make "
            "the new state of its fields: docs/checkpoints.md has the lines."
        )
    restored = {
        name: serialization.from_state_dict(getattr(node, name), state[name], name=name)
        for name in fields
        if name != "opt_state"
    }
    return node.replace(opt_state=_restore_opt_state(node, state["opt_state"]), **restored)


def _restore_opt_state(node: PyTree, state: Any) -> Any:
    try:
        return serialization.from_state_dict(node.opt_state, state, name="opt_state")
    except (KeyError, TypeError, ValueError) as error:
        expected: Any = serialization.to_state_dict(node.opt_state)
        if _paths(expected) == _paths(state):
            raise  # it says by itself which value it is
        raise ValueError(
            f"A checkpoint holds the state of another optimizer than this {type(node).__name__}'s "
            f"({str(error)[:500]}). Restore into a state of the optimizer that saved it, and "
            "change that afterwards: another loss scale is jmp.transforms.replace_loss_scale("
            "opt_state, new_scale), new masters are reset_masters(opt_state, params), and "
            "docs/checkpoints.md has the lines for every change."
        ) from error


def _paths(state: Any) -> set[str]:
    return {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}


def register() -> None:
    """Registers them; harmless when called again."""
    loss_scales = (NoOpLossScale, StaticLossScale, DynamicLossScale, HysteresisLossScale)
    for cls in (*loss_scales, FlatMasters):
        serialization.register_serialization_state(
            cls, _to_state_dict, _from_state_dict, override=True
        )


def register_train_state(cls: type) -> None:
    """Registers a TrainState, so that it restores one of Flax's and says what else to do."""
    serialization.register_serialization_state(
        cls, _train_state_to_dict, _restore_train_state, override=True
    )
