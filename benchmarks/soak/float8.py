"""Trains in float8 and in bfloat16 side by side: the GPT of `examples/gpt.py`, and digits.

The same initial values, batches and steps, over several seeds; all that autocast makes float8 is
float8, no product is below its smallest size. The GPT learns bytes of Python's own library. Digits
are those of `examples/digits.py`, whose convolutions have no float8 form: here a network of dense
layers learns them, wide enough that its inner products are float8. Before that, errors of gradients
at the initial values of small models, whose small products count as large.

A CPU multiplies what was rounded to float8, and adds up in float32: the roundings of operands are
those of the program for a GPU, the sums are not its tensor cores'.
"""

import argparse
import collections
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jmp
from benchmarks.processes import ROOT
from jmp import diagnostics
from testbed.gpt2 import GPT2, gpt2
from testbed.models import MODELS, cross_entropy
from testbed.relative_errors import relative_error
from testbed.small_products import small_is_float8

PRECISIONS = ("bfloat16", "float8")
SMALL_MODELS = {
    "gpt": "GPT, 2 layers of width 128",
    "plain_transformer": "RMSNorm, rotary, SwiGLU in plain JAX",
    "equinox_attention": "attention of Equinox",
}
# Tokens times the width squared, the smallest of a block's products, are 2**28 multiplications.
SIZE = {"layers": 2, "width": 256, "heads": 4, "length": 128, "batch_size": 32}
LEARNING_RATE = 2e-3
LAST = 20  # steps, whose mean loss is compared
LIMIT = 0.04  # nats, between those means
WIDTHS = (64, 1024, 1024, 1024, 10)
BATCH, EPOCHS = 512, 40
STANDARD_ERRORS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="of the GPT")
    parser.add_argument("--seeds", type=int, default=3, help="of the GPT")
    parser.add_argument("--digits-seeds", type=int, default=10)


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    found = {
        "gradients": of_gradients(console),
        "gpt": of_gpt(arguments.steps, range(arguments.seeds), console),
        "digits": of_digits(range(arguments.digits_seeds), console),
    }
    return {"passed": found["gpt"]["passed"] and found["digits"]["passed"], **found}


def of_gradients(console: Console) -> dict[str, dict[str, float]]:
    """Returns the error of the whole gradient against float32, in each precision, by model."""
    loss, _, tokens = gpt2(2, width=64, vocabulary=64, batch=4)
    tokens = jax.random.randint(jax.random.key(1), tokens.shape, 0, 64)
    params = jax.jit(GPT2(2, 64, 64).init)(jax.random.key(0), tokens)["params"]
    programs = {"GPT-2, 2 layers of width 64": (loss, params, (tokens,))}
    for name, title in SMALL_MODELS.items():
        (model,) = (row for row in MODELS if row.name == name)
        programs[title] = model.make(**model.small)
    found: dict[str, dict[str, float]] = {}
    with small_is_float8(), jax.numpy_rank_promotion("allow"):
        for title, (loss, params, batch) in programs.items():
            exact = jax.jit(jax.grad(loss))(params, *batch)
            found[title] = {}
            for precision in PRECISIONS:
                ours = jax.grad(jmp.autocast(loss, f"mixed_{precision}"))
                found[title][precision] = relative_error(jax.jit(ours)(params, *batch), exact)
            row = ", ".join(f"{name} {error:.4f}" for name, error in found[title].items())
            console.print(f"gradient at the start, {title}: {row}")
    return found


def of_products(report: diagnostics.PrecisionReport) -> dict[str, Any]:
    """Returns the share of operations in float8, and why the other products are not."""
    apart = "; not float8: "
    reasons: collections.Counter[str] = collections.Counter()
    for row in report.rows:
        if apart in row.why:
            reasons[row.why.split(apart)[1]] += row.times
    return {"float8_share": report.float8_flops_share, "not_float8": dict(reasons)}


def of_gpt(steps: int, seeds: Sequence[int], console: Console) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "examples"))
    example = importlib.import_module("gpt")
    options = {**SIZE, "steps": steps, "learning_rate": LEARNING_RATE}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    rows: list[dict[str, Any]] = []
    products: dict[str, Any] = {}
    for seed in seeds:
        row: dict[str, Any] = {"seed": seed}
        for precision in PRECISIONS:
            parsed = example.argument_parser().parse_args(
                [*given, f"--precision={precision}", f"--seed={seed}"]
            )
            losses, report = losses_of(example, parsed)
            row[precision] = float(np.mean(losses[-LAST:]))
            products = of_products(report)
        row["difference"] = row["float8"] - row["bfloat16"]
        console.print(f"GPT, seed {seed}: " + ", ".join(f"{p} {row[p]:.4f}" for p in PRECISIONS))
        rows.append(row)
    return {
        "passed": all(abs(row["difference"]) <= LIMIT for row in rows),
        "options": options,
        "limit": LIMIT,
        **products,
        "rows": rows,
    }


def losses_of(example: Any, options: argparse.Namespace) -> tuple[list[float], Any]:
    """Returns the loss of each step, and the precision report of the loss."""
    mesh = example.start_devices(options)
    programs, rows = example.make_programs(options, mesh), example.Rows(options, mesh)
    text, _ = example.load_text(options)
    state, losses = programs.create(), []
    for step in range(options.steps):
        state, measured = programs.train(state, rows.of_step(text, step))
        losses.append(measured["loss"])
    return [float(loss) for loss in losses], programs.report()


def of_digits(seeds: Sequence[int], console: Console) -> dict[str, Any]:
    images, labels = load_digits(return_X_y=True)
    *flat, train_labels, test_labels = train_test_split(
        (images / 16).astype(np.float32),
        labels.astype(np.int32),
        test_size=0.2,
        random_state=0,
        stratify=labels,
    )
    accuracies: dict[str, list[float]] = {}
    products: dict[str, Any] = {}
    for precision in PRECISIONS:
        policy = f"mixed_{precision}"
        train = training(policy, flat[0], train_labels)
        trained = [train(seed) for seed in seeds]
        predict = jax.jit(jmp.autocast(logits_of, policy))
        accuracies[precision] = [
            float(np.mean(np.argmax(predict(params, flat[1]), -1) == test_labels))
            for params in trained
        ]
        batch = flat[0][:BATCH], train_labels[:BATCH]
        products = of_products(diagnostics.precision_report(loss_fn, policy)(trained[0], *batch))
        console.print(f"digits, {precision}: {100 * np.mean(accuracies[precision]):.2f} %")
    differences = np.subtract(accuracies["float8"], accuracies["bfloat16"])
    error = float(differences.std(ddof=1) / np.sqrt(len(differences)))
    return {
        "passed": bool(abs(differences.mean()) <= STANDARD_ERRORS * error),
        "options": {"widths": WIDTHS, "batch_size": BATCH, "epochs": EPOCHS},
        "seeds": list(seeds),
        **products,
        "test_accuracy": accuracies,
        "difference": float(differences.mean()),
        "standard_error": error,
    }


def logits_of(params: Sequence[Any], x: Any) -> Any:
    """Returns the logits of rows of pixels: dense layers with relu between them."""
    for index, (kernel, bias) in enumerate(params):
        x = x @ kernel + bias
        x = jax.nn.relu(x) if index < len(params) - 1 else x
    return x


def loss_fn(params: Sequence[Any], images: Any, labels: Any) -> Any:
    return cross_entropy(logits_of(params, images), labels)


def training(policy: str, images: np.ndarray, labels: np.ndarray) -> Callable[[int], Any]:
    """Returns a function that trains on a seed, and returns the parameters."""
    steps = len(images) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-3, EPOCHS * steps))
    grad = jax.grad(jmp.autocast(loss_fn, policy))

    @jax.jit
    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grad(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    def train(seed: int) -> Any:
        random = np.random.default_rng(seed)
        params: Any = [
            (
                random.normal(size=shape, scale=(2 / shape[0]) ** 0.5).astype(np.float32),
                np.zeros((1, shape[1]), np.float32),
            )
            for shape in zip(WIDTHS, WIDTHS[1:], strict=False)
        ]
        state = jax.jit(optimizer.init)(params)
        for _ in range(EPOCHS):
            order = random.permutation(len(images))
            for start in range(0, steps * BATCH, BATCH):
                batch = order[start : start + BATCH]
                params, state = step(params, state, images[batch], labels[batch])
        return params

    return train
