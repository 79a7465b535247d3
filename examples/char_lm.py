"""A character-level LSTM whose gradients underflow in float16: what loss scaling is for.

    python examples/char_lm.py            # three to five minutes on two CPU cores
    python examples/char_lm.py --help

The text is real: the source of Python's own standard library, as found on this machine. The loss is
the mean over all characters of a batch, times a small weight, as of one task among several. Adam
divides a gradient by its own size, so the weight matters little in float32; in float16 the
gradients it makes small are flushed to zero on their way back through the network. Scaling the loss
brings them back. The weight is an option, and the share of gradients that underflow is measured and
printed. Each run is repeated with other seeds; the figure shows the mean and the range.

Writes `char_lm.json` and `char_lm.svg` into the output folder.
"""

import argparse
import pathlib
import sysconfig
import time
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from _common import COLORS, OUTPUT, OptionsHelp, begin, positive, rounded, save_figure, write_report
from rich.progress import Progress
from rich.table import Table

import jmp
from jmp import transforms
from jmp.adapters import linen

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Name, policy, loss scale. The dynamic one starts at torch's 2**16.
RUNS = (
    ("float32", "float32", jmp.NoOpLossScale()),
    ("float16 without loss scaling", "mixed_float16", jmp.NoOpLossScale()),
    ("float16 with loss scaling", "mixed_float16", jmp.torch_loss_scale()),
)
LAST = 20  # steps, whose mean loss is the final one


class CharLM(nn.Module):
    """Embedding, one LSTM, projection to the next character."""

    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width)(text)
        x = nn.RNN(nn.OptimizedLSTMCell(self.width))(x)
        return nn.Dense(self.vocabulary)(x)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=OptionsHelp)
    parser.add_argument("--steps", type=positive(int), default=300)
    parser.add_argument("--batch-size", type=positive(int), default=32)
    parser.add_argument("--seeds", type=positive(int), default=3)
    parser.add_argument("--length", type=positive(int), default=64, help="characters a sequence")
    parser.add_argument("--width", type=positive(int), default=128)
    parser.add_argument("--learning-rate", type=positive(float), default=5e-3)
    parser.add_argument("--loss-weight", type=positive(float), default=1e-3)
    parser.add_argument("--output-dir", type=pathlib.Path, default=OUTPUT)
    return parser.parse_args()


def load_text(characters: int = 1_000_000) -> tuple[np.ndarray, int]:
    """Returns the first characters of the standard library's source as numbers, and how many kinds.

    Only printable ASCII and the newline are kept.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= characters:
            break
    if not text:
        raise SystemExit(f"{folder} holds no *.py files; expected Python's standard library there.")
    codes = np.frombuffer(text[:characters].encode("ascii", "ignore"), np.uint8)
    codes = codes[(codes == 10) | ((codes >= 32) & (codes < 127))]
    kinds, numbers = np.unique(codes, return_inverse=True)
    return numbers.astype(np.int32), len(kinds)


def batches(text: np.ndarray, arguments: argparse.Namespace, seed: int = 0) -> np.ndarray:
    """Returns int32[steps, batch, length + 1]: random windows of the text, alike for all runs."""
    starts = np.random.default_rng(seed).integers(
        0, len(text) - arguments.length - 1, (arguments.steps, arguments.batch_size)
    )
    return text[starts[..., None] + np.arange(arguments.length + 1)]


def loss_fn(params: Any, apply_fn: Any, batch: jax.Array, weight: float) -> jax.Array:
    logits = apply_fn({"params": params}, batch[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return weight * losses.mean()


def first_params(model: CharLM, data: np.ndarray, seed: int = 0) -> Any:
    return model.init(jax.random.key(seed), jnp.asarray(data[0, :, :-1]))["params"]


def train(
    name: str, policy: str, loss_scale: jmp.LossScale, setup: Any, progress: Progress
) -> dict[str, Any]:
    """Trains every seed: other initial parameters and other windows, the same for all runs."""
    model, text, arguments = setup
    apply_fn = linen.wrap_apply(model.apply, policy)
    tx = transforms.with_loss_scale(optax.adam(arguments.learning_rate), loss_scale)

    @jax.jit
    def train_step(state: linen.TrainState, batch: jax.Array) -> tuple[linen.TrainState, jax.Array]:
        grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)
        loss, grads = grad_fn(state.params, state.apply_fn, batch, arguments.loss_weight)
        return state.apply_gradients(grads=grads), loss / arguments.loss_weight

    losses: list[list[float]] = []
    skipped, scales = [], []
    task = progress.add_task(name, total=arguments.steps * arguments.seeds)
    started = time.perf_counter()
    for seed in range(arguments.seeds):
        data = batches(text, arguments, seed)
        params = first_params(model, data, seed)
        with warnings.catch_warnings():
            # What it says of float16 without loss scaling is what this example shows.
            warnings.simplefilter("ignore", jmp.UnscaledLossWarning)
            state = linen.TrainState.create(apply_fn=apply_fn, params=params, tx=tx)
        losses.append([])
        for batch in data:
            state, loss = train_step(state, batch)
            losses[-1].append(float(loss))
            progress.advance(task)
        skipped.append(int(transforms.loss_scale_state(state.opt_state).skipped_steps))
        scales.append(float(state.loss_scale.loss_scale))
    finals = [float(np.mean(curve[-LAST:])) for curve in losses]
    return {
        "losses": rounded(losses),
        "final_losses": finals,
        "final_loss": float(np.mean(finals)),
        "seconds": (time.perf_counter() - started) / arguments.seeds,
        "skipped_steps": skipped,
        "final_scale": float(np.median(scales)),
    }


def underflow(setup: Any) -> dict[str, float]:
    """Measures, at the first step, what becomes of the parameters' gradients in float16.

    Returns the share of entries, of those that are not zero in float32, that: are below float16's
    smallest normal number and its smallest number at all, by their float32 values; come out as zero
    in float16 without loss scaling, and with a scale of 2**16.
    """
    model, params, data, arguments = setup

    def gradients(policy: str, loss_scale: jmp.LossScale) -> np.ndarray:
        apply_fn = linen.wrap_apply(model.apply, policy)
        grad_fn = jax.jit(jmp.scaled_value_and_grad(loss_fn, loss_scale), static_argnums=1)
        _, grads = grad_fn(params, apply_fn, data[0], arguments.loss_weight)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)])

    exact = np.abs(gradients("float32", jmp.NoOpLossScale()))
    there = exact > 0
    unscaled = gradients("mixed_float16", jmp.NoOpLossScale())
    scaled = gradients("mixed_float16", jmp.StaticLossScale(2.0**16))
    return {
        "below the smallest normal float16, 2^-14": float(np.mean(exact[there] < 2.0**-14)),
        "below the smallest float16, 2^-24": float(np.mean(exact[there] < 2.0**-24)),
        "zero in float16 without loss scaling": float(np.mean(unscaled[there] == 0)),
        "zero in float16 with a scale of 2^16": float(np.mean(scaled[there] == 0)),
    }


def plot(report: dict[str, Any]) -> Any:
    """Draws what `char_lm.json` holds: losses over the seeds, and their difference to float32."""
    runs, seeds = report["runs"], report["options"]["seeds"]
    losses = {name: np.array(run["losses"], float) for name, run in runs.items()}
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 6), height_ratios=(5, 3), sharex=True, layout="constrained"
    )
    looks = dict(zip(losses, (("-", 3.0, COLORS[2]), ("--", 1.4, COLORS[1]), ("-", 1.2, COLORS[0])),
                     strict=True))  # fmt: skip
    for name, curves in losses.items():
        style, width, color = looks[name]
        label = f"{name}: {runs[name]['final_loss']:.3f} at the end"
        band(top, curves, style=style, linewidth=width, color=color, label=label)
    reference, scaled = losses["float32"], losses["float16 with loss scaling"]
    band(bottom, scaled - reference, linewidth=1.2, color=COLORS[0])
    lost = 100 * report["underflow"]["zero in float16 without loss scaling"]
    top.set(ylabel="loss, nats a character")
    bottom.axhline(0, color=COLORS[2], linewidth=0.8)
    bottom.set(xlabel="step", ylabel="float16 with loss scaling\n- float32, nats")
    for axes in (top, bottom):
        last = (reference.shape[1] - LAST, reference.shape[1])
        axes.axvspan(*last, color="0.92", linewidth=0, zorder=0)
        axes.grid(alpha=0.3)
    words = f"lines: mean of {seeds} seeds, bands: lowest to highest; at the end: mean of the last "
    words += f"{LAST} steps (grey)\nAt the first step {lost:.0f} % of the gradients are zero in "
    words += "float16 without loss scaling."
    top.set_title(words, fontsize=8, loc="left")
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper left", fontsize=8)
    return figure


def band(axes: Any, curves: np.ndarray, color: str, style: str = "-", **look: Any) -> None:
    """Draws the mean of curves [seeds, steps], and between the lowest and the highest."""
    steps = np.arange(curves.shape[1])
    limits = (curves.min(axis=0), curves.max(axis=0))
    axes.fill_between(steps, *limits, color=color, alpha=0.25, linewidth=0)
    axes.plot(steps, curves.mean(axis=0), style, color=color, **look)


def main() -> None:
    arguments = parse_arguments()
    console = begin(arguments)
    text, vocabulary = load_text()
    model = CharLM(vocabulary, arguments.width)

    data = batches(text, arguments)
    shares = underflow((model, first_params(model, data), data, arguments))
    console.print(f"Gradients of the first step (loss weight {arguments.loss_weight:g}):")
    for name, share in shares.items():
        console.print(f"  {100 * share:5.1f} %  {name}")
    with Progress(console=console) as progress:
        results = {run[0]: train(*run, (model, text, arguments), progress) for run in RUNS}

    table = Table(title="A character-level language model of Python's standard library")
    table.add_column("run")
    for heading in ("final loss", "lowest", "highest", "seconds a seed", "skipped steps", "scale"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result['final_loss']:.3f}",
            f"{min(result['final_losses']):.3f}",
            f"{max(result['final_losses']):.3f}",
            f"{result['seconds']:.0f}",
            f"{np.mean(result['skipped_steps']):.1f}",
            f"2^{np.log2(result['final_scale']):.0f}" if result["final_scale"] != 1 else "-",
        )
    console.print(table)
    console.print(f"Final loss: the mean of the last {LAST} steps, over {arguments.seeds} seeds.")
    path = arguments.output_dir / "char_lm.json"
    report = write_report(path, arguments, underflow=shares, runs=results)
    save_figure(plot(report), path.with_suffix(".svg"))
    console.print(f"Wrote {path} and char_lm.svg beside it.")


if __name__ == "__main__":
    main()
