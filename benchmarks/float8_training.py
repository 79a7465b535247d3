"""Trains the GPT of `examples/gpt.py` in float8 and in bfloat16 side by side.

    JAX_PLATFORMS=cpu python -m benchmarks.float8_training    # ten minutes on two cores

The same initial values, batches and steps, over several seeds; all that autocast makes float8 is
float8, no product is below its smallest size. The GPT learns bytes of Python's own library. Before
that, errors of gradients at the initial values of small models, whose small products count as
large. Writes `results/float8_training.json`.

A CPU multiplies what was rounded to float8, and adds up in float32: the roundings of operands are
those of the program for a GPU, the sums are not its tensor cores'.
"""

import argparse
import importlib
import sys
import time
from typing import Any

import jax
import numpy as np

import jmp
from benchmarks._results import facts, write
from benchmarks.processes import ROOT
from testbed.gpt2 import GPT2, gpt2
from testbed.models import MODELS
from testbed.relative_errors import relative_error
from testbed.small_products import small_is_float8

PRECISIONS = ("bfloat16", "float8")
SMALL_MODELS = {
    "gpt": "GPT, 2 layers of width 128",
    "plain_transformer": "RMSNorm, rotary, SwiGLU in plain JAX",
    "equinox_attention": "attention of Equinox",
}
# Tokens times the width squared, the smallest of a block's products, are 2**28 multiplications.
OPTIONS = {"layers": 2, "width": 256, "heads": 4, "length": 128, "batch_size": 32}
OPTIONS |= {"steps": 200, "learning_rate": 2e-3}
SEEDS = 3
LAST = 20  # steps, whose mean loss is compared
RESULTS = ROOT / "results" / "float8_training.json"


def of_gradients() -> dict[str, dict[str, float]]:
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
            print(f"gradient at the start, {title}: {row}")
    return found


def of_gpt() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "examples"))
    example = importlib.import_module("gpt")
    given = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    rows: list[dict[str, Any]] = []
    for seed in range(SEEDS):
        row: dict[str, Any] = {"seed": seed}
        for precision in PRECISIONS:
            parsed = example.argument_parser().parse_args(
                [*given, f"--precision={precision}", f"--seed={seed}"]
            )
            losses, report = losses_of(example, parsed)
            row[precision] = float(np.mean(losses[-LAST:]))
            share = report.float8_flops_share
        row["difference"] = row["float8"] - row["bfloat16"]
        print(f"GPT, seed {seed}: " + ", ".join(f"{p} {row[p]:.4f}" for p in PRECISIONS))
        rows.append(row)
    return {"options": OPTIONS, "float8_share": share, "rows": rows}


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


def main() -> None:
    started = time.perf_counter()
    found = {"gradients": of_gradients(), "gpt": of_gpt()}
    write(RESULTS, found | facts(started, ("jax", "jaxlib", "flax", "optax")))


if __name__ == "__main__":
    main()
