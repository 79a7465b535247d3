"""A character-level LSTM in float32, float16 and bfloat16: is its accuracy the same?

    python examples/char_lm.py --seeds 3  # about four minutes on two CPU cores
    python examples/char_lm.py --help

The text is the source of Python's own standard library, as found on this machine. The end of the
text is held out: no training sees it. Each seed has its own initial parameters and its own
batches, the same in every precision. So the losses on the held-out text are compared pair by pair:
the mean difference to float32, and its 95 % confidence interval by Student's t.

Two precisions are called equivalent here if the whole interval lies within `--margin` of zero.

Writes `char_lm.json` and `char_lm.svg` into the output folder.
"""

import functools
import pathlib
import sysconfig
import time
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
    draw_band,
    finish,
    parse_options,
    print_table,
    rounded,
    stop,
)
from rich.progress import Progress
from scipy import stats

import jmp
from jmp import transforms
from jmp.adapters import linen

POLICIES = {"float32": "float32", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


class CharLM(nn.Module):
    """Embedding, one LSTM, projection to the next character."""

    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width)(text)
        x = nn.RNN(nn.OptimizedLSTMCell(self.width))(x)
        return nn.Dense(self.vocabulary)(x)


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


def batches(text: np.ndarray, arguments: Any, seed: int = 0) -> np.ndarray:
    """Returns int32[steps, batch, length + 1]: random windows of the text, alike for all runs."""
    starts = np.random.default_rng(seed).integers(
        0, len(text) - arguments.length - 1, (arguments.steps, arguments.batch_size)
    )
    return text[starts[..., None] + np.arange(arguments.length + 1)]


def loss_fn(params: Any, apply_fn: Any, batch: jax.Array) -> jax.Array:
    logits = apply_fn({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def first_params(model: CharLM, data: np.ndarray, seed: int = 0) -> Any:
    return model.init(jax.random.key(seed), jnp.asarray(data[0, :, :-1]))["params"]


def train(policy: str, setup: Any, tick: Any) -> dict[str, Any]:
    """Trains every seed in one precision; returns losses in training and on the held-out text."""
    model, text, held_out, arguments = setup
    apply_fn = linen.autocast(model.apply, policy)
    # A dynamic loss scale for float16, none for the others.
    tx = transforms.mixed_precision(optax.adam(arguments.learning_rate), policy)

    @functools.partial(jax.jit, compiler_options=ALL_ROUNDINGS)
    def train_step(state: linen.TrainState, batch: jax.Array) -> tuple[linen.TrainState, jax.Array]:
        grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)
        loss, grads = grad_fn(state.params, state.apply_fn, batch)
        return state.apply_gradients(grads=grads), loss

    @functools.partial(jax.jit, compiler_options=ALL_ROUNDINGS)
    def evaluate(params: Any) -> jax.Array:
        return jax.lax.map(lambda batch: loss_fn(params, apply_fn, batch), held_out).mean()

    curves, held_out_losses, skipped = [], [], []
    started = time.perf_counter()
    for seed in range(arguments.seeds):
        data = batches(text, arguments, seed)
        params = first_params(model, data, seed)
        state, losses = linen.TrainState.create(apply_fn=apply_fn, params=params, tx=tx), []
        for batch in data:
            state, loss = train_step(state, batch)
            losses.append(float(loss))
            tick()
        curves.append(losses)
        held_out_losses.append(float(evaluate(state.params)))
        scaling = transforms.loss_scale_state(state.opt_state)
        skipped.append(0 if scaling is None else int(scaling.skipped_steps))
    return {
        "policy": policy,
        "losses": rounded(curves),
        "held_out_losses": held_out_losses,
        "skipped_steps": skipped,
        "seconds": (time.perf_counter() - started) / arguments.seeds,
    }


def windows(text: np.ndarray, arguments: Any) -> np.ndarray:
    """Returns the text as int32[batches, batch, length + 1], without overlap; the rest is cut."""
    shape = (-1, arguments.batch_size, arguments.length + 1)
    return text[: len(text) // np.prod(shape[1:]) * np.prod(shape[1:])].reshape(shape)


def paired(losses: Any, reference: Any, margin: float) -> dict[str, Any]:
    """Compares losses with those of the same seeds in float32.

    Returns: the differences, their mean, the 95 % confidence interval of the mean, and whether all
    of it lies within the margin. With one seed there is no interval.
    """
    differences = np.subtract(losses, reference)
    count = len(differences)
    error = differences.std(ddof=1) / np.sqrt(count) if count > 1 else np.nan
    half_width = error * stats.t.ppf(0.975, count - 1) if count > 1 else np.nan
    interval = [float(differences.mean() + sign * half_width) for sign in (-1, 1)]
    return {
        "differences": differences.tolist(),
        "mean": float(differences.mean()),
        "interval": interval,
        "equivalent": bool(np.max(np.abs(interval)) < margin),
    }


def plot(report: dict[str, Any]) -> Any:
    """Draws what `char_lm.json` holds: curves, and the paired differences on the held-out text."""
    runs, options = report["runs"], report["options"]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 5.5), height_ratios=(5, 2), layout="constrained"
    )
    looks = zip(runs.items(), ("-", "--", ":"), (3.0, 1.4, 1.4), COLORS[2::-1], strict=True)
    for (name, run), style, width, color in looks:
        label = f"{name}: {np.mean(run['held_out_losses']):.4f} held out"
        draw_band(top, np.array(run["losses"], float), style=style, linewidth=width, color=color,
             label=label)  # fmt: skip
        if name == "float32":
            continue
        found, place = report["compared"][name], -list(runs).index(name)
        bottom.plot(found["differences"], [place] * options["seeds"], "o", color=color, alpha=0.4)
        bottom.errorbar(
            found["mean"], place - 0.3, xerr=np.ptp(found["interval"]) / 2, fmt="D", color=color,
            capsize=4,
        )  # fmt: skip
    bottom.axvline(0, color=COLORS[0], linewidth=0.8)
    bottom.axvspan(-options["margin"], options["margin"], color="0.92", linewidth=0, zorder=0)
    bottom.set(yticks=[-1, -2], yticklabels=list(runs)[1:], ylim=(-2.7, -0.6))
    bottom.set_xlabel("loss on the held-out text, difference to float32, nats a character")
    words = (
        f"a dot a seed; diamond and bar: mean and 95 % interval; grey: within {options['margin']}"
    )
    bottom.set_title(words, fontsize=8, loc="left")
    top.set(xlabel="step", ylabel="training loss, nats a character")
    top.set_title(f"lines: mean of {options['seeds']} seeds, bands: lowest to highest", fontsize=8,
                  loc="left")  # fmt: skip
    top.legend(fontsize=8)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    return figure


def main() -> None:
    arguments = parse_options(
        __doc__,
        steps=300,
        batch_size=32,
        seeds=10,
        length=(64, "characters a sequence"),
        width=128,
        learning_rate=5e-3,
        characters=(2_000_000, "of the text"),
        held_out=(0.1, "share of the text"),
        margin=(0.01, "nats a character"),
    )
    console = begin(arguments)
    text, vocabulary = load_text(arguments.characters)
    cut = round(len(text) * (1 - arguments.held_out))
    held_out = windows(text[cut:], arguments)
    if not len(held_out):
        stop(f"--held-out {arguments.held_out} of {len(text)} characters is less than one batch.")
    setup = (CharLM(vocabulary, arguments.width), text[:cut], jnp.asarray(held_out), arguments)

    runs = {}
    with Progress(console=console) as progress:
        for name, policy in POLICIES.items():
            task = progress.add_task(name, total=arguments.steps * arguments.seeds)
            runs[name] = train(policy, setup, lambda task=task: progress.advance(task))
    reference = runs["float32"]["held_out_losses"]
    compared = {
        name: paired(run["held_out_losses"], reference, arguments.margin)
        for name, run in runs.items()
        if name != "float32"
    }

    tokens = held_out[..., 1:].size
    headings = ["loss", "against float32", "95 % interval", "seconds a seed", "skipped steps"]
    rows = []
    for name, run in runs.items():
        found = compared.get(name)
        against = f"{found['mean']:+.4f}" if found else ""
        interval = " to ".join(f"{end:+.4f}" for end in found["interval"]) if found else ""
        seconds, skipped = f"{run['seconds']:.0f}", f"{np.mean(run['skipped_steps']):.1f}"
        loss = float(np.mean(run["held_out_losses"]))
        rows.append([name, loss, against, interval, seconds, skipped])
    print_table(console, [f"{tokens:,} held-out characters", *headings], *rows)
    for name, found in compared.items():
        word = "equivalent" if found["equivalent"] else "not shown to be equivalent"
        console.print(f"{name} and float32: {word}, with a margin of {arguments.margin} nats.")
    sizes = {"trained_on": cut, "held_out": tokens}
    finish(console, arguments, "char_lm", plot, sizes=sizes, compared=compared, runs=runs)


if __name__ == "__main__":
    main()
