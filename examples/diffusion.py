"""Trains a diffusion model of handwritten digits in Flax nnx, and draws new digits with it in half.

    python examples/diffusion.py    # about two minutes on two CPU cores; --help lists options

The network is given a noisy digit and its label, and learns to tell the digit from the noise (Ho et
al. 2020, in the form of Salimans and Ho 2022). The learning rate rises, then falls along a cosine.
New digits are drawn by DDIM (Song et al. 2021) with an exponential moving average (EMA) of the
parameters. In this loop the image stays float32, and the network runs in half.

It prints losses on held-out digits in three precisions: with the parameters, with their EMA in
float32, and with the same EMA in half. Half rounds the small steps of an average away, so the last
one falls behind: keep an EMA in float32. `diffusion.svg` in the output folder shows samples.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import PRECISIONS, begin, finish, load_images, parse_options, print_table
from flax import nnx
from matplotlib.figure import Figure

import jmp
from jmp import transforms
from jmp.adapters import nnx as mixed

HELD_OUT, LEVELS = 197, 100  # digits to test; of noise, from nearly none to nearly nothing else
ANGLES = np.linspace(0.02, 0.98, LEVELS) * np.pi / 2
SIGNAL, NOISE = jnp.asarray([np.cos(ANGLES), np.sin(ANGLES)], jnp.float32)


class Block(nnx.Module):
    """Two convolutions around a shortcut; the condition is added between them."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.GroupNorm(width, num_groups=4, rngs=rngs) for _ in range(2)])
        self.convs = nnx.List([nnx.Conv(width, width, (3, 3), rngs=rngs) for _ in range(2)])
        self.condition = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        y = self.convs[0](nnx.silu(self.norms[0](x)))
        y = y + self.condition(condition)[:, None, None]
        return x + self.convs[1](nnx.silu(self.norms[1](y)))


class Denoiser(nnx.Module):
    """A U-Net of two resolutions for 8 x 8 images; it knows nothing of precision."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.level, self.label = (nnx.Embed(size, width, rngs=rngs) for size in (LEVELS, 10))
        self.stem = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.down = nnx.Conv(width, width, (3, 3), strides=2, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(4)])
        self.head = nnx.Conv(width, 1, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array, level: jax.Array, label: jax.Array) -> jax.Array:
        condition = nnx.silu(self.level(level) + self.label(label))
        fine = self.blocks[0](self.stem(x), condition)
        coarse = self.blocks[2](self.blocks[1](self.down(fine), condition), condition)
        up = jax.image.resize(coarse, fine.shape, "nearest")
        return self.head(nnx.silu(self.blocks[3](fine + up, condition)))


def loss_fn(model: Denoiser, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
    keys = jax.random.split(key)
    level = jax.random.randint(keys[0], labels.shape, 0, LEVELS)
    noise = jax.random.normal(keys[1], images.shape)
    signal, share = (table[level][:, None, None, None] for table in (SIGNAL, NOISE))
    outputs = model(signal * images + share * noise, level, labels)
    return jnp.mean((outputs - (signal * noise - share * images)) ** 2)


@nnx.jit
def train_step(model: Any, optimizer: Any, averages: Any, *batch: jax.Array) -> jax.Array:
    loss = mixed.train_step(loss_fn, model, optimizer, *batch)
    is_taken = optimizer.opt_state.grads_finite[...]  # a skipped step moves no average
    for average in averages:
        old = nnx.state(average, nnx.Param)
        moved = optax.incremental_update(nnx.state(model, nnx.Param), old, step_size=0.01)
        moved = jax.tree.map(lambda new, old: new.astype(old.dtype), moved, old)
        nnx.update(average, jmp.select_tree(is_taken, moved, old))
    return loss


@nnx.jit
def sample(model: Denoiser, labels: jax.Array, key: jax.Array) -> jax.Array:
    """Returns new digits, float32[labels, 8, 8, 1] in [-1, 1]."""

    def denoise(x: jax.Array, level: jax.Array) -> tuple[jax.Array, jax.Array]:
        outputs = model(x, jnp.broadcast_to(level, labels.shape), labels)
        clean = jnp.clip(SIGNAL[level] * x - NOISE[level] * outputs, -1, 1)
        noise = (x - SIGNAL[level] * clean) / NOISE[level]
        # At the last level the first one's factors are taken, for an image that nobody reads.
        return SIGNAL[level - 1] * clean + NOISE[level - 1] * noise, clean

    noise = jax.random.normal(key, (*labels.shape, 8, 8, 1))
    return jax.lax.scan(denoise, noise, jnp.arange(LEVELS)[::-1])[1][-1]


def run(policy: str, arguments: Any, images: Any, labels: Any) -> dict[str, Any]:
    """Trains in one precision; returns losses and samples."""
    view = mixed.autocast(Denoiser(arguments.width, nnx.Rngs(0)), policy)
    rate = optax.warmup_cosine_decay_schedule(0, 3e-3, arguments.steps // 10, arguments.steps)
    tx = transforms.mixed_precision(optax.adam(rate), policy)
    optimizer = nnx.Optimizer(view, tx, wrt=nnx.Param)
    average, in_half = nnx.clone(view), nnx.clone(view)  # they compute by the same policy
    nnx.update(in_half, jmp.get_policy(policy).cast_to_compute(nnx.state(in_half, nnx.Param)))
    drawn = np.random.default_rng(0)
    for key in jax.random.split(jax.random.key(0), arguments.steps):
        rows = drawn.integers(HELD_OUT, len(images), arguments.batch_size)
        train_step(view, optimizer, (average, in_half), images[rows], labels[rows], key)
    # Each held-out digit with eight levels of noise.
    test = [jnp.repeat(data[:HELD_OUT], 8, axis=0) for data in (images, labels)]
    models = {"parameters": view, "their EMA": average, "EMA in half": in_half}
    evaluate = nnx.jit(lambda model: loss_fn(model, *test, jax.random.key(1)))
    losses = {name: float(evaluate(model)) for name, model in models.items()}
    samples = sample(average, jnp.arange(20) % 10, jax.random.key(2))
    return {"losses": losses, "samples": np.round(8 * samples[..., 0] + 8).astype(int).tolist()}


def plot(report: dict[str, Any]) -> Any:
    """Draws the samples in `diffusion.json`."""
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    panels = figure.subplots(len(report["runs"]), squeeze=False)
    for axes, (name, run) in zip(panels[:, 0], report["runs"].items(), strict=True):
        rows = np.array(run["samples"]).reshape(2, 10, 8, 8)
        picture = np.pad(rows, ((0, 0), (0, 0), (1, 1), (1, 1))).swapaxes(1, 2).reshape(20, 100)
        axes.imshow(picture, cmap="gray_r")
        axes.set_title(name, fontsize=10, loc="left")
        axes.set(frame_on=False, xticks=np.arange(4.5, 100, 10), xticklabels=range(10), yticks=[])
    return figure


def main() -> None:
    arguments = parse_options(__doc__, steps=800, batch_size=64, width=24, precisions=PRECISIONS)
    console = begin(arguments)
    images, labels = load_images()
    images = 2 * images[..., None] - 1
    runs = {policy: run(policy, arguments, images, labels) for policy in arguments.precisions}
    rows = ([policy, *found["losses"].values()] for policy, found in runs.items())
    print_table(console, ["held-out loss", *next(iter(runs.values()))["losses"]], *rows)
    finish(console, arguments, "diffusion", plot, runs=runs)


if __name__ == "__main__":
    main()
