"""How half parameters store the float32 values that an optimizer trains.

`ParameterStorage` is the interface: three functions of arrays say what a parameter becomes, what is
kept beside it, and which value the two stand for. The storages themselves are in
`_half_parameters`. Of these three functions everything else is made:

- `stored_by`, the transformation that runs an optimizer on the values;
- `masters`, `set_masters` and `reset_masters`, which read and set the values inside of an
  optimizer's state. The class of a state says which storage it belongs to.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from jax.typing import DTypeLike

from jmp import _jax_compat
from jmp._messages import described
from jmp.transforms import _states
from jmp.transforms._few_kernels import count_by_size, in_kernels_of_parameters, in_order_of_axes
from jmp.transforms._loss_scaling import WithLossScaleState
from jmp.transforms._rounding import RandomBits, difference_to, needs_master, rounded, widened
from jmp.transforms._states import STORAGES
from jmp.transforms._wrapping import Transformation, checked_inner, transformation, with_gradients
from jmp.trees import PyTree, cast_to_at_least_float32, is_array, leaves_by_path

S = TypeVar("S")


class ParameterStorage:
    """One way to store a float32 array in a half parameter and what is kept beside it.

    After a step `shown` is `visible(new, param, bits)`, the parameter becomes `shown` in its own
    dtype, and `beside(new, shown, param)` is kept in the state. Of these two `value` gives `new`
    again, as exactly as the storage can.

    It is made without arguments. Options of a transformation belong to `stored_by`.

    Attributes:
      caller: the public function that makes a transformation of it.
      state_type: the NamedTuple of its state: first the tree of what is kept beside the parameters,
        with `optax.MaskedNode` for those that need nothing; then `count`, if `stored_by` gets
        random bits; last `inner_state`.
      keeps_values: whether what is kept is the value itself, and no part of it in the parameter.
    """

    caller: ClassVar[str]
    state_type: ClassVar[type]
    keeps_values: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if cls.state_type in STORAGES:  # inherited: states would be read by another storage
            raise TypeError(
                f"{cls.__name__} has the state {cls.state_type.__name__} of "
                f"{type(STORAGES[cls.state_type]).__name__}; expected a NamedTuple of its own."
            )
        STORAGES[cls.state_type] = cls()

    def check(self, param: jax.Array, path: str) -> None:
        """Raises ValueError for a half parameter that it cannot store."""

    def visible(self, new: jax.Array, param: jax.Array, bits: jax.Array | None) -> jax.Array:
        """Returns what the parameter becomes: float32 numbers that its dtype holds, all finite but
        NaN.

        Args:
          new: the value, float32.
          param: the parameter as it is.
          bits: random, for a storage that asks for them; None rounds to the nearest.
        """
        return rounded(new, param.dtype)

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> Any:
        """Returns what is kept beside a parameter.

        Args:
          new: the value, float32.
          shown: what the parameter shows, as float32; hardly ever other than `visible`, see
            `shown_after`.
          param: the parameter, for its dtype.
        """
        raise NotImplementedError

    def value(self, param: jax.Array, beside: Any) -> jax.Array:
        """Returns the float32 value that a parameter and what is kept beside it stand for."""
        raise NotImplementedError


def in_one_program(storage: ParameterStorage, act: str, *args: Any) -> Any:
    """Calls a function of a storage, compiled: not operation by operation.

    `init` and `masters` are usually called outside of jit. There JAX would compile each operation
    for each shape.

    Args:
      act: "visible", "beside" or "value".
      *args: its arguments.
    """
    kind: Any = type(storage)
    return _compiled(kind, act)(*args)


@functools.cache
def _compiled(kind: Any, act: str) -> Callable[..., Any]:
    """Returns a function of a class of storages under jit: one, which keeps its programs."""
    return jax.jit(getattr(kind(), act))


def shown_after(change: jax.Array, param: jax.Array) -> jax.Array:
    """Returns what `optax.apply_updates` makes of a parameter, as float32.

    That is what was asked for, unless one step shrinks a number of bfloat16 more than 65536-fold,
    one of float16 4096-fold, or to a negative zero: no float32 difference says exactly that.
    """
    sum_ = param.astype(jnp.float32) + change
    if param.dtype == jnp.bfloat16:
        # From the new parameter itself: what is kept beside it then comes out of the same kernel on
        # a TPU. Else XLA would read everything once more, only for the parameter.
        return widened(sum_.astype(param.dtype))
    return rounded(sum_, param.dtype)


def stored_by(
    storage: ParameterStorage,
    inner: optax.GradientTransformation | optax.MultiSteps,
    dtype: DTypeLike = jnp.float32,
    bits: RandomBits | None = None,
) -> Transformation[Any]:
    """Returns the transformation that runs `inner` in float32 and stores what comes out.

    The arrays that are kept beside the parameters form a tree like theirs.

    Args:
      dtype: of the values that `inner` sees.
      bits: where the storage's random bits come from; None for one that rounds to the nearest.
    """
    caller, state_type = storage.caller, cast(Any, storage.state_type)
    optimizer = checked_inner(inner, caller, state_type)

    def first_beside(path: tuple[Any, ...], param: Any) -> Any:
        if not needs_master(param):
            return optax.MaskedNode()
        storage.check(param, keystr(path))
        wide = jnp.array(param, dtype)
        return in_one_program(storage, "beside", wide, wide, param)

    def value_of(param: Any, beside: Any) -> Any:  # beside float32 there is an empty tree
        if not needs_master(param):
            return param
        return in_one_program(storage, "value", param, beside)

    def init(params: optax.Params) -> Any:
        kept = tree_map_with_path(first_beside, params)
        inner_state = optimizer.init(jax.tree.map(value_of, params, kept))
        _refuse_around(inner_state, caller)
        count = [jnp.zeros([], jnp.int32)] if bits else []
        return state_type(kept, *count, inner_state)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if params is None:
            raise ValueError(
                f"{caller} got no params; call update(gradients, state, params): the "
                "update is the difference between the new masters and the parameters."
            )
        _check_stored_as_in_init(params, state[0], caller)

        # Run the optimizer on the values.
        old = jax.tree.map(value_of, params, state[0])
        gradients = cast_to_at_least_float32(in_order_of_axes(updates))
        extra_args = with_gradients(extra_args, updates, gradients)
        full_updates, inner_state = optimizer.update(
            gradients, state.inner_state, old, **extra_args
        )
        new = optax.apply_updates(old, full_updates)

        # Store the new values: parameters follow by `half_updates`.
        count_of = count_by_size(state.count) if bits else None

        def follow(path: tuple[Any, ...], param: Any, value: Any, update: Any) -> Any:
            if not needs_master(param):
                return optax.MaskedNode(), update
            drawn = bits.at(keystr(path), param, count_of(param)) if bits and count_of else None
            change = difference_to(storage.visible(value, param, drawn), param)
            return storage.beside(value, shown_after(change, param), param), change

        pairs = tree_map_with_path(follow, params, new, full_updates)
        kept = jax.tree.map(lambda _, pair: pair[0], params, pairs)
        half_updates = jax.tree.map(lambda _, pair: pair[1], params, pairs)
        count = [optax.safe_increment(state.count)] if bits else []
        new_state = state_type(kept, *count, inner_state)
        return half_updates, in_kernels_of_parameters(new_state, params, half_updates)

    return transformation(init, update, caller, state_type)


def _refuse_around(inner_state: optax.OptState, caller: str) -> None:
    """Raises ValueError for what stores parameters already, or belongs around what does."""
    for state, _ in _states.locate_storing(inner_state):
        raise ValueError(
            f"{caller} got an inner transformation that contains {STORAGES[type(state)].caller}, "
            "which stores the parameters already. Use one of the two, around the optimizer."
        )
    if _states.find_states(inner_state, WithLossScaleState):
        raise ValueError(
            f"{caller} got an inner transformation that contains with_loss_scale; a skipped step "
            f"would still move what {caller} counts and keeps. Swap the two: "
            f"with_loss_scale({caller}(adam), loss_scale)."
        )


def _check_stored_as_in_init(params: optax.Params, kept: PyTree, caller: str) -> None:
    """Raises ValueError if parameters have changed between half and another dtype."""
    with_master = {keystr(p) for p, _ in tree_leaves_with_path(kept, is_leaf=_states.is_kept)}
    for path, leaf in leaves_by_path(params).items():
        if needs_master(leaf) != (path in with_master):
            had, way = "no half", ""
            if path in with_master:
                had = "a half"
                way = " after each update (optax.apply_updates does, eqx.apply_updates does not)"
            raise ValueError(
                f"{caller} got params{path} of dtype {leaf.dtype}; when `init` was called it had "
                f"{had} dtype. Keep the dtype{way}, cast the parameters as they were stored then "
                "(cast_params of the adapters), or call init again."
            )


# The values inside of an optimizer's state: read them, set them, take them from parameters.


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
    _states.check_nothing_changes_masters(opt_state)
    given = _leaves_checked(opt_state, params, "masters")
    values = {
        path: in_one_program(storage, "value", given[path], beside)
        for path, (beside, storage) in _states.kept_by_path(opt_state).items()
    }
    # A half leaf of a frozen group has no master: it is what is returned.
    return tree_map_with_path(
        lambda path, p: values.get(keystr(path), p), cast_to_at_least_float32(params)
    )


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
        shown[path] = in_one_program(storage, "visible", value, given[path], None)
        return in_one_program(storage, "beside", value, shown[path], given[path])

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
    kept = _states.kept_by_path(opt_state)
    if not given or not all(map(is_array, given.values())):
        return params, opt_state  # None and shardings describe a tree, or stand for one
    if _states.ROOT in kept and _states.ROOT not in given:
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


def _leaves_checked(opt_state: optax.OptState, params: PyTree, caller: str) -> dict[str, Any]:
    """Returns parameters by path.

    Raises: TypeError for an optimizer in the place of its state, and for either in the place of
      parameters; ValueError if the state has masters of other parameters.
    """
    _states.check_is_state(opt_state)
    if _states.holds_a_state(params):
        raise TypeError(
            f"{caller} got {described(params)} as the parameters. The order is {caller}(opt_state, "
            "params)."
        )
    _states.check_half_ones_are_seen(opt_state, params)
    given = leaves_by_path(params)
    _check_all_given(opt_state, given, caller)
    return given


def _check_all_given(opt_state: optax.OptState, given: dict[str, Any], caller: str) -> None:
    """Raises ValueError if a parameter that has a master is missing, or has another shape."""
    for path, (beside, _) in _states.kept_by_path(opt_state).items():
        found, shape = given.get(path), getattr(beside, "shape", None)
        got_shape = getattr(found, "shape", None)
        if got_shape == shape or (shape is None and found is not None):
            continue
        got = "nothing" if found is None else f"the shape {got_shape}"
        is_vector = path == _states.ROOT and shape is not None and len(shape) == 1
        way = (
            "Something between, such as optax.flatten, makes one vector of the parameters before "
            "with_master_params sees them: put it inside, with_master_params(optax.flatten(adam))."
            if is_vector and found is None
            else "Pass the parameters that the optimizer was initialised with."
        )
        raise ValueError(
            f"{caller} got {got} for params{path}; expected the shape {shape} of its master. {way}"
        )


def _reset(param: Any, old: Any, storage: ParameterStorage, path: str) -> Any:
    """Returns what is kept beside a parameter that is the value; from the host, where `old` lies.

    Raises: ValueError for float32 if a part of the value is in the parameter itself.
    """
    if not needs_master(param) and not storage.keeps_values:
        raise ValueError(
            f"reset_masters got params{path} in {param.dtype}, of which {storage.caller} keeps a "
            "part in the parameter; expected the parameters as they are stored. Write "
            "params, opt_state = transforms.set_masters(opt_state, params, values)."
        )
    value = jnp.array(param, _dtype_of_value(old))
    return _beside_old(in_one_program(storage, "beside", value, value, param), param, old)


def _beside_old(new: jax.Array, given: Any, old: Any) -> jax.Array:
    """Returns what was made of `given`, on the devices of `old` if that came from the host."""
    is_placed = isinstance(old, jax.Array) and _jax_compat.is_concrete(old)
    from_host = not isinstance(given, jax.Array)
    return jax.device_put(new, old.sharding) if is_placed and from_host else new


def _dtype_of_value(old: Any) -> np.dtype:
    """Returns the dtype of the values that belong to what is kept: a master's own, or float32."""
    return old.dtype if getattr(old, "dtype", None) == jnp.float64 else np.dtype(np.float32)


def _map_kept(function: Callable[[str, Any, Any], Any], opt_state: S) -> S:
    """Applies `function` to the path of every half parameter, what is kept beside it, and how."""

    def in_state(state: Any) -> Any:
        storage = STORAGES[type(state)]
        mapped = tree_map_with_path(
            lambda path, old: function(keystr(path), old, storage),
            state[0],
            is_leaf=_states.is_kept,
        )
        return state._replace(**{state._fields[0]: mapped})

    return _states.map_states(in_state, opt_state, tuple(STORAGES))
