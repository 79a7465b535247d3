"""Logs loss and loss scale of a small network to a CSV file, one line a step, and draws them.

    python examples/log_metrics.py        # some seconds on two CPU cores
    python examples/log_metrics.py --help

A dynamic loss scale that starts far too high, at 2^32, so that the first steps are skipped until it
has come down; with a period far shorter than usual it then grows until a step overflows, backs off
and grows again. `jmp.diagnostics.metrics` is called inside the jitted step; `check_skips` ends the
run if skipping does not end. The data is scikit-learn's set of 1797 handwritten digits.

Writes `log_metrics.csv`, `log_metrics.json` and `log_metrics.svg` into the output folder.
"""

import csv
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import (
    begin,
    finish,
    load_images,
    parse_options,
    plot_run,
    print_table,
    rounded,
    written_whole,
)

import jmp
from jmp import diagnostics, transforms

FIELDS = (
    "step", "loss", "loss_scale", "grads_finite", "skipped_steps", "consecutive_skips", "skip_rate",
)  # fmt: skip


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(images @ params["in"])
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], labels)
    return losses.mean()


def train(arguments: Any, path: pathlib.Path) -> list[dict[str, float]]:
    """Trains and writes a line for each step; returns the lines."""
    images, labels = load_images()
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
            chosen = generator.choice(len(images), arguments.batch_size)
            batch = images[chosen].reshape(-1, 64), labels[chosen]
            params, opt_state, logged = train_step(params, opt_state, np.int32(step), *batch)
            lines.append({name: value.item() for name, value in jax.device_get(logged).items()})
            writer.writerow(lines[-1])
            diagnostics.check_skips(opt_state, limit=max(1, enough))
    return lines


def plot(report: dict[str, Any]) -> Any:
    """Draws the history that `log_metrics.json` holds."""
    return plot_run(report["history"])[0]


def main() -> None:
    arguments = parse_options(
        __doc__,
        steps=200,
        batch_size=256,
        learning_rate=1e-2,
        loss_scale=(2.0**32, "at the start"),
        period=(20, "steps between growths"),
    )
    console = begin(arguments)
    lines = train(arguments, arguments.output_dir / "log_metrics.csv")

    shown = lines[:: max(1, len(lines) // 8)]
    rows = [[f"{line[name]:.5g}" for name in FIELDS] for line in shown]
    print_table(console, [name.replace("_", "\n") for name in FIELDS], *rows)
    final_loss = float(np.mean([line["loss"] for line in lines[-20:]]))
    console.print(f"Mixed float16: loss {final_loss:.4f}, mean of the last 20 steps.")
    names = ("loss", "loss_scale", "grads_finite")
    history = {name: rounded([line[name] for line in lines]) for name in names}
    results = {"final_loss": final_loss, "last_line": lines[-1], "history": history}
    finish(console, arguments, "log_metrics", plot, **results)


if __name__ == "__main__":
    main()
