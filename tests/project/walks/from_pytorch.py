"""A torch.amp training script, ported to Flax linen from the pages of `docs/` alone.

Four micro-batches a step, gradients clipped by their global norm, AdamW for the body, SGD with
momentum for the head, a frozen encoder, an average of the parameters that is evaluated in half
precision, a batch with an infinity that is skipped, a checkpoint from which a new state goes on,
two devices.
"""

import functools
import os
import pathlib
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen

# A CPU counts as eight devices. JAX reads it when it first looks for devices, below.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
POLICY, MICRO_BATCHES, CLIP, HEAD_RATE, AVERAGE_RATE = "mixed_float16", 4, 1.0, 0.05, 0.1


class Net(nn.Module):
    @nn.compact
    def __call__(self, images):
        hidden = nn.relu(nn.Dense(128, name="encoder")(images))
        hidden = nn.relu(nn.LayerNorm(name="norm")(nn.Dense(64, name="body")(hidden)))
        return nn.Dense(10, name="head")(hidden)


class State(linen.TrainState):
    average: Any = None  # the moving average of the parameters


model = Net()
apply_fn = linen.wrap_apply(model.apply, POLICY)
adamw, sgd = optax.adamw(2e-3, weight_decay=0.01), optax.sgd(HEAD_RATE, momentum=0.9)
optimizers = {"frozen": optax.set_to_zero(), "adamw": adamw, "sgd": sgd}
groups = {"encoder": "frozen", "body": "adamw", "norm": "adamw", "head": "sgd"}
inner = optax.chain(optax.clip_by_global_norm(CLIP), optax.partition(optimizers, groups))
tx = transforms.mixed_precision(inner, POLICY)
init = jax.jit(model.init)


def create(seed):
    params = init(jax.random.key(seed), jnp.ones((1, 64)))["params"]
    params = jax.device_put(params, NamedSharding(MESH, P()))
    return State.create(apply_fn=apply_fn, params=params, tx=tx, average=params)


def loss_fn(apply_fn, params, batch):
    # As requires_grad=False: the encoder's gradients are zero and do not count in the norm.
    params = params | {"encoder": jax.lax.stop_gradient(params["encoder"])}
    logits = apply_fn({"params": params}, batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


@jax.jit
def train_step(state, batch):
    half_loss = functools.partial(loss_fn, state.apply_fn)
    grad_fn = jmp.accumulated_value_and_grad(half_loss, state.loss_scale, steps=MICRO_BATCHES)
    loss, grads = grad_fn(state.params, batch)
    norm = optax.tree.norm(state.loss_scale.unscale(grads))
    new = state.apply_gradients(grads=grads)
    moved = optax.incremental_update(new.params, state.average, AVERAGE_RATE)
    average = jmp.select_tree(new.grads_finite, moved, state.average)
    logged = {"loss": loss, "norm": norm, **diagnostics.metrics(new.opt_state)}
    return new.replace(average=average), logged


def equal(one, other):
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(one)]
    return bits == [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(other)]


def check_first_step(before, after, batch, norm):
    """Asserts that the head moved by the clipped float32 gradient of the whole batch."""
    in_float32 = jax.jit(jax.grad(functools.partial(loss_fn, model.apply)))
    grads = jax.device_get(in_float32(before.params, batch))
    exact = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
    assert exact > CLIP and abs(norm - exact) < 0.01 * exact
    expected = -HEAD_RATE * CLIP / exact * grads["head"]["kernel"]
    after, before = (np.asarray(state.params["head"]["kernel"]) for state in (after, before))
    assert np.linalg.norm(after - before - expected) < 0.01 * np.linalg.norm(expected)


def overflow_and_resume(state, batch):
    """Skips a batch with an infinity on one device, saves, and returns the restored state."""
    images = np.array(batch["images"])
    images[0, 0] = np.inf
    skipped, logged = train_step(state, placed({**batch, "images": images}))
    assert not skipped.grads_finite and not logged["grads_finite"]
    assert equal((state.params, state.average), (skipped.params, skipped.average))
    assert skipped.step == state.step
    assert skipped.loss_scale.loss_scale == state.loss_scale.loss_scale / 2
    fresh = create(seed=1)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(folder) / "state", skipped)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(pathlib.Path(folder) / "state", fresh)
    assert equal(restored, skipped) and not equal(restored.params, fresh.params)
    assert equal(train_step(restored, batch), train_step(skipped, batch))
    return restored


def placed(batch):
    return jax.device_put(batch, NamedSharding(MESH, P("data")))


images, labels = load_digits(return_X_y=True)
images, random = np.float32(images / 16), np.random.default_rng(0)
train, test = np.split(random.permutation(len(images)), [1408])
state = start = create(seed=0)
losses = []
for epoch in range(3):
    for rows in np.split(random.permutation(train), 22):  # 64 rows: 8 a device and micro-batch
        batch = placed({"images": images[rows], "labels": labels[rows]})
        state, logged = train_step(state, batch)
        losses.append(float(logged["loss"]))
        if len(losses) == 1:
            check_first_step(start, state, batch, logged["norm"])
    diagnostics.check_skips(state.opt_state, limit=10)
    state = overflow_and_resume(state, batch) if epoch == 1 else state

kernel = state.params["body"]["kernel"]
assert kernel.sharding.is_fully_replicated and len(kernel.sharding.device_set) == 2
assert equal(state.params["encoder"], start.params["encoder"])
assert not equal(kernel, start.params["body"]["kernel"])
assert int(state.step) + int(logged["skipped_steps"]) == len(losses) + 1
averaged = {"params": state.average}
assert state.average["head"]["kernel"].dtype == jnp.float32
assert not equal(state.average["head"], state.params["head"])
diagnostics.assert_products_in(state.apply_fn, jnp.float16)(averaged, images[test])
logits = np.asarray(jax.jit(state.apply_fn)(averaged, images[test]))
accuracy = (logits.argmax(-1) == labels[test]).mean()
assert losses[-1] < 0.2 * losses[0] and accuracy > 0.9
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, test accuracy of the average {accuracy:.3f}")
