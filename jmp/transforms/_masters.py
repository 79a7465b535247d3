"""Masters inside an optimizer's state: reading them, and taking them from parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_map_with_path

from jmp import _jax_compat
from jmp._messages import described
from jmp.transforms import _states
from jmp.transforms._flat_masters import FlatMasters, as_one_vector
from jmp.transforms._master_params import ROOT, check_half_ones_are_seen, shapes_with_master
from jmp.transforms._rounding import needs_master, rounded_master
from jmp.transforms._states import WithMasterParamsState
from jmp.trees import PyTree, cast_to_at_least_float32, is_array, leaves_by_path

S = TypeVar("S")


def masters(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters that the optimizer updates: the float32 masters.

    Args:
      opt_state: the state of an optimizer, chained, partitioned or masked.
      params: the parameters. Leaves that need no master (float32) are taken from here; half leaves
        without one (frozen groups) come back cast to float32.

    Raises: ValueError if something changes the masters' updates, see `check_optimizer_state`, or if
      a parameter that has a master is missing here, as those are that `optax.flatten` made one of;
      TypeError for an optimizer in the place of its state, or a state in the place of parameters.

    >>> masters((), {"w": jnp.ones(2, jnp.float16)})["w"].dtype
    dtype('float32')
    """
    _states.check_nothing_changes_masters(opt_state)
    _check_are_parameters(params, "masters")
    check_half_ones_are_seen(opt_state, params)
    _check_all_given(opt_state, leaves_by_path(params), "masters")
    by_path: dict[str, Any] = {}
    for state in _states.find_states(opt_state, WithMasterParamsState):
        if isinstance(state.masters, FlatMasters):
            by_path |= state.masters.leaves()
        else:
            by_path |= leaves_by_path(state.masters)
    # A half leaf of a frozen group has no master: it is what is returned.
    return tree_map_with_path(
        lambda path, p: by_path.get(keystr(path), p), cast_to_at_least_float32(params)
    )


def reset_masters(opt_state: S, params: PyTree) -> S:
    """Returns the optimizer's state with its masters taken from the parameters.

    Call it after something else than the optimizer has changed parameters: after loading a
    checkpoint, tying, pruning or averaging weights. Otherwise the next step undoes that change,
    because it starts from the masters. Moments, counts and the loss scale stay as they are.

    Args:
      opt_state: the state of an optimizer, chained, partitioned or masked. Without masters it is
        returned as it is.
      params: the parameters, as the optimizer's `init` had them. They may be given in float32:
        masters are then exact, and the model's parameters are these, rounded.

    Raises: ValueError if a parameter that has a master is missing here or has another shape;
      TypeError for an optimizer in the place of its state, or a state in that of parameters.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_master_params(optax.sgd(0.1))
    >>> state = tx.init(jnp.ones(2, jnp.float16))
    >>> reset_masters(state, jnp.float32([0.1, 0.2])).masters
    Array([0.1, 0.2], dtype=float32)
    """
    _states.check_is_state(opt_state)
    _check_are_parameters(params, "reset_masters")
    check_half_ones_are_seen(opt_state, params)
    given = leaves_by_path(params)
    _check_all_given(opt_state, given, "reset_masters")
    return _map_masters(lambda path, old: _as_master(given[path], old), opt_state)


def follow_replaced(opt_state: S, params: PyTree) -> S:
    """Returns the state with masters that follow parameters which were replaced.

    As `reset_masters`, but that a master stays where its rounding is what the parameter is now:
    parameters that were clipped, moved to other devices or put back say nothing of the digits that
    their masters have beyond half precision. Another model's parameters leave the state as it is.

    Raises: ValueError if the masters are those of one vector, as inside `optax.flatten`.
    """
    given = leaves_by_path(params)
    masters = shapes_with_master(opt_state)
    if not given or not all(map(is_array, given.values())):
        return opt_state  # None and shardings describe a tree, or stand for one
    if ROOT in masters and ROOT not in given:
        _check_all_given(opt_state, given, "replace(params=...)")
    if not masters.items() <= {path: leaf.shape for path, leaf in given.items()}.items():
        return opt_state

    def follow(path: str, old: jax.Array) -> jax.Array:
        param, master = given[path], _as_master(given[path], old)
        if not needs_master(param):
            return master
        is_rounded = rounded_master(old, param.dtype) == param.astype(jnp.float32)
        return jnp.where(is_rounded, old, master)

    return _map_masters(follow, opt_state)


def _check_are_parameters(params: PyTree, caller: str) -> None:
    """Raises TypeError for an optimizer or a state in the place of parameters."""
    if _states.holds_a_state(params):
        raise TypeError(
            f"{caller} got {described(params)} as the parameters. The order is {caller}(opt_state, "
            "params)."
        )


def _check_all_given(opt_state: optax.OptState, given: dict[str, Any], caller: str) -> None:
    """Raises ValueError if a parameter that has a master is missing, or has another shape."""
    for path, shape in shapes_with_master(opt_state).items():
        found = given.get(path)
        got_shape = getattr(found, "shape", None)
        if got_shape == shape:
            continue
        got = "nothing" if found is None else f"the shape {got_shape}"
        is_vector = path == ROOT and len(shape) == 1
        way = (
            "Something between, such as optax.flatten, makes one vector of the parameters before "
            "with_master_params sees them: put it inside, with_master_params(optax.flatten(adam)), "
            "or write with_master_params(adam, flat_master=True)."
            if is_vector and found is None
            else "Pass the parameters that the optimizer was initialised with."
        )
        raise ValueError(
            f"{caller} got {got} for params{path}; expected the shape {shape} of its master. {way}"
        )


def _as_master(param: Any, old: jax.Array) -> jax.Array:
    """Returns a copy in the dtype of the old master; what comes from the host, where that lies."""
    master: jax.Array = jnp.array(param, old.dtype)
    is_placed = isinstance(old, jax.Array) and _jax_compat.is_concrete(old)
    from_host = not isinstance(param, jax.Array)
    return jax.device_put(master, old.sharding) if is_placed and from_host else master


def _map_masters(function: Callable[[str, jax.Array], jax.Array], opt_state: S) -> S:
    """Applies `function` to the path of every parameter and its master."""

    def in_state(state: WithMasterParamsState) -> WithMasterParamsState:
        masters = state.masters
        if isinstance(masters, FlatMasters):
            leaves = [function(path, old) for path, old in masters.leaves().items()]
            vector = as_one_vector(leaves, masters.vector.dtype)
            return state._replace(masters=dataclasses.replace(masters, vector=vector))
        mapped = tree_map_with_path(lambda path, old: function(keystr(path), old), masters)
        return state._replace(masters=mapped)

    return _states.map_states(in_state, opt_state, WithMasterParamsState)
