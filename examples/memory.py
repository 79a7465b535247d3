"""Counts what training a GPT holds in memory: in float32, in float16, and with `jax.checkpoint`.

    python examples/memory.py             # half a minute on two CPU cores
    python examples/memory.py --help

    # GPT-2 small, 124 million parameters.
    python examples/memory.py --layers 12 --width 768 --heads 12 --length 1024 \\
        --vocabulary 50257 --no-xla

Nothing is trained or even allocated: shapes stand for the parameters and the batch. XLA compiles
each program for its own figures, for the device that is there; --no-xla leaves that out.

Writes `memory.json` and `memory.svg` into the output folder.
"""

import argparse
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from _common import COLORS, OUTPUT, OptionsHelp, begin, finish, positive, stop

from jmp import diagnostics

# Name, policy, and whether each block is under `jax.checkpoint`.
RUNS = (
    ("float32", "float32", False),
    ("mixed float16", "mixed_float16", False),
    ("mixed float16, checkpoint", "mixed_float16", True),
)

PART_COLORS = {
    "parameters": COLORS[3],
    "gradients": COLORS[2],
    "optimizer": COLORS[4],
    "copies of parameters": COLORS[5],
    "activations": COLORS[1],
}


class Block(nn.Module):
    """Causal attention, then two layers with gelu, each behind a LayerNorm, around a shortcut."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        joint = nn.Dense(3 * width, name="attention_in")(nn.LayerNorm()(x))
        query, key, value = (
            part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(joint, 3, axis=-1)
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + nn.Dense(width, name="attention_out")(mixed.reshape(x.shape))
        wide = nn.gelu(nn.Dense(4 * width, name="mlp_in")(nn.LayerNorm()(x)))
        return x + nn.Dense(width, name="mlp_out")(wide)


class GPT(nn.Module):
    """A decoder-only transformer, the head tied to the embedding."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    checkpoint: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.vocabulary, self.width, name="tokens")
        positions = nn.Embed(tokens.shape[1], self.width, name="positions")
        x = embedding(tokens) + positions(jnp.arange(tokens.shape[1])[None])
        block = nn.remat(Block) if self.checkpoint else Block
        for layer in range(self.layers):
            x = block(self.heads, name=f"block_{layer}")(x)
        return embedding.attend(nn.LayerNorm()(x))


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=OptionsHelp)
    add = parser.add_argument
    add("--layers", type=positive(int), default=4)
    add("--width", type=positive(int), default=256)
    add("--heads", type=positive(int), default=4)
    add("--length", type=positive(int), default=256, help="tokens that the model sees at once")
    add("--batch-size", type=positive(int), default=8)
    add("--vocabulary", type=positive(int), default=256)
    add("--xla", action=argparse.BooleanOptionalAction, default=True, help="compile as well")
    add("--output-dir", type=pathlib.Path, default=OUTPUT)
    return parser


def count(
    policy: str, checkpoint: bool, arguments: argparse.Namespace, sharding: Any = None
) -> Any:
    """Returns the memory report of one run; `sharding` names another device than those here."""
    model = GPT(
        arguments.layers, arguments.width, arguments.heads, arguments.vocabulary, checkpoint
    )
    size = (arguments.batch_size, arguments.length)
    tokens = jax.ShapeDtypeStruct(size, jnp.int32, sharding=sharding)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits, labels = model.apply(params, tokens)[:, :-1], tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return diagnostics.memory_report(
        loss_fn, policy=policy, optimizer=optax.adam(1e-3), compiled=arguments.xla
    )(params, tokens)


def layer_factor(report: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """Returns bytes kept over layers x hidden x batch x sequence, in all and within the blocks.

    Korthikanti et al. 2022 count 34 + 5 x heads x sequence / hidden within a block, with dropout.
    The second term is the attention scores.
    """
    sizes = arguments.layers, arguments.width, arguments.batch_size, arguments.length
    within = [row for row in report.residuals if "block_" in row.module and not row.of_parameters]
    scores = [r for r in within if r.shape.count(arguments.length) > 1 and len(r.shape) > 3]
    elements = math.prod(sizes)
    return {
        "in all": report.parts["activations"] / elements,
        "within the blocks": sum(row.bytes for row in within) / elements,
        "of it attention scores": sum(row.bytes for row in scores) / elements,
    }


def to_dict(report: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what is written down of a report: all but its hundreds of rows."""
    found = report.to_dict()
    del found["residuals"]
    return {**found, "transformer_factors": layer_factor(report, arguments)}


def plot(reports: dict[str, dict[str, Any]]) -> Any:
    """Draws a panel for each title: the reports of its runs, as `to_dict` writes them down."""
    size = (7, 0.4 + 2.7 * len(reports))
    figure, panels = plt.subplots(len(reports), squeeze=False, figsize=size, layout="constrained")
    for axes, (title, runs) in zip(panels[:, 0], reports.items(), strict=True):
        plot_bars(axes, runs)
        axes.set_title(title, loc="right", fontsize=9, fontweight="bold", pad=36)
    return figure


def plot_bars(axes: Any, runs: dict[str, dict[str, Any]]) -> None:
    """Draws a bar for each run: what JAX keeps, by part, and a diamond at XLA's peak.

    The bar is counted from shapes; the diamond is what XLA's compiled program needs at most. The
    second decides whether a training fits.
    """
    largest = max(run["total_bytes"] for run in runs.values())
    unit, name = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    ends = [0.0] * len(runs)
    for part, color in PART_COLORS.items():
        widths = [run["parts"][part] / unit for run in runs.values()]
        if any(widths):
            axes.barh(list(runs), widths, 0.65, ends, color=color, edgecolor="white", label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    plot_peaks(axes, [run["xla_peak_bytes"] for run in runs.values()], ends, unit)
    axes.invert_yaxis()  # the first at the top
    axes.margins(x=0.15)
    axes.set_xlabel(f"memory, {name}")
    axes.legend(fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def plot_peaks(axes: Any, peaks: Sequence[int | None], ends: Sequence[float], unit: float) -> None:
    """Writes the sum behind each bar, and below it XLA's peak, which is marked by a diamond."""
    low = len(ends) - 0.35 if any(peaks) else len(ends) - 0.5
    axes.set_ylim(-0.5, low)
    label = "XLA's peak, no optimizer"
    for position, (end, peak) in enumerate(zip(ends, peaks, strict=True)):
        axes.text(end, position, f" {end:#.3g} kept".replace(". ", " "), va="center", fontsize=8)
        if peak is None:
            continue
        look = {"color": "black", "markersize": 5, "linestyle": ""}
        axes.plot([peak / unit], [position + 0.43], "D", label=label, **look)
        words = f"   {peak / unit:#.3g} peak".replace(". ", " ")
        axes.text(peak / unit, position + 0.43, words, va="center", fontsize=8)
        label = ""  # one line of the legend for all


def main() -> None:
    arguments = argument_parser().parse_args()
    if arguments.width % arguments.heads:
        stop(f"--width {arguments.width} is no multiple of --heads {arguments.heads}")
    console = begin(arguments, does="XLA compiles")
    reports = {name: count(policy, ckpt, arguments) for name, policy, ckpt in RUNS}
    print(diagnostics.compare_memory(reports))
    factors = {name: layer_factor(report, arguments) for name, report in reports.items()}
    formula = 34 + 5 * arguments.heads * arguments.length / arguments.width
    console.print("Bytes of activations over layers x hidden x batch x sequence:")
    for name, factor in factors.items():
        console.print(f"  {name}: {', '.join(f'{v:.1f} {k}' for k, v in factor.items())}")
    console.print(f"  by Korthikanti et al.'s formula, float16 and dropout: {formula:.1f}")

    data = {name: to_dict(report, arguments) for name, report in reports.items()}
    title = f"GPT of --layers {arguments.layers} --width {arguments.width}, counted, not measured"
    draw = lambda report: plot({title: report["reports"]})
    finish(console, arguments, "memory", draw, reports=data)


if __name__ == "__main__":
    main()
