"""Trains a ResNet-50 on CIFAR-10 in float32 and in half, and compares time, size and accuracy.

    python examples/cifar10.py --data-dir cifar-10-batches-py     # meant for a GPU
    python examples/cifar10.py --help

The model is an ordinary Flax model with BatchNorm that knows nothing of precision. Every precision
sees the same initial weights, batches and crops. float32 is what JAX makes of it: on NVIDIA GPUs
since Ampere its products run in TensorFloat-32 unless JAX_DEFAULT_MATMUL_PRECISION=float32 is set.

Writes `cifar10.json` and `cifar10.svg` into the output folder. Into the checkpoint folder go a
checkpoint after every epoch, with all that --resume needs, and at the end the model alone.
"""

import argparse
import functools
import pathlib
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _checkpoints import Checkpoints, check_checkpoints
from _cifar10_files import FOLDER, load_data
from _common import (
    COLORS,
    OUTPUT,
    OptionsHelp,
    begin,
    finish,
    positive,
    print_table,
    written_whole,
)
from flax import serialization
from rich.console import Console
from rich.progress import Progress

import jmp
from jmp import transforms
from jmp.adapters import linen

# How to train, and how to store what is exported. BatchNorm is float32 in both.
PRECISIONS = {
    "float32": ("float32", "float32"),
    "float16": ("mixed_float16", "p=f16,c=f16,o=f32"),
    "bfloat16": ("mixed_bfloat16", "p=bf16,c=bf16,o=f32"),
}
# The blocks of each stage, and whether they are bottlenecks.
MODELS = {"resnet18": ((2, 2, 2, 2), False), "resnet50": ((3, 4, 6, 3), True)}

# Options that may differ when a training is resumed: they change nothing that is learned.
FREE = {"data_dir", "output_dir", "checkpoint_dir", "resume", "stop_after"}


class Block(nn.Module):
    """Two 3 x 3 convolutions, or a 3 x 3 one between two 1 x 1, around a shortcut."""

    features: int
    stride: int
    bottleneck: bool

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, kernel_init=nn.initializers.he_normal())
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        features, strides = self.features, (self.stride, self.stride)
        if self.bottleneck:
            y = nn.relu(norm()(conv(features, (1, 1))(x)))
            y = nn.relu(norm()(conv(features, (3, 3), strides)(y)))
            y = conv(4 * features, (1, 1))(y)
        else:
            y = nn.relu(norm()(conv(features, (3, 3), strides)(x)))
            y = conv(features, (3, 3))(y)
        y = norm(scale_init=nn.initializers.zeros)(y)  # every block starts as its shortcut
        if x.shape != y.shape:
            x = norm()(conv(y.shape[-1], (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A ResNet for 32 x 32 images: its stem is one 3 x 3 convolution, without pooling."""

    stages: tuple[int, ...]
    bottleneck: bool
    width: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Block(self.width * 2**stage, stride, self.bottleneck)(x, train)
        return nn.Dense(self.classes)(x.mean(axis=(1, 2)))


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=OptionsHelp)
    add = parser.add_argument
    add("--data-dir", type=pathlib.Path, help=f"{FOLDER}, or the folder that it lies in")
    add("--model", choices=MODELS, default="resnet50")
    add("--width", type=positive(int), default=64, help="channels at the start")
    add("--precision", nargs="+", choices=PRECISIONS, default=["float32", "float16"])
    add("--batch-size", nargs="+", type=positive(int), default=[128, 512])
    add("--epochs", type=positive(int), default=30)
    add("--learning-rate", type=positive(float), default=0.1, help="peak, times batch / 128")
    add("--weight-decay", type=positive(float), default=5e-4, help="of kernels alone")
    add("--seed", type=int, default=0)
    add("--output-dir", type=pathlib.Path, default=OUTPUT)
    add("--checkpoint-dir", type=pathlib.Path, help="default: OUTPUT_DIR/checkpoints/cifar10")
    add("--resume", action="store_true", help="go on with the trainings in the checkpoint folder")
    add("--stop-after", type=positive(int), help="end after this epoch, to be resumed")
    return parser


def augment(key: jax.Array, images: jax.Array) -> jax.Array:
    """Moves images by up to 4 pixels, black moving in, and mirrors half of them."""
    crop_key, flip_key = jax.random.split(key)
    padded = jnp.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    corners = jax.random.randint(crop_key, (len(images), 2), 0, 9)
    crop = lambda image, corner: jax.lax.dynamic_slice(image, (*corner, 0), images.shape[1:])
    images = jax.vmap(crop)(padded, corners)
    flips = jax.random.bernoulli(flip_key, 0.5, (len(images), 1, 1, 1))
    return jnp.where(flips, images[:, :, ::-1], images)


def normalize(data: Any, images: jax.Array) -> jax.Array:
    return (images.astype(jnp.float32) - data["mean"]) / data["std"]


def train_step(state: Any, data: Any, number: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    """Returns the next state and the loss of the images at int32[n] `batch`."""
    # Crops follow from seed and step alone, so that a resumed training comes to the very same ones.
    images = augment(jax.random.fold_in(data["key"], number), data["train_images"][batch])
    images, labels = normalize(data, images), data["train_labels"][batch]

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updated["batch_stats"]

    grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale, has_aux=True)
    (loss, batch_stats), grads = grad_fn(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


def count_correct(apply_fn: Any, variables: Any, data: Any, batch: jax.Array) -> jax.Array:
    """Returns how many test images at int32[n] `batch` are recognised; -1 stands for no image."""
    logits = apply_fn(variables, normalize(data, data["test_images"][batch]), train=False)
    return jnp.sum((logits.argmax(-1) == data["test_labels"][batch]) & (batch >= 0))


def make_optimizer(arguments: argparse.Namespace, batch_size: int, steps: int) -> Any:
    peak = arguments.learning_rate * batch_size / 128  # k times the batch, k times the rate
    schedule = optax.cosine_onecycle_schedule(steps * arguments.epochs, peak)
    is_kernel = lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    return optax.chain(
        optax.add_decayed_weights(arguments.weight_decay, mask=is_kernel),
        optax.sgd(schedule, momentum=0.9, nesterov=True),
    )


class Setup(NamedTuple):
    """What all trainings share."""

    model: ResNet
    variables: Any
    data: Any
    arguments: argparse.Namespace
    record: dict[str, Any]


def run(precision: str, batch_size: int, setup: Setup, progress: Progress) -> dict[str, Any] | None:
    """Trains once, or goes on with it; returns everything measured, None if it is to be resumed."""
    model, variables, data, arguments, record = setup
    policy, export_policy = PRECISIONS[precision]
    name = f"{precision}-batch{batch_size}"
    train_count, test_count = len(data["train_labels"]), len(data["test_labels"])
    steps = train_count // batch_size  # the rest of an epoch's images is left out
    state = linen.TrainState.create(
        apply_fn=linen.autocast(model.apply, policy),
        tx=transforms.mixed_precision(make_optimizer(arguments, batch_size, steps), policy),
        # Copies, as every step donates its state and other trainings start from the same weights.
        **jax.tree.map(jnp.copy, variables),
    )
    variables_of = lambda state: {"params": state.params, "batch_stats": state.batch_stats}
    step = jax.jit(train_step, donate_argnums=0)
    count = jax.jit(functools.partial(count_correct, state.apply_fn))

    def in_batches(numbers: np.ndarray) -> np.ndarray:
        return numbers.astype(np.int32).reshape(-1, batch_size)

    def test_accuracy(variables: Any) -> float:
        numbers = np.pad(np.arange(test_count), (0, -test_count % batch_size), constant_values=-1)
        counts = [count(variables, data, batch) for batch in in_batches(numbers)]
        return sum(map(int, counts)) / test_count

    folder = (arguments.checkpoint_dir / name).absolute()
    checkpoints = Checkpoints(folder / "training", arguments.checkpoint_dir, record)
    state, history = checkpoints.restore(
        state, {"loss": [], "test_accuracy": [], "seconds": [], "compiled_in": []}
    )

    first = len(history["loss"])
    task = progress.add_task(name, total=steps * arguments.epochs, completed=steps * first)
    for epoch in range(first, arguments.stop_after):
        # Of seed and epoch alone, so that a resumed training sees the same order.
        order = np.random.default_rng((arguments.seed, epoch)).permutation(train_count)
        losses, started = [], time.perf_counter()
        for i, batch in enumerate(in_batches(order[: steps * batch_size])):
            state, loss = step(state, data, np.int32(epoch * steps + i), batch)
            losses.append(loss)
            progress.advance(task)
        jax.block_until_ready(state)
        history["seconds"].append(time.perf_counter() - started)
        history["compiled_in"] += [epoch] * (epoch == first)
        history["loss"].append(float(np.mean(jax.device_get(losses))))
        history["test_accuracy"].append(test_accuracy(variables_of(state)))
        progress.update(task, description=f"{name} {100 * history['test_accuracy'][-1]:.1f} %")
        checkpoints.save(epoch + 1, state, history)
    checkpoints.close()
    if len(history["loss"]) < arguments.epochs:
        return None

    # What one hands on: the model alone, in the dtypes it is used in, and tested as it was stored.
    exported = linen.cast_params(variables_of(state), export_policy)
    model_file = folder / "model.msgpack"
    with written_whole(model_file) as file:
        file.write_bytes(serialization.to_bytes(jax.device_get(exported)))
    stored = serialization.from_bytes(exported, model_file.read_bytes())
    checkpoint = [path for path in (folder / "training").rglob("*") if path.is_file()]
    warm = np.delete(history["seconds"], history["compiled_in"])
    return {
        "precision": precision,
        "batch_size": batch_size,
        "seconds_per_epoch": float(np.median(warm if len(warm) else history["seconds"])),
        "parameter_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)),
        "model_bytes": model_file.stat().st_size,
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint),
        "test_accuracy": test_accuracy(stored),
        "skipped_steps": int(transforms.loss_scale_state(state.opt_state).skipped_steps),
        "final_scale": float(state.loss_scale.loss_scale),
        "epochs": history,
    }


def print_results(runs: list[dict[str, Any]], console: Console) -> None:
    # Narrow enough for a terminal of 80 columns.
    headings = ["precision\n", "batch\n", "s an\nepoch", "params\nMB", "model on\ndisk, MB"]
    headings += ["checkpoint\non disk, MB", "accuracy\n%", "skipped\nsteps"]
    rows = []
    for result in runs:
        sizes = (result[f"{what}_bytes"] / 1e6 for what in ("parameter", "model", "checkpoint"))
        cells = f"{result['seconds_per_epoch']:.2f}", *(f"{size:.3g}" for size in sizes)
        accuracy = f"{100 * result['test_accuracy']:.2f}"
        start = result["precision"], result["batch_size"]
        rows.append([*start, *cells, accuracy, result["skipped_steps"]])
    print_table(console, headings, *rows)
    console.print(
        "Time: training alone, median of the epochs that did not compile, if there are\n"
        "any. Params: as trained, float32 throughout. Model: as exported, read back and\n"
        "tested; in half its BatchNorms stay float32. Checkpoint: whatever training needs\n"
        "to go on, float32 with momentum, compressed by Orbax."
    )


def plot(report: dict[str, Any]) -> Any:
    """Draws losses and test accuracies by epoch: a colour a precision, a style a batch size."""
    # Wide below narrow, as the curves may well lie on each other.
    looks = {"float32": (COLORS[0], 3.0), "float16": (COLORS[1], 1.8), "bfloat16": (COLORS[2], 0.9)}
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 6), sharex=True, layout="constrained")
    runs = report["runs"]
    batch_sizes = sorted({result["batch_size"] for result in runs})
    for result in runs:
        history, batch_size = result["epochs"], result["batch_size"]
        epochs = range(1, len(history["loss"]) + 1)
        style = ("-", "--", "-.", ":")[batch_sizes.index(batch_size) % 4]
        color, width = looks[result["precision"]]
        look = {"color": color, "linewidth": width, "linestyle": style, "marker": "."}
        look["label"] = f"{result['precision']}, batch {batch_size}"
        top.plot(epochs, history["loss"], **look)
        bottom.plot(epochs, 100 * np.array(history["test_accuracy"]), **look)
    top.set(yscale="log", ylabel="training loss, nats, mean of the epoch")
    bottom.set(xlabel="epoch", ylabel="test accuracy, %")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    handles = bottom.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, fontsize=8, handlelength=4)
    top.grid(alpha=0.3)
    bottom.grid(alpha=0.3)
    return figure


def main() -> None:
    parser = argument_parser()
    arguments = parser.parse_args()
    if arguments.checkpoint_dir is None:
        arguments.checkpoint_dir = arguments.output_dir / "checkpoints" / "cifar10"
    arguments.stop_after = min(arguments.epochs, arguments.stop_after or arguments.epochs)
    try:
        data, classes = load_data(arguments.data_dir)
        if max(arguments.batch_size) > (count := len(data["train_labels"])):
            raise ValueError(f"--batch-size: expected at most {count}, the images to train on.")
        options = {name: value for name, value in vars(arguments).items() if name not in FREE}
        record = options | {"train_images": len(data["train_labels"])}
        check_checkpoints(arguments.checkpoint_dir, record, arguments.resume)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")

    console = begin(arguments, "checkpoint_dir")
    # All images are on the device, as bytes.
    data = jax.device_put(data | {"key": jax.random.key(arguments.seed)})
    model = ResNet(*MODELS[arguments.model], arguments.width, classes)
    # rbg, because the default generator takes the CPU's compiler minutes for so many kernels.
    init = jax.jit(functools.partial(model.init, train=False))
    variables = init(jax.random.key(arguments.seed, impl="rbg"), jnp.zeros((1, 32, 32, 3)))
    setup = Setup(model, variables, data, arguments, record)
    with Progress(console=console) as progress:
        runs = [
            run(precision, batch_size, setup, progress)
            for batch_size in arguments.batch_size
            for precision in arguments.precision
        ]
    if None in runs:
        stopped = f"Stopped after epoch {arguments.stop_after} of {arguments.epochs}"
        console.print(f"{stopped}; the same options with --resume go on from there.")
        return

    print_results(runs, console)
    finish(
        console,
        argparse.Namespace(**options, output_dir=arguments.output_dir),
        "cifar10",
        plot,
        train_images=len(data["train_labels"]),
        test_images=len(data["test_labels"]),
        matmul_precision=jax.config.jax_default_matmul_precision or "default",
        runs=runs,
    )


if __name__ == "__main__":
    main()
