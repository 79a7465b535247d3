"""`mixed-precision-for-JAX` 0.1.8 (mpx), from the package index, by its README.

Left as they are, for they change no speed: it unscales with the scale already adjusted, and keeps
the scale in float16. Stepped around: it would skip no batch statistics, so they are selected here.
"""

from typing import Any

import jax
import jax.numpy as jnp
import mpx

from benchmarks.recipes._training import HALF, Training


def training(workload: Any) -> Training:
    mpx.set_half_precision_datatype(HALF)
    apply_fn = workload.module(None).apply

    def init(key: jax.Array) -> Any:
        params, statistics = workload.variables(key)
        scaling = mpx.DynamicLossScaling(jnp.float32(2.0**15), min_loss_scaling=jnp.float32(1))
        return params, workload.optimizer.init(params), scaling, statistics

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, scaling, statistics = state
        inputs, targets = batch

        def loss_fn(params: Any, inputs: Any) -> Any:
            return workload.loss_fn(apply_fn)(params, statistics, (inputs, targets))

        grad_fn = mpx.filter_value_and_grad(loss_fn, scaling, has_aux=True)
        (loss, updated), scaling, finite, gradients = grad_fn(params, inputs)
        params, opt_state = mpx.optimizer_update(
            params, workload.optimizer, opt_state, gradients, finite
        )
        statistics = mpx.select_tree(finite, updated, statistics)
        return (params, opt_state, scaling, statistics), loss

    return Training(init, step)
