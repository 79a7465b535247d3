"""Checkpoints of Flax: how `flax.serialization` saves and restores a TrainState, and what it holds.

Importing this file teaches `flax.serialization` the classes of ours that a saved state holds. A
checkpoint is checked when it is restored, because its values are known then: a NaN for a scale
would make every gradient NaN. A restore that cannot be right says what to do instead;
docs/checkpoints.md has the code for every change of a run.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import serialization

from jmp._messages import described, listed, shape_text, where_trees_differ
from jmp.loss_scaling._scales import SAVED, LossScale
from jmp.transforms import StoredArray
from jmp.trees import PyTree, is_array, leaves_by_path


def register_train_state(cls: type) -> None:
    """Gives a class of TrainStates our way to save and restore, in place of Flax's."""
    to_dict, restore = _train_state_to_dict, _restore_train_state
    serialization.register_serialization_state(cls, to_dict, restore, override=True)


def array_fields(node: PyTree) -> list[str]:
    """Returns the fields of a TrainState that are no static ones, such as `tx`."""
    fields = dataclasses.fields(node)
    return [field.name for field in fields if field.metadata.get("pytree_node", True)]


def _train_state_to_dict(node: PyTree) -> dict[str, Any]:
    return {name: serialization.to_state_dict(getattr(node, name)) for name in array_fields(node)}


def _restore_train_state(node: PyTree, state: dict[str, Any]) -> PyTree:
    if node.batch_stats is None:  # Flax's TrainState does not have this field
        state = {"batch_stats": None, **state}
    saved, own = _structure(state), _structure(_train_state_to_dict(node))
    if leaves_by_path(saved).keys() != leaves_by_path(own).keys():
        raise ValueError(
            "A checkpoint holds other fields, or the state of another optimizer, than this "
            f"{type(node).__name__} (of the saved state and this one "
            f"{where_trees_differ(saved, own)}). Restore into a state of the class and the "
            "optimizer that saved it, and change that afterwards: another loss scale is "
            "jmp.transforms.set_loss_scale(opt_state, new_scale), new masters are "
            "reset_masters(opt_state, params), and docs/checkpoints.md has the lines for every "
            "change."
        )
    load = serialization.from_state_dict
    return node.replace(**{n: load(getattr(node, n), state[n], name=n) for n in state})


def _structure(state: dict[str, Any]) -> dict[str, Any]:
    """Returns what must agree in a saved state: its fields, and the leaves of the optimizer."""
    return {name: part if name == "opt_state" else 0 for name, part in state.items()}


# The parts of a state: loss scales, and arrays in one or two bytes a number.


def _to_state_dict(node: PyTree) -> dict[str, Any]:
    return {path[0].name: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(node)}


def _from_state_dict(node: PyTree, state: dict[str, Any]) -> PyTree:
    expected = _to_state_dict(node)
    if not isinstance(state, dict) or expected.keys() != state.keys():
        raise ValueError(
            f"A checkpoint holds {described(state)} for a {type(node).__name__}; expected "
            f"{listed(expected)}. Restore into the class that was saved, and change it afterwards: "
            "a loss scale by jmp.transforms.set_loss_scale(opt_state, new_scale)."
        )
    state = {n: np.asarray(v) if isinstance(v, (int, float)) else v for n, v in state.items()}
    restored = jax.tree.unflatten(jax.tree.structure(node), [state[name] for name in expected])
    if not all(map(is_array, state.values())):
        return restored  # elsewhere leaves may be anything, such as shardings
    arrays = {name: leaf for name, leaf in expected.items() if is_array(leaf)}
    for name, leaf in arrays.items():
        # The dtype of codes says what numbers they stand for.
        is_alike = leaf.dtype == state[name].dtype or not isinstance(node, StoredArray)
        if leaf.shape != state[name].shape or not is_alike:
            raise ValueError(
                f"A checkpoint holds {name}={shape_text(state[name])} for a {type(node).__name__}; "
                f"expected {shape_text(leaf)}. Restore into a state of the same parameters, of as "
                "many members and stored as the saved one is, and change it afterwards: "
                "docs/checkpoints.md has the lines."
            )
    return _within_bounds(restored) if isinstance(node, LossScale) else restored


def _within_bounds(loss_scale: LossScale) -> LossScale:
    """Returns the restored scale, brought between its floor and its ceiling."""
    try:
        # The constructor looks at values, which unflattening must not.
        return dataclasses.replace(loss_scale)  # type: ignore[type-var]  # each is a dataclass
    except ValueError as error:
        raise ValueError(
            f"A checkpoint holds a {type(loss_scale).__name__} that cannot be used: {error} "
            "Restore an earlier checkpoint; or read it by flax.serialization.msgpack_restore, put "
            "a number there, and give it to from_state_dict."
        ) from error


for cls in (*SAVED, StoredArray):
    serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict, override=True)
