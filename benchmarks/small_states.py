"""Trains with half parameters and small states of optimizers, and counts the bytes of each way.

    JAX_PLATFORMS=cpu python -m benchmarks.small_states               # all, on two CPU cores
    JAX_PLATFORMS=cpu python -m benchmarks.small_states --only bytes

Three parts, each of which replaces its own results in `results/small_states.json`:

* `text`: the language model of `examples/char_lm.py`, smaller, by Adam with a learning rate that
  falls to a hundredth. It computes in float32 from parameters as they are stored; gradients have
  the parameters' dtype. All that differs from float32 is storage.
* `moments`: Adam's second moment, stored in each way, after a gradient of 1 and 1,500 of 0.05.
* `bytes`: what a parameter and Adam's state for it take, counted in the state; and what an update
  moves, counted in the program that XLA compiles for an H200, without a GPU.

Trainings of a seed have the same initial parameters and the same batches. A final loss is the mean
of the last 20 steps.
"""

import argparse
import json
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

import jmp
from benchmarks import figures
from benchmarks._results import facts, write
from benchmarks.processes import ROOT
from benchmarks.recipes._training import update_of
from jmp import transforms
from testbed.machines.gpus import compile_for_h200

SEEDS = 5
# Of the language model: characters that it sees at once, and the learning rate at first.
TEXT = {"steps": 2000, "width": 64, "length": 32, "learning_rate": 5e-3}
LAST = 20  # steps, whose mean loss is the final one
RESULTS = ROOT / "results" / "small_states.json"
VERSIONS = ("jax", "jaxlib", "flax", "optax")

Optimizer = optax.GradientTransformation


class Strategy(NamedTuple):
    """One way to store parameters and the state of an optimizer.

    Attributes:
      dtype: of parameters.
      masters: as in `mixed_precision`; or "optax", whose optimizer is taken as it is, so that its
        state has the dtype of parameters.
      state: as in `with_stored_state`.
    """

    dtype: str
    masters: str | None = None
    state: str | None = None

    def __call__(self, optimizer: Optimizer) -> Optimizer:
        if self.masters == "optax":
            return optimizer
        if self.state:
            optimizer = transforms.with_stored_state(optimizer, self.state)
        policy = jmp.Policy(self.dtype, "float32", "float32")
        scale = jmp.StaticLossScale(2.0**10) if self.dtype == "float16" else jmp.NoOpLossScale()
        return transforms.mixed_precision(optimizer, policy, scale, masters=self.masters)


STRATEGIES = {
    "float32": Strategy("float32"),
    "full": Strategy("bfloat16", "full"),
    "split": Strategy("bfloat16", "split"),
    "kahan": Strategy("bfloat16", "kahan"),
    "stochastic": Strategy("bfloat16", "stochastic"),
    "split, bfloat16 state": Strategy("bfloat16", "split", "bfloat16"),
    "stochastic, int8 state": Strategy("bfloat16", "stochastic", "int8"),
    "stochastic, float8_e4m3fn state": Strategy("bfloat16", "stochastic", "float8_e4m3fn"),
    "none": Strategy("bfloat16", "none"),
    "optax": Strategy("bfloat16", "optax"),
}

# Beside the parameters of a GPT of width 640 with vectors: what an update is compiled for.
SHAPES = [(640, 1024)] * 40 + [(1024,)] * 20


class Task(NamedTuple):
    """A model with its data; the first axis of arrays is that of seeds."""

    loss_fn: Callable[[Any, Any], jax.Array]  # of parameters and a batch
    params: Any  # float32
    batches: Any  # [seeds, steps, ...]


def counted_apart(state: Any, seed: jax.Array) -> Any:
    """Returns a state whose random bits are those of a seed: they follow from the step."""
    drawing = (transforms.WithStochasticRoundingState, transforms.WithStoredStateState)

    def apart(node: Any) -> Any:
        if not isinstance(node, drawing):
            return node
        inner = counted_apart(node.inner_state, seed)
        return node._replace(count=node.count + seed * 2**20, inner_state=inner)

    return jax.tree.map(apart, state, is_leaf=lambda node: isinstance(node, drawing))


def train(strategy: Strategy, optimizer: Optimizer, task: Task) -> np.ndarray:
    """Returns the losses of all seeds, [seeds, steps]."""
    tx = strategy(optimizer)

    def start(params: Any, seed: jax.Array) -> tuple[Any, Any]:
        stored = jmp.cast_floating(params, strategy.dtype)
        state = tx.init(stored)
        if strategy.masters not in (None, "none", "optax"):
            stored, state = transforms.set_masters(state, stored, params)
        return stored, counted_apart(state, seed)

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = carry

        def loss_fn(params: Any) -> jax.Array:
            return task.loss_fn(jmp.cast_to_full(params), batch)

        loss_scale = getattr(state, "loss_scale", jmp.NoOpLossScale())
        loss, grads = jmp.scaled_value_and_grad(loss_fn, loss_scale)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    def run(params: Any, batches: Any, seed: jax.Array) -> jax.Array:
        return jax.lax.scan(step, start(params, seed), batches)[1]

    seeds = jnp.arange(len(jax.tree.leaves(task.params)[0]))
    return np.asarray(jax.jit(jax.vmap(run))(task.params, task.batches, seeds))


def summary(curves: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """Returns final losses, and how they differ, seed by seed, from those of the reference."""
    finals, others = (each[:, -LAST:].mean(axis=1) for each in (curves, reference))
    difference = finals - others
    mean, spread = float(difference.mean()), float(difference.std(ddof=1))
    return {
        "final_losses": finals.tolist(),
        "final_loss": float(finals.mean()),
        "spread": float(finals.std(ddof=1)),
        "differences": difference.tolist(),
        "difference": mean,
        "difference_spread": spread,
    }


def text_task() -> Task:
    char_lm = figures.example("char_lm")
    text, vocabulary = char_lm.load_text()
    options = types.SimpleNamespace(steps=TEXT["steps"], batch_size=16, length=TEXT["length"])
    model = char_lm.CharLM(vocabulary, TEXT["width"])
    data = [char_lm.batches(text, options, seed) for seed in range(SEEDS)]
    params = [char_lm.first_params(model, batches, seed) for seed, batches in enumerate(data)]

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        return char_lm.loss_fn(params, model.apply, batch)

    return Task(loss_fn, stacked(params), jnp.asarray(np.stack(data)))


def stacked(trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def text(console: Console) -> dict[str, Any]:
    """A language model by Adam in each way that has bfloat16 parameters."""
    task = text_task()
    schedule = optax.cosine_decay_schedule(TEXT["learning_rate"], TEXT["steps"], alpha=0.01)
    rows = {}
    reference = train(STRATEGIES["float32"], optax.adam(schedule), task)
    for way in STRATEGIES:
        started = time.perf_counter()
        is_reference = way == "float32"
        curves = reference if is_reference else train(STRATEGIES[way], optax.adam(schedule), task)
        rows[way] = summary(curves, reference)
        console.print(line(way, rows[way], time.perf_counter() - started))
    return TEXT | {"parameters": size_of(task), "ways": rows}


def line(name: str, row: dict[str, Any], seconds: float) -> str:
    return (
        f"{name:48} {row['final_loss']:.4f}  {row['difference']:+.4f} "
        f"± {row['difference_spread']:.4f}  {seconds:3.0f} s"
    )


def finite_or_none(value: Any) -> Any:
    """Returns results in which NaN and infinities are None, for which JSON has a word."""
    if isinstance(value, dict):
        return {name: finite_or_none(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return list(map(finite_or_none, value))
    return None if isinstance(value, float) and not np.isfinite(value) else value


def size_of(task: Task) -> int:
    return sum(leaf.size // len(leaf) for leaf in jax.tree.leaves(task.params))


def moments(console: Console) -> dict[str, Any]:
    """How much too small Adam's step becomes where the second moment does not fall."""
    shape, large, small, steps = (64, 64), 1.0, 0.05, 1500
    gradients = jnp.asarray([large] + [small] * steps)

    def second_moment(tx: Optimizer, dtype: str) -> jax.Array:
        def step(carry: Any, gradient: jax.Array) -> tuple[Any, None]:
            return tx.update(jnp.full(shape, gradient, dtype), carry, params)[1], None

        params = jnp.ones(shape, dtype)
        state = jax.jit(lambda state: jax.lax.scan(step, state, gradients)[0])(tx.init(params))
        inner = getattr(state, "inner_state", state)
        return getattr(inner.nu, "decoded", lambda: inner.nu)()

    adam = optax.scale_by_adam()
    exact = second_moment(adam, "float32")
    ways = {"optax, bfloat16 parameters": second_moment(adam, "bfloat16")}
    for kind in ("bfloat16", "float16", "float8_e4m3fn", "int8"):
        for rounding in ("nearest", "stochastic"):
            tx = transforms.with_stored_state(adam, [("*", "*", kind)], rounding=rounding)
            ways[f"{kind}, {rounding}"] = second_moment(tx, "float32")
    rows = {}
    for way, stored in ways.items():
        ratio = np.sqrt(np.float64(exact) / np.float64(stored.astype("float32")))
        rows[way] = {"step": float(ratio.mean()), "spread": float(ratio.std())}
        console.print(f"{way:30} {rows[way]['step']:.4f} ± {rows[way]['spread']:.4f}")
    return {"large": large, "small": small, "steps": steps, "ways": rows}


def bytes_of(console: Console) -> dict[str, Any]:
    """Bytes a parameter: held with Adam's state, and moved by an update on an H200."""
    count = sum(int(np.prod(shape)) for shape in SHAPES)
    rows = {}
    for way in STRATEGIES:
        dtype = STRATEGIES[way].dtype
        params = [jax.ShapeDtypeStruct(shape, dtype) for shape in SHAPES]
        tx = STRATEGIES[way](optax.adam(1e-3))
        state = jax.eval_shape(tx.init, params)
        program = compile_for_h200(update_of(tx), params, state, params, donate_argnums=(0, 1))
        held = [nbytes(tree) / count for tree in (params, state)]
        rows[way] = {"held": sum(held), "moved": program.bytes_moved / count}
        console.print(f"{way:40} held {rows[way]['held']:.2f}, moved {rows[way]['moved']:.2f}")
    return {"parameters": count, "tensors": len(SHAPES), "ways": rows}


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


PARTS = {"text": text, "moments": moments, "bytes": bytes_of}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small_states",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="else all")
    console = Console(width=120)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in parser.parse_args().only:
        started = time.perf_counter()
        results[name] = {"seeds": SEEDS} | PARTS[name](console) | facts(started, VERSIONS)
        write(RESULTS, finite_or_none(results))
    console.print(f"Wrote {RESULTS}.")


if __name__ == "__main__":
    main()
