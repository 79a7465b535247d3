"""`with_master_params`: float32 masters for parameters that are stored in half.

Masters are kept in one of two forms, as a tree or as one vector: `InTree`, `InOneVector`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr
from jax.typing import DTypeLike

from jmp.dtypes import floating_dtype
from jmp.transforms import _inner, _states
from jmp.transforms._few_kernels import in_order_of_axes
from jmp.transforms._flat_masters import FlatMasters, InOneVector
from jmp.transforms._placement import placed
from jmp.transforms._rounding import difference_to_master, needs_master
from jmp.transforms._states import Transformation, WithMasterParamsState
from jmp.trees import PyTree, cast_to_at_least_float32, leaves_by_path

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
    `optax.flatten`, which makes float32 vectors of half and float32 leaves, there are no masters:
    `with_loss_scale` and `transforms.masters` refuse that. `check_optimizer_state` does not,
    because it gets no parameters.

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

    form = InOneVector(master_dtype) if flat_master else InTree(master_dtype)

    def init(params: optax.Params) -> WithMasterParamsState:
        masters = form.first(params, inner)
        seen = form.seen_by_inner(masters, params)
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
        old = form.seen_by_inner(state.masters, params)
        gradients = form.gradients_for_inner(updates, params)
        full_updates, inner_state = _inner.update_inner(
            inner, updates, gradients, state.inner_state, old, extra_args, "with_master_params"
        )
        new = optax.apply_updates(old, full_updates)
        masters, half_updates = form.after(state.masters, params, new, full_updates)
        return half_updates, WithMasterParamsState(masters, inner_state)

    tx: Transformation[WithMasterParamsState] = optax.GradientTransformationExtraArgs(init, update)
    return tx


class InTree:
    """Masters in a tree like the parameters': one for each half leaf, nothing for the others.

    `init` of `with_master_params` calls `first` and `seen_by_inner`; `update` calls
    `seen_by_inner`, `gradients_for_inner` and `after`. `InOneVector` has the same methods. Each
    gets what either of the two needs.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype

    def first(self, params: optax.Params, inner: optax.GradientTransformationExtraArgs) -> PyTree:
        """Returns the masters of the first step."""
        make: Any = lambda p: jnp.array(p, self.dtype) if needs_master(p) else optax.MaskedNode()
        return jax.tree.map(make, params)

    def seen_by_inner(self, masters: PyTree, params: optax.Params) -> optax.Params:
        """Returns what `inner` updates: the masters, and the parameters that need none."""
        is_absent = lambda node: isinstance(node, optax.MaskedNode)
        either = lambda m, p: p if isinstance(m, optax.MaskedNode) else m
        return jax.tree.map(either, masters, params, is_leaf=is_absent)

    def gradients_for_inner(self, updates: optax.Updates, params: optax.Params) -> optax.Updates:
        """Returns the gradients as `inner` sees them."""
        return cast_to_at_least_float32(in_order_of_axes(updates))

    def after(
        self, masters: PyTree, params: optax.Params, new: PyTree, updates: optax.Updates
    ) -> tuple[PyTree, optax.Updates]:
        """Returns the masters after a step, and the updates by which the parameters follow.

        Args:
          masters: the masters before the step.
          new: what `seen_by_inner` returned, with `updates` added to it.
          updates: what `inner` returned.
        """
        keep = lambda p, n: n if needs_master(p) else optax.MaskedNode()
        follow = lambda p, n, u: difference_to_master(p, n) if needs_master(p) else u
        return jax.tree.map(keep, params, new), jax.tree.map(follow, params, new, updates)


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


def has_flat_masters(opt_state: optax.OptState) -> bool:
    """Returns whether any parameter group keeps its masters as one vector."""
    states = _states.find_states(opt_state, WithMasterParamsState)
    return any(isinstance(state.masters, FlatMasters) for state in states)


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
