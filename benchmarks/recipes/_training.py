"""What a recipe returns, and the two precisions that need no recipe: float32 and bare half."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

HALF = jnp.float16


class Training(NamedTuple):
    """A training loop's two functions, both to be jitted.

    Attributes:
      init: key -> state.
      step: (state, batch) -> (state, loss). For an update alone the batch is float16 gradients and
        the loss is None.
    """

    init: Callable[[jax.Array], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]


def float32(workload: Any) -> Training:
    """The unmodified model and optimizer."""
    return _plain(workload, None)


def half_unscaled(workload: Any) -> Training:
    """Every layer's `dtype` in half by hand; parameters float32; no loss scaling."""
    return _plain(workload, HALF)


def unscaled_update(workload: Any) -> Training:
    """The optimizer on the gradients, cast to float32."""
    return update_by(workload, workload.optimizer, lambda g: g.astype(jnp.float32))


def update_by(
    workload: Any,
    tx: optax.GradientTransformation,
    change: Callable[[jax.Array], jax.Array] = lambda gradient: gradient,
    dtype: Any = jnp.float32,
) -> Training:
    """Returns updates of parameters of a dtype, of gradients that are changed one by one."""

    def init(key: jax.Array) -> Any:
        params = [p.astype(dtype) for p in workload.params(key)]
        return params, tx.init(params)

    def step(state: Any, gradients: Any) -> Any:
        return update_of(tx)(*state, jax.tree.map(change, gradients)), None

    return Training(init, step)


def update_of(tx: optax.GradientTransformation) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Returns `(params, state, gradients) -> (params, state)`."""

    def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return update


def _plain(workload: Any, dtype: Any) -> Training:
    loss_fn = workload.loss_fn(workload.module(dtype).apply)

    def init(key: jax.Array) -> Any:
        params, statistics = workload.variables(key)
        return params, statistics, workload.optimizer.init(params)

    def step(state: Any, batch: Any) -> Any:
        params, statistics, opt_state = state
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, statistics), gradients = grad_fn(params, statistics, batch)
        params, opt_state = update_of(workload.optimizer)(params, opt_state, gradients)
        return (params, statistics, opt_state), loss

    return Training(init, step)
