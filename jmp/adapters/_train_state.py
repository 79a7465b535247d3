"""Flax's TrainState with atomic steps, and masters that follow replaced parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from jmp._describe import described
from jmp.adapters import _flax_serialization
from jmp.adapters._atomic import check_is_scaled, keep_if_skipped, loss_scale_in
from jmp.loss_scaling import LossScale, NoOpLossScale
from jmp.transforms._callers import skips_undone
from jmp.transforms._inner import structures_compared
from jmp.transforms._loss_scaling import check_order, find_loss_scaling
from jmp.transforms._masters import follow_replaced
from jmp.transforms._placement import placed
from jmp.trees import PyTree


class TrainState(train_state.TrainState):
    """Flax's TrainState with batch statistics, whose steps are atomic.

    Make one by `TrainState.create`. An atomic step is taken as a whole or not at all.
    A subclass may have fields of its own, each with a default, as `average: PyTree = None`.

    Attributes, beyond those of Flax's:
      batch_stats: the model's running statistics, or None.

    >>> import flax.linen as nn, optax, jmp
    >>> from jmp import transforms
    >>> model = nn.Dense(1)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    >>> tx = transforms.with_loss_scale(optax.sgd(0.1), jmp.StaticLossScale(8))
    >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    >>> bad = jax.tree.map(lambda p: p * jnp.inf, params)
    >>> skipped = state.apply_gradients(grads=bad)
    >>> int(skipped.step), bool(skipped.grads_finite)
    (0, False)
    """

    batch_stats: PyTree = None

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: optax.Params,
        tx: optax.GradientTransformation,
        **kwargs: Any,
    ) -> Self:
        """Creates a state at step 0.

        The step is an int32 array from the start: a Python 0 would compile the step twice. It lies
        on the mesh of the parameters, if they are sharded.

        Args:
          apply_fn: the model's apply function, such as `wrap_apply` returned.
          params: a tree of arrays, float32 or half.
          tx: an optax transformation, such as `transforms.mixed_precision(optax.adam(1e-3), ...)`.
            In a chain, transformations may come after loss scaling: `apply_gradients` undoes what
            they changed in a step that is skipped.
          **kwargs: the other fields, such as `batch_stats`.

        Raises:
          TypeError: `tx` is no optax transformation; None as parameters.
          ValueError: an optimizer in an order that fails, see `transforms.check_optimizer_state`;
            `mixed_precision` of a policy that needs no scale where `apply_fn` computes in float16,
            or of one whose parameters are float32 where these are half.

        Warns: `jmp.UnscaledLossWarning` for another optimizer without a loss scale where `apply_fn`
          computes in float16.
        """
        _check_optimizer(tx)
        if params is None:
            raise TypeError(
                "TrainState.create got params=None; expected a tree of arrays, such as "
                "model.init(key, x)['params']."
            )
        state: Self = super().create(  # type: ignore[no-untyped-call]  # Flax gives no types
            apply_fn=apply_fn, params=params, tx=tx, **kwargs
        )
        check_order(state.opt_state, undone_on_a_skip=True)
        check_is_scaled(tx, state.opt_state, apply_fn)
        return state.replace(step=placed(jnp.zeros([], jnp.int32), params))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]  # likewise
        # Flax has given every subclass one of its own, and a way to restore it.
        cls.replace = _replace_with_masters  # type: ignore[assignment, method-assign]
        _flax_serialization.register_train_state(cls)

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale in force, wherever the optimizer holds it; `NoOpLossScale` if nowhere."""
        return loss_scale_in(self.opt_state)

    @property
    def grads_finite(self) -> jax.Array:
        """Whether the last step was taken, a bool scalar, wherever the optimizer holds it.

        True before the first step, and always True where nothing is checked: without loss scaling
        and with `NoOpLossScale`, as in bfloat16.
        """
        scaling = find_loss_scaling(self.opt_state)
        if scaling is None:
            return jnp.array(True)
        is_checked = not isinstance(scaling.loss_scale, NoOpLossScale)
        return scaling.grads_finite if is_checked else jnp.ones_like(scaling.grads_finite)

    def apply_gradients(self, *, grads: optax.Updates, **kwargs: Any) -> Self:
        """Returns the next state, or on overflow this one with a smaller scale.

        Args:
          grads: scaled gradients, as `jmp.scaled_value_and_grad` returns them.
          **kwargs: fields to replace, such as `batch_stats=new_statistics`. If the step is skipped
            they stay as they were, like the parameters. For what is computed from the *new*
            parameters, such as their average, select after this call, by `grads_finite` of the new
            state.

        Raises:
          TypeError: a field that the state does not have; None as gradients.
          ValueError: a static field, such as `tx`, which a skipped step could not leave as it was;
            gradients of another structure than the parameters.
        """
        _check_not_static(self, kwargs)
        with skips_undone(), structures_compared(grads, self.params, "apply_gradients"):
            new: Self = super().apply_gradients(  # type: ignore[no-untyped-call]  # likewise
                grads=grads, **kwargs
            )
        moved = {"step", "params", *kwargs}
        before = {name: getattr(self, name) for name in moved}
        after = {name: getattr(new, name) for name in moved}
        kept, opt_state = keep_if_skipped(after, before, new.opt_state, self.opt_state)
        return new.replace(opt_state=opt_state, **kept)


def _replace_with_masters(self: TrainState, **updates: Any) -> TrainState:
    """Returns a state with other fields; masters follow `params=`, unless `opt_state=` is given.

    Without that the next step would undo the replacement, because it starts from the masters. To
    evaluate with other parameters and go on with the present ones afterwards, give
    `opt_state=state.opt_state` too.

    Raises: TypeError for a field that the state does not have; ValueError for `params=` where the
      masters are those of one vector, as inside `optax.flatten`.
    """
    if "params" in updates and "opt_state" not in updates:
        updates["opt_state"] = follow_replaced(self.opt_state, updates["params"])
    return dataclasses.replace(self, **updates)


TrainState.replace = _replace_with_masters  # type: ignore[assignment, method-assign]
_flax_serialization.register_train_state(TrainState)


def _check_not_static(state: TrainState, given: dict[str, Any]) -> None:
    static = {f.name for f in dataclasses.fields(state) if not f.metadata.get("pytree_node", True)}
    if static & given.keys():
        raise ValueError(
            f"apply_gradients got the static fields {', '.join(sorted(static & given.keys()))}; "
            "expected fields of arrays, which a skipped step can leave as they were. Write "
            "state.apply_gradients(grads=grads).replace(...) for the others."
        )


def _check_optimizer(tx: Any) -> None:
    """Raises TypeError for what is no optimizer, such as a function that makes one."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"TrainState.create got tx={described(tx)}; expected an optax transformation, such as "
            "transforms.mixed_precision(optax.adam(1e-3), policy)."
        )
