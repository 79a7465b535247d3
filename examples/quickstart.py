"""The five-line change: float32 training, and the same in mixed precision (lines marked NEW)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from sklearn.datasets import load_digits

import jmp
from jmp import transforms
from jmp.adapters import linen

MODEL = nn.Sequential([nn.Dense(64), nn.LayerNorm(), nn.relu, nn.Dense(10)])
IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES = jnp.asarray(IMAGES / 16, jnp.float32)
PARAMS = MODEL.init(jax.random.key(0), IMAGES)["params"]


def mean_loss(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def before(steps):
    tx = optax.adam(1e-2)
    state = train_state.TrainState.create(apply_fn=MODEL.apply, params=PARAMS, tx=tx)

    @jax.jit
    def train_step(state):
        loss_fn = lambda params: mean_loss(state.apply_fn({"params": params}, IMAGES))
        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    for _ in range(steps):
        state, loss = train_step(state)
    return loss


def after(steps):
    apply_fn = linen.autocast(MODEL.apply, "mixed_float16")  # NEW
    tx = transforms.mixed_precision(optax.adam(1e-2), "mixed_float16")  # NEW
    state = linen.TrainState.create(apply_fn=apply_fn, params=PARAMS, tx=tx)  # NEW

    @jax.jit
    def train_step(state):
        loss_fn = lambda params: mean_loss(state.apply_fn({"params": params}, IMAGES))
        grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)  # NEW
        loss, grads = grad_fn(state.params)  # NEW
        return state.apply_gradients(grads=grads), loss

    for _ in range(steps):
        state, loss = train_step(state)
    return loss


if __name__ == "__main__":
    print(f"float32: loss {before(100):.4f}    mixed float16: loss {after(100):.4f}")
