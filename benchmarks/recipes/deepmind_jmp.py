"""DeepMind's `jmp` 0.0.4, from the package index, by its README: cast the tree, scale, skip.

Its import name is ours; it runs in a process whose import path has it first. Stepped around: its
README's half-precision scale raises in `adjust`, so the scale is float32; batch statistics are left
in float32, as a half policy for the whole state lets a variance go negative; a step takes the scale
as its leaves, since its class refuses the `jax.stages.ArgInfo` that JAX puts into it in lowering.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp
from benchmarks.recipes._training import HALF, Training

if hasattr(jmp, "autocast"):  # else ours would be measured under its name
    raise ModuleNotFoundError("DeepMind's jmp is not installed: make benchmarks/peers/installed")

POLICY = jmp.Policy(param_dtype=jnp.float32, compute_dtype=HALF, output_dtype=jnp.float32)


def training(workload: Any) -> Training:
    apply_fn = workload.module(None).apply

    def half_apply(variables: Any, inputs: Any, **options: Any) -> Any:
        variables = {**variables, "params": POLICY.cast_to_compute(variables["params"])}
        return apply_fn(variables, POLICY.cast_to_compute(inputs), **options)

    loss_fn = workload.loss_fn(half_apply)

    def init(key: jax.Array) -> Any:
        params, statistics = workload.variables(key)
        return _init(workload.optimizer, params), statistics

    def step(state: Any, batch: Any) -> Any:
        (params, opt_state, scale_leaves), statistics = state
        loss_scale = _loss_scale(scale_leaves)

        def scaled_loss(params: Any) -> Any:
            loss, new_statistics = loss_fn(params, statistics, batch)
            return loss_scale.scale(loss), (loss, new_statistics)

        gradients, (loss, new_statistics) = jax.grad(scaled_loss, has_aux=True)(params)
        new, finite = _step(workload.optimizer, (params, opt_state, scale_leaves), gradients)
        return (new, jmp.select_tree(finite, new_statistics, statistics)), loss

    return Training(init, step)


def update(workload: Any) -> Training:
    def step(state: Any, gradients: Any) -> Any:
        return _step(workload.optimizer, state, gradients)[0], None

    return Training(lambda key: _init(workload.optimizer, workload.params(key)), step)


def _init(optimizer: Any, params: Any) -> Any:
    return params, optimizer.init(params), jax.tree.leaves(_new_loss_scale())


def _new_loss_scale() -> Any:
    return jmp.DynamicLossScale(jnp.float32(2.0**15))


def _loss_scale(leaves: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(_new_loss_scale()), leaves)


def _step(optimizer: Any, state: Any, gradients: Any) -> Any:
    params, opt_state, scale_leaves = state
    loss_scale = _loss_scale(scale_leaves)
    gradients = loss_scale.unscale(POLICY.cast_to_param(gradients))
    finite = jmp.all_finite(gradients)
    updates, new_opt_state = optimizer.update(gradients, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns on every step
        loss_scale = loss_scale.adjust(finite)
    params, opt_state = jmp.select_tree(finite, (new_params, new_opt_state), (params, opt_state))
    return (params, opt_state, jax.tree.leaves(loss_scale)), finite
