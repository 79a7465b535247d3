"""Logs loss and loss scale of a small network to a CSV file, one line a step, and draws them.

    python examples/log_metrics.py        # some seconds on two CPU cores
    python examples/log_metrics.py --help

A dynamic loss scale that starts far too high, at 2^32, so that the first steps are skipped until it
has come down; with a period far shorter than usual it then grows until a step overflows, backs off
and grows again. `jmp.diagnostics.metrics` is called inside the jitted step; `check_skips` ends the
run if skipping does not end. The data is scikit-learn's set of 1797 handwritten digits.

Writes `log_metrics.csv`, `log_metrics.json` and `log_metrics.svg` into the output folder.
"""

import argparse
import csv
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from _common import (
    COLORS,
    OUTPUT,
    OptionsHelp,
    begin,
    draw_skipped,
    positive,
    rounded,
    save_figure,
    write_report,
    written_whole,
)
from rich import box
from rich.table import Table
from sklearn.datasets import load_digits

import jmp
from jmp import diagnostics, transforms

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIELDS = (
    "step", "loss", "loss_scale", "grads_finite", "skipped_steps", "consecutive_skips", "skip_rate",
)  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=OptionsHelp)
    parser.add_argument("--steps", type=positive(int), default=200)
    parser.add_argument("--batch-size", type=positive(int), default=256)
    parser.add_argument("--learning-rate", type=positive(float), default=1e-2)
    parser.add_argument("--loss-scale", type=positive(float), default=2.0**32, help="at the start")
    parser.add_argument("--period", type=positive(int), default=20, help="steps between growths")
    parser.add_argument("--output-dir", type=pathlib.Path, default=OUTPUT)
    return parser.parse_args()


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(images @ params["in"])
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], labels)
    return losses.mean()


def train(arguments: argparse.Namespace, path: pathlib.Path) -> list[dict[str, float]]:
    """Trains and writes a line for each step; returns the lines."""
    pixels, digits = load_digits(return_X_y=True)
    generator = np.random.default_rng(0)
    params = {
        "in": jnp.asarray(generator.normal(0, 64**-0.5, (64, 128)), jnp.float32),
        "out": jnp.asarray(generator.normal(0, 128**-0.5, (128, 16)), jnp.float32),
    }
    scale = jmp.DynamicLossScale(arguments.loss_scale, period=arguments.period)
    tx = transforms.with_loss_scale(optax.adam(arguments.learning_rate), scale)
    opt_state = tx.init(params)
    half_loss = jmp.autocast(loss_fn, "mixed_float16")

    @jax.jit
    def train_step(params: Any, opt_state: Any, step: Any, *batch: jax.Array) -> Any:
        grad_fn = jmp.scaled_value_and_grad(half_loss, opt_state.loss_scale)
        loss, grads = grad_fn(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        logged = {"step": step, "loss": loss, **diagnostics.metrics(opt_state, steps=step)}
        return optax.apply_updates(params, updates), opt_state, logged

    lines = []
    enough = int(np.log2(arguments.loss_scale)) + 20  # halvings down to 1, and some
    with written_whole(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for step in range(1, arguments.steps + 1):
            chosen = generator.choice(len(pixels), arguments.batch_size)
            batch = (np.float32(pixels[chosen] / 16), digits[chosen].astype(np.int32))
            params, opt_state, logged = train_step(params, opt_state, np.int32(step), *batch)
            lines.append({name: value.item() for name, value in jax.device_get(logged).items()})
            writer.writerow(lines[-1])
            diagnostics.check_skips(opt_state, limit=max(1, enough))
    return lines


def plot(report: dict[str, Any]) -> Any:
    """Draws the history that `log_metrics.json` holds."""
    history = report["history"]
    figure, (top, bottom, last) = plt.subplots(
        3, 1, figsize=(7, 5.4), height_ratios=(5, 4, 0.6), sharex=True, layout="constrained"
    )
    steps = np.array(history["step"])
    top.plot(steps, history["loss"], color=COLORS[3], linewidth=1.2)
    bottom.plot(steps, history["loss_scale"], color=COLORS[0], drawstyle="steps-post")
    draw_skipped(last, steps[~np.array(history["grads_finite"], bool)])
    top.set(ylabel="training loss, nats", yscale="log")
    bottom.set_yscale("log", base=2)
    bottom.set(ylabel="loss scale after the step")
    last.set(xlabel="step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    return figure


def main() -> None:
    arguments = parse_arguments()
    console = begin(arguments)
    path = arguments.output_dir / "log_metrics.csv"
    lines = train(arguments, path)

    table = Table(title="Mixed float16, some of the lines", box=box.SIMPLE, padding=0)
    for name in FIELDS:
        table.add_column(name.replace("_", "\n"), justify="right")
    for line in lines[:: max(1, len(lines) // 8)]:
        table.add_row(*(f"{line[name]:.5g}" for name in FIELDS))
    console.print(table)
    final_loss = float(np.mean([line["loss"] for line in lines[-20:]]))
    report = write_report(
        path.with_suffix(".json"),
        arguments,
        final_loss=final_loss,
        last_line=lines[-1],
        history={
            name: rounded([line[name] for line in lines])
            for name in ("step", "loss", "loss_scale", "grads_finite")
        },
    )
    save_figure(plot(report), path.with_suffix(".svg"))
    console.print(f"Wrote {path.name}, log_metrics.json and log_metrics.svg into {path.parent}.")


if __name__ == "__main__":
    main()
