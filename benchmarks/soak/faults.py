"""Trains for 25,000 steps of which many are spoilt, and compares each step with NumPy, bit by bit.

Gradients of all magnitudes are scaled and rounded to half precision, so that some overflow by
themselves, and into about four steps of ten an infinity or a NaN is put. NumPy follows the
definitions one step at a time: of the loss scale (torch's, Megatron's), of momentum and of a
schedule. After each step parameters, masters, momentum, the schedule's count, the scale and what it
counts must be the same. All factors are powers of two, which makes every product exact: there is
one right answer.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

import jmp
from jmp import transforms

SHAPES = {"bias": (3,), "gain": (), "kernel": (2, 3)}  # in the order of leaves
SPOILT = 0.4  # of the steps
FAULTS = (np.inf, -np.inf, np.nan)
DECAY, RATES, STEPS_A_RATE = 0.5, (2.0**-3, 2.0**-6), 100

SCALES: dict[str, jmp.LossScale] = {
    "dynamic": jmp.DynamicLossScale(2.0**10, period=3, min_loss_scale=2.0**-4),
    "hysteresis": jmp.HysteresisLossScale(2.0**10, period=2, hysteresis=3, max_loss_scale=2.0**20),
    "static": jmp.StaticLossScale(2.0**10),
}
# How parameters are stored, and in which dtype.
STORAGES = {
    "float32": "float32",
    "float16 with masters": "float16",
    "bfloat16 with masters": "bfloat16",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=25_000, help="of each kind of training")
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    rows = []
    for scale in SCALES:
        for storage in STORAGES:
            row = {"scale": scale, "parameters": storage}
            row |= compare(scale, storage, arguments.steps, arguments.seed)
            rows.append(row)
            console.print(row)
    return {
        "passed": not any(row["different"] for row in rows),
        "steps": sum(row["steps"] for row in rows),
        "faults": sum(row["faults"] for row in rows),
        "skipped": sum(row["skipped"] for row in rows),
        "rows": rows,
    }


def compare(scale: str, storage: str, steps: int, seed: int) -> dict[str, Any]:
    """Trains both ways, and returns counts and the first steps that differ."""
    dtype = STORAGES[storage]
    inputs = make_inputs(steps, seed, dtype)
    found = {name: np.asarray(value) for name, value in ours(scale, dtype, inputs).items()}
    expected = numpys(SCALES[scale], inputs, dtype)
    different = [
        f"step {step}: {name}"
        for name, values in expected.items()
        for step in np.flatnonzero(differs(found[name], values))[:3]
    ]
    return {
        "steps": steps,
        "faults": int(inputs["spoilt"].sum()),
        "skipped": int((~found["finite"]).sum()),
        "different": different,
    }


def differs(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns, step by step, whether anything differs in any bit."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, (found, expected)
    width = np.dtype(f"u{expected.dtype.itemsize}")
    rows = (found.view(width) != expected.view(width)).reshape(len(expected), -1)
    return rows.any(axis=1)


def make_inputs(steps: int, seed: int, dtype: str) -> dict[str, np.ndarray]:
    """Returns true gradients, and what is put into them after they were scaled."""
    rng = np.random.default_rng(seed)
    size = sum(int(np.prod(shape)) for shape in SHAPES.values())
    signs = rng.choice([-1.0, 1.0], (steps, size))
    gradients = signs * 10.0 ** rng.uniform(-6, 2, (steps, size))
    gradients[rng.random((steps, size)) < 0.05] = 0.0
    spoilt = rng.random(steps) < SPOILT
    where = spoilt[:, None] & (rng.integers(size, size=steps)[:, None] == np.arange(size))
    return {
        "start": rng.standard_normal(size).astype(jnp.dtype(dtype)),
        "gradients": gradients.astype(np.float32),
        "spoilt": spoilt,
        "faults": np.where(where, rng.choice(FAULTS, steps)[:, None], 0.0).astype(np.float32),
    }


def schedule(count: Any) -> Any:
    """Returns the learning rate, a power of two: one rate, then another, and again."""
    return jnp.where(count // STEPS_A_RATE % len(RATES) == 0, *RATES)


def as_tree(vector: jax.Array) -> dict[str, jax.Array]:
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    parts = jnp.split(vector, np.cumsum(sizes)[:-1])
    return {n: p.reshape(s) for (n, s), p in zip(SHAPES.items(), parts, strict=True)}


def as_vector(tree: dict[str, jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.ravel(tree[name]) for name in SHAPES])


def ours(scale: str, dtype: str, inputs: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns what a scan over all steps has after each."""
    half = jnp.bfloat16 if dtype == "bfloat16" else jnp.float16
    inner = optax.chain(optax.trace(DECAY), optax.scale_by_learning_rate(schedule))
    if dtype != "float32":
        inner = transforms.with_master_params(inner)
    tx = transforms.with_loss_scale(inner, SCALES[scale])
    params = as_tree(jnp.asarray(inputs["start"]))

    def step(carry: Any, given: Any) -> Any:
        params, state = carry
        gradient, fault, spoilt = given
        scaled = (gradient * state.loss_scale.loss_scale).astype(half)
        scaled = jnp.where(spoilt & (fault != 0), fault.astype(half), scaled)
        updates, state = tx.update(as_tree(scaled), state, params)
        params = optax.apply_updates(params, updates)
        masters = as_vector(transforms.masters(state, params))
        inside = state.inner_state
        chain = inside if dtype == "float32" else inside.inner_state
        after = {
            "finite": state.grads_finite,
            "scale": jnp.float32(state.loss_scale.loss_scale),
            "skipped": state.skipped_steps,
            "in a row": state.consecutive_skips,
            "masters": masters,
            "parameters": as_vector(params),
            "momentum": as_vector(chain[0].trace),
            "count": chain[1].count,
        }
        for name in ("counter", "tolerance"):
            if hasattr(state.loss_scale, name):
                after[name] = getattr(state.loss_scale, name)
        return (params, state), after

    given = tuple(inputs[name] for name in ("gradients", "faults", "spoilt"))
    train = jax.jit(lambda carry, given: jax.lax.scan(step, carry, given)[1])
    return train((params, tx.init(params)), given)


class NumpyScale:
    """A loss scale by the published rules; without a period it never moves."""

    def __init__(self, scale: Any) -> None:
        self.scale = float(scale.loss_scale)
        self.period = getattr(scale, "period", None)
        self.floor = getattr(scale, "min_loss_scale", 0.0)
        self.ceiling = getattr(scale, "max_loss_scale", np.inf)
        self.hysteresis = getattr(scale, "hysteresis", 1)
        self.counter, self.tolerance = 0, self.hysteresis

    def update(self, finite: bool) -> None:
        if self.period is None:
            return
        if not finite:
            self.counter, self.tolerance = 0, max(self.tolerance - 1, 0)
            if self.tolerance == 0:
                self.scale = max(self.scale / 2, self.floor)
            return
        self.counter += 1
        if self.counter == self.period:
            self.counter, self.tolerance = 0, self.hysteresis
            self.scale = min(self.scale * 2, self.ceiling)


def numpys(scale: Any, inputs: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Returns the same by definition, in NumPy."""
    half = jnp.dtype("bfloat16" if dtype == "bfloat16" else "float16")
    state = NumpyScale(scale)
    masters = inputs["start"].astype(np.float32)
    params, momentum = inputs["start"], np.zeros_like(masters)
    count = skipped = in_a_row = 0
    rows: dict[str, list[Any]] = {}
    given = zip(inputs["gradients"], inputs["faults"], inputs["spoilt"], strict=True)
    for gradient, fault, spoilt in given:
        with np.errstate(all="ignore"):
            scaled = (gradient * np.float32(state.scale)).astype(half)
            if spoilt:
                scaled = np.where(fault != 0, fault.astype(half), scaled)
            finite = bool(np.isfinite(scaled).all())
            if finite:
                true = scaled.astype(np.float32) / np.float32(state.scale)
                momentum = true + np.float32(DECAY) * momentum
                rate = RATES[count // STEPS_A_RATE % len(RATES)]
                masters = masters - np.float32(rate) * momentum
                params = follow(params, masters)
                count += 1
        skipped, in_a_row = skipped + (not finite), 0 if finite else in_a_row + 1
        state.update(finite)
        after = {
            "finite": np.bool_(finite),
            "scale": np.float32(state.scale),
            "skipped": np.int32(skipped),
            "in a row": np.int32(in_a_row),
            "masters": masters,
            "parameters": params,
            "momentum": momentum,
            "count": np.int32(count),
        }
        if state.period is not None:
            after["counter"] = np.int32(state.counter)
            if hasattr(scale, "tolerance"):
                after["tolerance"] = np.int32(state.tolerance)
        for name, value in after.items():
            rows.setdefault(name, []).append(value)
    return {name: np.stack(values) for name, values in rows.items()}


def follow(params: np.ndarray, masters: np.ndarray) -> np.ndarray:
    """Returns the masters rounded, as parameters follow them.

    Where a parameter shrinks more than 4096-fold at once, no float32 number added to it gives its
    rounded master; there it is the nearest sum, as documented.
    """
    rounded = masters.astype(params.dtype)
    if params.dtype == np.float32:
        return rounded
    old, new = params.astype(np.float32), rounded.astype(np.float32)
    return np.where(abs(old) > 4096 * abs(new), (old + (new - old)).astype(params.dtype), rounded)
