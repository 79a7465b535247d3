"""The float32 values of half parameters inside of an optimizer's state: read, set and taken anew.

`masters` reads them, however they are stored, `set_masters` sets them, `reset_masters` takes them
from parameters that were changed, and `follow_replaced` from those that replace others.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from jmp._jax_compat import is_concrete
from jmp._messages import described
from jmp.transforms import _wrapping
from jmp.transforms._parameter_storage import ParameterStorage, compiled, is_kept
from jmp.transforms._rounding import needs_master, rounded
from jmp.trees import PyTree, cast_to_at_least_float32, is_array, leaves_by_path

S = TypeVar("S")


def masters(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters that the optimizer updates: the float32 masters.

    However they are stored: with split masters or Kahan summation they are joined, with stochastic
    rounding they are the parameters themselves, cast.

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
    given = _leaves_checked(opt_state, params, "masters")
    _wrapping.check_nothing_changes_masters(opt_state)
    kept = kept_by_path(opt_state).items()
    values = {path: compiled(way.value)(given[path], beside) for path, (beside, way) in kept}
    wide = cast_to_at_least_float32(params)
    # A half leaf of a frozen group has no master: it is what is returned.
    return tree_map_with_path(lambda path, p: values.get(keystr(path), p), wide)


def reset_masters(opt_state: S, params: PyTree) -> S:
    """Returns the optimizer's state with its masters taken from the parameters.

    Call it after something else than the optimizer has changed parameters: after loading a
    checkpoint, tying, pruning or averaging weights. Otherwise the next step undoes that change,
    because it starts from the masters. Moments, counts and the loss scale stay as they are.

    Args:
      opt_state: the state of an optimizer, chained, partitioned or masked. Without masters it is
        returned as it is.
      params: the parameters, as the optimizer's `init` had them. To `with_master_params` they may
        be given in float32: masters are then exact, and the model's parameters are these, rounded.
        For the other ways of storing them that is `set_masters`.

    Raises: ValueError if a parameter that has a master is missing here or has another shape, or is
      float32 although the parameter holds a part of its master; TypeError for an optimizer in the
      place of its state, or a state in the place of parameters.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_master_params(optax.sgd(0.1))
    >>> state = tx.init(jnp.ones(2, jnp.float16))
    >>> reset_masters(state, jnp.float32([0.1, 0.2])).masters
    Array([0.1, 0.2], dtype=float32)
    """
    given = _leaves_checked(opt_state, params, "reset_masters")
    return _map_kept(lambda path, old, storage: _reset(given[path], old, storage, path), opt_state)


def set_masters(opt_state: S, params: PyTree, values: PyTree) -> tuple[PyTree, S]:
    """Returns parameters and an optimizer's state that hold these float32 values.

    The inverse of `masters`, whichever way half parameters are stored: for a run that begins with
    float32 weights, or goes on from one that was stored in another way. Moments, counts and the
    loss scale stay as they are. With stochastic rounding values are rounded to the nearest.

    Args:
      opt_state: the state of an optimizer, chained, partitioned or masked.
      params: the parameters as they are, for their dtypes.
      values: a tree like `params`, in float32.

    Raises: as `reset_masters`, for `params` and `values`.

    >>> import optax
    >>> from jmp import transforms
    >>> params = {"w": jnp.zeros(2, jnp.bfloat16)}
    >>> state = transforms.with_split_masters(optax.sgd(0.1)).init(params)
    >>> params, state = set_masters(state, params, {"w": jnp.float32([0.1, 0.2])})
    >>> params["w"], masters(state, params)["w"]
    (Array([0.100098, 0.200195], dtype=bfloat16), Array([0.1, 0.2], dtype=float32))
    """
    given, wide = (_leaves_checked(opt_state, tree, "set_masters") for tree in (params, values))
    shown: dict[str, jax.Array] = {}

    def store(path: str, old: Any, storage: Any) -> Any:
        value = cast_to_at_least_float32(wide[path])
        value = _beside_old(jnp.array(value, _dtype_of_value(old)), value, given[path])
        shown[path] = compiled(storage.visible)(value, given[path], None)
        return compiled(storage.beside)(value, shown[path], given[path])

    new_state = _map_kept(store, opt_state)

    def new(path: tuple[Any, ...], param: Any, value: Any) -> Any:
        if not is_array(param):
            return value
        return jnp.array(shown.get(keystr(path), value), param.dtype)  # never the given array

    return tree_map_with_path(new, params, values), new_state


def follow_replaced(opt_state: S, params: PyTree, before: PyTree) -> tuple[PyTree, S]:
    """Returns parameters that replace others, and a state whose masters follow them.

    As `reset_masters`, but a master stays if its parameter stays: parameters that were clipped,
    moved to other devices or put back say nothing of the digits that their masters have beyond half
    precision. Values in float32 are taken whole, see `set_masters`. Another model's parameters
    leave the state as it is.

    Args:
      params: the new parameters.
      before: the parameters that are replaced.

    Raises: ValueError if the masters are of one vector, as inside `optax.flatten`.
    """
    given, replaced = leaves_by_path(params), leaves_by_path(before)
    kept = kept_by_path(opt_state)
    if not given or not all(map(is_array, given.values())):
        return params, opt_state  # None and shardings describe a tree, or stand for one
    if _wrapping.ROOT in kept and _wrapping.ROOT not in given:
        _check_all_given(opt_state, given, "replace(params=...)")
    for path, (beside, _) in kept.items():
        if path not in given or getattr(beside, "shape", given[path].shape) != given[path].shape:
            return params, opt_state
    if kept and not any(needs_master(given[path]) for path in kept):
        return set_masters(opt_state, before, params)

    def follow(path: str, old: Any, storage: Any) -> Any:
        param = given[path]
        if not needs_master(param):
            return _reset(param, old, storage, path)
        if storage.keeps_values:
            stays = rounded(old, param.dtype) == param.astype(jnp.float32)
        else:
            stays = replaced[path] == param
        keep = lambda new, was: jnp.where(stays, was, new)
        return jax.tree.map(keep, _reset(param, old, storage, path), old)

    return params, _map_kept(follow, opt_state)


def kept_by_path(opt_state: optax.OptState) -> dict[str, tuple[Any, ParameterStorage]]:
    """Returns what is kept beside each half parameter, and by which storage.

    The keys are the paths (`keystr`) of the parameters of all groups. Beside a parameter there is
    an array, or an `EmptyState` if its storage keeps nothing.
    """
    return {
        keystr(path): (beside, _wrapping.WRAPPERS[type(state)].storage)
        for state, _ in _wrapping.states_at(opt_state, _wrapping.STORES_PARAMETERS)
        for path, beside in tree_leaves_with_path(state[0], is_leaf=is_kept)
    }


def _leaves_checked(opt_state: optax.OptState, params: PyTree, caller: str) -> dict[str, Any]:
    """Returns parameters by path.

    Raises: TypeError for an optimizer in the place of its state, and for either in the place of
      parameters; ValueError if the state has masters of other parameters.
    """
    _wrapping.check_is_state(opt_state)
    if _wrapping.holds_a_state(params):
        raise TypeError(
            f"{caller} got {described(params)} as the parameters. The order is {caller}(opt_state, "
            "params)."
        )
    _wrapping.check_half_ones_are_seen(opt_state, params)
    given = leaves_by_path(params)
    _check_all_given(opt_state, given, caller)
    return given


def _check_all_given(opt_state: optax.OptState, given: dict[str, Any], caller: str) -> None:
    """Raises ValueError if a parameter that has a master is missing, or has another shape."""
    for path, (beside, _) in kept_by_path(opt_state).items():
        found, shape = given.get(path), getattr(beside, "shape", None)
        got_shape = getattr(found, "shape", None)
        if got_shape == shape or (shape is None and found is not None):
            continue
        got = "nothing" if found is None else f"the shape {got_shape}"
        raise ValueError(
            f"{caller} got {got} for params{path}; expected the shape {shape} of its master. Pass "
            "the parameters that the optimizer was initialised with. If optax.flatten makes one "
            "vector of them, put it inside, with_master_params(optax.flatten(adam))."
        )


def _reset(param: Any, old: Any, storage: ParameterStorage, path: str) -> Any:
    """Returns what is kept beside a parameter that is the value; from the host, where `old` lies.

    Raises: ValueError for float32 if a part of the value is in the parameter itself.
    """
    if not needs_master(param) and not storage.keeps_values:
        raise ValueError(
            f"reset_masters got params{path} in {param.dtype}; expected the parameters as they are "
            "stored, which hold a part of the values themselves. Write "
            "params, opt_state = transforms.set_masters(opt_state, params, values)."
        )
    value = jnp.array(param, _dtype_of_value(old))
    return _beside_old(compiled(storage.beside)(value, value, param), param, old)


def _beside_old(new: jax.Array, given: Any, old: Any) -> jax.Array:
    """Returns what was made of `given`, on the devices of `old` if that came from the host."""
    is_placed = isinstance(old, jax.Array) and is_concrete(old)
    from_host = not isinstance(given, jax.Array)
    return jax.device_put(new, old.sharding) if is_placed and from_host else new


def _dtype_of_value(old: Any) -> np.dtype:
    """Returns the dtype of the values that belong to what is kept: a master's own, or float32."""
    return old.dtype if getattr(old, "dtype", None) == jnp.float64 else np.dtype(np.float32)


def _map_kept(function: Callable[[str, Any, Any], Any], opt_state: S) -> S:
    """Applies `function` to the path of every half parameter, what is kept beside it, and how."""

    def in_state(state: Any) -> Any:
        storage = _wrapping.WRAPPERS[type(state)].storage
        by_path = lambda path, old: function(keystr(path), old, storage)
        mapped = tree_map_with_path(by_path, state[0], is_leaf=is_kept)
        return state._replace(**{state._fields[0]: mapped})

    return _wrapping.map_states(in_state, opt_state, _wrapping.STORES_PARAMETERS)
