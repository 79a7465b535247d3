"""Trains a small ResNet on handwritten digits in six precisions, and compares them.

    python examples/digits.py             # about four minutes on two CPU cores
    python examples/digits.py --seeds 3   # less than two: `make train`
    python examples/digits.py --help

The model is an ordinary Flax model with BatchNorm that knows nothing of precision. The data is
scikit-learn's bundled set of 1797 real digits of 8 x 8 pixels; nothing is downloaded. The images
are split into as many parts as there are seeds: each seed is tested on another part and trained on
the rest, so that each image is a test image once. Every precision sees the same seeds, parts,
initial weights and batches.

Writes `digits.json` and `digits.svg` into the output folder.
"""

import functools
import math
import pathlib
import tempfile
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
    ALL_ROUNDINGS,
    COLORS,
    begin,
    draw_skipped,
    finish,
    load_images,
    parse_options,
    print_table,
    rounded,
    stop,
)
from flax import serialization
from rich.console import Console
from rich.progress import Progress
from sklearn.model_selection import StratifiedKFold

import jmp
from jmp import transforms
from jmp.adapters import linen


class Block(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm around a shortcut."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), strides, use_bias=False)(x)))
        y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A ResNet for 8 x 8 images, as one would write it in float32."""

    width: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = Block(self.width)(x, train)
        x = Block(2 * self.width, stride=2)(x, train)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


# torch's start of 2**16. Its period of 2000 is longer than this whole training; with 25 the scale
# is seen growing until it overflows, and backing off.
GROWING = jmp.DynamicLossScale(2.0**16, period=25, min_loss_scale=0.0)
# Policy, and loss scale; without one the optimizer is not wrapped.
PRECISIONS = {
    "float32": ("float32", jmp.NoOpLossScale()),
    # What casting everything and hoping for the best means: half weights, half statistics, half
    # gradients, half Adam, no loss scaling.
    "naive float16": ("p=f16,c=f16,o=f16", None),
    "static float16": ("mixed_float16", jmp.StaticLossScale(512.0)),
    "mixed float16": ("mixed_float16", GROWING),
    "mixed bfloat16": ("mixed_bfloat16", jmp.NoOpLossScale()),
    "float16, masters": ("O2", GROWING),
}


def parse_arguments() -> Any:
    arguments = parse_options(
        __doc__,
        epochs=20,
        batch_size=64,
        seeds=(10, "two or more"),
        learning_rate=3e-3,
        width=(16, "channels at the start"),
    )
    if arguments.seeds < 2:
        stop("--seeds 1: the images are split into as many parts; expected 2 or more")
    trained = 1797 - math.ceil(1797 / arguments.seeds)
    if arguments.batch_size > trained:
        stop(f"--batch-size {arguments.batch_size}: there are {trained} images to train on")
    return arguments


def load_parts(count: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Returns for each part train images, test images, train labels, test labels.

    Images are in [0, 1], NHWC. Each part has about as many of each digit.
    """
    images, labels = load_images()
    images = images[..., None]
    split = StratifiedKFold(count, shuffle=True, random_state=0).split(images, labels)
    return [(images[train], images[test], labels[train], labels[test]) for train, test in split]


def create_state(precision: str, model: nn.Module, optimizer: Any, key: jax.Array) -> Any:
    policy, loss_scale = PRECISIONS[precision]
    if loss_scale is not None:
        optimizer = transforms.mixed_precision(optimizer, policy, loss_scale)
    variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
    with warnings.catch_warnings():
        # What it says of naive float16 is what this example shows.
        warnings.simplefilter("ignore", jmp.UnscaledLossWarning)
        return linen.TrainState.create(
            apply_fn=linen.autocast(model.apply, policy),
            tx=optimizer,
            **linen.cast_params(variables, policy),
        )


def train_step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, dict[str, Any]]:
    """Returns the next state, and what to write down: loss, loss scale, skipped steps so far."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updated["batch_stats"]

    grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale, has_aux=True)
    (loss, batch_stats), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    scaling = transforms.loss_scale_state(state.opt_state)
    return state, {
        "loss": loss,
        "loss_scale": state.loss_scale.loss_scale,
        "skipped_steps": 0 if scaling is None else scaling.skipped_steps,
    }


def accuracy(state: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images, train=False)
    return (logits.argmax(-1) == labels).mean(dtype=jnp.float32)


def run(precision: str, arguments: Any, parts: Any, progress: Progress) -> dict[str, Any]:
    """Trains every seed in one precision; returns everything measured, as plain numbers."""
    steps = min(len(train_images) for train_images, *_ in parts) // arguments.batch_size
    task = progress.add_task(precision, total=len(parts) * arguments.epochs * steps)
    schedule = optax.cosine_decay_schedule(arguments.learning_rate, steps * arguments.epochs)
    model, optimizer = ResNet(arguments.width), optax.adam(schedule)
    jit = functools.partial(jax.jit, compiler_options=ALL_ROUNDINGS)
    create = jit(functools.partial(create_state, precision, model, optimizer))
    step = jit(train_step, donate_argnums=0)
    evaluate = jit(accuracy)

    accuracies, histories, seconds = [], [], []
    for seed, (train_images, test_images, train_labels, test_labels) in enumerate(parts):
        state, history = create(jax.random.key(seed)), []
        shuffle = np.random.default_rng(seed)
        for _ in range(arguments.epochs):
            order = shuffle.permutation(len(train_images))
            started = time.perf_counter()
            for i in range(steps):
                batch = order[i * arguments.batch_size : (i + 1) * arguments.batch_size]
                state, measured = step(state, train_images[batch], train_labels[batch])
                history.append(measured)
                progress.advance(task)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - started)
        accuracies.append(float(evaluate(state, test_images, test_labels)))
        histories.append({name: [float(m[name]) for m in history] for name in history[0]})

    variables = {"params": state.params, "batch_stats": state.batch_stats}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = pathlib.Path(folder) / "checkpoint.msgpack"
        checkpoint.write_bytes(serialization.to_bytes(variables))
        checkpoint_bytes = checkpoint.stat().st_size
    losses = np.array([history["loss"] for history in histories])
    return {
        "policy": PRECISIONS[precision][0],
        "test_accuracy": accuracies,
        "final_loss": losses[:, -steps:].mean(axis=1).tolist(),  # mean of the last epoch
        "seconds_per_epoch": float(np.median(seconds[1:] or seconds)),  # the first one compiles
        "parameter_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)),
        "checkpoint_bytes": checkpoint_bytes,
        "skipped_steps": [history["skipped_steps"][-1] for history in histories],
        "final_scale": [history["loss_scale"][-1] for history in histories],
        "loss_curve": rounded(losses.mean(axis=0)),
        "loss_band": rounded([losses.min(axis=0), losses.max(axis=0)]),
        "epoch_losses": rounded(losses.reshape(len(losses), -1, steps).mean(axis=-1)),
        "scale_curve": histories[0]["loss_scale"],
        "skip_curve": histories[0]["skipped_steps"],
    }


def add_differences(results: dict[str, Any]) -> None:
    """Adds the accuracy's paired difference to float32 over the seeds, and its standard error."""
    reference = np.array(results["float32"]["test_accuracy"])
    for result in results.values():
        difference = np.array(result["test_accuracy"]) - reference
        error = difference.std(ddof=1) / np.sqrt(len(difference))
        result["accuracy_difference"] = float(difference.mean())
        result["accuracy_difference_standard_error"] = float(error)


def print_results(results: dict[str, Any], console: Console) -> None:
    # Narrow enough for a terminal of 80 columns.
    headings = ["precision\n", "accuracy\n%", "against\nfloat32", "loss\n", "s an\nepoch"]
    headings += ["params\nkB", "on disk\nkB", "skips\n", "scale\n"]
    rows = []
    for name, result in results.items():
        scale = np.median(result["final_scale"])
        difference, error = (
            100 * result[f"accuracy_difference{of}"] for of in ("", "_standard_error")
        )
        rows.append([
            name,
            f"{100 * np.mean(result['test_accuracy']):.2f}",
            f"{difference:+.2f} ±{error:.2f}",
            float(np.mean(result["final_loss"])),
            f"{result['seconds_per_epoch']:.2f}",
            f"{result['parameter_bytes'] / 1000:.0f}",
            f"{result['checkpoint_bytes'] / 1000:.0f}",
            f"{np.mean(result['skipped_steps']):.1f}",
            "-" if scale == 1 else f"2^{np.log2(scale):.0f}",
        ])  # fmt: skip
    print_table(console, headings, *rows)
    console.print(
        "Means over the seeds. Against float32: the accuracies' paired difference and\n"
        "its standard error. Loss of the last epoch; scale at the end, median."
    )


def plot(report: dict[str, Any]) -> Any:
    """Draws what `digits.json` holds: losses, their differences to float32, the loss scale."""
    results, seeds = report["precisions"], report["options"]["seeds"]
    figure, (top, middle, bottom, last) = plt.subplots(
        4, 1, figsize=(7, 9), height_ratios=(4, 4, 3, 0.6), sharex=True, layout="constrained"
    )
    reference = np.array(results["float32"]["epoch_losses"])
    steps = len(results["float32"]["loss_curve"]) // reference.shape[1]
    middles = (np.arange(reference.shape[1]) + 0.5) * steps
    looks = zip(COLORS, ("-", "", "-.", "--", ":", "--"), "oXs^Dv", strict=True)
    places = iter(np.linspace(-0.3, 0.3, len(results) - 2))
    for (name, result), (color, style, marker) in zip(results.items(), looks, strict=True):
        curve = np.array(result["loss_curve"], float)  # null is NaN
        if not np.all(np.isfinite(curve)):
            end = int(np.argmin(np.isfinite(curve)))
            label = f"{name}: NaN from step {end} on"
            top.plot(
                curve[:end], marker=marker, markersize=8, color=color, linestyle="", label=label
            )
            continue
        look = {"marker": marker if name != "float32" else "", "markersize": 4, "markevery": []}
        top.plot(curve, color=color, linestyle=style, label=name, linewidth=1.2, **look)
        if name == "float32":
            top.fill_between(np.arange(len(curve)), *result["loss_band"], color="0.75", linewidth=0)
            continue
        ratios = 100 * (np.array(result["epoch_losses"]) / reference - 1)
        band = ratios.std(axis=0, ddof=1) / np.sqrt(seeds)
        middle.errorbar(
            middles + next(places) * steps, ratios.mean(axis=0), band, color=color,
            marker=marker, markersize=3, linestyle="", elinewidth=1, label=name,
        )  # fmt: skip
    mixed = results["mixed float16"]
    for name, style in (("static float16", "-."), ("mixed float16", "-")):
        scale, color = results[name]["scale_curve"], COLORS[list(results).index(name)]
        bottom.plot(scale, color=color, linestyle=style, label=name, drawstyle="steps-post")
    draw_skipped(last, np.flatnonzero(np.diff(mixed["skip_curve"], prepend=0)))
    middle.axhline(0, color=COLORS[0], linewidth=0.8)
    top.set(yscale="log", ylabel=f"training loss, nats\nmean of {seeds} seeds")
    middle.set(ylabel="loss, difference to float32, %\nmeans of epochs, same seeds")
    bottom.set_yscale("log", base=2)
    bottom.set(ylabel="loss scale, seed 0")
    last.set(xlabel="step")
    top.set_title("grey: lowest to highest of the seeds in float32", fontsize=8, loc="right")
    middle.set_title("bars: standard error over the seeds", fontsize=8, loc="right")
    last.set_title("skipped: mixed float16, seed 0", fontsize=8, loc="right")
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=8)
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    return figure


def main() -> None:
    arguments = parse_arguments()
    console = begin(arguments)
    parts = load_parts(arguments.seeds)
    with Progress(console=console) as progress:
        results = {name: run(name, arguments, parts, progress) for name in PRECISIONS}
    add_differences(results)
    print_results(results, console)
    finish(console, arguments, "digits", plot, precisions=results)


if __name__ == "__main__":
    main()
