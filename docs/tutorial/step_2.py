import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp

policy = "mixed_float16"
images, labels = load_digits(return_X_y=True)  # 1797 real handwritten digits
images = np.asarray(images / 16, np.float32)
shuffle = np.random.default_rng(0)
train, test = np.split(shuffle.permutation(len(images)), [1408])

model = nn.Sequential([nn.Dense(128), nn.LayerNorm(), nn.relu, nn.Dense(10)])
params = model.init(jax.random.key(0), images[:1])["params"]
tx = optax.adam(1e-3)
opt_state = tx.init(params)


def loss_fn(params, images, labels):
    logits = model.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


half_loss_fn = jmp.autocast(loss_fn, policy)


@jax.jit
def train_step(params, opt_state, images, labels):
    loss, grads = jax.value_and_grad(half_loss_fn)(params, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@jax.jit
def predict(params, images):
    return model.apply({"params": params}, images)


for _ in range(10):
    for rows in np.split(shuffle.permutation(train), 22):  # 22 batches of 64
        batch = images[rows], labels[rows]
        params, opt_state, loss = train_step(params, opt_state, *batch)

accuracy = (predict(params, images[test]).argmax(-1) == labels[test]).mean()
print(f"loss {loss:.4f}, test accuracy {accuracy:.3f}")
