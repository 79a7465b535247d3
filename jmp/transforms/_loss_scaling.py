"""`with_loss_scale`: unscale, check, step or skip, adjust."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_map_with_path

from jmp.loss_scaling import LossScale, NoOpLossScale
from jmp.loss_scaling._gradients import check_loss_scale
from jmp.sharding._axes import AxisName, agreed, axis_names
from jmp.transforms import _inner, _states
from jmp.transforms._few_kernels import (
    flag_by_size,
    gradients_finite,
    in_kernels_of_parameters,
    in_order_of_axes,
    read_from_array,
)
from jmp.transforms._flat_masters import map_vectors
from jmp.transforms._kept import (
    check_half_ones_are_seen,
    has_flat_masters,
    shapes_with_master,
)
from jmp.transforms._placement import placed
from jmp.transforms._states import Transformation, WithLossScaleState
from jmp.trees import PyTree, cast_to_at_least_float32, leaves_by_path, select_leaves


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScale,
    *,
    axis_name: AxisName = "auto",
) -> Transformation[WithLossScaleState]:
    """Wraps an optimizer so that it takes scaled gradients and skips steps that overflowed.

    `update` casts the gradients to at least float32, unscales them with the scale in force, checks
    them once and runs `inner` on them, so that clipping inside `inner` sees true gradients. If any
    was infinite or NaN the updates are -0.0 (added to a number it changes nothing, not even the
    sign of a zero) and the inner state stays as it is: moments, counts and schedules. Both results
    are computed, and one is selected by `jnp.where`; a `lax.cond` would copy every donated buffer.
    Extra arguments reach `inner`.

    With `NoOpLossScale` nothing is checked or selected: the program is `inner` on float32
    gradients.

    Make it the outermost. What comes before it in a chain, or around it as `apply_if_finite`, sees
    scaled gradients, or hides a skip. What comes after it in a chain runs on a skipped step too, on
    updates of -0.0: moments change, and `add_decayed_weights` shrinks the parameters. The steps of
    `jmp.adapters` undo that, and refuse the other orders. A training step of your own reads the
    scale by `transforms.loss_scale_state(opt_state)`, or checks the finished optimizer once by
    `transforms.check_optimizer_state(tx.init(params))`: both refuse every order that fails. `init`
    and `update` see what is inside them and not what is around them; of what is around, `init`
    refuses `partition` and `masked` alone.

    `init` puts the state, that of `inner` too, where the parameters lie; see
    `transforms.state_shardings`. Under jit optax's own moments come out on one device or whole on
    each.

    Wrap it *around* `optax.MultiSteps`: the other way round one infinite micro-batch ruins the
    accumulator, which optax resets by multiplying with zero, and 0 * inf is NaN.

    Args:
      inner: any optax transformation, or a `MultiSteps` object.
      loss_scale: the initial scale. `init` copies its arrays, so that it may be used again after
        the state was donated.
      axis_name: mapped axes whose devices must agree on a skip; see `agreed`. The default finds
        them under shard_map and pmap; () switches it off.

    Returns: a transformation whose state is a `WithLossScaleState`.

    Raises:
      TypeError: `loss_scale` is not a loss scale, `inner` no transformation, or `axis_name` no
        name; in `update`, for a state that is not its own, or None as gradients.
      ValueError: a static scale of zero; in `init`, if `inner` unscales already, or changes updates
        after masters, or if some parameters are masked; in `update`, for gradients of another
        structure than the parameters, or that are still to be added up (`unreduced`).

    >>> import optax
    >>> tx = with_loss_scale(optax.sgd(0.5), StaticLossScale(8))
    >>> state = tx.init(jnp.float32(1.0))
    >>> updates, state = tx.update(jnp.float16(8.0), state)
    >>> float(updates), bool(state.grads_finite)
    (-0.5, True)
    """
    inner = _inner.as_transformation(inner, "with_loss_scale")
    check_loss_scale(loss_scale, "with_loss_scale")
    axis_names(axis_name, "axis_name", "with_loss_scale")

    def init(params: optax.Params) -> WithLossScaleState:
        _check_not_masked(params)
        inner_state = _inner.init_inner(inner, params, "with_loss_scale")
        seen = _params_for_inner(params, inner_state)
        if _leaf_dtypes(seen) != _leaf_dtypes(params):
            inner_state = inner.init(seen)
        _states.check_inner_state(inner_state, WithLossScaleState, "with_loss_scale")
        _states.check_nothing_changes_masters(inner_state)
        check_half_ones_are_seen(inner_state, params)
        state = WithLossScaleState(
            loss_scale=jax.tree.map(jnp.array, loss_scale),
            grads_finite=jnp.array(True),
            skipped_steps=jnp.zeros([], jnp.int32),
            consecutive_skips=jnp.zeros([], jnp.int32),
            inner_state=_states.without_weak_types(inner_state),
        )
        return placed(state, params)

    def update(
        updates: optax.Updates,
        state: WithLossScaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScaleState]:
        _states.check_own_state(state, WithLossScaleState, "with_loss_scale")
        _states.refuse_unreduced(updates, "with_loss_scale")
        scale = state.loss_scale
        gradients, to_check = _unscaled(updates, state)
        new_updates, inner_state = _inner.update_inner(
            inner,
            updates,
            gradients,
            state.inner_state,
            _params_for_inner(params, state.inner_state),
            extra_args,
            "with_loss_scale",
        )
        if isinstance(scale, NoOpLossScale):
            return new_updates, state._replace(inner_state=inner_state)

        finite = agreed(gradients_finite(to_check), scale, axis_name)
        finite = read_from_array(finite, state.grads_finite)
        flag_of = flag_by_size(finite)
        new_updates = jax.tree.map(lambda u: _zero_unless(flag_of(u), u), new_updates)
        changed = WithLossScaleState(
            loss_scale=scale.adjust(finite),
            grads_finite=finite,
            skipped_steps=jnp.where(
                finite, state.skipped_steps, optax.safe_increment(state.skipped_steps)
            ),
            consecutive_skips=jnp.where(finite, 0, optax.safe_increment(state.consecutive_skips)),
            inner_state=select_leaves(flag_of, inner_state, state.inner_state),
        )
        # Behind the selects: what they select is no longer what parameters are computed from.
        return new_updates, in_kernels_of_parameters(changed, params, new_updates)

    tx: Transformation[WithLossScaleState] = optax.GradientTransformationExtraArgs(init, update)
    return tx


def check_optimizer_state(opt_state: PyTree) -> None:
    """Raises ValueError if an optimizer combines these transformations in an order that fails.

    Those orders are: anything before loss scaling in a chain, which would see scaled gradients;
    a transformation with a state after it, which a skip would not stop; loss scaling twice, or
    inside `partition`, `masked`, `apply_if_finite`, `MultiSteps` and the like; anything chained
    after masters, or masters inside `lookahead` and others that change updates. `named_chain` is
    a chain.

    A transformation sees its own part of the state, so neither `init` nor `update` can refuse these
    orders in a training step of your own: call this once, with `tx.init(params)`. `masters` checks
    the orders of masters, `loss_scale_state` all. The adapters call it too. They accept
    transformations after loss scaling, because their steps undo on a skip what these changed.

    Raises: ValueError for such an order; TypeError for an optimizer where its state belongs.

    >>> check_optimizer_state(())
    """
    check_order(opt_state)


def loss_scale_state(opt_state: PyTree) -> WithLossScaleState | None:
    """Returns the `WithLossScaleState` inside an optimizer's state, or None where there is none.

    Raises: as `check_optimizer_state`.

    >>> loss_scale_state(()) is None
    True
    """
    check_optimizer_state(opt_state)
    return find_loss_scaling(opt_state)


def find_loss_scaling(opt_state: optax.OptState) -> WithLossScaleState | None:
    """Returns the state of loss scaling, also where a transformation with a state comes after it.

    For steps that undo, on a skip, what came after; see `transforms.check_optimizer_state`.
    """
    check_order(opt_state, undone_on_a_skip=True)
    return next(iter(_states.find_states(opt_state, WithLossScaleState)), None)


def check_order(opt_state: optax.OptState, *, undone_on_a_skip: bool = False) -> None:
    """Raises ValueError for orders that fail; see `transforms.check_optimizer_state`.

    Args:
      undone_on_a_skip: whether the step undoes, on a skip, what comes after loss scaling.
    """
    _states.check_nothing_changes_masters(opt_state)
    _states.check_loss_scaling(opt_state, undone_on_a_skip=undone_on_a_skip)


def _check_not_masked(params: optax.Params) -> None:
    is_masked = lambda node: isinstance(node, optax.MaskedNode)
    if any(map(is_masked, jax.tree.leaves(params, is_leaf=is_masked))):
        raise ValueError(
            "with_loss_scale got parameters of which some are masked: it stands inside "
            "optax.partition or optax.masked, and the gradients of the other parameters would stay "
            "scaled. Put it around: with_loss_scale(optax.partition(...), loss_scale)."
        )


def _leaf_dtypes(params: optax.Params) -> list[Any]:
    return [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(params)]


def _unscaled(updates: optax.Updates, state: WithLossScaleState) -> tuple[optax.Updates, PyTree]:
    """Returns unscaled gradients in at least float32, and the arrays in which to check them."""

    def unscale(tree: PyTree) -> PyTree:
        return state.loss_scale.unscale(cast_to_at_least_float32(tree))

    if has_flat_masters(state.inner_state):
        return map_vectors(unscale, updates)  # the form in which they are needed afterwards
    gradients = unscale(in_order_of_axes(updates))
    return gradients, gradients


def _params_for_inner(params: optax.Params, inner_state: optax.OptState) -> optax.Params:
    """Returns `params` in at least float32, but for those that `inner` keeps masters of.

    Moments made from half parameters would be half: Adam's eps of 1e-8 is zero in float16, and its
    second moment stalls in bfloat16.
    """
    masters = shapes_with_master(inner_state)
    if not masters.keys() <= leaves_by_path(params).keys():
        return params  # something inside rearranges the leaves, and gives them other names
    return tree_map_with_path(
        lambda path, p: p if keystr(path) in masters else cast_to_at_least_float32(p), params
    )


def _zero_unless(finite: jax.Array, update: Any) -> Any:
    if getattr(update, "dtype", None) == jax.dtypes.float0:
        return update
    # -0.0 + x is x for every x, -0.0 included; +0.0 would turn a parameter of -0.0 into +0.0.
    return jnp.where(finite, update, jnp.asarray(-0.0).astype(update.dtype))
