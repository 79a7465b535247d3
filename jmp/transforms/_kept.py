"""What the states of an optimizer keep beside half parameters: of which, and whether of all."""

from typing import Any

import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jmp.transforms import _states
from jmp.transforms._flat_masters import FlatMasters
from jmp.transforms._rounding import needs_master
from jmp.transforms._states import WithMasterParamsState
from jmp.trees import PyTree, leaves_by_path

ROOT = keystr(())  # the path of a tree that is one array


def check_half_ones_are_seen(opt_state: optax.OptState, params: optax.Params) -> None:
    """Raises ValueError if masters were made of one float32 vector, where parameters are half.

    Args:
      opt_state: an optimizer's state.
      params: the parameters that its `init` was given.
    """
    given = leaves_by_path(params)
    if ROOT in given or not any(map(needs_master, given.values())):
        return
    for state, around in _states.locate(opt_state, _states.storing_states()):
        # A group to which no parameter belongs has no masters either.
        is_of_a_group = any(isinstance(node, optax.MaskedState) for node, _ in around)
        if isinstance(state[0], optax.MaskedNode) and not is_of_a_group:
            caller = _states.STORAGES[type(state)].caller
            raise ValueError(
                f"{caller} got no half parameters: something around it, such as "
                "optax.flatten, made one vector of half and float32 ones, which has no masters, "
                f"and updates would be lost. Put it inside: {caller}(optax.flatten(adam))."
            )


def check_stored_as_in_init(params: optax.Params, kept: PyTree, caller: str) -> None:
    """Raises ValueError if parameters have changed between half and another dtype."""
    with_master = shapes_by_path(kept)
    for path, leaf in leaves_by_path(params).items():
        if needs_master(leaf) != (path in with_master):
            had, way = "no half", ""
            if path in with_master:
                had = "a half"
                way = " after each update (optax.apply_updates does, eqx.apply_updates does not)"
            raise ValueError(
                f"{caller} got params{path} of dtype {leaf.dtype}; when `init` "
                f"was called it had {had} dtype. Keep the dtype"
                f"{way}, cast the parameters as they were stored then "
                "(cast_params of the adapters), or call init again."
            )


def has_flat_masters(opt_state: optax.OptState) -> bool:
    """Returns whether any parameter group keeps its masters as one vector."""
    states = _states.find_states(opt_state, WithMasterParamsState)
    return any(isinstance(state.masters, FlatMasters) for state in states)


def shapes_by_path(kept: PyTree) -> dict[str, tuple[int, ...] | None]:
    """Returns the shapes of the parameters beside which something is kept, by path (`keystr`).

    None for the shape where what is kept is empty, as for stochastic rounding.
    """
    if isinstance(kept, FlatMasters):
        return dict(zip(kept.paths, kept.shapes, strict=True))
    return {path: getattr(each, "shape", None) for path, each in beside_by_path(kept).items()}


def beside_by_path(kept: PyTree) -> dict[str, Any]:
    """Returns what is kept beside each half parameter by path: an array, or an `EmptyState`."""
    return {keystr(path): each for path, each in tree_leaves_with_path(kept, is_leaf=is_kept)}


def is_kept(node: object) -> bool:
    """Returns whether a node says that a parameter is stored, and that nothing is kept beside."""
    return isinstance(node, optax.EmptyState)


def shapes_with_master(opt_state: optax.OptState) -> dict[str, tuple[int, ...] | None]:
    """Returns the shapes of all half parameters that some state stores, of whatever group."""
    shapes: dict[str, tuple[int, ...] | None] = {}
    for state in _states.find_states(opt_state, _states.storing_states()):
        shapes |= shapes_by_path(state[0])
    return shapes
