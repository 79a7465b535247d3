"""Varies each constant of autocast's planner, and measures what changes.

The figures stand beside the constants and in `docs/internals.md`. Bytes, memory and kernels are
those of float16 programs compiled for an H200, counted and not timed, without a GPU; errors and
planning times are of a CPU. Run it from the project's root in the test environment; the names of
constants measure these alone, and leave the other figures as they are:

    JAX_PLATFORMS=cpu PYTHONPATH=. .venv-test/bin/python benchmarks/planner_constants.py
"""

import json
import pathlib
import sys
import timeit
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
from tabulate import tabulate

import jmp
from benchmarks.planner_rules import (
    FIGURES,
    HALVES,
    normal,
    numbers,
    replaced,
)
from jmp.autocasting import _islands
from jmp.autocasting._numbers import known_of
from testbed.machines.gpus import Program, compile_for_h200
from testbed.machines.training_steps import compile_step
from testbed.models import MODELS, cross_entropy

RESULTS = pathlib.Path("results/planner_constants.json")
Rows = list[dict[str, Any]]


def figures_over(program: Program, other: Program) -> dict[str, float]:
    """Returns the figures of a program, each over that of the other."""
    return {name: round(getattr(program, name) / getattr(other, name), 4) for name in FIGURES}


def step(name: str, sizes: dict[str, Any], off: dict[str, Any], *target: str) -> Any:
    """Compiles a training step of a model, with other objects at some addresses.

    Args:
      *target: the machine and the half type, where they are not an H200 and float16.
    """
    (model,) = (model for model in MODELS if model.name == name)
    with replaced(off):
        return compile_step(model, "autocast", sizes, *target)


def small() -> Rows:
    """Training steps with islands of fewer elements recomputed, or fewer islands."""
    little = {"batch": 2, "length": 64, "layers": 2, "width": 128, "vocabulary": 256}
    tiny = {"batch": 1, "length": 32, "layers": 2, "width": 64, "vocabulary": 256}
    rows = []
    for name, sizes in (
        ("gpt", tiny),
        ("gpt", little),
        ("unet", {"widths": (32, 64)}),
        ("lstm", {"width": 256}),
    ):
        chosen = step(name, sizes, {})
        for exponent in (8, 10, 12, 16, 18):
            program = step(name, sizes, {"_islands.SMALL": 2**exponent})
            figures = figures_over(program, chosen)
            rows.append({"model": f"{name} {sizes}", "SMALL": f"2**{exponent}", **figures})
    return rows


def large() -> Rows:
    """The end of a classifier, its labels' logits picked as a sum over the same with a gather."""
    rows = []
    for exponent in (8, 10, 12, 13, 14, 15, 16, 18, 20):
        classes = 2 ** (exponent // 2)
        examples = 2**exponent // classes

        def loss(w: Any, x: Any, labels: Any) -> Any:
            logits = jax.nn.log_softmax(x @ w)
            return -jnp.take_along_axis(logits, labels[:, None], 1).mean()

        shapes = ((64, classes), (examples, 64))
        types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        types.append(jax.ShapeDtypeStruct((examples,), np.int32))
        programs = []
        for limit in (0, 2**30):
            with replaced({"targets._pick.LARGE": limit}):
                gradient = jax.grad(jmp.autocast(loss, "mixed_float16"))
                programs.append(compile_for_h200(gradient, *types))
        rows.append({"elements": f"2**{exponent}", **figures_over(*programs)})
    return rows


def _head(
    tokens: int,
    width: int,
    classes: int,
    limits: dict[str, Any],
    of_logits: Callable[[Any, Any], Any] = cross_entropy,
) -> Program:
    """Compiles a product and its cross entropy, value and gradient."""

    def loss(x: Any, table: Any, labels: Any) -> Any:
        return of_logits(x @ table.T, labels)

    types = [jax.ShapeDtypeStruct((n, width), np.float32) for n in (tokens, classes)]
    types.append(jax.ShapeDtypeStruct((tokens,), np.int32))
    with replaced({f"targets.{name}": limit for name, limit in limits.items()}):
        mixed = jmp.autocast(loss, "mixed_float16")
        return compile_for_h200(jax.value_and_grad(mixed, argnums=(0, 1)), *types)


TWO_PASSES = {"_one_pass.SHORT": 2**30, "_one_pass.LONG": 2**30}


def short() -> Rows:
    """A cross entropy, its sums in one pass with the maxima over the same in two passes."""
    rows = []
    for classes in (10, 21, 32, 64, 100, 1000, 8192, 16384, 50304):
        tokens, width = (1 << 16, 64) if classes <= 100 else (8192, 768)
        on = {"_one_pass.SHORT": 1}
        one, two = (_head(tokens, width, classes, limits) for limits in (on, TWO_PASSES))
        rows.append({"classes": classes, **figures_over(one, two)})
    return rows


def long() -> Rows:
    """A softmax alone: kernels, and bytes over those of the half scores."""
    rows = []
    for length in (1024, 8192, 16384, 16385, 32768, 50304):
        softmax = lambda x: jax.nn.softmax(x.astype(np.float32)).astype(x.dtype)
        program = compile_for_h200(softmax, jax.ShapeDtypeStruct((8192, length), np.float16))
        moved = round(program.bytes_moved / (2 * 8192 * length), 2)
        rows.append({"length of rows": length, "kernels": program.kernels, "bytes": moved})
    return rows


def picked(numbers: Any, labels: Any) -> Any:
    return jnp.take_along_axis(numbers, labels[:, None], 1)


def by_hand(logits: Any, labels: Any) -> Any:
    shifted = logits - logits.max(-1, keepdims=True)
    return (jnp.log(jnp.exp(shifted).sum(-1, keepdims=True)) - picked(shifted, labels)).mean()


def with_z_loss(logits: Any, labels: Any) -> Any:
    z = jax.nn.logsumexp(logits, axis=-1)
    return cross_entropy(logits, labels) + 1e-4 * jnp.mean(z**2)


def with_entropy(logits: Any, labels: Any) -> Any:
    of_logs = jax.nn.softmax(logits) * jax.nn.log_softmax(logits)
    return cross_entropy(logits, labels) + 0.01 * of_logs.sum(-1).mean()


def of_targets(smoothing: float) -> Callable[[Any, Any], Any]:
    def loss(logits: Any, labels: Any) -> Any:
        targets = jax.nn.one_hot(labels, logits.shape[-1])
        if smoothing:
            targets = optax.smooth_labels(targets, smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()

    return loss


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "cross entropy of optax (a log-sum-exp)": cross_entropy,
    "the labels' of a log-softmax": lambda x, y: -picked(jax.nn.log_softmax(x), y).mean(),
    "the logarithm of the labels' of a softmax": lambda x, y: (
        -jnp.log(picked(jax.nn.softmax(x), y)).mean()
    ),
    "cross entropy with one-hot labels": of_targets(0),
    "cross entropy with smoothed labels": of_targets(0.1),
    "the first, with a z-loss": with_z_loss,
    "the first, of logits capped by tanh": lambda x, y: cross_entropy(30 * jnp.tanh(x / 30), y),
    "the first, with the entropy of a softmax": with_entropy,
    "x - max(x) by hand, without `stop_gradient`": by_hand,
}


def losses() -> Rows:
    """Ends of a language model: bytes with sums in two passes, and in one."""
    rows = []
    for title, loss in LOSSES.items():
        programs = (_head(8192, 768, 50304, limits, loss) for limits in (TWO_PASSES, {}))
        before, after = (program.bytes_moved for program in programs)
        rows.append({"loss": title, "before": before, "bytes_moved": after})
    return rows


def layers() -> Rows:
    """Errors of gradients: a carry in half, and in float32, of a deep network and of a state."""

    def network(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)) @ w)

    def leaky(x: Any, w: Any) -> Any:
        return 0.99 * x + 0.01 * jnp.tanh(x @ w)

    rows = []
    for name, turn in (("residual network", network), ("leaky state", leaky)):
        for turns in (16, 32, 64, 128, 256, 512, 1024):

            def loss(params: Any, x: Any, turn: Any = turn) -> Any:
                first = x @ params["in"]
                state, _ = jax.lax.scan(lambda x, w: (turn(x, w), None), first, params["layers"])
                return jnp.mean((state @ params["out"]) ** 2)

            params = {key: normal(i, 64, 64) / 8 for i, key in enumerate(("in", "out"))}
            params["layers"] = normal(2, turns, 64, 64) / 8
            arguments = params, normal(3, 32, 64)
            reference = numbers(jax.grad(loss)(*arguments))
            row: dict[str, Any] = {"carry": name, "turns": turns}
            for half, scale in HALVES.items():
                for place, limit in (("half", 2**20), ("float32", 0)):
                    with replaced({"kinds.scan.LAYERS": limit}):
                        ours = jmp.autocast(loss, f"mixed_{half}")
                        scaled = lambda *args, ours=ours, scale=scale: ours(*args) * scale
                        got = numbers(jax.jit(jax.grad(scaled))(*arguments)) / scale
                    error = np.linalg.norm(got - reference) / np.linalg.norm(reference)
                    row[f"{half}, in {place}"] = float(f"{error:.2e}")
            rows.append(row)
    return rows


def looked_at() -> Rows:
    """How long it takes to look into an array, and what is found in a table of sines."""
    rows = []
    for exponent in (8, 12, 14, 16, 18, 20, 22):
        array = jnp.sin(jnp.arange(2**exponent) / 100)
        with replaced({"_numbers.LOOKED_AT": 2**30}):
            seconds = min(timeit.repeat(lambda a=array: known_of(a, np.float16), number=1))
        rows.append({"elements": f"2**{exponent}", "milliseconds": round(1000 * seconds, 3)})
    return rows


def unknown() -> Rows:
    """Islands of a layer whose batch is a symbol, of which as many are recomputed."""

    def loss(params: Any, x: Any) -> Any:
        y = x @ params["in"]
        y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
        y = jax.nn.softmax(jax.nn.gelu(y @ params["w"]) @ params["w"])
        return jnp.mean((y @ params["out"]) ** 2)

    def recomputed(batch: Any, width: int, symbol: int) -> str:
        found = []
        choose = _islands.choose_recompute

        def recorded(*args: Any) -> Any:
            found.append(choose(*args))
            return found[-1]

        types = {k: jax.ShapeDtypeStruct((width, width), np.float32) for k in ("in", "w", "out")}
        x = jax.ShapeDtypeStruct((batch, width), np.float32)
        off = {"_islands.choose_recompute": recorded, "_numbers.UNKNOWN": symbol}
        with replaced(off):
            jax.eval_shape(jmp.autocast(loss, "mixed_float16"), types, x)
        return ", ".join(f"{mode.value}" for mode in found)

    rows = []
    (symbol,) = jax.export.symbolic_shape("batch")
    for width in (4, 64, 512):
        for counts in (1, 64, 4096, 2**20):
            rows.append({"width": width, "batch": f"symbol, UNKNOWN {counts}"})
            rows[-1]["islands"] = recomputed(symbol, width, counts)
        for batch in (1, 64, 4096):
            rows.append({"width": width, "batch": f"{batch}"})
            rows[-1]["islands"] = recomputed(batch, width, 4096)
    return rows


CONSTANTS: dict[str, Callable[[], Rows]] = {
    "SMALL": small,
    "LARGE": large,
    "LONG": long,
    "SHORT": short,
    "LOSSES": losses,
    "LAYERS": layers,
    "LOOKED_AT": looked_at,
    "UNKNOWN": unknown,
}


def main(names: list[str]) -> None:
    """Measures the constants that are named, or all, and prints their tables."""
    warnings.simplefilter("ignore")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_numpy_rank_promotion", "allow")
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names or CONSTANTS:
        found[name] = CONSTANTS[name]()
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}\n{tabulate(found[name], 'keys', tablefmt='github')}\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
