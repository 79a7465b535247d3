"""Trains a GPT on a folder of text, byte by byte, in mixed precision by autocast.

    python examples/gpt.py                # Python's own source; minutes on two CPU cores
    python examples/gpt.py --help

    # For a GPU: GPT-2 small but for its vocabulary, 86 million parameters of its 124.
    python examples/gpt.py --data-dir my-text --pattern "*.txt" --layers 12 --width 768 \\
        --heads 12 --length 1024 --accumulate 4 --learning-rate 6e-4 --steps 10000 --fsdp

    # Two processes of four devices each, here on one machine without a GPU.
    python examples/gpt.py --fsdp --devices 4 --processes 2 --process-id 0 \\
        --coordinator localhost:9876 &
    python examples/gpt.py --fsdp --devices 4 --processes 2 --process-id 1 \\
        --coordinator localhost:9876

The model is an ordinary Flax nnx module, written in float32, that knows nothing of precision nor
of devices. Tokens are bytes, so that nothing is downloaded. Files are taken in a fixed random
order, and the last tenth of the text is held out. A step is --accumulate micro-batches of
--batch-size texts, and one update of the parameters; if a micro-batch overflows, the step is
skipped and the loss scale halved.

Parameters are float32, or with --masters stored in half, in one of five ways.

All devices take part: each takes an equal part of a micro-batch. Parameters and the optimizer's
state are whole on each device, or with --fsdp in parts, one on each. Process 0 writes.

Writes `gpt.json` and `gpt.svg` into the output folder, and into the checkpoint folder all that
--resume needs to end, on a CPU bit by bit, where an uninterrupted training ends. On other devices,
more or fewer, it ends there but for the order in which sums are rounded.
"""

import argparse
import hashlib
import pathlib
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _checkpoints import Checkpoints, check_checkpoints
from _common import (
    COLORS,
    OUTPUT,
    OptionsHelp,
    begin,
    finish,
    legend_above,
    positive,
    print_table,
)
from _devices import (
    DEVICE_OPTIONS,
    add_device_options,
    check_processes,
    join_parts,
    own_part,
    place_params,
    start_devices,
)
from _text import load_text
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import Progress

import jmp
from jmp import diagnostics, transforms

POLICIES = {
    "float32": "float32",
    "float16": "mixed_float16",
    "bfloat16": "mixed_bfloat16",
    "float8": "mixed_float8",
}
MASTERS = ("full", "split", "stochastic", "kahan", "none")
VOCABULARY = 256  # bytes
VALIDATION_BATCHES = 8
# Options that may differ when a training is resumed: they change nothing that is learned.
FREE = (
    "data_dir pattern output_dir checkpoint_dir checkpoint_every validate_every resume stop_after "
    "prompt sample_length temperature"
).split() + DEVICE_OPTIONS


class Block(nnx.Module):
    """Causal attention, then two layers with gelu, each behind a LayerNorm, around a shortcut."""

    def __init__(self, width: int, heads: int, layers: int, rngs: nnx.Rngs) -> None:
        # What adds to the stream starts smaller the more blocks there are, as in GPT-2.
        small, smaller = (nnx.initializers.normal(0.02 / d) for d in (1, (2 * layers) ** 0.5))
        self.heads = heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention_in = nnx.Linear(width, 3 * width, kernel_init=small, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, kernel_init=smaller, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_in = nnx.Linear(width, 4 * width, kernel_init=small, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * width, width, kernel_init=smaller, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        joint = self.attention_in(self.attention_norm(x))
        query, key, value = (
            part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(joint, 3, axis=-1)
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.reshape(x.shape))
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nnx.Module):
    """A decoder-only transformer over bytes, the head tied to the embedding."""

    def __init__(self, width: int, heads: int, layers: int, length: int, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(0.02)
        self.bytes = nnx.Embed(VOCABULARY, width, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(length, width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, layers, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(
        self, text: jax.Array, place: Callable[[jax.Array], jax.Array] = lambda x: x
    ) -> jax.Array:
        """Returns float32[batch, length, 256] logits of what follows each of int32 `text`.

        Args:
          place: says on which devices the stream of activations lies.
        """
        x = place(self.bytes(text) + self.positions(jnp.arange(text.shape[1])[None]))
        for block in self.blocks:
            x = block(x)
        return self.bytes.attend(self.norm(x))


class State(NamedTuple):
    """All that training changes."""

    params: Any
    opt_state: Any


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=OptionsHelp)
    add = parser.add_argument
    add("--data-dir", type=pathlib.Path, help="searched with all folders in it; default: Python's")
    add("--pattern", default="*.py", help="which files in it are text, such as '*.txt'")
    add(
        "--precision",
        choices=POLICIES,
        default="float16",
        help="dtype of matrix products; float8 for the large ones alone",
    )
    add(
        "--masters",
        choices=MASTERS,
        help="store parameters in half: with float32 masters (full), with what bfloat16 lacks of "
        "them (split), rounded by chance (stochastic), with sums of what rounding took (kahan), or "
        "with nothing, which loses small updates (none); default: in float32",
    )
    add("--layers", type=positive(int), default=4, help="transformer blocks")
    add("--width", type=positive(int), default=128, help="features; a multiple of --heads")
    add("--heads", type=positive(int), default=4, help="attention heads in a block")
    add("--length", type=positive(int), default=128, help="bytes that the model sees at once")
    add("--batch-size", type=positive(int), default=16, help="texts in a micro-batch")
    add("--accumulate", type=positive(int), default=1, help="micro-batches in a step")
    add("--steps", type=positive(int), default=250, help="updates of the parameters")
    add("--learning-rate", type=positive(float), default=4e-3, help="peak, after the warmup")
    add("--weight-decay", type=positive(float), default=0.1, help="of kernels only")
    add("--seed", type=int, default=0, help="of parameters, texts and the sample")
    add("--validate-every", type=positive(int), default=50, help="steps between validations")
    add("--prompt", default="def ", help="start of the sample; default: %(default)r")
    add("--sample-length", type=positive(int), default=200, help="bytes in the sample")
    add("--temperature", type=positive(float), default=0.8, help="near 0: the likeliest byte")
    add("--output-dir", type=pathlib.Path, default=OUTPUT, help="for gpt.json and gpt.svg")
    add("--checkpoint-dir", type=pathlib.Path, help="default: OUTPUT_DIR/checkpoints/gpt")
    add("--checkpoint-every", type=positive(int), default=100, help="steps between checkpoints")
    add("--resume", action="store_true", help="continue from the checkpoint folder")
    add("--stop-after", type=positive(int), help="end after this step; --resume continues")
    add_device_options(parser)
    return parser


def check_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that do not fit together."""
    width, heads = arguments.width, arguments.heads
    if width % heads:
        fitting = [n for n in range(1, width + 1) if width % n == 0]
        raise ValueError(
            f"--heads {heads} does not divide --width {width}; expected one of "
            f"{', '.join(map(str, fitting))}, as every head takes an equal part of the width."
        )
    if not arguments.prompt:
        raise ValueError("--prompt is empty; expected one character or more to go on from.")
    half = jmp.get_policy(POLICIES[arguments.precision]).compute_dtype
    if arguments.masters and half == jnp.float32:
        raise ValueError(
            f"--masters {arguments.masters} says how half parameters are stored; expected a "
            "--precision other than float32."
        )
    if arguments.masters == "split" and half != jnp.bfloat16:
        raise ValueError(
            "--masters split splits a float32 number into bfloat16 and the rest; expected "
            "--precision bfloat16 or float8, or for float16 --masters full or kahan."
        )
    check_processes(arguments)


def make_optimizer(arguments: argparse.Namespace) -> optax.GradientTransformationExtraArgs:
    """AdamW with loss scaling; the schedule counts updates of the parameters."""
    peak, warmup = arguments.learning_rate, max(1, arguments.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        0.1 * peak, peak, warmup, max(arguments.steps, warmup + 1), end_value=0.1 * peak
    )
    # Kernels alone: no norm, no bias and no embedding decays.
    is_kernel = lambda path, _: path[-1].key == "kernel"
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=arguments.weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(is_kernel, params),
        ),
    )
    policy = POLICIES[arguments.precision]
    return transforms.mixed_precision(optimizer, policy, masters=arguments.masters)


class Rows:
    """Brings texts to the devices; each process cuts out those of its own devices alone."""

    def __init__(self, arguments: argparse.Namespace, mesh: Mesh) -> None:
        self.arguments, self.mesh = arguments, mesh

    def of_step(self, text: np.ndarray, step: int) -> jax.Array:
        """Returns int32[rows, length + 1], of which row i is in micro-batch i mod --accumulate."""
        # Of seed and step alone: that is how a resumed training comes to the very same batches.
        random = np.random.default_rng((self.arguments.seed % 2**32, step))
        rows = self.arguments.accumulate * self.arguments.batch_size
        return self._cut(text, random.integers(len(text) - self.arguments.length, size=rows))

    def spread(self, text: np.ndarray) -> jax.Array:
        """Returns VALIDATION_BATCHES batches, spread over the text, always the same ones."""
        rows = VALIDATION_BATCHES * self.arguments.batch_size
        last = len(text) - self.arguments.length - 1
        return self._cut(text, np.linspace(0, last, rows, dtype=int))

    def _cut(self, text: np.ndarray, starts: np.ndarray) -> jax.Array:
        places = np.add.outer(own_part(starts), np.arange(self.arguments.length + 1))
        return join_parts(text[places].astype(np.int32), self.mesh)


def make_programs(arguments: argparse.Namespace, mesh: Mesh) -> types.SimpleNamespace:
    """Returns what runs on the devices: `create`, `train`, `validate` and `sample`; `places`,
    where each array of a `State` lies; and `report`, which says what is half or float8."""
    policy, optimizer = POLICIES[arguments.precision], make_optimizer(arguments)
    length, batch_size = arguments.length, arguments.batch_size

    def make_model() -> GPT:
        size = (arguments.width, arguments.heads, arguments.layers, length)
        return GPT(*size, nnx.Rngs(arguments.seed))

    graph = nnx.graphdef(nnx.eval_shape(make_model))

    def make_params() -> Any:
        return nnx.to_pure_dict(nnx.state(make_model()))

    def stored(params: Any) -> Any:
        """Returns parameters in half if they are stored so, each rounded to the nearest."""
        return jmp.get_policy(policy).cast_to_compute(params) if arguments.masters else params

    # Between data parallel and FSDP this line alone differs: jit does the rest.
    shapes = place_params(jax.eval_shape(lambda: stored(make_params())), mesh, arguments.fsdp)
    places = State(
        jax.tree.map(lambda leaf: leaf.sharding, shapes),
        transforms.state_shardings(optimizer, shapes),
    )

    def create() -> State:
        exact = make_params()
        params = stored(exact)
        opt_state = optimizer.init(params)
        # From the float32 numbers themselves, where parameters in half hold a part of them.
        return State(*transforms.set_masters(opt_state, params, exact))

    everywhere, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def logits_fn(params: Any, text: jax.Array, *place: Any) -> jax.Array:
        return nnx.merge(graph, nnx.State(params))(text, *place)

    def loss_fn(params: Any, text: jax.Array) -> jax.Array:
        # Each device keeps its texts, and weights come to it. Without this line the partitioner may
        # move activations instead: seven times the bytes under FSDP.
        place = lambda x: jax.lax.with_sharding_constraint(x, by_rows)
        logits = logits_fn(params, text[:, :-1], place)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    plain_loss_fn = loss_fn
    loss_fn = jmp.autocast(loss_fn, policy)  # products in half; `train` scales the loss

    def train(state: State, batch: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        """Returns the state after one step, and what to write down of it."""
        loss_scale = state.opt_state.loss_scale
        # A text is never bad in itself: what overflows has too large a scale, which has to shrink.
        grad_fn = jmp.accumulated_value_and_grad(
            loss_fn, loss_scale, arguments.accumulate, skip="window"
        )
        loss, grads = grad_fn(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), {
            "loss": loss,
            "loss_scale": jnp.float32(opt_state.loss_scale.loss_scale),
            "skipped": opt_state.skipped_steps,
        }

    def validate(params: Any, rows: jax.Array) -> jax.Array:
        """Returns the mean loss of all rows."""
        # Row i belongs to batch i mod VALIDATION_BATCHES: rows stay on their devices.
        batches = rows.reshape(batch_size, VALIDATION_BATCHES, -1).swapaxes(0, 1)
        return jax.lax.map(lambda batch: loss_fn(params, batch), batches).mean()

    def sample(params: Any, prompt: jax.Array) -> jax.Array:
        """Returns the bytes that follow `prompt`, drawn one by one."""
        predict = jmp.autocast(logits_fn, policy)
        params = jax.lax.with_sharding_constraint(params, everywhere)  # once, not for each byte

        def next_byte(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            text, filled = carry  # a window of fixed size; what is not filled yet, nobody attends
            logits = predict(params, text[None])[0, filled - 1]
            drawn = jax.random.categorical(key, logits / arguments.temperature)
            full = filled == length
            text = jnp.where(full, jnp.roll(text, -1), text)  # the oldest byte makes room
            text = text.at[filled - full].set(drawn)
            return (text, jnp.minimum(filled + 1, length)), drawn

        filled = min(len(prompt), length)
        text = jnp.zeros(length, jnp.int32).at[:filled].set(prompt[-filled:])
        keys = jax.random.split(jax.random.key(arguments.seed), arguments.sample_length)
        return jax.lax.scan(next_byte, (text, jnp.int32(filled)), keys)[1]

    def report() -> diagnostics.PrecisionReport:
        text = jax.ShapeDtypeStruct((batch_size, length + 1), np.int32)
        return diagnostics.precision_report(plain_loss_fn, policy)(shapes, text)

    return types.SimpleNamespace(
        places=places,
        create=jax.jit(create, out_shardings=places),
        train=jax.jit(train, donate_argnums=0, out_shardings=(places, everywhere)),
        validate=jax.jit(validate, out_shardings=everywhere),
        sample=jax.jit(sample, out_shardings=everywhere),
        report=report,
    )


class Setup(NamedTuple):
    """What a training needs beside its options; `texts`: to train on, and held out."""

    programs: types.SimpleNamespace
    rows: Rows
    texts: tuple[np.ndarray, np.ndarray]
    record: dict[str, Any]
    console: Console


def run(arguments: argparse.Namespace, setup: Setup) -> tuple[State, dict[str, Any]]:
    """Trains, or goes on with it; returns the state and what was measured at every step."""
    programs, rows, (train_text, held_out), record, console = setup
    state = programs.create()
    history = {"loss": [], "loss_scale": [], "skipped": [], "validation": [], "seconds": 0.0}
    folder = arguments.checkpoint_dir
    checkpoints = Checkpoints(folder / "training", folder, record)
    state, history = checkpoints.restore(state, history)

    held_out_rows = rows.spread(held_out)
    # Compiled ahead: once, and not while the clock runs.
    train = programs.train.lower(state, rows.of_step(train_text, 0)).compile()
    stops = (arguments.validate_every, arguments.checkpoint_every)
    first = len(history["loss"])
    with Progress(console=console) as progress:
        task = progress.add_task("loss", total=arguments.steps, completed=first)
        while (step := len(history["loss"])) < arguments.stop_after:
            end = min(arguments.stop_after, *(step - step % every + every for every in stops))
            measured, started = [], time.perf_counter()
            for number in range(step, end):
                state, now = train(state, rows.of_step(train_text, number))
                # Of the step before: while we wait for that, the device has this one to work on.
                label = f"loss {measured[-1]['loss']:.3f}" if measured else None
                progress.update(task, advance=1, description=label)
                measured.append(now)
            jax.block_until_ready(state)
            history["seconds"] += time.perf_counter() - started
            for now in jax.device_get(measured):
                for name, value in now.items():
                    history[name].append(value.item())
            if end % arguments.validate_every == 0 or end == arguments.steps:
                loss = float(programs.validate(state.params, held_out_rows))
                history["validation"].append([end, loss])
            if end % arguments.checkpoint_every == 0 or end == arguments.stop_after:
                checkpoints.save(end, state, history)
    checkpoints.close()
    return state, history


def summarize(
    arguments: argparse.Namespace, state: State, history: Any, console: Console
) -> dict[str, Any]:
    """Prints the figures of the whole training, and returns them."""
    tokens = arguments.steps * arguments.accumulate * arguments.batch_size * arguments.length
    skipped, scale = history["skipped"][-1], history["loss_scale"][-1]
    summary = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "tokens_per_second": tokens / history["seconds"],
        "training_loss": float(np.mean(history["loss"][-20:])),
        "validation_loss": history["validation"][-1][1],
        "skipped_steps": skipped,
        "final_scale": scale,
    }
    in_bits = lambda nats: f"{nats:.3f} nats a byte, {nats / np.log(2):.3f} bits"
    print_table(
        console,
        [f"A GPT in {arguments.precision}", ""],
        ["parameters", f"{summary['parameters']:,}"],
        ["tokens a second, compilation apart", f"{summary['tokens_per_second']:,.0f}"],
        ["training loss, last 20 steps", in_bits(summary["training_loss"])],
        ["validation loss", in_bits(summary["validation_loss"])],
        ["skipped steps", f"{skipped} of {arguments.steps}"],
        ["final loss scale", f"2^{np.log2(scale):.0f}" if scale != 1 else "-"],
    )
    return summary


def plot(report: dict[str, Any]) -> Any:
    """Draws what `gpt.json` holds: losses and the loss scale."""
    history = report["history"]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(6.4, 5.6), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    losses = np.array(history["loss"])
    steps, around = np.arange(1, len(losses) + 1), max(1, len(losses) // 30)
    smoothed = np.convolve(losses, np.full(around, 1 / around), "valid")
    top.plot(steps, losses, color=COLORS[2], linewidth=0.7, alpha=0.6, label="training, a step")
    label = f"training, mean of {around} steps"
    middles = steps[: len(smoothed)] + (around - 1) / 2
    top.plot(middles, smoothed, color=COLORS[3], linewidth=1.6, label=label)
    top.plot(*zip(*history["validation"], strict=True), "o", color=COLORS[1], label="validation")
    top.set(ylabel="loss, nats a byte", title=f"GPT in {report['options']['precision']}")
    handles = top.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, fontsize=8)
    scale = np.array(history["loss_scale"])
    bottom.plot(steps, scale, color=COLORS[0], drawstyle="steps-post")
    skipped = np.flatnonzero(np.diff(history["skipped"], prepend=0))
    if len(skipped):
        bottom.plot(steps[skipped], scale[skipped], "x", color=COLORS[1], label="skipped")
        legend_above(bottom)
    bottom.set_yscale("log", base=2)
    bottom.set(xlabel="step", ylabel="loss scale")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    return figure


def main() -> None:
    parser = argument_parser()
    arguments = parser.parse_args()
    if arguments.checkpoint_dir is None:
        arguments.checkpoint_dir = arguments.output_dir / "checkpoints" / "gpt"
    arguments.stop_after = min(arguments.steps, arguments.stop_after or arguments.steps)
    record = {name: value for name, value in vars(arguments).items() if name not in FREE}
    try:
        check_options(arguments)
        texts = load_text(arguments)
        record["text_sha256"] = hashlib.sha256(b"".join(texts)).hexdigest()
        check_checkpoints(arguments.checkpoint_dir, record, arguments.resume)
        mesh = start_devices(arguments)
    except (ValueError, OSError, NotImplementedError) as error:  # the last: an absolute pattern
        parser.exit(2, f"{parser.prog}: error: {error}\n")

    console = begin(arguments, "checkpoint_dir")
    if mesh.size > 1:
        held = "a part" if arguments.fsdp else "all"
        of = f"{mesh.size} devices, {jax.process_count()} process(es)"
        console.print(f"{of}; on each {held} of parameters and moments")
    programs = make_programs(arguments, mesh)
    if arguments.precision == "float8":
        share = programs.report().float8_flops_share
        console.print(f"{share:.0%} of the operations of products in float8, the rest in bfloat16")
    setup = Setup(programs, Rows(arguments, mesh), texts, record, console)
    state, history = run(arguments, setup)
    if len(history["loss"]) < arguments.steps:
        console.print(
            f"Stopped after step {len(history['loss'])} of {arguments.steps}; the same options "
            "with --resume go on from there."
        )
        return

    summary = summarize(arguments, state, history, console)
    prompt = np.frombuffer(arguments.prompt.encode(), np.uint8).astype(np.int32)
    drawn = np.asarray(programs.sample(state.params, prompt))
    if jax.process_index() > 0:
        return  # it took part in all that was computed; process 0 writes

    sample = bytes(drawn.tolist()).decode(errors="replace")
    # Bytes that a terminal would take for commands are shown as dots.
    shown = "".join(c if c.isprintable() or c in "\n\t" else "." for c in sample)
    console.rule("sample")
    console.print(arguments.prompt + shown, markup=False, highlight=False)
    console.rule()

    finish(
        console,
        argparse.Namespace(**record, output_dir=arguments.output_dir),
        "gpt",
        plot,
        devices=mesh.size,
        text_bytes={"training": len(texts[0]), "validation": len(texts[1])},
        **summary,
        sample=sample,
        history=history,
    )


if __name__ == "__main__":
    main()
