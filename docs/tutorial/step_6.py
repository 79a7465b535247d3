import pathlib

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import serialization
from sklearn.datasets import load_digits

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen

policy = "p=f16,c=f16,o=f32"
images, labels = load_digits(return_X_y=True)  # 1797 real handwritten digits
images = np.asarray(images / 16, np.float32)
shuffle = np.random.default_rng(0)
train, test = np.split(shuffle.permutation(len(images)), [1408])

model = nn.Sequential([nn.Dense(128), nn.LayerNorm(), nn.relu, nn.Dense(10)])
params = model.init(jax.random.key(0), images[:1])["params"]
params = linen.cast_params({"params": params}, policy)["params"]
tx = transforms.mixed_precision(optax.adam(1e-3), policy, jmp.DynamicLossScale(2.0**24))
opt_state = tx.init(params)

checkpoint = pathlib.Path("digits.msgpack")
if checkpoint.exists():  # go on where the last run ended
    saved = {"params": params, "opt_state": opt_state}
    saved = serialization.from_bytes(saved, checkpoint.read_bytes())
    params, opt_state = saved["params"], saved["opt_state"]


def loss_fn(params, images, labels):
    logits = model.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


half_loss_fn = jmp.autocast(loss_fn, policy)


@jax.jit
def train_step(params, opt_state, images, labels):
    grad_fn = jmp.scaled_value_and_grad(half_loss_fn, opt_state.loss_scale)
    loss, grads = grad_fn(params, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@jax.jit
@jmp.autocast(policy=policy)
def predict(params, images):
    return model.apply({"params": params}, images)


for _ in range(10):
    for rows in np.split(shuffle.permutation(train), 22):  # 22 batches of 64
        batch = images[rows], labels[rows]
        params, opt_state, loss = train_step(params, opt_state, *batch)
    diagnostics.check_skips(opt_state, limit=20)  # an error if all are skipped

saved = {"params": params, "opt_state": opt_state}
checkpoint.write_bytes(serialization.to_bytes(saved))

accuracy = (predict(params, images[test]).argmax(-1) == labels[test]).mean()
print(f"loss {loss:.4f}, test accuracy {accuracy:.3f}")
scale = opt_state.loss_scale.loss_scale
print(f"{opt_state.skipped_steps} skipped steps, loss scale {scale:g}")
