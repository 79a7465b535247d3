"""A Haiku script of DeepMind's jmp 0.0.4: its loop as it was, then ported; from `docs/` alone.

The ported part begins with the policy and the scale that the old library pickled. It trains anew,
and it goes on with the old training.
"""

import base64
import functools
import io
import pickle
from collections import namedtuple

import haiku as hk
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import haiku as mixed

# pickle.dumps({"policy": policy, "loss_scale": loss_scale}) in DeepMind's jmp 0.0.4
OLD_PICKLE = """
gASV5AEAAAAAAAB9lCiMBnBvbGljeZSMD2ptcC5fc3JjLnBvbGljeZSMBlBvbGljeZSTlCmBlH2UKIwLcGFyYW1fZHR5cGWU
jAlqYXgubnVtcHmUjAdmbG9hdDMylJOUjA1jb21wdXRlX2R0eXBllGgIjAdmbG9hdDE2lJOUjAxvdXRwdXRfZHR5cGWUaAp1
YowKbG9zc19zY2FsZZSME2ptcC5fc3JjLmxvc3Nfc2NhbGWUjBBEeW5hbWljTG9zc1NjYWxllJOUKYGUfZQoaA+MFm51bXB5
Ll9jb3JlLm11bHRpYXJyYXmUjAxfcmVjb25zdHJ1Y3SUk5SMBW51bXB5lIwHbmRhcnJheZSTlEsAhZRDAWKUh5RSlChLASlo
GIwFZHR5cGWUk5SMAmY0lImIh5RSlChLA4wBPJROTk5K/////0r/////SwB0lGKJQwQAAABGlHSUYowHY291bnRlcpRoF2ga
SwCFlGgch5RSlChLASloIIwCaTSUiYiHlFKUKEsDaCROTk5K/////0r/////SwB0lGKJQwQFAAAAlHSUYowGcGVyaW9klEsU
jAZmYWN0b3KUSwKMDm1pbl9sb3NzX3NjYWxllGgXaBpLAIWUaByHlFKUKEsBKWgjiUMEAACAP5R0lGJ1YnUu"""
STEPS = 22  # of an epoch
TrainState = namedtuple("TrainState", "params state opt_state loss_scale")
images, labels = load_digits(return_X_y=True)
images = np.float32(images / 16)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
mp_policy = jmp.get_policy("params=float32,compute=float16,output=float32")


@hk.without_apply_rng
@hk.transform_with_state
def network(x, is_training):
    for width in (64, 32):
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Linear(width)(x), is_training))
    return hk.Linear(10, name="head")(x)


def mean_loss(apply_fn, params, state, x, y):
    logits, state = apply_fn(params, state, x, is_training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state


def train(update, now):
    """Trains, then overflows: returns the states before and after that, and the mean loss."""
    shuffle, losses = np.random.default_rng(0), []
    for _ in range(6):
        for rows in np.split(shuffle.permutation(64 * STEPS), STEPS):
            now, loss = update(now, images[rows], labels[rows])
            losses.append(loss)
    after, _ = update(now, images[:64] * 1e6, labels[:64])  # 1e6 is infinite in float16
    return now, after, np.mean(losses[-STEPS:])


@jax.jit
def old_update(now, x, y):
    def loss_fn(params):
        loss, state = mean_loss(network.apply, params, now.state, x, y)
        return now.loss_scale.scale(loss), (loss, state)

    grads, (loss, state) = jax.grad(loss_fn, has_aux=True)(now.params)
    grads = now.loss_scale.unscale(mp_policy.cast_to_compute(grads))  # half, as for a pmean
    grads = mp_policy.cast_to_param(grads)
    grads_finite = jmp.all_finite(grads)
    updates, opt_state = optimizer.update(grads, now.opt_state, now.params)
    stepped = (optax.apply_updates(now.params, updates), state, opt_state)
    kept = jmp.select_tree(grads_finite, stepped, tuple(now[:3]))
    return TrainState(*kept, now.loss_scale.adjust(grads_finite)), loss


def as_written_for_deepminds_jmp(params, state):
    """Trains with each class of scales, as the README of DeepMind's jmp and Haiku's pages say."""
    hk.mixed_precision.set_policy(hk.Linear, mp_policy)
    in_full = jmp.get_policy("full")
    hk.mixed_precision.set_policy(hk.BatchNorm, in_full.with_output_dtype(jmp.half_dtype()))
    dynamic = jmp.DynamicLossScale(jmp.half_dtype()(2**13), period=20)
    start = params, state, optimizer.init(params)
    try:
        for scale in (jmp.NoOpLossScale(), jmp.StaticLossScale(2**13), dynamic):
            now, after, loss = train(old_update, TrainState(*start, scale))
            np.testing.assert_equal(*jax.device_get((after[:3], now[:3])))
    finally:  # `with_policy` would warn
        hk.mixed_precision.clear_policy(hk.Linear)
        hk.mixed_precision.clear_policy(hk.BatchNorm)
    assert after.loss_scale.loss_scale == now.loss_scale.loss_scale / 2 > 2**13
    return after, loss


class DeepMindUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return super().find_class("jmp" if module.startswith("jmp._src.") else module, name)


def with_autocast(params, state, old):
    """The same model by the adapter, the same optimizer wrapped: anew, and from `old` on."""
    saved = DeepMindUnpickler(io.BytesIO(base64.b64decode(OLD_PICKLE))).load()
    policy, loss_scale = (type(one)(**vars(one)) for one in saved.values())  # made anew
    rules = [("head", "float32")]
    half = mixed.with_policy(network, policy, rules=rules)
    tx = transforms.mixed_precision(optimizer, policy, loss_scale)
    loss_fn, scales = functools.partial(mean_loss, half.apply), []
    step = jax.jit(lambda p, s, o, x, y: mixed.train_step(loss_fn, p, o, tx, x, y, state=s))

    def new_update(now, x, y):
        taken = step(*now, x, y)
        diagnostics.check_skips(taken.opt_state, limit=5)
        scales.append(taken.opt_state.loss_scale.loss_scale)
        return (taken.model, taken.state, taken.opt_state), taken.loss

    now, after, loss = train(new_update, (params, state, tx.init(params)))
    assert scales[13:15] == [2**13, 2**14]  # 5 of 20 finite steps were counted before
    kept = [(*one[:2], one[2].inner_state) for one in jax.device_get((now, after))]
    np.testing.assert_equal(*kept)  # parameters, BatchNorm's state, moments
    assert not after[2].grads_finite and scales[-1] == scales[-2] / 2
    logits, _ = jax.jit(functools.partial(half.apply, is_training=False))(*now[:2], images[-389:])
    assert logits.dtype == np.float32 and np.mean(logits.argmax(-1) == labels[-389:]) > 0.9

    opt_state = tx.init(old.params)._replace(inner_state=old.opt_state, loss_scale=old.loss_scale)
    continued = train(new_update, (old.params, old.state, opt_state))[-1]

    plain_loss = functools.partial(mean_loss, network.apply)  # before it is wrapped
    report = diagnostics.precision_report(plain_loss, policy, rules=rules)
    report = report(*now[:2], images[:64], labels[:64])
    products = {row.module: row.dtype_in for row in report.rows if row.operation == "dot_general"}
    assert products == {"linear": "float16", "linear_1": "float16", "head": "float32"}
    assert ["HIGHEST precision" in hazard for hazard in report.hazards] == [True]  # of the head
    print(report)
    return loss, continued


def main():
    init = jax.jit(network.init, static_argnums=2)
    params, state = init(jax.random.key(0), images[:1], True)
    old, old_loss = as_written_for_deepminds_jmp(params, state)
    loss, continued = with_autocast(params, state, old)
    print(f"loss {old_loss:.4f} old, {loss:.4f} ported, {continued:.4f} continued")
    assert abs(loss - old_loss) < 0.1 * old_loss and continued < old_loss < 0.1


if __name__ == "__main__":
    main()
