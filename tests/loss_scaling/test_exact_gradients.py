"""Values and gradients of scaled losses are exactly those that are written down.

Numbers are small multiples of powers of two, so that every sum is exact.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp

W = {"a": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([2.0, 4.0], jnp.float16)}
ROWS = jnp.array([[1.0, 2.0, 0.0], [0.0, -1.0, 2.0], [4.0, 0.0, 1.0], [2.0, 2.0, 2.0]])
BAD = ROWS.at[1, 0].set(jnp.inf)
COUNTS = jnp.array([1, 0, 2, 1])


def mean(w, x):
    return (x @ w["a"]).mean() * w["b"].astype(jnp.float32).sum()


def mean_and_aux(w, x):
    return mean(w, x), {"rows": x.sum(1)}


def total(w, x, counts):
    return ((x @ w["a"]) * counts).sum() * w["b"].astype(jnp.float32).sum()


def count(_, counts):
    return counts.sum()


def accumulated(fun=mean, **options):
    return jmp.accumulated_value_and_grad(fun, jmp.StaticLossScale(8.0), **options)


BY_COUNTS = {"batch_argnums": (1, 2), "weight": count}
CASES = {
    "scaled": (jmp.scaled_value_and_grad(mean, jmp.StaticLossScale(8.0)), (W, ROWS)),
    "two steps": (accumulated(steps=2), (W, ROWS)),
    "one step": (accumulated(steps=1), (W, ROWS)),
    "aux": (accumulated(mean_and_aux, steps=2, has_aux=True), (W, ROWS)),
    "counts": (accumulated(total, steps=2, **BY_COUNTS), (W, ROWS, COUNTS)),
    "counts, one step": (accumulated(total, steps=1, **BY_COUNTS), (W, ROWS, COUNTS)),
    "no count": (accumulated(total, steps=2, **BY_COUNTS), (W, ROWS, 0 * COUNTS)),
    "bad": (accumulated(steps=2), (W, BAD)),
    "bad left out": (accumulated(steps=2, skip="micro_batch"), (W, BAD)),
    "bad left out, one step": (accumulated(steps=1, skip="micro_batch"), (W, BAD)),
    "bad left out, counts": (
        accumulated(total, steps=4, skip="micro_batch", **BY_COUNTS), (W, BAD, COUNTS)),
    "all bad": (accumulated(steps=2, skip="micro_batch"), (W, BAD * jnp.inf)),
    "in float16": (accumulated(steps=2, accumulate_dtype=jnp.float16), (W, ROWS)),
    "of the second": (
        accumulated(lambda x, w: mean(w, x), steps=2, argnums=1, batch_argnums=0), (ROWS, W)),
}  # fmt: skip
WRITTEN = {
    "scaled": "float32 5.25 float32 [84.0, 36.0, 60.0] float16 [7.0, 7.0]",
    "two steps": "float32 5.25 float32 [84.0, 36.0, 60.0] float32 [7.0, 7.0]",
    "one step": "float32 5.25 float32 [84.0, 36.0, 60.0] float32 [7.0, 7.0]",
    "aux": "float32 5.25 float32 [[3.0, 5.0], [1.0, 6.0]] "
    "float32 [84.0, 36.0, 60.0] float32 [7.0, 7.0]",
    "counts": "float32 7.5 float32 [132.0, 48.0, 48.0] float32 [10.0, 10.0]",
    "counts, one step": "float32 7.5 float32 [132.0, 48.0, 48.0] float32 [10.0, 10.0]",
    "no count": "float32 nan float32 [nan, nan, nan] float32 [nan, nan]",
    "bad": "float32 inf float32 [inf, 36.0, 60.0] float32 [inf, inf]",
    "bad left out": "float32 4.5 float32 [120.0, 48.0, 24.0] float32 [6.0, 6.0]",
    "bad left out, one step": "float32 nan float32 [nan, nan, nan] float32 [nan, nan]",
    "bad left out, counts": "float32 7.5 float32 [132.0, 48.0, 48.0] float32 [10.0, 10.0]",
    "all bad": "float32 nan float32 [nan, nan, nan] float32 [nan, nan]",
    "in float16": "float32 5.25 float32 [84.0, 36.0, 60.0] float32 [7.0, 7.0]",
    "of the second": "float32 5.25 float32 [84.0, 36.0, 60.0] float32 [7.0, 7.0]",
}


def shown(tree):
    leaves = jax.tree.leaves(tree)
    return " ".join(f"{x.dtype} {np.asarray(x, np.float64).tolist()}" for x in leaves)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_exact(name):
    function, args = CASES[name]
    assert shown(jax.jit(function)(*args)) == WRITTEN[name]
