"""How the planner tells what each value may lose: a program each; plans are in `plan_listings/`.

Arrays have 128 x 128 elements unless said otherwise: large enough to be recomputed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import Precision

import jmp
from testbed.planned.cases import INDICES, ROW, W, X, new_cases, struct

CASES, planned = new_cases()

# Operands, constants and arrays.


@planned(X, W)
def dead_readers(x, w):
    """What nothing needs decides nothing: p does not feed."""
    p = jnp.exp(x @ w)
    _ = p @ w
    return p.sum()


@planned(X, W)
def small_numbers(x, w):
    """1e-5 is subnormal in float16: digits are lost. Infinity and zero are held."""
    y = x @ w
    return lax.max(y, 1e-5) @ w, lax.max(y, -jnp.inf) @ w, lax.max(y, 0.0) @ w


@planned(X, W)
def residual_around_a_product(x, w):
    """Operations on both sides of a product are two islands, and in order."""
    y = jnp.exp(x @ w)
    return (jnp.exp(y @ w) + y) @ w


@planned(X, W, INDICES)
def tables(x, w, tokens):
    """No embedding: a table of one number, rows that are compared, rows of a region."""
    ones = jnp.ones((128, 128))[tokens]
    same = x[tokens].T == w
    inside = jmp.full_precision(lambda: x[tokens])()
    return (x @ w + ones) @ w, jnp.where(same, x @ w, 0) @ w, inside @ w


@planned(X, W)
def cases_of_a_bounded_result(x, w):
    """One plus and minus a bounded result; two minus it, and one minus any other, are half."""
    y, z = x @ w, x @ w
    return (jnp.tanh(y) - 1) @ w, (2 - jnp.tanh(y * 1)) @ w, (1 - z) @ w


# What a product reads.


@planned(X, W)
def solved_between_products(x, w):
    """A solver and a precise product read float32: nothing is rounded in front of them."""
    solved = jnp.linalg.cholesky(jnp.exp(x @ w))
    precise = jnp.matmul(jnp.exp(x @ w), w, precision=Precision.HIGHEST)
    return solved @ w, precise @ w


@planned(X, W)
def read_by_solvers_and_products(x, w):
    """What both read is half; a product behind the next operation of an island does not count."""
    solve = functools.partial(lax.linalg.cholesky, symmetrize_input=False)
    y, z = jnp.exp(x @ w), jnp.exp(x @ w)
    return y @ w, solve(y), (z + 1e9) @ w, solve(z)


@planned(X, W, rules=[("head", "p=f32,c=f32,o=f16")])
def rule_on_parameters(x, w):
    """What a rule rounds comes out half, also of parameters alone."""
    with jax.named_scope("head"):
        v = jnp.sin(w)
    return (x @ w + v) @ w


@planned(X, W, ROW, INDICES)
def fixed_rows(x, w, b, places):
    """No gradient flows into a row of positions: it is rounded before it is repeated."""
    positions = jnp.sin(jnp.arange(128.0))
    given = jnp.sin(places.astype(jnp.float32))
    return (x @ w + positions) @ w, (x @ w + positions * b) @ w, (x @ w + given) @ w


# Tables.


@planned(X, W, INDICES)
def rows_that_are_normalised(x, w, tokens):
    """Rows that are compared with what is made of them, or with a number, are an embedding."""
    rows = x[tokens]
    centred = rows - rows.mean(-1, keepdims=True)
    moved = x[tokens].reshape(64, 256).reshape(128, 128)
    return centred @ w, (x[tokens] - 1.0) @ w, (moved - jnp.sin(moved)) @ w


@planned(X, W, INDICES)
def rows_that_are_moved_and_compared(x, w, tokens):
    """Rows that are compared with others are not, however they are moved before."""
    moved, both = x[tokens].reshape(64, 256).reshape(128, 128), x[tokens]
    return (moved - w) @ w, (both - both.T * w) @ w, (both.T - x[tokens]) @ w


# Numbers.


@planned(X, W)
def arrays_of_one_number(x, w):
    """An array of equal numbers is that number; zeros and infinities fit, and 1e-9 does not."""
    y, z, v = x @ w, x @ w, x @ w
    held = np.where(np.tri(128) > 0, 0, -np.inf).astype(np.float32)
    same, other = np.full((128, 128), 0.5, np.float32), np.full((128, 128), 1e-9, np.float32)
    one = np.full((1, 1), 1, np.float32)
    return (
        (y + same) @ w,
        lax.max(z, held) @ w,
        (v + other) @ w,
        (jnp.tanh(v) - 2 * same) @ w,
        (one - jnp.tanh(v)) @ w,
    )


@planned(struct(512, 256), struct(256, 256))
def arrays_too_large_to_look_at(x, w):
    """Up to 65536 numbers are looked at; a larger array is an input."""
    looked_at = np.full((256, 256), 1e9, np.float32)
    larger = np.full((512, 256), 1e9, np.float32)
    return ((x @ w)[:256] * looked_at) @ w, (x @ w * larger) @ w


@planned(X, W)
def small_and_large_in_one_array(x, w):
    """The smallest number counts, and so does the largest."""
    small, large = np.ones(128, np.float32), np.ones(128, np.float32)
    small[3:5], large[3] = (1e-9, 0), -1e9
    return (x @ w * small) @ w, (x @ w * large) @ w, (x @ w * np.ones(0, np.float32).sum()) @ w


@planned(X, W, struct(128, 128, dtype=bool))
def what_is_known_behind_a_choice(x, w, keep):
    """What may hold -1e9 is hard wherever it is moved to; what was a boolean is not."""
    mask = jnp.where(keep, 0.0, -1e9)
    joined = jnp.concatenate([mask[:64], jnp.zeros((64, 128))])
    return (x @ w + mask) @ w, (x @ w * joined.T) @ w, (x @ w + keep[:1].astype(float)) @ w


@planned(X, W, ROW)
def what_is_known_of_moved_numbers(x, w, b):
    """A row that is reshaped and repeated is a row; a turned or negated one is another value."""
    row = jnp.broadcast_to(b.reshape(1, 128), (128, 128))
    column = jnp.broadcast_to(-b[:, None], (128, 128))
    return (x @ w + row) @ w, (x @ w + column) @ w, (x @ w + row[:, ::-1]) @ w


# Other dtypes and reasons.


@planned(X, W)
def reasons_of_products(x, w):
    """What keeps a product from being lowered."""
    y = x @ w
    half = y.astype(jnp.float16)
    algorithm = lax.DotAlgorithmPreset.F32_F32_F32
    return (
        lax.dot(y, w, precision=algorithm),
        lax.dot(half, half, precision=algorithm, preferred_element_type=jnp.float32),
        lax.dot(half, half),
        lax.dot(half, w.astype(jnp.bfloat16), preferred_element_type=jnp.float32),
        lax.dot(half, w, preferred_element_type=jnp.float32),
        jnp.matmul(y, w, precision=Precision.HIGH),
    )


@planned(struct(4, 128, 128), W)
def sum_over_a_mapped_axis(xs, w):
    """What vmap makes of a sum over its axis is a sum like any other: part of an island."""

    def centred(x):
        y = x @ w
        return (y - lax.pmean(y, "batch")) @ w, lax.psum(y, "batch")

    return jax.vmap(centred, axis_name="batch")(xs)


@planned(struct(4, 128, 128), W)
def sum_over_a_mapped_axis_and_devices(xs, w):
    """Over devices too it is a sum of theirs."""
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = jax.sharding.PartitionSpec("devices"), jax.sharding.PartitionSpec()
    summed = jax.vmap(lambda x: lax.psum(x @ w, ("batch", "devices")), axis_name="batch")
    options = {"in_specs": rows, "out_specs": everywhere, "check_vma": False}
    return jax.shard_map(summed, mesh=mesh, **options)(xs)


@planned(X, W)
def user_asks_for_float32_operations(x, w):
    """A region without products: its island reads half and is float32 throughout."""
    y = jmp.full_precision(lambda y: jnp.tanh(y) * 2)(x @ w)
    return y @ w, jmp.full_precision(lambda y: jnp.sort(y))(x @ w) @ w


@planned(X, W, struct(128, 128), struct(1, 128))
def masks_that_may_be(x, w, mask, row):
    """Saturated: inputs of two axes that a choice or an addition joins; one row is a bias."""
    y, z = x @ w, x @ w
    joined = jnp.concatenate([y[:64], mask[:64]])
    return (z + row) @ w, lax.max(y, row.T * jnp.ones(())) @ w, joined @ w, (z * row) @ w
