"""Flax's TrainState with atomic steps, and how a saved one is restored.

`replace(params=...)` lets masters follow: the next step, which starts from them, would undo it.

Importing this module also teaches `flax.serialization` the classes of ours that a saved state
holds. A checkpoint is checked when it is restored, because its values are known then: a NaN for a
scale would make every gradient NaN. A restore that cannot be right says what to do instead;
docs/checkpoints.md has the code for every change of a run.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from flax.training import train_state

from jmp._messages import described, listed, where_trees_differ, wrong
from jmp.adapters._atomic import check_is_scaled, keep_if_skipped, loss_scale_in
from jmp.loss_scaling._base import SAVED, LossScale
from jmp.loss_scaling._constant import NoOpLossScale
from jmp.transforms import StoredArray
from jmp.transforms._loss_scaling import find_loss_scaling
from jmp.transforms._masters import follow_replaced
from jmp.transforms._placement import placed
from jmp.transforms._wrapping import check_order, structures_compared
from jmp.trees import PyTree, is_array, leaves_by_path, register_for_export


class TrainState(train_state.TrainState):
    """Flax's TrainState with batch statistics, whose steps are atomic.

    Make one with `TrainState.create`. An atomic step is taken as a whole or not at all. A subclass
    may have fields of its own, each with a default, as `average: PyTree = None`.

    Attributes, in addition to Flax's:
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
          apply_fn: the model's apply function, such as `autocast` returned.
          params: a tree of arrays, float32 or half.
          tx: an optax transformation, such as `transforms.mixed_precision(optax.adam(1e-3), ...)`.
            In a chain, transformations may come after loss scaling: `apply_gradients` undoes what
            they changed in a step that is skipped.
          **kwargs: the other fields, such as `batch_stats`.

        Raises:
          TypeError: `tx` is no optax transformation; None as parameters.
          ValueError: an optimizer in an order that fails, see `transforms.check_optimizer_state`;
            `mixed_precision` of a policy with float32 parameters, if these are half.

        Warns: `jmp.UnscaledLossWarning` for an optimizer without a loss scale if `apply_fn`
          computes in float16.
        """
        caller = "TrainState.create"
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            example = "transforms.mixed_precision(optax.adam(1e-3), policy)"
            expected = f"an optax transformation, such as {example}"
            raise wrong(TypeError, caller, tx, expected, name="tx")
        if params is None:
            expected = "a tree of arrays, such as model.init(key, x)['params']"
            raise wrong(TypeError, caller, params, expected, name="params")
        state: Self = super().create(  # type: ignore[no-untyped-call]  # Flax gives no types
            apply_fn=apply_fn, params=params, tx=tx, **kwargs
        )
        check_order(state.opt_state, params, undone_on_a_skip=True)
        check_is_scaled(state.opt_state, apply_fn)
        return state.replace(step=placed(jnp.zeros([], jnp.int32), params))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]  # likewise
        _exchange_made_by_flax(cls)

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale in force, wherever the optimizer holds it; `NoOpLossScale` if nowhere."""
        return loss_scale_in(self.opt_state)

    @property
    def grads_finite(self) -> jax.Array:
        """Whether the last step was taken, a bool scalar, wherever the optimizer holds it.

        It is True before the first step, and always True if nothing is checked: without loss
        scaling and with `NoOpLossScale`, as in bfloat16.
        """
        scaling = find_loss_scaling(self.opt_state)
        if scaling is None:
            return jnp.array(True)
        is_checked = not isinstance(scaling.loss_scale, NoOpLossScale)
        return scaling.grads_finite if is_checked else jnp.ones_like(scaling.grads_finite)

    def apply_gradients(
        self, *, grads: optax.Updates, extra_args: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Self:
        """Returns the next state, or on overflow this one with a smaller scale.

        Args:
          grads: scaled gradients, as `jmp.scaled_value_and_grad` returns them.
          extra_args: further arguments of `tx.update`, such as `{"value": loss}` for
            `optax.contrib.reduce_on_plateau`.
          **kwargs: fields to replace, such as `batch_stats=new_statistics`. If the step is skipped
            they stay as they were, like the parameters. A field that is computed from the *new*
            parameters, such as their average, is selected after this call, with `grads_finite` of
            the new state.

        Raises:
          TypeError: a field that the state does not have; None as gradients.
          ValueError: a static field, such as `tx`, which a skipped step could not leave as it was;
            gradients of another structure than the parameters.
        """
        _check_not_static(self, kwargs)
        given: Self = self
        if extra_args:
            update = functools.partial(optax.with_extra_args_support(self.tx).update, **extra_args)
            given = self.replace(tx=optax.GradientTransformation(self.tx.init, update))
        with structures_compared(grads, self.params, "apply_gradients"):
            new: Self = super(TrainState, given).apply_gradients(  # type: ignore[no-untyped-call]
                grads=grads, **kwargs
            )
        moved = {"step", "params", *kwargs}
        before = {name: getattr(self, name) for name in moved}
        after = {name: getattr(new, name) for name in moved}
        kept, opt_state = keep_if_skipped(after, before, new.opt_state, self.opt_state)
        return new.replace(opt_state=opt_state, tx=self.tx, **kept)


def _check_not_static(state: TrainState, given: dict[str, Any]) -> None:
    static = {field.name for field in dataclasses.fields(state)} - set(_array_fields(state))
    if static & given.keys():
        raise ValueError(
            f"apply_gradients got the static fields {', '.join(sorted(static & given.keys()))}; "
            "expected fields of arrays, which a skipped step can leave as they were. Write "
            "state.apply_gradients(grads=grads).replace(...) for the others."
        )


def _replace_with_masters(self: TrainState, **updates: Any) -> TrainState:
    """Returns a state with other fields; masters follow `params=`, unless `opt_state=` is given.

    If the masters did not follow, the next step, which starts from them, would undo the
    replacement. To evaluate with other parameters and go on with the present ones afterwards, give
    `opt_state=state.opt_state` too.

    Raises: TypeError for a field that the state does not have; ValueError for `params=` if the
      masters are one vector, as inside `optax.flatten`.
    """
    if "params" in updates and "opt_state" not in updates:
        updates["params"], updates["opt_state"] = follow_replaced(
            self.opt_state, updates["params"], self.params
        )
    return dataclasses.replace(self, **updates)


def _exchange_made_by_flax(cls: type[TrainState]) -> None:
    """Exchanges the `replace`, and the way to restore a state, that Flax gives each class."""
    cls.replace = _replace_with_masters  # type: ignore[assignment, method-assign]
    register_for_export(cls)
    serialization.register_serialization_state(
        cls, _train_state_to_dict, _restore_train_state, override=True
    )


def _to_state_dict(node: PyTree) -> dict[str, Any]:
    return {path[0].name: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(node)}


def _from_state_dict(node: PyTree, state: dict[str, Any]) -> PyTree:
    expected = _to_state_dict(node)
    if not isinstance(state, dict) or expected.keys() != state.keys():
        raise ValueError(
            f"A checkpoint holds {described(state)} for a {type(node).__name__}; expected "
            f"{listed(expected)}. Restore into the class that was saved, and change it afterwards: "
            "a loss scale by jmp.transforms.set_loss_scale(opt_state, new_scale)."
        )
    state = {n: np.asarray(v) if isinstance(v, (int, float)) else v for n, v in state.items()}
    restored = jax.tree.unflatten(jax.tree.structure(node), [state[name] for name in expected])
    # Elsewhere leaves may be anything, such as shardings.
    if all(map(is_array, state.values())):
        _check_shapes(node, expected, state)
        if isinstance(node, LossScale):
            return _within_bounds(restored)
    return restored


def _check_shapes(node: PyTree, expected: dict[str, Any], state: dict[str, Any]) -> None:
    codes = getattr(node, "codes", None)
    if isinstance(node, StoredArray) and is_array(codes) and state["codes"].dtype != codes.dtype:
        raise ValueError(
            f"A checkpoint holds codes of dtype {state['codes'].dtype} for a StoredArray; expected "
            f"{codes.dtype}, stored as {node.kind}. Restore into a state that is stored as the "
            "saved one is, and store it otherwise afterwards: "
            "transforms.encode_state(tx.init(params).inner_state, "
            "transforms.decode_state(opt_state.inner_state))."
        )
    for name, leaf in expected.items():
        if is_array(leaf) and leaf.shape != state[name].shape:
            raise ValueError(
                f"A checkpoint holds {name} of shape {state[name].shape} for a "
                f"{type(node).__name__}; expected {leaf.shape}. Restore into a state of the same "
                "parameters and as many members."
            )


def _within_bounds(loss_scale: LossScale) -> LossScale:
    """Returns the restored scale, brought between its floor and its ceiling."""
    try:
        # The constructor looks at values, which unflattening must not.
        return dataclasses.replace(loss_scale)  # type: ignore[type-var]  # each is a dataclass
    except ValueError as error:
        raise ValueError(
            f"A checkpoint holds a {type(loss_scale).__name__} that cannot be used: {error} "
            "Restore an earlier checkpoint; or read it by flax.serialization.msgpack_restore, put "
            "a number there, and give it to from_state_dict."
        ) from error


def _array_fields(node: PyTree) -> list[str]:
    fields = dataclasses.fields(node)
    return [field.name for field in fields if field.metadata.get("pytree_node", True)]


def _train_state_to_dict(node: PyTree) -> dict[str, Any]:
    return {name: serialization.to_state_dict(getattr(node, name)) for name in _array_fields(node)}


def _restore_train_state(node: PyTree, state: dict[str, Any]) -> PyTree:
    fields = _array_fields(node)
    if node.batch_stats is None:  # Flax's TrainState does not have this field
        state = {"batch_stats": None, **state}
    if set(state) != set(fields):
        raise ValueError(
            f"A checkpoint holds {listed(sorted(state))} for a {type(node).__name__}; expected "
            f"{listed(sorted(fields), most=16)}. Restore into the class that was saved, and make "
            "the new state of its fields: docs/checkpoints.md has the lines."
        )
    _check_optimizer(node, state["opt_state"])
    restored = {
        name: serialization.from_state_dict(getattr(node, name), state[name], name=name)
        for name in fields
    }
    return node.replace(**restored)


def _check_optimizer(node: PyTree, saved: Any) -> None:
    """Raises ValueError if the saved state of an optimizer has other leaves than the one of
    `node`."""
    expected: Any = serialization.to_state_dict(node.opt_state)
    if leaves_by_path(saved).keys() != leaves_by_path(expected).keys():
        raise ValueError(
            f"A checkpoint holds the state of another optimizer than this {type(node).__name__}'s "
            f"(of the saved state and this one {where_trees_differ(saved, expected)}). "
            "Restore into a state of the optimizer that saved it, and change that afterwards: "
            "another loss scale is jmp.transforms.set_loss_scale(opt_state, new_scale), new "
            "masters are reset_masters(opt_state, params), and docs/checkpoints.md has the lines "
            "for every change."
        )


_exchange_made_by_flax(TrainState)
for held in (*SAVED, StoredArray):
    serialization.register_serialization_state(
        held, _to_state_dict, _from_state_dict, override=True
    )
