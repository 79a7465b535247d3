"""`with_loss_scale`: unscale, run the optimizer, check, step or skip, adjust the scale.

`_wrapping` calls the optimizer inside. `_few_kernels` has the forms of the check and of the select
that compile to few kernels; in plain JAX they are `all_finite` and `jnp.where`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp.loss_scaling import LossScale, NoOpLossScale
from jmp.loss_scaling._gradients import check_loss_scale
from jmp.sharding._axes import AxisName, agreed, axis_names
from jmp.transforms._few_kernels import (
    flag_by_size,
    gradients_finite,
    in_kernels_of_parameters,
    in_order_of_axes,
    read_from_array,
)
from jmp.transforms._wrapping import Transformation, Wrapper
from jmp.trees import PyTree, cast_to_at_least_float32, register_for_export, select_leaves


@register_for_export
class WithLossScaleState(NamedTuple):
    """State of `with_loss_scale`.

    Attributes:
      loss_scale: the `jmp.LossScale` for the next loss.
      grads_finite: bool scalar: whether the last gradients were finite, and with that the step
        taken. With `NoOpLossScale` nothing is checked: it stays True, also after an infinity.
      skipped_steps: int32 scalar: steps skipped so far.
      consecutive_skips: int32 scalar: steps skipped in a row. If it keeps growing, the model itself
        gives infinities or NaNs, and no scale helps.
      inner_state: state of the wrapped optimizer.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_loss_scale(optax.sgd(0.1), DynamicLossScale(8.0))
    >>> state = tx.init(jnp.ones(2))
    >>> float(state.loss_scale.loss_scale), bool(state.grads_finite), int(state.skipped_steps)
    (8.0, True, 0)
    """

    loss_scale: LossScale
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    inner_state: PyTree


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScale,
    *,
    axis_name: AxisName = "auto",
) -> Transformation[WithLossScaleState]:
    """Wraps an optimizer so that it takes scaled gradients and skips steps that overflowed.

    `update` casts the gradients to at least float32, unscales them with the state's scale, checks
    them once and runs `inner` on them, so that clipping inside `inner` sees true gradients. If any
    was infinite or NaN the updates are -0.0 (added to a number it changes nothing, not even the
    sign of a zero) and the inner state stays as it is: moments, counts and schedules. Both results
    are computed, and one is selected by `jnp.where`; a `lax.cond` would copy every donated buffer.
    Extra arguments reach `inner`.

    With `NoOpLossScale` nothing is checked or selected: the program is `inner` on float32
    gradients.

    Make it the outermost. A transformation before it in a chain, or around it as `apply_if_finite`,
    sees scaled gradients, or hides a skip. One after it in a chain runs on a skipped step too, on
    updates of -0.0: moments change, and `add_decayed_weights` shrinks the parameters. The steps of
    `jmp.adapters` undo that, and refuse the other orders. A training step of your own reads the
    scale by `transforms.loss_scale_state(opt_state)`, or checks the finished optimizer once by
    `transforms.check_optimizer_state(tx.init(params))`: both refuse every order that fails. `init`
    and `update` see what is inside them and not what is around them; of what is around, `init`
    refuses only `partition` and `masked`.

    `init` puts the state, with the state of `inner`, where the parameters lie; see
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
    wrapper = Wrapper(inner, "with_loss_scale", WithLossScaleState)
    check_loss_scale(loss_scale, "with_loss_scale")
    axis_names(axis_name, "axis_name", "with_loss_scale")

    def init(params: optax.Params) -> WithLossScaleState:
        _check_not_masked(params)
        inner_state = wrapper.init_inner_in_float32(params)
        return WithLossScaleState(
            loss_scale=jax.tree.map(jnp.array, loss_scale),
            grads_finite=jnp.array(True),
            skipped_steps=jnp.zeros([], jnp.int32),
            consecutive_skips=jnp.zeros([], jnp.int32),
            inner_state=inner_state,
        )

    def update(
        updates: optax.Updates,
        state: WithLossScaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScaleState]:
        scale, old = state.loss_scale, state.inner_state

        # Unscale, in at least float32.
        gradients = scale.unscale(cast_to_at_least_float32(in_order_of_axes(updates)))

        # Run `inner`, as if the gradients were finite.
        seen = wrapper.in_float32(params, old)
        new_updates, new = wrapper.update_inner(updates, gradients, old, seen, extra_args)
        if isinstance(scale, NoOpLossScale):
            return new_updates, state._replace(inner_state=new)

        # Check the gradients. Devices that share the scale agree.
        finite = agreed(gradients_finite(gradients), scale, axis_name)
        finite = read_from_array(finite, state.grads_finite)

        # Select the step; or the state as it was, and updates that change nothing.
        flag_of = flag_by_size(finite)

        def zero_if_skipped(update: Any) -> Any:
            if getattr(update, "dtype", None) == jax.dtypes.float0:
                return update
            # -0.0 + x is x for every x, -0.0 included; +0.0 would turn -0.0 into +0.0.
            return jnp.where(flag_of(update), update, jnp.asarray(-0.0).astype(update.dtype))

        new_updates = jax.tree.map(zero_if_skipped, new_updates)
        new_state = WithLossScaleState(
            loss_scale=scale.adjust(finite),
            grads_finite=finite,
            skipped_steps=jnp.where(
                finite, state.skipped_steps, optax.safe_increment(state.skipped_steps)
            ),
            consecutive_skips=jnp.where(finite, 0, optax.safe_increment(state.consecutive_skips)),
            inner_state=select_leaves(flag_of, new, old),
        )
        # After the selects: they return other arrays than those that parameters are computed from.
        return new_updates, in_kernels_of_parameters(new_state, params, new_updates)

    return wrapper.transformation(init, update)


def _check_not_masked(params: optax.Params) -> None:
    is_masked = lambda node: isinstance(node, optax.MaskedNode)
    if any(map(is_masked, jax.tree.leaves(params, is_leaf=is_masked))):
        raise ValueError(
            "with_loss_scale got parameters of which some are masked: it stands inside "
            "optax.partition or optax.masked, and the gradients of the other parameters would stay "
            "scaled. Put it around: with_loss_scale(optax.partition(...), loss_scale)."
        )
