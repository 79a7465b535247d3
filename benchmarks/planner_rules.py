"""Switches off one rule of autocast's planner at a time, and measures what that costs.

A rule is switched off by another function in its place (`RULES`). Three things are measured, each
relative to autocast with all rules:
  - bytes moved, temporary memory and kernels of a training step in float16, compiled for an H200;
    estimated cycles and temporary memory in bfloat16, compiled for TPUs, where there is the
    compiler for them (`make targets`, and its interpreter). Counted, not timed, without devices;
  - the same for small programs (`testbed.lean_programs`), on an H200;
  - the error of the gradient against float32, in both half types, on a CPU and at small sizes.
    There islands and arrays count as large from 256 elements on, so that all rules are at work. Up
    to 5 % is the luck of the roundings;
  - the error of the gradient of small programs (`PROGRAMS`) that a rule was made for.
`python -m benchmarks.report` writes the tables in `docs/internals.md`. Run it from the project's
root in the test environment. With names of models it measures only these, with `cost`, `errors`
or `v5e` only that, and leaves all other figures as they are:

    JAX_PLATFORMS=cpu PYTHONPATH=. .venv-test/bin/python benchmarks/planner_rules.py gpt errors
    JAX_PLATFORMS=cpu PYTHONPATH=. .venv-targets/bin/python benchmarks/planner_rules.py v5e
"""

import contextlib
import functools
import importlib.util
import json
import pathlib
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmp
from jmp import _jax_compat
from jmp.autocasting import _islands, _planner
from jmp.autocasting._numbers import is_inexact
from jmp.autocasting._steps import Arithmetic
from testbed.lean_programs import LEAN_PROGRAMS, LeanProgram
from testbed.machines.gpus import compile_for_gpu
from testbed.machines.tpus import TPUS
from testbed.machines.training_steps import compile_for, make_step
from testbed.models import MODELS, Model
from testbed.passes import replaced, targets, without_pass
from testbed.relative_errors import numbers, relative_error

RESULTS = pathlib.Path("results/planner_rules.json")
HALVES = {"float16": 2.0**12, "bfloat16": 1.0}  # and the loss scale
FIGURES = ("bytes_moved", "temp_bytes", "kernels")
FIGURES_OF_TPUS = ("cycles", "temp_bytes")
# So that all rules are at work at small sizes.
SMALL = {"_islands.SMALL": 256, "targets._cross_entropy.LARGE": 256, "targets._zeros.LARGE": 256}

# Models and their sizes: on an H200, and on a CPU beside `Model.small`.
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "resnet": ({"widths": (64, 128)}, {}),
    "unet": ({"widths": (32, 64)}, {}),
    "gpt": ({"layers": 2}, {}),
    "scanned_gpt": ({"layers": 2}, {}),
    "lstm": ({"width": 256}, {}),
    "plain_transformer": ({"layers": 1}, {}),
    "equinox_attention": ({"batch": 8, "length": 509, "width": 512}, {"length": 31}),
}
# Up to a minute for each program, so that only what is scanned is measured there.
ON_TPUS = {"v5e": ("unet", "scanned_gpt", "lstm")}


# Rules, and what stands in their place.


def _all_values(graph: Any, _: Any) -> set[Any]:
    values = {value for node in graph.nodes for value in (*node.inputs, *node.outputs)}
    return set(filter(is_inexact, {*graph.inputs, *graph.outputs, *values}))


def _neutral_values_decide(value: Any, node: Any, inside: Any, level: Any) -> str:
    is_open = value.is_float32 and value.producer not in inside and value.constant is None
    if is_open and value not in level.facts.dependent:
        return "a float32 operand"
    return WHY_OPERAND(value, node, inside, level)


def _island_with(**changed: Any) -> Callable[..., Any]:
    return lambda **fields: ISLAND(**{**fields, **changed})


WHY_OPERAND = _islands._why_operand
ISLAND = _islands.Island
READ_HALF = _planner.Planner._read_half


def _only_streams(_: Any, __: Any, ___: Any, streams: Sequence[bool]) -> Any:
    return list(streams), [False] * len(streams)


def _half_arithmetic(node: Any) -> Arithmetic:
    # The function by which a scatter combines numbers stays as it was traced.
    return Arithmetic.ROUNDED if node.name.startswith("scatter") else Arithmetic.HALF


def _without_derivatives() -> Any:
    return types.SimpleNamespace(**{**vars(_jax_compat), "is_differentiated": lambda _: False})


class Rule(NamedTuple):
    """A rule of the planner, and what switches it off: by address, what stands there instead.

    Nothing stands instead of a pass, which is left out by its name.
    """

    name: str
    off: dict[str, Any] = {}

    def switched_off(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the planner does without it."""
        return replaced(self.off) if self.off else without_pass(self.name)


RULES = [
    Rule("islands are recomputed", {"_islands.choose_recompute": lambda *_: False}),
    Rule("peeling", {"_islands.peel": lambda nodes, *_: ([], nodes)}),
    Rule("half between islands", {"_islands.half_between": lambda *_: set()}),
    Rule("slopes are factors", {"_islands.factors_in_half": lambda *_: set()}),
    Rule("numbers are repeated inside", {"_islands.repeated_numbers": lambda _: []}),
    Rule("derivatives inside are kept", {"_islands._jax_compat": _without_derivatives()}),
    Rule("cuts", {"_facts.find_cuts": lambda *_: set()}),
    Rule("islands leave half", {"_level.Level.leaves_half": lambda *_: False}),
    Rule("only what feeds is half", {"_facts.feeding_values": _all_values}),
    Rule("what is carried is not rounded", {"_facts.carried_values": lambda *_: set()}),
    Rule("embeddings", {"_facts._is_embedding": lambda *_: False}),
    Rule("coordinates are no embeddings", {"_facts._is_coordinate": lambda *_: False}),
    Rule("neutral values do not decide", {"_islands._why_operand": _neutral_values_decide}),
    Rule(
        "repeated in float32, then rounded",
        {
            "_planner.Planner._read_half": lambda *args: READ_HALF(*args)._replace(shape=None),
            "_planner._half_arithmetic": _half_arithmetic,
        },
    ),
    Rule("masks saturate", {"_level.Level.may_be_mask": lambda *_: False}),
    Rule("constants are looked at", {"_numbers.fits": lambda *_: True}),
    Rule("one minus a bounded value", {"_islands._beside_one": lambda _: None}),
    Rule("outer products are multiplications", {"_equations.contracts_nothing": lambda _: False}),
    Rule("counts are exact", {"_flatten._products.why_exact": lambda *_: ""}),
    Rule("angles are exact", {"_flatten._products.reads_inputs": lambda _: False}),
    Rule("streams are carried in half", {"kinds.loops.LAYERS": 0}),
    Rule("states of products are carried in half", {"kinds.loops.carried_in_half": _only_streams}),
    Rule("one cast for all readers", {"_islands.Island": _island_with(shares_casts=False)}),
    Rule("a cast of its own elsewhere", {"_islands.Island": _island_with(shares_casts=True)}),
    *(
        Rule(name)
        for name in dict.fromkeys(one.name for target in targets() for one in target.passes)
    ),
]


# Small programs, each made for one rule.


def normal(key: int, *shape: int) -> jax.Array:
    """Returns an array of normal numbers."""
    return jax.random.normal(jax.random.key(key), shape)


def biased():
    """A bias, repeated over 16384 rows; only the bias is differentiated."""

    def loss(bias, x, w, v):
        return jnp.mean(jnp.tanh(x @ w + bias) @ v)

    return loss, jnp.full(16, 0.5), (normal(2, 16384, 16), normal(0, 16, 16) / 4, jnp.eye(16))


def masked():
    """The largest of scores to which an argument adds -1e9, one row masked throughout."""

    def loss(params, x, mask):
        scores, _ = jax.lax.top_k(x @ params["w"] + mask, 8)
        return jnp.mean((jax.nn.softmax(scores) @ params["v"]) ** 2)

    mask = jnp.where(jnp.tril(jnp.ones((32, 32))) > 0, 0, -1e9).at[3].set(-1e9)
    params = {"w": normal(0, 32, 32) / 6, "v": normal(1, 8, 8) / 3}
    return loss, params, (normal(2, 32, 32), mask)


def stepping(turns=512):
    """A loop that adds small steps to a state, of which a product is read at each turn."""

    def loss(params, x):
        def turn(state, _):
            state = state + 0.01 * jnp.tanh(state @ params["w"])
            return state, jnp.tanh(state @ params["v"])

        state, read = jax.lax.scan(turn, x, None, length=turns)
        return jnp.mean(state**2) + jnp.mean(read**2)

    params = {"w": normal(0, 16, 16) / 4, "v": normal(1, 16, 16) / 4}
    return loss, params, (normal(2, 8, 16),)


def distances():
    """Distances of points that are looked up, in a layer."""

    def loss(params, pairs):
        points = params["points"][pairs]
        return jnp.mean((jnp.tanh(100 * (points[:, 0] - points[:, 1])) @ params["w"]) ** 2)

    points = 10 + normal(0, 64, 8) / 100
    pairs = jax.random.randint(jax.random.key(1), (256, 2), 0, 64)
    return loss, {"points": points, "w": normal(2, 8, 8) / 3}, (pairs,)


def saturating():
    """What tanh leaves of one, large enough to read after."""

    def loss(params, x):
        return jnp.mean(((1 - jnp.tanh(4 + x @ params["w"])) @ params["v"]) ** 2)

    return loss, {"w": normal(0, 16, 16) / 8, "v": normal(1, 16, 16)}, (normal(2, 64, 16),)


def guarded():
    """A quotient whose denominator is kept from zero by 1e-12; some rows are zero."""

    def loss(params, x):
        y = jnp.abs(x) @ jnp.abs(params["w"])
        return jnp.mean(((y / (y + 1e-12)) @ params["v"]) ** 2)

    x = normal(2, 64, 16).at[:8].set(0)
    return loss, {"w": normal(0, 16, 16) / 8, "v": normal(1, 16, 16)}, (x,)


def counted():
    """Distances from the mean of the positions before, which a product computes."""

    def loss(params, x, positions):
        steps = positions.astype(jnp.float32)
        means = jnp.tril(jnp.ones((1024, 1024)) / steps) @ steps
        return jnp.mean(((x @ params["w"] * (means - steps / 2)) @ params["v"]) ** 2)

    params = {"w": normal(0, 16, 16), "v": normal(1, 16, 16)}
    return loss, params, (normal(2, 1024, 16), jnp.arange(1, 1025)[:, None])


def featured():
    """Fourier features of coordinates."""

    def loss(params, x):
        features = jnp.sin(2 * jnp.pi * x @ params["b"])
        return jnp.mean((jnp.tanh(features @ params["w"]) @ params["v"]) ** 2)

    params = {"b": 8 * normal(0, 2, 16), "w": normal(1, 16, 16), "v": normal(2, 16, 16)}
    return loss, params, (normal(3, 256, 2),)


PROGRAMS = [
    Model(make.__name__, make, {})
    for make in (biased, masked, stepping, distances, saturating, guarded, counted, featured)
]


# What is measured.


def cost(model: Model, base: dict[str, Any] | None, machine: str = "h200") -> dict[str, Any]:
    """Returns the figures of a training step, and its text before XLA sees it.

    Args:
      base: the same with all rules; where the text is the same, so are the figures.
      machine: a GPU or a TPU.
    """
    is_tpu = machine in TPUS
    half, platform = ("bfloat16", "tpu") if is_tpu else ("float16", "gpu")
    step, arguments = make_step(model, "autocast", SIZES[model.name][0], half, platform=platform)
    text = jax.jit(step).lower(*arguments).as_text()
    if base is not None and text == base["text"]:
        return base
    program = compile_for(machine, step, *arguments, donate_argnums=0)
    figures = FIGURES_OF_TPUS if is_tpu else FIGURES
    return {"text": text, **{figure: getattr(program, figure) for figure in figures}}


@functools.cache
def made(model: Model) -> Any:
    """Returns the loss of a small model, its parameters and its batch."""
    return model.make(**model.small, **SIZES.get(model.name, ({}, {}))[1])


def gradient_of(model: Model, loss: Callable[..., Any], scale: float) -> Any:
    """Returns the gradient of a small model, lowered for the CPU."""

    def scaled(*args: Any) -> Any:
        result = loss(*args)
        return (result[0] if model.has_aux else result) * scale

    return jax.jit(jax.grad(scaled)).lower(*made(model)[1:2], *made(model)[2])


@functools.cache
def in_float32(model: Model) -> np.ndarray:
    """Returns the gradient without autocast."""
    loss, params, batch = made(model)
    return numbers(gradient_of(model, loss, 1).compile()(params, *batch))


def errors(model: Model, base: dict[str, Any] | None) -> dict[str, Any]:
    """Returns for each half type the relative error of the whole gradient, and the text."""
    loss, params, batch = made(model)
    reference, found = in_float32(model), {}
    sizes = {} if model in PROGRAMS else SMALL
    for half, scale in HALVES.items():
        with replaced(sizes):
            lowered = gradient_of(model, jmp.autocast(loss, f"mixed_{half}"), scale)
        text = lowered.as_text()
        if base is not None and text == base[half]["text"]:
            found[half] = base[half]
            continue
        got = numbers(lowered.compile()(params, *batch)) / scale
        found[half] = {"text": text, "error": relative_error(got, reference)}
    return found


def lean(program: LeanProgram, base: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the figures of a step of a few lines in float16, and its text, for an H200."""
    loss = jmp.autocast(program.loss(jnp.float32), "mixed_float16", platform="gpu")
    step = program.step(loss)
    text = jax.jit(step).lower(program.params, *program.batch).as_text()
    if base is not None and text == base["text"]:
        return base
    found = compile_for_gpu("h200", step, program.params, *program.batch)
    return {"text": text, **{figure: getattr(found, figure) for figure in FIGURES}}


MEASURED: list[tuple[Any, str, Callable[..., Any]]] = [
    *((model, "cost", cost) for model in MODELS if model.name in SIZES),
    *((program, "lean", lean) for program in LEAN_PROGRAMS),
    *(
        (model, machine, functools.partial(cost, machine=machine))
        for machine, names in ON_TPUS.items()
        for model in MODELS
        if model.name in names
    ),
    # A ResNet at random initialisation amplifies any rounding.
    *((m, "errors", errors) for m in MODELS if m.name in SIZES and not m.noisy),
    *((program, "errors", errors) for program in PROGRAMS),
]


def measure(names: list[str], found: dict[str, Any]) -> None:
    """Measures models without each of the rules; `found` is filled, model by model."""
    for model, what, measured in MEASURED:
        if what in TPUS and importlib.util.find_spec("libtpu") is None:
            continue
        wanted = [name for name in names if name not in ("cost", "errors", "lean", *TPUS)]
        if (wanted and model.name not in wanted) or (wanted != names and what not in names):
            continue
        # They change neither what an H200 moves nor what is rounded, and may change TPUs' programs.
        jax.config.update("jax_disable_most_optimizations", what not in TPUS)
        base = measured(model, None)
        found.setdefault("all rules", {}).setdefault(what, {})[model.name] = _without_text(base)
        for rule in RULES:
            with rule.switched_off():
                got = measured(model, base)
            figures = "the same" if got == base else _without_text(got)
            found.setdefault(rule.name, {}).setdefault(what, {})[model.name] = figures
            print(model.name, what, rule.name, figures, file=sys.stderr, flush=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        jax.clear_caches()


def _without_text(figures: dict[str, Any]) -> dict[str, Any]:
    if "text" not in figures:
        return {half: inner["error"] for half, inner in figures.items()}
    return {name: figure for name, figure in figures.items() if name != "text"}


# Ratios.


def ratios(figures: Any, base: dict[str, float]) -> str:
    """Returns figures over those with all rules; "" where the program is the same.

    A program for a TPU may hold all its intermediate values in vector memory, which does not count.
    """
    if figures == "the same":
        return ""
    pairs = [(value, base[name]) for name, value in figures.items()]
    return " ".join(_short(value / before) if before else "–" for value, before in pairs)


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def main(names: list[str]) -> None:
    """Measures the models that are named, or all."""
    warnings.simplefilter("ignore")
    measure(names, json.loads(RESULTS.read_text()) if names and RESULTS.exists() else {})


if __name__ == "__main__":
    main(sys.argv[1:])
