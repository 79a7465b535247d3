"""Masters inside an optimizer's state: reading them, and taking them from parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_map_with_path

from jmp import _jax_compat
from jmp.transforms import _states
from jmp.transforms._flat_masters import FlatMasters, flatten
from jmp.transforms._master_params import WithMasterParamsState, needs_master, shapes_with_master
from jmp.transforms._rounding import rounded
from jmp.trees import PyTree, cast_to_at_least_float32, is_array, leaves_by_path

S = TypeVar("S")


def collect_masters(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """Returns `params` with half leaves replaced by their masters, of whatever parameter group."""
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
      TypeError for an optimizer in the place of its state.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_master_params(optax.sgd(0.1))
    >>> state = tx.init(jnp.ones(2, jnp.float16))
    >>> reset_masters(state, jnp.float32([0.1, 0.2])).masters
    Array([0.1, 0.2], dtype=float32)
    """
    _states.check_is_state(opt_state)
    given = leaves_by_path(params)
    if not _are_parameters(given):
        return opt_state
    for path, shape in shapes_with_master(opt_state).items():
        found = given.get(path)
        if found is None or found.shape != shape:
            got = "nothing" if found is None else f"the shape {found.shape}"
            raise ValueError(
                f"reset_masters got {got} for params{path}; expected the shape {shape} of its "
                "master. Pass the parameters that the optimizer was initialised with."
            )
    return _map_masters(lambda path, old: _as_master(given[path], old), opt_state)


def follow_replaced(opt_state: S, params: PyTree) -> S:
    """Returns the state with masters that follow parameters which were replaced.

    As `reset_masters`, but that a master stays where its rounding is what the parameter is now:
    parameters that were clipped, moved to other devices or put back say nothing of the digits that
    their masters have beyond half precision. Another model's parameters leave the state as it is.
    """
    given = leaves_by_path(params)
    shapes = {path: getattr(leaf, "shape", None) for path, leaf in given.items()}
    if not _are_parameters(given) or not shapes_with_master(opt_state).items() <= shapes.items():
        return opt_state

    def follow(path: str, old: jax.Array) -> jax.Array:
        param, master = given[path], _as_master(given[path], old)
        if not needs_master(param):
            return master
        is_rounded = rounded(old, param.dtype) == param.astype(jnp.float32)
        return jnp.where(is_rounded, old, master)

    return _map_masters(follow, opt_state)


def _are_parameters(given: dict[str, Any]) -> bool:
    """Returns whether these are arrays; None and shardings describe a tree, or stand for one."""
    return bool(given) and all(map(is_array, given.values()))


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
            vector = flatten(leaves, masters.vector.dtype)
            return state._replace(masters=dataclasses.replace(masters, vector=vector))
        mapped = tree_map_with_path(lambda path, old: function(keystr(path), old), masters)
        return state._replace(masters=mapped)

    return _states.map_states(in_state, opt_state, WithMasterParamsState)
