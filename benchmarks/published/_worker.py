"""Measures one model in a process of its own and writes JSON.

python -m benchmarks.published._worker hugging_face bert results.json
"""

import collections
import importlib.metadata
import json
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp
from benchmarks import published
from benchmarks.published import Model, Row
from jmp.autocasting._operations import is_product
from jmp.autocasting._propagation import walk
from jmp.diagnostics import precision_report
from jmp.diagnostics._places import module_and_line

HALVES = ("float16", "bfloat16")
# Taken in this order until the gradient is finite, as a dynamic loss scale would.
SCALES = {"float32": (1.0,), "float16": (2.0**12, 2.0**8, 2.0**4, 1.0), "bfloat16": (1.0,)}
POINTS = 5
# The programs run a few times, on a few numbers.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def by_autocast(row: Row, model: Model, half: str) -> Callable[..., Any]:
    return jmp.autocast(model.loss, f"mixed_{half}")


def by_hand(row: Row, model: Model, half: str) -> Callable[..., Any]:
    other = row.make(dtype=half)

    def loss(params: Any, batch: Any) -> Any:
        # As users of these options write it: the loss of half logits is computed in float32.
        return other.score(jmp.cast_to_full(other.call(other.apply, params, batch)), batch)

    return loss


def by_adapter(row: Row, model: Model, half: str) -> Callable[..., Any]:
    apply = row.adapter(model.apply, f"mixed_{half}")
    return lambda params, batch: model.score(model.call(apply, params, batch), batch)


def recipes_of(row: Row) -> dict[str, tuple[Callable[..., Any], str]]:
    found = {f"autocast {half}": (by_autocast, half) for half in HALVES}
    if row.by_hand:
        found |= {f"by hand {half}": (by_hand, half) for half in HALVES}
    if row.adapter:
        found["adapter float16"] = (by_adapter, "float16")
    return found


def measured(source: str, name: str) -> dict[str, Any]:
    """Returns what is written down for one model."""
    row = published.find(source, name)
    model = row.make()
    reference, gradients = run(model.loss, SCALES["float32"], model)
    del reference["others"]  # all of them
    recipes = {"float32": reference}
    for recipe, (make, half) in recipes_of(row).items():
        recipes[recipe] = attempt(make, row, model, half, gradients)
    return {"title": row.title, "source": source, "versions": versions(source), "recipes": recipes}


def attempt(
    make: Callable[..., Any], row: Row, model: Model, half: str, gradients: list[np.ndarray]
) -> dict[str, Any]:
    """Returns counts and errors of one recipe, or the exception it raised."""
    try:
        function = make(row, model, half)
        answer, found = run(function, SCALES[half], model)
        if make is by_autocast:
            answer["reasons"] = reasons(model.loss, half, model.params, model.batch)
    except Exception as error:  # a recipe that fails is a cell of the table
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    pairs = zip(found, gradients, strict=True)
    errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
    return answer | {"gradient_error": float(np.median(errors))}


def run(
    function: Any, scales: Sequence[float], model: Model
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Traces, compiles and runs loss and gradient.

    Returns: what was found, and the unscaled gradients: all parameters in one float64 vector. They
      are taken at several points: at one, a ReLU at zero may give half and float32 two gradients.
    """

    def step(scale: Any, params: Any, batch: Any) -> Any:
        return jmp.scaled_value_and_grad(function, scale)(params, batch)

    traced = jax.jit(step).trace(jmp.DynamicLossScale(1.0), model.params, model.batch)
    compiled = traced.lower().compile(QUICKLY)
    losses, gradients, used = [], [], []
    for params in points(model.params):
        for scale in scales:
            loss, scaled = compiled(jmp.DynamicLossScale(scale), params, model.batch)
            leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(scaled)]
            gradient = np.concatenate(leaves) / scale
            if np.isfinite(gradient).all():
                break
        losses.append(float(loss))
        gradients.append(gradient)
        used.append(scale)
    found = {
        "scale": min(used),
        "finite": bool(np.isfinite(losses).all() and np.isfinite(gradients).all()),
    }
    return counted(traced.jaxpr) | found, gradients


def points(params: Any) -> list[Any]:
    """Returns parameters near `params`, each number changed by some percents."""
    numbers = np.random.default_rng(0)

    def near(leaf: Any) -> Any:
        factors = 1 + 0.02 * numbers.normal(size=leaf.shape)
        return jnp.asarray(np.asarray(leaf) * factors, leaf.dtype)

    return [jax.tree.map(near, params) for _ in range(POINTS)]


def counted(closed: Any) -> dict[str, Any]:
    """Counts the products of a program, each once that stands in it, and names those not half."""
    total, others = 0, collections.Counter()
    for visit in walk(closed.jaxpr):
        equation: Any = visit.equation
        if not is_product(equation):
            continue
        total += 1
        dtypes = {atom.aval.dtype for atom in equation.invars}
        if not {str(d) for d in dtypes if jnp.issubdtype(d, jnp.floating)} <= set(HALVES):
            path, source = module_and_line(visit)
            others[f"{equation.primitive.name} at {short(source)} ({path})"] += 1
    return {"products": total, "half": total - others.total(), "others": dict(others)}


def reasons(function: Callable[..., Any], half: str, *arguments: Any) -> list[dict[str, Any]]:
    """Returns the products of the forward pass that are not half, and why."""
    report = precision_report(function, f"mixed_{half}")(*arguments)
    return [
        {
            "operation": row.operation,
            "source": short(row.source),
            "why": row.why,
            "times": row.times,
        }
        for row in report.rows
        if row.kind == "product" and row.dtype_in not in HALVES
    ]


def short(source: str) -> str:
    """Returns a file's place without that of the environment it is in."""
    return source.rpartition("site-packages/")[2]


def versions(source: str) -> dict[str, str]:
    packages = ("jax", "jaxlib", *published.SOURCES[source][1])
    return {package: importlib.metadata.version(package) for package in packages}


if __name__ == "__main__":
    result = measured(*sys.argv[1:3])
    pathlib.Path(sys.argv[3]).write_text(json.dumps(result, indent=1) + "\n")
