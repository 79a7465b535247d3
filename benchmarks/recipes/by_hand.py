"""Mixed precision written by hand: `dtype` on every layer, dynamic loss scaling in the step.

With cuDNN's attention, which is what `torch.nn.functional.scaled_dot_product_attention` of the
PyTorch recipes compares with: `jax.nn.dot_product_attention(..., implementation="cudnn")`. Stepped
around: for a gradient it takes sequences of even length alone (`benchmarks/models.py` fills up).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import cudnn_attention
from benchmarks.recipes._training import HALF, Training


class State(NamedTuple):
    params: Any
    opt_state: Any
    scale: jax.Array
    good_steps: jax.Array


def training(workload: Any) -> Training:
    return _training(workload, workload.module(HALF))


def training_with_cudnn_attention(workload: Any) -> Training:
    return _training(workload, workload.module(HALF).clone(attention=cudnn_attention))


def _training(workload: Any, module: Any) -> Training:
    loss_fn = workload.loss_fn(module.apply)

    def init(key: jax.Array) -> Any:
        params, statistics = workload.variables(key)
        return _init(workload.optimizer, params), statistics

    def step(state: Any, batch: Any) -> Any:
        state, statistics = state

        def scaled_loss(params: Any) -> Any:
            loss, new_statistics = loss_fn(params, statistics, batch)
            return state.scale * loss, (loss, new_statistics)

        gradients, (loss, new_statistics) = jax.grad(scaled_loss, has_aux=True)(state.params)
        state, finite = _step(workload.optimizer, state, gradients)
        return (state, _where(finite, new_statistics, statistics)), loss

    return Training(init, step)


def update(workload: Any) -> Training:
    def step(state: State, gradients: Any) -> Any:
        return _step(workload.optimizer, state, gradients)[0], None

    return Training(lambda key: _init(workload.optimizer, workload.params(key)), step)


def _init(optimizer: Any, params: Any) -> State:
    return State(params, optimizer.init(params), jnp.float32(2.0**16), jnp.int32(0))


def _step(optimizer: Any, state: State, scaled_gradients: Any) -> tuple[State, jax.Array]:
    inverse = 1 / state.scale
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32) * inverse, scaled_gradients)
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    grow = state.good_steps == 1999
    scale = jnp.where(finite, jnp.where(grow, 2 * state.scale, state.scale), state.scale / 2)
    return (
        State(
            params=_where(finite, params, state.params),
            opt_state=_where(finite, opt_state, state.opt_state),
            scale=jnp.clip(scale, 1, 2.0**24),
            good_steps=jnp.where(finite & ~grow, state.good_steps + 1, 0),
        ),
        finite,
    )


def _where(finite: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
