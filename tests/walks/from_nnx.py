"""A Flax nnx training with BatchNorm and Dropout, made half precision, from `docs/` alone."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from jmp import diagnostics, transforms
from jmp.adapters import nnx as mixed


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.conv(images)))
        return self.head(self.dropout(x.mean(axis=(1, 2))))


def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit
def train_step(model, optimizer, images, labels):
    return mixed.train_step(loss_fn, model, optimizer, images, labels)


@nnx.jit
def evaluate(model, images):
    return model(images)


def create(seed):
    rules = [("head", "float32")]  # logits in float32
    view = mixed.with_policy(Net(nnx.Rngs(seed)), "mixed_float16", rules)
    tx = transforms.mixed_precision(optax.adam(3e-2), "mixed_float16")
    return view, nnx.Optimizer(view, tx, wrt=nnx.Param)


def statistics(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))


def main():
    random = np.random.default_rng(0)
    labels = np.arange(16) % 2
    images = random.normal(size=(16, 6, 6, 1)).astype(np.float32)
    images[labels == 1] += 0.7

    # Is it on? Without the rule for the head every product is half.
    half_loss = mixed.autocast(loss_fn, "mixed_float16")
    diagnostics.assert_products_in(half_loss, jnp.float16)(Net(nnx.Rngs(0)), images, labels)

    view, optimizer = create(0)
    view.train()
    losses = [float(train_step(view, optimizer, images, labels)) for _ in range(30)]
    diagnostics.check_skips(nnx.as_pure(optimizer.opt_state), limit=10)
    assert losses[-1] < 0.5 * losses[0]
    assert view.conv.kernel[...].dtype == view.norm.mean[...].dtype == jnp.float32

    view.eval()
    logits = evaluate(view, images)
    assert logits.dtype == jnp.float32
    accuracy = float((logits.argmax(axis=-1) == labels).mean())
    np.testing.assert_array_equal(logits, evaluate(view, images))  # no dropout, no new statistics

    other, other_optimizer = create(1)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(folder) / "30", nnx.state((view, optimizer)))
        checkpointer.wait_until_finished()
        like = nnx.state((other, other_optimizer))
        restored = checkpointer.restore(pathlib.Path(folder) / "30", like)
    nnx.update((other, other_optimizer), restored)
    for model, its_optimizer in ((view, optimizer), (other, other_optimizer)):
        model.train()
        losses.append(float(train_step(model, its_optimizer, images, labels)))
    assert losses[-1] == losses[-2]  # the same parameters, statistics and dropout

    scale, before = mixed.loss_scale(optimizer).loss_scale, statistics(view)
    train_step(view, optimizer, images * np.inf, labels)
    jax.tree.map(np.testing.assert_array_equal, statistics(view), before)
    assert mixed.loss_scale(optimizer).loss_scale == scale / 2
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
