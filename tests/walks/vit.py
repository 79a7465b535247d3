"""A vision transformer with drop path and an average of its parameters, in Flax nnx.

It trains on scikit-learn's digits in float32, then in mixed float16 from the same start,
and evaluates the averages.

    python vit.py --steps 150
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import nnx as mixed


class DropPath(nnx.Module):
    """Drops the whole branch of some examples."""

    def __init__(self, rate: float, rngs: nnx.Rngs) -> None:
        self.rate, self.deterministic = rate, False
        self.rngs = rngs.dropout.fork()

    def __call__(self, branch: jax.Array) -> jax.Array:
        if self.deterministic or self.rate == 0.0:
            return branch
        kept = jax.random.bernoulli(self.rngs(), 1 - self.rate, (len(branch), 1, 1))
        return jnp.where(kept, branch / (1 - self.rate), 0.0)


class Block(nnx.Module):
    def __init__(self, width: int, drop: float, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.drop_path = DropPath(drop, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.drop_path(self.attention(self.norm1(x)))
        return x + self.drop_path(self.down(nnx.gelu(self.up(self.norm2(x)))))


class ViT(nnx.Module):
    def __init__(self, width: int, depth: int, drop: float, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Conv(1, width, (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (16, width)))
        rates = np.linspace(0.0, drop, depth).tolist()
        self.blocks = nnx.List([Block(width, rate, rngs) for rate in rates])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embed(images).reshape(len(images), 16, -1) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def loss_fn(model: ViT, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(view, optimizer, averaged, images, labels):
    loss = mixed.train_step(loss_fn, view, optimizer, images, labels)
    new, old = nnx.state(view, nnx.Param), nnx.state(averaged, nnx.Param)
    moved = optax.incremental_update(new, old, step_size=0.05)
    grads_finite = nnx.as_pure(optimizer.opt_state).grads_finite
    nnx.update(averaged, jmp.select_tree(grads_finite, moved, old))
    return loss


@nnx.jit
def accuracy(model: ViT, images: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(model(images).argmax(axis=-1) == labels)


def train(policy: str, steps: int) -> tuple[np.ndarray, float]:
    """Returns the losses, and the test accuracy of the averaged parameters."""
    digits = load_digits()
    images = jnp.asarray(digits.images[..., None] / 16, jnp.float32)
    labels = jnp.asarray(digits.target, jnp.int32)
    view = mixed.autocast(ViT(32, 2, 0.1, nnx.Rngs(0)), policy)
    averaged = nnx.clone(view)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    tx = transforms.mixed_precision(optax.adamw(schedule), policy)
    optimizer = nnx.Optimizer(view, tx, wrt=nnx.Param)
    losses = []
    for batch in np.random.default_rng(0).integers(0, 1500, (steps, 64)):
        x, y = images[batch], labels[batch]
        losses.append(float(train_step(view, optimizer, averaged, x, y)))
    half = jmp.get_policy(policy).compute_dtype
    diagnostics.assert_products_in(nnx.grad(loss_fn), half)(view, x, y)
    averaged.eval()
    score = float(accuracy(averaged, images[1500:], labels[1500:]))
    if policy == "mixed_float16":  # a bad batch moves neither parameters nor average
        leaves = lambda: jax.tree.leaves(nnx.state((view, averaged), nnx.Param))
        before, scale = leaves(), mixed.loss_scale(optimizer).loss_scale
        train_step(view, optimizer, averaged, jnp.full_like(x, jnp.inf), y)
        assert all(map(jnp.array_equal, before, leaves()))
        assert mixed.loss_scale(optimizer).loss_scale == scale / 2
        assert {str(leaf.dtype) for leaf in before} == {"float32"}
    return np.asarray(losses), score


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args(argv).steps
    losses, score = train("float32", steps)
    half_losses, half_score = train("mixed_float16", steps)
    print(f"float32: loss {losses[-1]:.4f}, accuracy {score:.3f}")
    print(f"mixed_float16: loss {half_losses[-1]:.4f}, accuracy {half_score:.3f}")
    assert half_losses[-5:].mean() < 0.95 * half_losses[:5].mean()
    assert abs(half_losses - losses).max() < 0.05
    assert abs(half_score - score) < 0.05


if __name__ == "__main__":
    main()
