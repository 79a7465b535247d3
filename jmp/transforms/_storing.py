"""How half parameters store the float32 values that an optimizer trains.

`ParameterStorage` is the interface: three functions of arrays say what a parameter becomes, what is
kept beside it, and which value the two stand for. `stored_by` makes a transformation of one, which
runs an optimizer on the values. The storages themselves are in `_half_parameters`.
`transforms.masters`, `set_masters` and `reset_masters` find the storage of a state by the state's
class.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path
from jax.typing import DTypeLike

from jmp.transforms._few_kernels import (
    count_by_size,
    in_kernels_of_parameters,
    in_order_of_axes,
)
from jmp.transforms._loss_scale_state import check_no_loss_scaling_inside
from jmp.transforms._rounding import RandomBits, difference_to, needs_master, rounded, widened
from jmp.transforms._states import STORAGES, find_storing, shapes_by_path
from jmp.transforms._wrapping import Transformation, Wrapper
from jmp.trees import PyTree, cast_to_at_least_float32, leaves_by_path


class ParameterStorage:
    """One way to store a float32 array in a half parameter and what is kept beside it.

    After a step `shown` is `visible(new, param, bits)`, the parameter becomes `shown` in its own
    dtype, and `beside(new, shown, param)` is kept in the state. Of these two `value` gives `new`
    again, as exactly as the storage can.

    It is made without arguments. Options of a transformation belong to `stored_by`.

    Attributes:
      caller: the public function that makes a transformation of it.
      state_type: the NamedTuple of its state: first the tree of what is kept beside the parameters,
        with `optax.MaskedNode` for those that need nothing; last `inner_state`.
    """

    caller: ClassVar[str]
    state_type: ClassVar[type]

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
    wrapper = Wrapper[Any](inner, caller, state_type)
    kept_name = state_type._fields[0]
    counts = "count" in state_type._fields

    def first_beside(path: tuple[Any, ...], param: Any) -> Any:
        if not needs_master(param):
            return optax.MaskedNode()
        storage.check(param, keystr(path))
        wide = jnp.array(param, dtype)
        return in_one_program(storage, "beside", wide, wide, param)

    def value_of(param: Any, beside: Any) -> Any:  # what is kept beside one may be any tree
        if not needs_master(param):
            return param
        return in_one_program(storage, "value", param, beside)

    def init(params: optax.Params) -> Any:
        kept = tree_map_with_path(first_beside, params)
        inner_state = wrapper.init_inner(jax.tree.map(value_of, params, kept))
        for _, inside in find_storing(inner_state):
            raise ValueError(
                f"{caller} got an inner transformation that contains {inside.caller}, which stores "
                "the parameters already. Use one of the two, around the optimizer."
            )
        check_no_loss_scaling_inside(inner_state, caller)
        count = {"count": jnp.zeros([], jnp.int32)} if counts else {}
        return state_type(**{kept_name: kept}, inner_state=inner_state, **count)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if params is None:
            raise ValueError(
                f"{caller} got no params; call update(gradients, state, params): the "
                "update is the difference between the new masters and the parameters."
            )
        kept = state[0]
        _check_stored_as_in_init(params, kept, caller)

        # Run the optimizer on the values.
        old = jax.tree.map(value_of, params, kept)
        gradients = cast_to_at_least_float32(in_order_of_axes(updates))
        full_updates, inner_state = wrapper.update_inner(
            updates, gradients, state.inner_state, old, extra_args
        )
        new = optax.apply_updates(old, full_updates)

        # Store the new values: parameters follow by `changes`.
        count_of = count_by_size(state.count) if counts else None

        def follow(path: tuple[Any, ...], param: Any, value: Any, update: Any) -> Any:
            if not needs_master(param):
                return optax.MaskedNode(), update
            drawn = bits.at(keystr(path), param, count_of(param)) if bits and count_of else None
            change = difference_to(storage.visible(value, param, drawn), param)
            return storage.beside(value, shown_after(change, param), param), change

        leaves, structure = cast(Any, tree_flatten_with_path(params))
        trees = structure.flatten_up_to(new), structure.flatten_up_to(full_updates)
        pairs = [follow(*leaf, *others) for leaf, *others in zip(leaves, *trees, strict=True)]
        beside, changes = zip(*pairs, strict=True) if pairs else ((), ())
        changed = {kept_name: structure.unflatten(beside), "inner_state": inner_state}
        if counts:
            changed["count"] = optax.safe_increment(state.count)
        half_updates = structure.unflatten(changes)
        return half_updates, in_kernels_of_parameters(
            state._replace(**changed), params, half_updates
        )

    return wrapper.transformation(init, update)


def _check_stored_as_in_init(params: optax.Params, kept: PyTree, caller: str) -> None:
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
