"""`flax.training.dynamic_scale.DynamicScale`, as Flax's ImageNet example uses it.

Stepped around: its Python numbers would compile the step twice, so they are arrays from the start;
the example restores no batch statistics on a skipped step, so they are selected here.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

from benchmarks.recipes._training import HALF, Training


def training(workload: Any) -> Training:
    loss_fn = workload.loss_fn(workload.module(HALF).apply)

    def init(key: jax.Array) -> Any:
        params, statistics = workload.variables(key)
        scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2.0**16))
        return params, statistics, workload.optimizer.init(params), scale

    def step(state: Any, batch: Any) -> Any:
        params, statistics, opt_state, scale = state
        grad_fn = scale.value_and_grad(loss_fn, has_aux=True)
        scale, finite, (loss, new_statistics), gradients = grad_fn(params, statistics, batch)
        updates, new_opt_state = workload.optimizer.update(gradients, opt_state, params)
        new = (optax.apply_updates(params, updates), new_statistics, new_opt_state)
        old = (params, statistics, opt_state)
        select = lambda a, b: jnp.where(finite, a, b)
        return (*jax.tree.map(select, new, old), scale), loss

    return Training(init, step)
