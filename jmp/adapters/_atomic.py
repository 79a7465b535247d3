"""Atomic steps: all that a training step changes is changed together, or not at all."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jmp._messages import refuse_other_models, users_stacklevel, wrong
from jmp.loss_scaling._gradients import UnscaledLossWarning, pair_of, scaled_value_and_grad
from jmp.loss_scaling._scales import LossScale, NoOpLossScale
from jmp.policy import lowered_to
from jmp.transforms._few_kernels import flag_by_size
from jmp.transforms._loss_scaling import WithLossScaleState, find_loss_scaling
from jmp.transforms._wrapping import as_transformation
from jmp.trees import PyTree, is_floating, is_inexact_array, register_for_export, select_leaves

T = TypeVar("T")


def loss_scale_in(opt_state: optax.OptState) -> LossScale:
    """Returns the loss scale in force inside an optimizer's state; a no-op if there is none."""
    scaling = find_loss_scaling(opt_state)
    return NoOpLossScale() if scaling is None else scaling.loss_scale


def grads_finite_in(opt_state: optax.OptState) -> jax.Array:
    """Returns whether the last step was taken, a bool scalar; True if no gradient is checked."""
    scaling = find_loss_scaling(opt_state)
    if scaling is None:
        return jnp.array(True)
    is_checked = not isinstance(scaling.loss_scale, NoOpLossScale)
    return scaling.grads_finite if is_checked else jnp.ones_like(scaling.grads_finite)


def check_is_scaled(opt_state: optax.OptState, *computing: object) -> None:
    """Warns if functions or modules compute in float16 and the optimizer scales no loss.

    It is a warning and no error, because another library may scale the loss.

    Raises: ValueError for an optimizer in a wrong order.
    Warns: `UnscaledLossWarning`.
    """
    is_scaled = not isinstance(loss_scale_in(opt_state), NoOpLossScale)
    if not is_scaled and jnp.float16 in map(lowered_to, computing):
        warnings.warn(
            "The model computes in float16, but its optimizer scales no loss: small gradients "
            "would be flushed to zero. Write transforms.mixed_precision(tx, 'mixed_float16'); or "
            "transforms.with_loss_scale(tx, jmp.StaticLossScale(1.0)) if there is to be no scale.",
            UnscaledLossWarning,
            stacklevel=users_stacklevel(),
        )


def keep_if_skipped(
    after: T, before: T, state_after: optax.OptState, state_before: optax.OptState
) -> tuple[T, optax.OptState]:
    """Returns the result of a step: `after`, or `before` if the optimizer has skipped it.

    Args:
      after, before: all that the step changes beside the optimizer's state. Parameters are among
        it: loss scaling leaves them as they were, but later transformations of a chain may change
        them.
      state_after, state_before: the optimizer's state. A skip changes nothing in it but the counts
        of loss scaling itself.
    """
    if isinstance(loss_scale_in(state_after), NoOpLossScale):
        return after, state_after
    flag_of = flag_by_size(grads_finite_in(state_after))
    is_scaling: Callable[[Any], bool] = lambda node: isinstance(node, WithLossScaleState)

    def select(new: Any, old: Any) -> Any:
        if is_scaling(new):  # which has selected the states that it wraps already
            return new
        # Moments made from half parameters are half, until the first update in float32.
        old = old.astype(new.dtype) if is_floating(new) and is_floating(old) else old
        return select_leaves(flag_of, new, old)

    kept = jax.tree.map(select, state_after, state_before, is_leaf=is_scaling)
    return select_leaves(flag_of, after, before), kept


_ORDER = " The order is train_step(loss_fn, model, opt_state, tx, *args)."


@register_for_export
class TrainStep(NamedTuple):
    """The result of `train_step` of Equinox and of Haiku.

    Attributes:
      model: the next model or parameters.
      opt_state: the next state of the optimizer.
      loss: the loss of the model before the step; unscaled, at least float32.
      state: the next state of the model (running statistics), or None.
      aux: the other value that the loss function returned, or None.

    >>> step = TrainStep({"w": jnp.ones(2)}, (), jnp.float32(0.5))
    >>> float(step.loss), step.state
    (0.5, None)
    """

    model: PyTree
    opt_state: PyTree
    loss: jax.Array
    state: PyTree = None
    aux: Any = None


def check_step(loss_fn: object, model: object, own: str, kind: str) -> None:
    """Refuses a loss that is no function, and a model of another framework or without arrays.

    Args:
      own: the framework whose models are taken, or "" if parameters are.
      kind: what the model should be.
    """
    if not callable(loss_fn):
        expected = "a function of the model"
        raise wrong(TypeError, "train_step", loss_fn, expected, name="loss_fn", more=_ORDER)
    name = "model" if own else "params"
    refuse_other_models(model, "train_step", name, own, kind)
    if not any(map(is_inexact_array, jax.tree.leaves(model))):
        expected = f"{kind}, with a floating array"
        raise wrong(ValueError, "train_step", model, expected, name=name, more=_ORDER)


def take_step(
    loss_fn: Callable[..., Any],
    params: optax.Params,
    opt_state: PyTree,
    tx: optax.GradientTransformation,
    args: tuple[Any, ...],
    state: PyTree,
    has_aux: bool,
    extra_args: Mapping[str, Any] | None,
) -> TrainStep:
    """Takes one step on a tree of arrays, or skips it and changes nothing but the scale.

    Args:
      loss_fn: `(params, *args)` to a scalar; with a state `(params, state, *args)` to
        `(scalar, state)`; with `has_aux` to `(scalar, aux)` or `(scalar, (state, aux))`.
      extra_args: for `tx.update`, beside the loss as `value`.
    """
    # It leaves out arguments that `tx` does not take.
    update = as_transformation(tx, "train_step", "tx", _ORDER).update
    check_is_scaled(opt_state, loss_fn)
    # Equinox's State may be used once: the loss gets a copy, so that it outlives an error.
    given = args if state is None else (jax.tree.map(lambda leaf: leaf, state), *args)
    returns_pair = has_aux or state is not None
    differentiate = scaled_value_and_grad(loss_fn, loss_scale_in(opt_state), has_aux=returns_pair)
    value, gradients = differentiate(params, *given)
    loss, more = value if returns_pair else (value, None)
    new_state, aux = None, more
    if state is not None:
        new_state, aux = pair_of(more, "(state, aux)") if has_aux else (more, None)
    extra_args = {"value": loss, **(extra_args or {})}
    updates, new_opt_state = update(gradients, opt_state, params, **extra_args)
    new_params = optax.apply_updates(params, updates)
    after, before = (new_params, new_state), (params, state)
    (new_params, new_state), kept = keep_if_skipped(after, before, new_opt_state, opt_state)
    return TrainStep(new_params, kept, loss, new_state, aux)
