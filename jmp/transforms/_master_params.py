"""`with_master_params`: float32 masters for parameters that are stored in half."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jmp.dtypes import floating_dtype, is_half
from jmp.transforms import _states
from jmp.trees import cast_to_at_least_float32, is_floating, path_string


class WithMasterParamsState(NamedTuple):
    """State of `with_master_params`.

    Attributes:
      masters: the parameters' tree with a master for every half leaf, and `optax.MaskedNode()`,
        which holds nothing, for every other leaf.
      inner_state: state of the wrapped optimizer.
    """

    masters: Any
    inner_state: Any


def with_master_params(
    inner: optax.GradientTransformation | optax.MultiSteps,
    master_dtype: DTypeLike = jnp.float32,
) -> optax.GradientTransformationExtraArgs:
    """Keeps float32 masters of half parameters in the optimizer's state.

    In float16 1 + 0.0001 is 1, in bfloat16 even 1 + 0.001: small updates vanish. The masters take
    them, and the parameters follow: after `optax.apply_updates` they equal their masters, rounded,
    bit for bit. One exception: an update that shrinks a weight more than 4096-fold at once, or to a
    negative zero, which no float32 difference added to the old weight can express; the next step
    makes up for it, because the masters are the truth. (Micikevicius et al. 2018, section 3.1.)

    Leaves that are float32 already, such as BatchNorm's, are not duplicated. `inner` sees masters
    and gradients in at least float32. Only wrappers such as `with_loss_scale` may go around it: in
    `optax.chain(with_master_params(...), optax.scale(0.5))` masters and parameters would part in
    silence; `masters` and the adapters' training states refuse such a chain.

    Args:
      inner: any optax transformation, or a `MultiSteps` object.
      master_dtype: float32 or float64.

    Returns: a transformation whose state is a `WithMasterParamsState`; `update` needs `params`.

    Raises:
      ValueError: half masters; `update` without `params`; masters around masters.
      TypeError: `inner` is no transformation.

    >>> import optax
    >>> tx = with_master_params(optax.sgd(1e-4))
    >>> params = jnp.ones(2, jnp.float16)
    >>> state = tx.init(params)
    >>> for _ in range(10):  # ten steps, each too small for float16
    ...     updates, state = tx.update(jnp.ones(2, jnp.float16), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params.dtype, bool((params == state.masters.astype(jnp.float16)).all()), float(params[0])
    (dtype('float16'), True, 0.9990234375)
    """
    inner = _states.as_transformation(inner, "with_master_params")
    master_dtype = floating_dtype(master_dtype, "master_dtype")
    if master_dtype not in (jnp.dtype("float32"), jnp.dtype("float64")):
        raise ValueError(
            f"with_master_params got master_dtype={master_dtype}; expected float32 or float64: "
            "masters exist to take updates that are too small for half precision."
        )

    def init(params: Any) -> WithMasterParamsState:
        masters = jax.tree.map(
            lambda p: jnp.array(p, master_dtype) if _needs_master(p) else optax.MaskedNode(), params
        )
        inner_state = inner.init(_masters_or_params(masters, params))
        _states.check_inner_state(inner_state, WithMasterParamsState, "with_master_params")
        return WithMasterParamsState(masters, _states.without_weak_types(inner_state))

    def update(
        updates: Any, state: WithMasterParamsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, WithMasterParamsState]:
        if params is None:
            raise ValueError(
                "with_master_params got no params; call update(gradients, state, params): the "
                "update is the difference between the new masters and the parameters."
            )
        full = _masters_or_params(state.masters, params)
        gradients = cast_to_at_least_float32(updates)
        full_updates, inner_state = _states.update_inner(
            inner, gradients, state.inner_state, full, extra_args, "with_master_params"
        )
        new_full = optax.apply_updates(full, full_updates)
        masters = jax.tree.map(
            lambda p, new: new if _needs_master(p) else optax.MaskedNode(), params, new_full
        )
        half_updates = jax.tree.map(
            lambda p, new, u: _difference(p, new) if _needs_master(p) else u,
            params,
            new_full,
            full_updates,
        )
        return half_updates, WithMasterParamsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _needs_master(param: Any) -> bool:
    return is_floating(param) and is_half(param.dtype)


def _masters_or_params(masters: Any, params: Any) -> Any:
    return jax.tree.map(
        lambda m, p: p if isinstance(m, optax.MaskedNode) else m,
        masters,
        params,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )


def _difference(param: jax.Array, master: jax.Array) -> jax.Array:
    """Returns what must be added to `param`, in float32, to get the rounded master."""
    rounded = _rounded(master.astype(jnp.float32), param.dtype)
    old = param.astype(jnp.float32)
    # Equal values: the zero with the master's sign, so that -0.0 stays what it is.
    return jnp.where(rounded == old, jnp.copysign(jnp.float32(0), rounded), rounded - old)


def _rounded(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns float32 `value` rounded to the nearest number of a half `dtype`, still float32.

    Not `value.astype(dtype).astype(float32)`: XLA drops such a pair of casts on a GPU.
    """
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
    # reduce_precision flushes what is subnormal in float16: there, multiples of 2**-24.
    subnormal = jnp.round(value * 2.0**24) * 2.0**-24
    normal = jax.lax.reduce_precision(value, exponent_bits=5, mantissa_bits=10)
    return jnp.where(jnp.abs(value) < 2.0**-14, subnormal, normal)


def collect_masters(opt_state: Any, params: Any) -> Any:
    """Returns `params` with half leaves replaced by their masters, of whatever parameter group."""
    by_path = {
        path_string(path): master
        for state in _states.find_states(opt_state, WithMasterParamsState)
        for path, master in jax.tree_util.tree_leaves_with_path(state.masters)
    }
    # A half leaf of a frozen group has no master and is its own truth.
    return jax.tree_util.tree_map_with_path(
        lambda path, p: by_path.get(path_string(path), p), cast_to_at_least_float32(params)
    )
