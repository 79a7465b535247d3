"""`with_master_params`: float32 masters for parameters that are stored in half.

A half parameter follows its master by an update that is exactly the difference, in float32, of the
rounded master and the parameter: `difference_to_master`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr
from jax.typing import DTypeLike

from jmp._messages import described
from jmp.dtypes import floating_dtype, is_half
from jmp.transforms import _inner, _states
from jmp.transforms._few_kernels import in_order_of_axes
from jmp.transforms._flat_masters import FlatMasters, as_one_vector, check_takes_a_vector
from jmp.transforms._inner import Transformation
from jmp.transforms._placement import placed
from jmp.transforms._states import WithMasterParamsState
from jmp.trees import PyTree, cast_to_at_least_float32, is_floating, leaves_by_path

ROOT = keystr(())  # the path of a tree that is one array


def with_master_params(
    inner: optax.GradientTransformation | optax.MultiSteps,
    master_dtype: DTypeLike = jnp.float32,
    *,
    flat_master: bool = False,
) -> Transformation[WithMasterParamsState]:
    """Keeps float32 masters of half parameters in the optimizer's state.

    In float16 1 + 0.0001 is 1, in bfloat16 even 1 + 0.001: small updates vanish. The masters take
    them, and the parameters follow: after `optax.apply_updates` they equal their masters, rounded,
    bit for bit. (Micikevicius et al. 2018, section 3.1.) There are two exceptions. If an update
    shrinks a weight more than 4096-fold at once, or to a negative zero, no float32 difference gives
    exactly that; the next step corrects it, because it starts from the masters. And while a master
    is beyond the half range, its parameter stays at the largest finite number.

    If parameters are changed by other means, such as loading a checkpoint, the next step undoes it:
    call `transforms.reset_masters(opt_state, params)` with them.

    Masters and the state of `inner` lie where the parameters lie, see `transforms.state_shardings`.
    Leaves that are float32 already, such as BatchNorm's, are not duplicated. `inner` sees masters
    and gradients in at least float32. Only wrappers such as `with_loss_scale` may go around it: in
    `optax.chain(with_master_params(...), optax.scale(0.5))` masters and parameters would become
    different. `with_loss_scale` and the adapters refuse that, and `optax.lookahead` and others
    around it; without them, `transforms.check_optimizer_state(tx.init(params))` does. Inside
    `optax.flatten`, which makes float32 vectors of half and float32 leaves, there are no masters.

    Args:
      inner: any optax transformation, or a `MultiSteps` object.
      master_dtype: float32 or float64.
      flat_master: keep masters, and with them the moments of `inner`, as one flat vector. For
        hundreds of small tensors: an Adam update of 400 takes a few kernels instead of hundreds,
        and moves more bytes. All parameters must be of one half dtype (give each dtype a group with
        `optax.partition`). `inner` gets one vector; what treats each tensor by itself is refused:
        LAMB, Muon, Adafactor, masks inside it. Sharded parameters it gathers on each device: it is
        for one device.

    Returns: a transformation whose state is a `WithMasterParamsState`; `update` needs `params`.

    Raises:
      TypeError: `inner` is no transformation, or `master_dtype` no dtype; in `update`, a state that
        is not its own.
      ValueError: half masters; masters around masters; `update` without `params`, or with
        parameters whose dtypes have changed since `init`, or with gradients still to be added up
        (`unreduced`); in `init`, flat masters of more than one dtype, or of an optimizer that
        treats a vector in another way than a tree or that cannot be tried on one.

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
    inner = _inner.as_transformation(inner, "with_master_params")
    master_dtype = floating_dtype(master_dtype, "master_dtype")
    if master_dtype not in (jnp.dtype("float32"), jnp.dtype("float64")):
        raise ValueError(
            f"with_master_params got master_dtype={master_dtype}; expected float32 or float64: "
            "masters hold updates that are too small for half precision."
        )

    def init(params: optax.Params) -> WithMasterParamsState:
        if flat_master:
            masters: PyTree = FlatMasters.from_tree(params, master_dtype)
            check_takes_a_vector(inner, params, master_dtype)
        else:
            make = lambda p: jnp.array(p, master_dtype) if needs_master(p) else optax.MaskedNode()
            masters = jax.tree.map(make, params)
        seen = _masters_or_params(masters, params)
        inner_state = _inner.init_inner(inner, seen, "with_master_params")
        _states.check_inner_state(inner_state, WithMasterParamsState, "with_master_params")
        state = WithMasterParamsState(masters, _states.without_weak_types(inner_state))
        return placed(state, params)

    def update(
        updates: optax.Updates,
        state: WithMasterParamsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithMasterParamsState]:
        if params is None:
            raise ValueError(
                "with_master_params got no params; call update(gradients, state, params): the "
                "update is the difference between the new masters and the parameters."
            )
        _states.check_own_state(state, WithMasterParamsState, "with_master_params")
        _states.refuse_unreduced(updates, "with_master_params")
        _check_stored_as_in_init(params, state.masters)
        full = _masters_or_params(state.masters, params)
        if flat_master:
            _check_gradients(updates, params)
            gradients: PyTree = as_one_vector(cast_to_at_least_float32(updates), full.dtype)
        else:
            gradients = cast_to_at_least_float32(in_order_of_axes(updates))
        full_updates, inner_state = _inner.update_inner(
            inner, updates, gradients, state.inner_state, full, extra_args, "with_master_params"
        )
        new_full = optax.apply_updates(full, full_updates)
        if flat_master:
            masters = dataclasses.replace(state.masters, vector=new_full)
            new_leaves = list(masters.leaves().values())
            new_full = full_updates = jax.tree.unflatten(jax.tree.structure(params), new_leaves)
        else:
            keep = lambda p, new: new if needs_master(p) else optax.MaskedNode()
            masters = jax.tree.map(keep, params, new_full)
        half_updates = jax.tree.map(
            lambda p, new, u: difference_to_master(p, new) if needs_master(p) else u,
            params,
            new_full,
            full_updates,
        )
        return half_updates, WithMasterParamsState(masters, inner_state)

    tx: Transformation[WithMasterParamsState] = optax.GradientTransformationExtraArgs(init, update)
    return tx


def difference_to_master(param: jax.Array, master: jax.Array) -> jax.Array:
    """Returns what must be added to `param`, in float32, to get the rounded master."""
    new = rounded_master(master, param.dtype)
    old = param.astype(jnp.float32)
    # Equal values: the zero with the master's sign, so that -0.0 stays what it is.
    zero = jnp.copysign(jnp.float32(0), new)
    if param.dtype == jnp.float16:
        # 0.0 + -0.0 is 0.0: a master of -1e-9 needs a number that float16 rounds to -0.0.
        turns = (old == 0) & (jnp.signbit(new) != jnp.signbit(old))
        zero = jnp.where(turns, jnp.copysign(jnp.float32(2.0**-126), new), zero)
    change = new - old
    if param.dtype == jnp.bfloat16:
        # From one end of its range to the other is more than float32 can say at once.
        farthest = float(jnp.finfo(jnp.float32).max)
        change = jnp.clip(change, -farthest, farthest)
    return jnp.where(new == old, zero, change)


def rounded_master(master: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns a master rounded to the nearest finite number of a half `dtype`, as float32.

    Beyond the half range that is the largest finite number: from an infinite parameter no sum leads
    back, since inf - inf is NaN. (A choice by `isfinite(master)`, to let infinite ones through,
    would break flat masters' update into a kernel a tensor.)

    Not `master.astype(dtype).astype(float32)`: XLA drops such a pair of casts on a GPU.
    """
    value = master.astype(jnp.float32)
    largest = float(jnp.finfo(dtype).max)
    if jnp.dtype(dtype) == jnp.bfloat16:
        half = jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
        return jnp.clip(half, -largest, largest)
    # reduce_precision flushes what is subnormal in float16: there, multiples of 2**-24.
    subnormal = jnp.round(value * 2.0**24) * 2.0**-24
    normal = jax.lax.reduce_precision(value, exponent_bits=5, mantissa_bits=10)
    return jnp.clip(jnp.where(jnp.abs(value) < 2.0**-14, subnormal, normal), -largest, largest)


def needs_master(param: Any) -> bool:
    """Returns whether a parameter is stored in half."""
    return is_floating(param) and is_half(param.dtype)


def check_half_ones_are_seen(opt_state: optax.OptState, params: optax.Params) -> None:
    """Raises ValueError if masters were made of one float32 vector, where parameters are half.

    Args:
      opt_state: an optimizer's state.
      params: the parameters that its `init` was given.
    """
    given = leaves_by_path(params)
    if ROOT in given or not any(map(needs_master, given.values())):
        return
    for state, around in _states.locate(opt_state, WithMasterParamsState):
        # A group to which no parameter belongs has no masters either.
        is_of_a_group = any(isinstance(node, optax.MaskedState) for node, _ in around)
        if isinstance(state.masters, optax.MaskedNode) and not is_of_a_group:
            raise ValueError(
                "with_master_params got no half parameters: something around it, such as "
                "optax.flatten, made one vector of half and float32 ones, which has no masters, "
                "and updates would be lost. Put it inside: with_master_params(optax.flatten(adam))."
            )


def _check_stored_as_in_init(params: optax.Params, masters: PyTree) -> None:
    """Raises ValueError if parameters have changed between half and another dtype."""
    with_master = shapes_by_path(masters)
    for path, leaf in leaves_by_path(params).items():
        if needs_master(leaf) != (path in with_master):
            had, way = "no half", ""
            if path in with_master:
                had = "a half"
                way = " after each update (optax.apply_updates does, eqx.apply_updates does not)"
            raise ValueError(
                f"with_master_params got params{path} of dtype {leaf.dtype}; when `init` "
                f"was called it had {had} dtype. Keep the dtype"
                f"{way}, cast the parameters as they were stored then "
                "(cast_params of the adapters), or call init again."
            )


def _masters_or_params(masters: PyTree, params: optax.Params) -> optax.Params:
    """Returns the masters, and the parameters that need none."""
    if isinstance(masters, FlatMasters):
        return masters.vector
    return jax.tree.map(
        lambda m, p: p if isinstance(m, optax.MaskedNode) else m,
        masters,
        params,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )


def has_flat_masters(opt_state: optax.OptState) -> bool:
    """Returns whether any parameter group keeps its masters as one vector."""
    states = _states.find_states(opt_state, WithMasterParamsState)
    return any(isinstance(state.masters, FlatMasters) for state in states)


def _check_gradients(gradients: optax.Updates, params: optax.Params) -> None:
    """Raises ValueError if gradients would land beside their parameters in the vector."""
    got, expected = (
        {path: jnp.shape(leaf) for path, leaf in leaves_by_path(tree).items()}
        for tree in (gradients, params)
    )
    if got != expected:
        raise ValueError(
            "with_master_params(..., flat_master=True) got gradients of the shapes "
            f"{described(got)}; expected those of the parameters, {described(expected)}. "
            "Differentiate with respect to the parameters that the optimizer holds."
        )


def shapes_by_path(masters: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters that one state has masters of, by path (`keystr`)."""
    if isinstance(masters, FlatMasters):
        return dict(zip(masters.paths, masters.shapes, strict=True))
    return {path: master.shape for path, master in leaves_by_path(masters).items()}


def shapes_with_master(opt_state: optax.OptState) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all parameters that have a master, of whatever group, by path."""
    shapes: dict[str, tuple[int, ...]] = {}
    for state in _states.find_states(opt_state, WithMasterParamsState):
        shapes |= shapes_by_path(state.masters)
    return shapes
