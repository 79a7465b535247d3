"""How half parameters store the float32 values that an optimizer trains.

`ParameterStorage` is the interface: three functions of arrays say what a parameter becomes, what is
kept beside it, and which value the two stand for. A subclass with a state of its own is a
transformation (`stored_by`), and `transforms.masters`, `set_masters` and `reset_masters` know it by
its state.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path
from jax.typing import DTypeLike

from jmp.transforms import _inner, _states
from jmp.transforms._few_kernels import (
    count_by_size,
    in_kernels_of_parameters,
    in_order_of_axes,
)
from jmp.transforms._kept import check_stored_as_in_init
from jmp.transforms._placement import placed
from jmp.transforms._random_bits import RandomBits
from jmp.transforms._rounding import difference_to, needs_master, rounded, widened
from jmp.transforms._states import Transformation
from jmp.trees import PyTree, cast_to_at_least_float32


class ParameterStorage:
    """One way to store a float32 array in a half parameter and what is kept beside it.

    After a step `shown` is `visible(new, param, bits)`, the parameter becomes `shown` in its own
    dtype, and `beside(new, shown, param)` is kept in the state. Of these two `value` gives `new`
    again, as exactly as the storage can.

    Attributes:
      caller: the public function that makes a transformation of it.
      state_type: the NamedTuple of its state: first the tree of what is kept beside the parameters,
        with `optax.MaskedNode` for those that need nothing; last `inner_state`.
    """

    caller: ClassVar[str]
    state_type: ClassVar[type]

    def __init_subclass__(cls) -> None:
        _states.STORAGES[cls.state_type] = cls()

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


class MasterForm(Protocol):
    """What a transformation asks of all parameters together: `InTree`, `InOneVector`."""

    def first(self, params: optax.Params, inner: optax.GradientTransformationExtraArgs) -> PyTree:
        """Returns what is kept beside the parameters of the first step."""

    def seen_by_inner(self, kept: PyTree, params: optax.Params) -> optax.Params:
        """Returns what `inner` updates: float32 values, and the parameters that are no half."""

    def gradients_for_inner(self, updates: optax.Updates, params: optax.Params) -> optax.Updates:
        """Returns the gradients as `inner` sees them."""

    def after(
        self,
        kept: PyTree,
        params: optax.Params,
        new: PyTree,
        updates: optax.Updates,
        count: jax.Array | None,
    ) -> tuple[PyTree, optax.Updates]:
        """Returns what is kept after a step, and the updates by which the parameters follow.

        Args:
          kept: what was kept before the step.
          new: what `seen_by_inner` returned, with `updates` added to it.
          updates: what `inner` returned.
          count: how many steps were taken before, where the state knows it.
        """


def in_one_program(storage: ParameterStorage, act: str, *args: Any) -> Any:
    """Calls a function of a storage; outside of a trace compiled, not operation by operation.

    `init` and `masters` are usually called outside of jit, where each operation is compiled for
    each shape.

    Args:
      act: "visible", "beside" or "value".
      *args: those of that function.
    """
    kind: Any = type(storage)
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))
    return getattr(storage, act)(*args) if is_traced else _compiled(kind, act)(*args)


@functools.cache
def _compiled(kind: Any, act: str) -> Callable[..., Any]:
    """Returns a function of a class of storages under jit: one, which keeps its programs."""
    return jax.jit(getattr(kind(), act))


class InTree:
    """What is kept in a tree like the parameters': something for each half leaf, nothing else."""

    def __init__(
        self,
        storage: ParameterStorage,
        dtype: DTypeLike = jnp.float32,
        bits: RandomBits | None = None,
    ) -> None:
        self.storage = storage
        self.dtype = dtype
        self.bits = bits

    def first(self, params: optax.Params, inner: optax.GradientTransformationExtraArgs) -> PyTree:
        def make(path: tuple[Any, ...], param: Any) -> Any:
            if not needs_master(param):
                return optax.MaskedNode()
            self.storage.check(param, keystr(path))
            wide = jnp.array(param, self.dtype)
            return in_one_program(self.storage, "beside", wide, wide, param)

        return tree_map_with_path(make, params)

    def seen_by_inner(self, kept: PyTree, params: optax.Params) -> optax.Params:
        # What is kept beside a parameter may be any tree.
        def seen(param: Any, beside: Any) -> Any:
            if not needs_master(param):
                return param
            return in_one_program(self.storage, "value", param, beside)

        return jax.tree.map(seen, params, kept)

    def gradients_for_inner(self, updates: optax.Updates, params: optax.Params) -> optax.Updates:
        return cast_to_at_least_float32(in_order_of_axes(updates))

    def after(
        self,
        kept: PyTree,
        params: optax.Params,
        new: PyTree,
        updates: optax.Updates,
        count: jax.Array | None,
    ) -> tuple[PyTree, optax.Updates]:
        count_of = None if count is None else count_by_size(count)

        def follow(path: tuple[Any, ...], param: Any, value: Any, update: Any) -> Any:
            if not needs_master(param):
                return optax.MaskedNode(), update
            bits = None
            if self.bits and count_of:
                bits = self.bits.at(keystr(path), param, count_of(param))
            change = difference_to(self.storage.visible(value, param, bits), param)
            return self.storage.beside(value, shown_after(change, param), param), change

        leaves, structure = cast(Any, tree_flatten_with_path(params))
        trees = structure.flatten_up_to(new), structure.flatten_up_to(updates)
        pairs = [follow(*leaf, *others) for leaf, *others in zip(leaves, *trees, strict=True)]
        beside, changes = zip(*pairs, strict=True) if pairs else ((), ())
        return structure.unflatten(beside), structure.unflatten(changes)


def shown_after(change: jax.Array, param: jax.Array) -> jax.Array:
    """Returns what `optax.apply_updates` makes of a parameter, as float32.

    That is what was asked for, unless one step shrinks a number of bfloat16 more than 65536-fold,
    one of float16 4096-fold, or to a negative zero: no float32 difference says exactly that.
    """
    sum_ = param.astype(jnp.float32) + change
    if param.dtype == jnp.bfloat16:
        # From the new parameter itself: what is kept beside it then comes out of the same kernel on
        # a TPU, where XLA would else read everything once more for the parameter alone.
        return widened(sum_.astype(param.dtype))
    return rounded(sum_, param.dtype)


def stored_by(
    form: MasterForm,
    storage: ParameterStorage,
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> Transformation[Any]:
    """Returns the transformation that runs `inner` in float32 and stores what comes out."""
    caller, state_type = storage.caller, cast(Any, storage.state_type)
    wrapped = _inner.as_transformation(inner, caller)
    kept_name = state_type._fields[0]
    counts = "count" in state_type._fields

    def init(params: optax.Params) -> Any:
        kept = form.first(params, wrapped)
        seen = form.seen_by_inner(kept, params)
        inner_state = _inner.init_inner(wrapped, seen, caller)
        _states.check_no_storage_inside(inner_state, caller)
        _states.check_no_loss_scaling_inside(inner_state, caller)
        state = {kept_name: kept, "inner_state": _states.without_weak_types(inner_state)}
        if counts:
            state["count"] = jnp.zeros([], jnp.int32)
        return placed(state_type(**state), params)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if params is None:
            raise ValueError(
                f"{caller} got no params; call update(gradients, state, params): the "
                "update is the difference between the new masters and the parameters."
            )
        _states.check_own_state(state, state_type, caller)
        _states.refuse_unreduced(updates, caller)
        kept = getattr(state, kept_name)
        check_stored_as_in_init(params, kept, caller)
        old = form.seen_by_inner(kept, params)
        gradients = form.gradients_for_inner(updates, params)
        full_updates, inner_state = _inner.update_inner(
            wrapped, updates, gradients, state.inner_state, old, extra_args, caller
        )
        new = optax.apply_updates(old, full_updates)
        count = state.count if counts else None
        kept, half_updates = form.after(kept, params, new, full_updates, count)
        changed = {kept_name: kept, "inner_state": inner_state}
        if counts:
            changed["count"] = optax.safe_increment(state.count)
        state = in_kernels_of_parameters(state._replace(**changed), params, half_updates)
        return half_updates, state

    tx: Transformation[Any] = optax.GradientTransformationExtraArgs(init, update)
    return tx
