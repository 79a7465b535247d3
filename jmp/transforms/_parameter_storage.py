"""One way to store a float32 value in a half parameter, and the step that does so.

A `ParameterStorage` is three functions of arrays: they say what a parameter becomes, what is kept
beside it, and which value the two stand for. The rest is made of these: `stored_by`, the
transformation that runs an optimizer on the values, and the functions in `_masters`, which read and
set the values inside of an optimizer's state. `register_wrapper` says which storage the class of a
state belongs to. The storages that there are stand in `_half_parameters`.
"""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from jax.typing import DTypeLike

from jmp.transforms import _few_kernels, _rounding, _wrapping
from jmp.transforms._rounding import RandomBits, needs_master, rounded, rounded_by
from jmp.trees import PyTree, cast_to_at_least_float32, leaves_by_path

# A function of a storage as one program. `init` and `masters` are usually called outside of jit,
# where JAX would compile each operation for each shape.
compiled = functools.cache(jax.jit)


class ParameterStorage:
    """One way to store a float32 array in a half parameter and what is kept beside it.

    After a step `shown` is `visible(new, param, bits)`, the parameter becomes `shown` in its own
    dtype, and `beside(new, shown, param)` is kept in the state. Of these two `value` gives `new`
    again, as exactly as the storage can.

    The base class keeps nothing: the parameter itself is the value, rounded by chance if the
    transformation has random bits. `with_stochastic_rounding` uses it as it is.

    Each class is made once, without arguments. Options of a transformation belong to `stored_by`.

    Attributes:
      keeps_values: whether what is kept is the value itself, and no part of it in the parameter.
    """

    keeps_values: ClassVar[bool] = False

    def check(self, param: jax.Array, path: str) -> None:
        """Raises ValueError for a half parameter that it cannot store."""

    def visible(self, new: jax.Array, param: jax.Array, bits: jax.Array | None) -> jax.Array:
        """Returns what the parameter becomes: float32 numbers that its dtype holds, all finite but
        NaN.

        Args:
          new: the value, float32.
          param: the parameter as it is.
          bits: random, if the transformation has any; None rounds to the nearest.
        """
        return rounded(new, param.dtype) if bits is None else rounded_by(bits, new, param.dtype)

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> Any:
        """Returns what is kept beside a parameter.

        Args:
          new: the value, float32.
          shown: what the parameter shows, as float32; hardly ever other than `visible`, see
            `shown_after`.
          param: the parameter, for its dtype.
        """
        return optax.EmptyState()

    def value(self, param: jax.Array, beside: Any) -> jax.Array:
        """Returns the float32 value that a parameter and what is kept beside it stand for."""
        return param.astype(jnp.float32)


def stored_by(
    state_type: type,
    inner: _wrapping.Optimizer,
    dtype: DTypeLike = jnp.float32,
    bits: RandomBits | None = None,
) -> _wrapping.Transformation[Any]:
    """Returns the transformation that runs `inner` in float32 and stores what comes out.

    The arrays that are kept beside the parameters form a tree like theirs.

    Args:
      state_type: the NamedTuple of its state, which `register_wrapper` registers: first the tree
        of what is kept beside the parameters, with `optax.MaskedNode` for those that need nothing;
        then `count`, if there are random bits; last `inner_state`.
      dtype: of the values that `inner` sees.
      bits: where the storage's random bits come from; None for one that rounds to the nearest.
    """
    caller, _, storage = _wrapping.WRAPPERS[state_type]
    optimizer = _wrapping.checked_inner(inner, state_type)

    def first_beside(path: tuple[Any, ...], param: Any) -> Any:
        if not needs_master(param):
            return optax.MaskedNode()
        storage.check(param, keystr(path))
        wide = jnp.array(param, dtype)
        return compiled(storage.beside)(wide, wide, param)

    def value_of(param: Any, beside: Any) -> Any:  # beside float32 there is an empty tree
        return compiled(storage.value)(param, beside) if needs_master(param) else param

    def init(params: optax.Params) -> Any:
        kept = tree_map_with_path(first_beside, params)
        inner_state = optimizer.init(jax.tree.map(value_of, params, kept))
        count = [jnp.zeros([], jnp.int32)] if bits else []
        return state_type(kept, *count, inner_state)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                f"{caller} got no params; call update(gradients, state, params): the "
                "update is the difference between the new masters and the parameters."
            )
        _check_stored_as_in_init(params, state[0], caller)

        # Run the optimizer on the values.
        old = jax.tree.map(value_of, params, state[0])
        gradients = cast_to_at_least_float32(_few_kernels.in_order_of_axes(updates))
        extra_args = _wrapping.with_gradients(extra_args, updates, gradients)
        changes, inner_state = optimizer.update(gradients, state.inner_state, old, **extra_args)
        new = optax.apply_updates(old, changes)

        # Store the new values: parameters follow by `half_updates`.
        count_of = _few_kernels.count_by_size(state.count) if bits else None

        def follow(path: tuple[Any, ...], param: Any, value: Any, update: Any) -> Any:
            if not needs_master(param):
                return optax.MaskedNode(), update
            drawn = bits.at(keystr(path), param, count_of(param)) if bits and count_of else None
            change = _rounding.difference_to(storage.visible(value, param, drawn), param)
            return storage.beside(value, _rounding.shown_after(change, param), param), change

        pairs = tree_map_with_path(follow, params, new, changes)
        kept = jax.tree.map(lambda _, pair: pair[0], params, pairs)
        half_updates = jax.tree.map(lambda _, pair: pair[1], params, pairs)
        count = [optax.safe_increment(state.count)] if bits else []
        new_state = state_type(kept, *count, inner_state)
        return half_updates, _few_kernels.in_kernels_of_parameters(new_state, params, half_updates)

    return _wrapping.transformation(init, update, state_type)


def _check_stored_as_in_init(params: optax.Params, kept: PyTree, caller: str) -> None:
    """Raises ValueError if parameters have changed between half and another dtype."""
    with_master = {keystr(p) for p, _ in tree_leaves_with_path(kept, is_leaf=is_kept)}
    for path, leaf in leaves_by_path(params).items():
        if needs_master(leaf) != (path in with_master):
            had = "a half" if path in with_master else "no half"
            raise ValueError(
                f"{caller} got params{path} of dtype {leaf.dtype}; when `init` was called it had "
                f"{had} dtype. Keep the dtype in updates (optax.apply_updates does, "
                "apply_updates of jmp.adapters.equinox too, eqx.apply_updates not), cast the "
                "parameters as they were stored then (cast_params of the adapters), or call init "
                "again."
            )


def is_kept(node: object) -> bool:
    """Returns whether a node says that a parameter is stored, and that nothing is kept beside."""
    return isinstance(node, optax.EmptyState)
