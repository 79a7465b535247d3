"""A static loss scale and `optax.apply_if_finite`: what optax alone offers.

Stepped around: it applies the infinity once its patience ends, so its patience is without end;
batch statistics, which no optax transformation sees, are selected here.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.recipes._training import HALF, Training, update_by, update_of

SCALE = 512.0
PATIENCE = np.iinfo(np.int32).max


def training(workload: Any) -> Training:
    loss_fn = workload.loss_fn(workload.module(HALF).apply)
    optimizer = _optimizer(workload)

    def init(key: jax.Array) -> Any:
        params, statistics = workload.variables(key)
        return params, statistics, optimizer.init(params)

    def step(state: Any, batch: Any) -> Any:
        params, statistics, opt_state = state

        def scaled_loss(params: Any) -> Any:
            loss, new_statistics = loss_fn(params, statistics, batch)
            return SCALE * loss, (loss, new_statistics)

        gradients, (loss, updated) = jax.grad(scaled_loss, has_aux=True)(params)
        gradients = jax.tree.map(_unscaled, gradients)
        params, opt_state = update_of(optimizer)(params, opt_state, gradients)
        select = lambda a, b: jnp.where(opt_state.last_finite, a, b)
        return (params, jax.tree.map(select, updated, statistics), opt_state), loss

    return Training(init, step)


def update(workload: Any) -> Training:
    return update_by(workload, _optimizer(workload), _unscaled)


def _optimizer(workload: Any) -> Any:
    return optax.apply_if_finite(workload.optimizer, PATIENCE)


def _unscaled(gradient: jax.Array) -> jax.Array:
    return gradient.astype(jnp.float32) / SCALE
