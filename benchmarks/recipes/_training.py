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
    optimizer = workload.optimizer

    def init(key: jax.Array) -> Any:
        params = workload.params(key)
        return params, optimizer.init(params)

    def step(state: Any, gradients: Any) -> Any:
        params, opt_state = state
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return Training(init, step)


def _plain(workload: Any, dtype: Any) -> Training:
    loss_fn = workload.loss_fn(workload.module(dtype).apply)

    def init(key: jax.Array) -> Any:
        params, statistics = workload.variables(key)
        return params, statistics, workload.optimizer.init(params)

    def step(state: Any, batch: Any) -> Any:
        params, statistics, opt_state = state
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, statistics), gradients = grad_fn(params, statistics, batch)
        updates, opt_state = workload.optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), statistics, opt_state), loss

    return Training(init, step)
