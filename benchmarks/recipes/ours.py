"""This library: the adapter for Flax, by autocast, and half parameters with float32 masters."""

from typing import Any

import jax
import jax.numpy as jnp

import jmp
from benchmarks.recipes._training import HALF, Training, update_by
from jmp import transforms
from jmp.adapters import linen


def adapter(workload: Any) -> Training:
    """`linen.autocast` and dynamic loss scaling; parameters float32."""
    return _training(workload, "O1", jmp.torch_loss_scale())


def autocast(workload: Any) -> Training:
    """`jmp.autocast` of the whole loss, and dynamic loss scaling."""
    return _autocast(workload)


def autocast_fused(workload: Any) -> Training:
    """The same with attention in one kernel."""
    return _autocast(workload, attention="fused")


def adapter_unscaled(workload: Any) -> Training:
    """The same without loss scaling, as for bfloat16."""
    return _training(workload, "O1", jmp.NoOpLossScale())


def masters(workload: Any) -> Training:
    """Half parameters with float32 masters in the optimizer, dynamic loss scaling."""
    return _training(workload, "O2", jmp.torch_loss_scale())


def update(workload: Any) -> Training:
    return _update(workload, jnp.float32, workload.optimizer)


def masters_update(workload: Any) -> Training:
    return _update(workload, HALF, transforms.with_master_params(workload.optimizer))


def _autocast(workload: Any, **options: Any) -> Training:
    loss_fn = workload.loss_fn(workload.module(None).apply)
    loss_fn = jmp.autocast(loss_fn, "mixed_float16", **options)
    return _step_of(workload, loss_fn, "O1", jmp.torch_loss_scale())


def _training(workload: Any, policy: str, loss_scale: jmp.LossScale) -> Training:
    loss_fn = workload.loss_fn(linen.autocast(workload.module(None).apply, policy))
    return _step_of(workload, loss_fn, policy, loss_scale)


def _step_of(workload: Any, loss_fn: Any, policy: str, loss_scale: jmp.LossScale) -> Training:
    def init(key: jax.Array) -> linen.TrainState:
        params, statistics = workload.variables(key)
        return linen.TrainState.create(
            apply_fn=None,
            params=linen.cast_params(params, policy),
            batch_stats=statistics,
            tx=transforms.mixed_precision(workload.optimizer, policy, loss_scale),
        )

    def step(state: linen.TrainState, batch: Any) -> Any:
        grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale, has_aux=True)
        (loss, statistics), gradients = grad_fn(state.params, state.batch_stats, batch)
        return state.apply_gradients(grads=gradients, batch_stats=statistics), loss

    return Training(init, step)


def _update(workload: Any, param_dtype: Any, optimizer: Any) -> Training:
    tx = transforms.with_loss_scale(optimizer, jmp.torch_loss_scale())
    return update_by(workload, tx, dtype=param_dtype)
