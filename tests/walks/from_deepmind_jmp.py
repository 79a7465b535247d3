"""A Haiku script for DeepMind's jmp: unchanged, and then with autocast; from `docs/` alone."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import haiku as mixed


def forward(x, is_training):
    x = hk.Linear(16)(x)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
    return hk.Linear(2, name="head")(x)


def mean_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def as_written_for_deepminds_jmp(x, labels, steps):
    """Trains as the README of DeepMind's jmp and Haiku's documentation say."""
    half, full = jmp.half_dtype(), jnp.float32
    policy = jmp.Policy(compute_dtype=half, param_dtype=full, output_dtype=half)
    hk.mixed_precision.set_policy(hk.Linear, policy)
    hk.mixed_precision.set_policy(hk.BatchNorm, policy.with_output_dtype(full))
    network = hk.without_apply_rng(hk.transform_with_state(forward))
    optimizer = optax.adam(1e-2)
    loss_scale = jmp.DynamicLossScale(jmp.half_dtype()(2**15))

    def loss_fn(params, state, loss_scale, x, labels):
        logits, state = network.apply(params, state, x, True)
        return loss_scale.scale(mean_loss(logits.astype(full), labels)), state

    @jax.jit
    def train_step(params, state, opt_state, loss_scale, x, labels):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, new_state), grads = grad_fn(params, state, loss_scale, x, labels)
        grads = loss_scale.unscale(grads)
        grads_finite = jmp.all_finite(grads)
        updates, new_opt_state = optimizer.update(grads, opt_state)
        new = (optax.apply_updates(params, updates), new_state, new_opt_state)
        params, state, opt_state = jmp.select_tree(grads_finite, new, (params, state, opt_state))
        loss = loss / loss_scale.loss_scale
        return params, state, opt_state, loss_scale.adjust(grads_finite), loss

    try:
        params, state = network.init(jax.random.key(0), x, True)
        opt_state, losses = optimizer.init(params), []
        for _ in range(steps):
            params, state, opt_state, loss_scale, loss = train_step(
                params, state, opt_state, loss_scale, x, labels
            )
            losses.append(float(loss))
    finally:
        hk.mixed_precision.clear_policy(hk.Linear)
        hk.mixed_precision.clear_policy(hk.BatchNorm)
    return losses


def with_autocast(x, labels, steps):
    """The same training: one wrapped network, one wrapped optimizer, one call a step."""
    network = hk.without_apply_rng(hk.transform_with_state(forward))
    network = mixed.with_policy(network, "mixed_float16")
    tx = transforms.mixed_precision(optax.adam(1e-2), "mixed_float16", jmp.deepmind_loss_scale())

    def loss_fn(params, state, x, labels):
        logits, state = network.apply(params, state, x, True)
        return mean_loss(logits, labels), state

    @jax.jit
    def train_step(params, state, opt_state, x, labels):
        return mixed.train_step(loss_fn, params, opt_state, tx, x, labels, state=state)

    params, state = network.init(jax.random.key(0), x, True)
    in_half = functools.partial(network.apply, is_training=False)
    diagnostics.assert_products_in(in_half, jnp.float16)(params, state, x)
    opt_state, losses = tx.init(params), []
    for _ in range(steps):
        taken = train_step(params, state, opt_state, x, labels)
        params, state, opt_state = taken.model, taken.state, taken.opt_state
        losses.append(float(taken.loss))

    spoilt = train_step(params, state, opt_state, x * jnp.inf, labels)
    same = jax.tree.map(jnp.array_equal, (spoilt.model, spoilt.state), (params, state))
    assert jax.tree.all(same)  # a skipped step: parameters and statistics stay
    logits, _ = jax.jit(in_half)(params, state, x)
    assert logits.dtype == jnp.float32
    return losses, float((logits.argmax(axis=-1) == labels).mean())


def main():
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    labels = (x[:, 0] > 0).astype(np.int32)
    before = as_written_for_deepminds_jmp(x, labels, steps=15)
    after, accuracy = with_autocast(x, labels, steps=15)
    print(f"last loss {before[-1]:.3f} before, {after[-1]:.3f} after; accuracy {accuracy:.2f}")
    assert before[-1] < 0.5 * before[0] and after[-1] < 0.5 * after[0]
    assert abs(before[-1] - after[-1]) < 0.05


if __name__ == "__main__":
    main()
