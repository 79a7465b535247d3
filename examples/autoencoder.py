"""A deep autoencoder whose gradients underflow in float16: what loss scaling is for.

    python examples/autoencoder.py        # about two minutes on two CPU cores
    python examples/autoencoder.py --help

The data is scikit-learn's bundled set of 1797 handwritten digits of 8 x 8 pixels. The network has
eight layers of sigmoid units, and the loss is the mean squared error over images and pixels, with
no factor. The derivative of a sigmoid is at most 1/4, so gradients become smaller from layer to
layer on their way back. Adam divides a gradient by its own size, so this network trains in float32.
In float16 the gradients of the first layers are zero, and the loss stays at that of the mean image.
With a scaled loss the gradients are not zero.

Writes `autoencoder.json` and `autoencoder.svg` into the output folder.
"""

import time
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _common import (
    COLORS,
    begin,
    draw_band,
    finish,
    load_images,
    parse_options,
    print_table,
    rounded,
)
from rich.progress import Progress

import jmp
from jmp import transforms
from jmp.adapters import linen

# Name, policy, loss scale. The dynamic one starts at torch's 2**16.
RUNS = (
    ("float32", "float32", jmp.NoOpLossScale()),
    ("float16 without loss scaling", "mixed_float16", jmp.NoOpLossScale()),
    ("float16 with loss scaling", "mixed_float16", jmp.torch_loss_scale()),
)
WIDTHS = (128, 64, 32, 16, 32, 64, 128, 64)
LAST = 20  # steps, whose mean loss is the final one
DRAWN = 10  # steps, whose mean loss is a point of the figure


class Autoencoder(nn.Module):
    """Sigmoid layers from 64 pixels to 16 numbers and back."""

    widths: tuple[int, ...] = WIDTHS

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths:
            x = nn.sigmoid(nn.Dense(width)(x))
        return x


def loss_fn(params: Any, apply_fn: Any, images: jax.Array) -> jax.Array:
    return jnp.mean((apply_fn({"params": params}, images) - images) ** 2)


def train(
    policy: str, loss_scale: jmp.LossScale, images: np.ndarray, arguments: Any, tick: Any
) -> dict[str, Any]:
    """Trains every seed: other initial parameters and other batches, the same for all runs."""
    model = Autoencoder()
    apply_fn = linen.autocast(model.apply, policy)
    tx = transforms.with_loss_scale(optax.adam(arguments.learning_rate), loss_scale)

    @jax.jit
    def train_step(state: linen.TrainState, batch: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)
        loss, grads = grad_fn(state.params, state.apply_fn, batch)
        leaves = jax.tree.leaves(grads)
        zeros = sum(jnp.sum(leaf == 0) for leaf in leaves) / sum(leaf.size for leaf in leaves)
        return state.apply_gradients(grads=grads), loss, zeros

    curves, shares, skipped = [], [], []
    started = time.perf_counter()
    for seed in range(arguments.seeds):
        params = model.init(jax.random.key(seed), images[:1])["params"]
        with warnings.catch_warnings():
            # What it says of float16 without loss scaling is what this example shows.
            warnings.simplefilter("ignore", jmp.UnscaledLossWarning)
            state = linen.TrainState.create(apply_fn=apply_fn, params=params, tx=tx)
        drawn, losses, zeros = np.random.default_rng(seed), [], []
        for _ in range(arguments.steps):
            batch = images[drawn.integers(0, len(images), arguments.batch_size)]
            state, loss, share = train_step(state, batch)
            losses.append(float(loss))
            zeros.append(float(share))
            tick()
        curves.append(losses)
        shares.append(zeros)
        skipped.append(int(transforms.loss_scale_state(state.opt_state).skipped_steps))
    return {
        "losses": rounded(curves),
        "final_losses": [float(np.mean(losses[-LAST:])) for losses in curves],
        "zero_gradients": [float(np.mean(zeros)) for zeros in shares],
        "seconds": (time.perf_counter() - started) / arguments.seeds,
        "skipped_steps": skipped,
    }


def plot(report: dict[str, Any]) -> Any:
    """Draws what `autoencoder.json` holds: losses over the seeds, and the difference to float32."""
    runs, seeds = report["runs"], report["options"]["seeds"]
    each = min(DRAWN, report["options"]["steps"])
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 5.5), height_ratios=(5, 2), sharex=True, layout="constrained"
    )
    looks = zip(runs.items(), ("-", "--", "-"), (3.0, 1.4, 1.2), COLORS[2::-1], strict=True)
    for (name, run), style, width, color in looks:
        zero = np.mean(run["zero_gradients"])
        label = f"{name}: {np.mean(run['final_losses']):.4f} at the end, "
        label += f"{100 * zero:.0f} % of the gradients are zero"
        look = {"style": style, "linewidth": width, "color": color, "each": each}
        draw_band(top, np.array(run["losses"], float), label=label, **look)
    top.axhline(report["mean_image_loss"], color="0.4", linewidth=0.8, linestyle=":",
                label=f"the mean image as output: {report['mean_image_loss']:.4f}")  # fmt: skip
    losses = {name: np.array(run["losses"], float) for name, run in runs.items()}
    scaled = losses["float16 with loss scaling"] - losses["float32"]
    draw_band(bottom, scaled, linewidth=1.2, color=COLORS[0], each=each)
    bottom.axhline(0, color=COLORS[2], linewidth=0.8)
    top.set(ylabel="mean squared error", ylim=(0.03, 0.12))
    bottom.set(xlabel="step", ylabel="float16 with loss\nscaling - float32")
    words = f"lines: mean of {seeds} seeds and {each} steps, bands: lowest to highest; "
    words += f"at the end: mean of {LAST} steps"
    top.set_title(words, fontsize=8, loc="left")
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper left", fontsize=8)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    return figure


def main() -> None:
    options = {"steps": 2000, "batch_size": 256, "seeds": 3, "learning_rate": 1e-3}
    arguments = parse_options(__doc__, **options)
    console = begin(arguments)
    images = load_images()[0].reshape(-1, 64)
    runs = {}
    with Progress(console=console) as progress:
        for name, policy, loss_scale in RUNS:
            task = progress.add_task(name, total=arguments.steps * arguments.seeds)
            tick = lambda task=task: progress.advance(task)
            runs[name] = train(policy, loss_scale, images, arguments, tick)

    headings = ["run", "final loss", "lowest", "highest", "zero gradients", "seconds a seed"]
    rows = []
    for name, run in runs.items():
        losses, zeros = run["final_losses"], np.mean(run["zero_gradients"])
        cells = float(np.mean(losses)), min(losses), max(losses)
        rows.append([name, *cells, f"{100 * zeros:.0f} %", f"{run['seconds']:.0f}"])
    print_table(console, headings, *rows)
    mean_image_loss = float(images.var(axis=0).mean())
    console.print(f"The mean image as output has a loss of {mean_image_loss:.4f}.")
    finish(console, arguments, "autoencoder", plot, mean_image_loss=mean_image_loss, runs=runs)


if __name__ == "__main__":
    main()
