"""Measures a model that generates: what is half, what its loops carry, and the next tokens.

The float32 model generates a text. Every recipe then reads it one token a turn, and its choice of
each next token and its log-probabilities are compared with those of float32.
"""

import collections
import functools
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp
from benchmarks.published import Generation, Row
from jmp import _jax_compat
from jmp.autocasting._propagation import walk

HALVES = ("float16", "bfloat16")


def measured_generation(
    row: Row, model: Generation, counted: Callable[[Any], dict[str, Any]], compiler_options: Any
) -> dict[str, Any]:
    """Returns the recipes of a model: "float32", and by autocast and by hand in each half.

    Args:
      counted: `(closed jaxpr) -> counts` of products.
    """

    def run(function: Any, *arguments: Any) -> tuple[Any, Any]:
        traced = jax.jit(function).trace(*arguments)
        return traced.jaxpr, traced.lower().compile(compiler_options)(*arguments)

    program, tokens = run(model.generate, model.params, *model.inputs)
    _, reference = run(model.score, model.params, tokens, *model.inputs)
    reference = log_probabilities(reference)
    first = counted(program)
    del first["others"]  # all of them
    recipes = {"float32": first | caches(program)}
    found = {}

    def attempt(recipe: str, generate: Any, score: Any) -> None:
        try:
            program, _ = run(generate, model.params, *model.inputs)
            _, logits = run(score, model.params, tokens, *model.inputs)
        except Exception as error:  # a recipe that fails is a cell of the table
            traceback.print_exc()
            recipes[recipe] = {"error": f"{type(error).__name__}: {error}"[:600]}
            return
        scores = found[recipe] = log_probabilities(logits)
        recipes[recipe] = counted(program) | caches(program)
        recipes[recipe] |= {
            "finite": bool(np.isfinite(scores).all()),
            "as_float32": same_tokens(scores, reference),
            "error_of_scores": float(np.sqrt(np.mean((scores - reference) ** 2))),
        }

    for half in HALVES:
        other = row.make(dtype=half)
        attempt(f"by hand {half}", other.generate, other.score)
        lower = functools.partial(jmp.autocast, policy=f"mixed_{half}", follow=["while"])
        mixed = [lower(model.generate), lower(model.score)]
        attempt(f"autocast {half}", *mixed)
        if {f"by hand {half}", f"autocast {half}"} <= set(found):
            pair = found[f"autocast {half}"], found[f"by hand {half}"]
            recipes[f"autocast {half}"]["as_by_hand"] = same_tokens(*pair)
    return recipes


def log_probabilities(logits: Any) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)), np.float64)


def same_tokens(scores: np.ndarray, others: np.ndarray) -> float:
    """Returns for which share of the turns both find the same token the most probable."""
    return float(np.mean(scores.argmax(-1) == others.argmax(-1)))


def caches(closed: Any) -> dict[str, dict[str, int]]:
    """Counts the floating arrays of three axes or more that loops carry, by their dtypes."""
    found: collections.Counter[str] = collections.Counter()
    for visit in walk(closed.jaxpr):
        equation = visit.equation
        if equation.primitive.name == "scan":
            _, carries, _ = _jax_compat.Scan.of(equation.params).split(equation.invars)
        elif equation.primitive.name == "while":
            _, _, carries = _jax_compat.While.of(equation.params).split(equation.invars)
        else:
            continue
        for atom in carries:
            if jnp.issubdtype(atom.aval.dtype, jnp.floating) and len(atom.aval.shape) > 2:
                found[str(atom.aval.dtype)] += 1
    return {"caches": dict(found)}
