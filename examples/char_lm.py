"""A character-level LSTM whose gradients underflow in float16: what loss scaling is for.

    python examples/char_lm.py            # a minute or two on two CPU cores
    python examples/char_lm.py --help

The text is real: the source of Python's own standard library, as found on this machine. The loss is
the mean over all characters of a batch, times a small weight, as of one task among several. Adam
divides a gradient by its own size, so the weight matters little in float32; in float16 the
gradients it makes small are flushed to zero on their way back through the network. Scaling the loss
brings them back. The weight is an option, and the share of gradients that underflow is measured and
printed.

Writes `char_lm.json` and `char_lm.png` into the output folder.
"""

import argparse
import pathlib
import sysconfig
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from _common import COLORS, begin, positive, save_figure, write_report
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=positive(int), default=300)
    parser.add_argument("--batch-size", type=positive(int), default=32)
    parser.add_argument("--length", type=positive(int), default=64, help="characters a sequence")
    parser.add_argument("--width", type=positive(int), default=128)
    parser.add_argument("--learning-rate", type=positive(float), default=5e-3)
    parser.add_argument("--loss-weight", type=positive(float), default=1e-3)
    parser.add_argument("--output-dir", type=pathlib.Path, default=pathlib.Path("results"))
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


def batches(text: np.ndarray, arguments: argparse.Namespace) -> np.ndarray:
    """Returns int32[steps, batch, length + 1]: random windows of the text, alike for all runs."""
    starts = np.random.default_rng(0).integers(
        0, len(text) - arguments.length - 1, (arguments.steps, arguments.batch_size)
    )
    return text[starts[..., None] + np.arange(arguments.length + 1)]


def loss_fn(params: Any, apply_fn: Any, batch: jax.Array, weight: float) -> jax.Array:
    logits = apply_fn({"params": params}, batch[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return weight * losses.mean()


def train(
    name: str, policy: str, loss_scale: jmp.LossScale, setup: Any, progress: Progress
) -> dict[str, Any]:
    model, params, data, arguments = setup
    state = linen.TrainState.create(
        apply_fn=linen.wrap_apply(model.apply, policy),
        params=params,
        tx=transforms.with_loss_scale(optax.adam(arguments.learning_rate), loss_scale),
    )

    @jax.jit
    def train_step(state: linen.TrainState, batch: jax.Array) -> tuple[linen.TrainState, jax.Array]:
        grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)
        loss, grads = grad_fn(state.params, state.apply_fn, batch, arguments.loss_weight)
        return state.apply_gradients(grads=grads), loss / arguments.loss_weight

    losses = []
    task = progress.add_task(name, total=len(data))
    started = time.perf_counter()
    for batch in data:
        state, loss = train_step(state, batch)
        losses.append(float(loss))
        progress.advance(task)
    return {
        "losses": losses,
        "final_loss": float(np.mean(losses[-20:])),
        "seconds": time.perf_counter() - started,
        "skipped_steps": int(transforms.loss_scale_state(state.opt_state).skipped_steps),
        "final_scale": float(state.loss_scale.loss_scale),
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


def plot(results: dict[str, Any], lost: float, path: pathlib.Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    styles = (("-", 3.0, COLORS[2]), ("--", 1.4, COLORS[1]), ("-", 1.2, COLORS[0]))
    for (name, result), (style, width, color) in zip(results.items(), styles, strict=True):
        axes.plot(result["losses"], style, linewidth=width, color=color, label=name)
    axes.set(xlabel="step", ylabel="loss, nats a character")
    axes.set_title(f"{100 * lost:.0f} % of the gradients are zero without scaling", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def main() -> None:
    arguments = parse_arguments()
    console = begin(arguments)
    text, vocabulary = load_text()
    data = batches(text, arguments)
    model = CharLM(vocabulary, arguments.width)
    params = model.init(jax.random.key(0), jnp.asarray(data[0, :, :-1]))["params"]
    setup = (model, params, data, arguments)

    shares = underflow(setup)
    console.print(f"Gradients of the first step (loss weight {arguments.loss_weight:g}):")
    for name, share in shares.items():
        console.print(f"  {100 * share:5.1f} %  {name}")
    with Progress(console=console) as progress:
        results = {run[0]: train(*run, setup, progress) for run in RUNS}

    table = Table(title="A character-level language model of Python's standard library")
    table.add_column("run")
    for heading in ("final loss", "seconds", "skipped steps", "final scale"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result['final_loss']:.3f}",
            f"{result['seconds']:.0f}",
            str(result["skipped_steps"]),
            f"2^{np.log2(result['final_scale']):.0f}" if result["final_scale"] != 1 else "-",
        )
    console.print(table)
    lost = shares["zero in float16 without loss scaling"]
    plot(results, lost, arguments.output_dir / "char_lm.png")
    write_report(arguments.output_dir / "char_lm.json", arguments, underflow=shares, runs=results)
    console.print(f"Wrote {arguments.output_dir / 'char_lm.json'} and char_lm.png beside it.")


if __name__ == "__main__":
    main()
