"""Closer looks at single rules of the planner: a small program each, with its plan in the docstring.

A line is a step. `f32>f16` is a float32 operand that is read in half, `->` what is stored. Arrays
have 128 x 128 elements unless said otherwise: large enough to be recomputed.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp
from tests.plans import (
    HAS_THESE_TRACES,
    IMAGE,
    INDICES,
    KERNEL,
    ROW,
    Case,
    W,
    X,
    add_case,
    expected,
    listing_of,
    struct,
)

CASES: list[Case] = []
planned = functools.partial(add_case, CASES)

# Operands, constants and arrays.


@planned(X, W)
def dead_readers(x, w):
    """What nothing needs decides nothing: p does not feed.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f32
      exp; full
      reduce_sum; full
    """
    p = jnp.exp(x @ w)
    _ = p @ w
    return p.sum()


@planned(X, W)
def small_numbers(x, w):
    """1e-5 is subnormal in float16: digits are lost. Infinity and zero are held.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16 saturated
      max; float16 does not hold the constant 1e-05
    dot_general in half: f32>f16 f32>f16 -> f16
    max in half: f32>f16 -inf f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    max in half: f32>f16 0 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    return lax.max(y, 1e-5) @ w, lax.max(y, -jnp.inf) @ w, lax.max(y, 0.0) @ w


@planned(X, W, policy="mixed_bfloat16")
def small_numbers_in_bfloat16(x, w):
    """bfloat16 holds 1e-5 as well as another number.

    dot_general in half: f32>bf16 f32>bf16 -> bf16
    max in half: f32>bf16 1e-05 f32>bf16 -> bf16
    dot_general in half: f32>bf16 f32>bf16 -> bf16
    """
    return lax.max(x @ w, 1e-5) @ w


@planned(X, W, ROW)
def mask_over_the_keys(x, w, mask):
    """What is added to the scores of an attention stays in the island.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    island, recompute, apart: f32>f16 f32 -> f16
      add
      reduce_max
      max
      broadcast_in_dim
      stop_gradient
      sub
      exp; full
      reduce_sum; full
      broadcast_in_dim
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jax.nn.softmax(x @ w + mask, -1) @ w


@planned(X, W, ROW)
def bias_before_the_loss(x, w, b):
    """A bias before a loss is peeled off.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    add in half: f32>f16 f32>f16 repeated -> f16
    island, recompute, apart: f32>f16 -> f32
      reduce_max
      max
      broadcast_in_dim
      stop_gradient
      sub
      exp; full
      reduce_sum; full
      broadcast_in_dim
      log; full
      sub
      reduce_sum; full
    """
    return jax.nn.log_softmax(x @ w + b, -1).sum()


@planned(X, W)
def sum_and_its_parts(x, w):
    """No addition is peeled off where both operands enter anyway.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32>f16 -> f16
      add
      exp; full
      sin
      mul
      sin
      mul
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = x @ w, x @ w
    return (jnp.exp(y + z) * jnp.sin(y) * jnp.sin(z)) @ w


@planned(X, W, recompute="all")
def linear_island(x, w):
    """An island that is linear throughout is not peeled away.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32 -> f16 saturated
      sub; an operand is a float32 input as large as the result
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return (x @ w - w) @ w


@planned(X, W)
def row_maximum(x, w):
    """A reduction over rows without a sum is recomputed.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      mul; float16 does not hold the constant 1e+09
      reduce_max
      broadcast_in_dim
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    return (y / jnp.max(y * 1e9, -1, keepdims=True)) @ w


@planned(X, W)
def residual_around_a_product(x, w):
    """Operations on both sides of a product are two islands, and in order.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32>f16 -> f16
      exp; full
      add
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = jnp.exp(x @ w)
    return (jnp.exp(y @ w) + y) @ w


@planned(IMAGE, KERNEL)
def norm_with_one_statistic(x, k):
    """A norm over everything has one sum: it is no norm over leading axes.

    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      mul; a square, whose range a half type does not hold
      reduce_sum; full
      rsqrt; full
      mul
      sin
    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    """
    conv = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    y = conv(x, k)
    y = y * lax.rsqrt((y * y).sum())
    return conv(jnp.sin(y), k)


@planned(IMAGE, KERNEL, struct(16))
def norm_and_residual(x, k, scale):
    """The end of a norm is its last affine step; what is added then is half.

    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    island, plain, apart: f32>f16 f32 -> f16
      reduce_sum; full
      div
      broadcast_in_dim
      sub
      mul
      sub
    tanh in half: f32>f16 -> f16
    add in half: f32>f16 f32>f16 -> f16
    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 f32 -> f16
      mul; an operand is a float32 input as large as the result
    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    """
    conv = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    y = conv(x, k)
    z = (y - y.mean((0, 1, 2))) * scale - 0.5
    return conv(jnp.tanh(z) + y, k), conv(z * x, k)


@planned(X, W, INDICES)
def sorted_in_float32(x, w, tokens):
    """Barriers that follow read half only if all that comes from products is half.

    dot_general in half: f32>f16 f32>f16 -> f16
    cumsum in float32: f32 -> f32
    sort in float32: f32 f32 -> f32 f32
    sort in float32: f32 f32 -> f32 f32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    broadcast_in_dim: i32 -> i32
    scatter-min in float32, rounded: f32 i32 f32 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    cummax in half: f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    wide = jnp.cumsum(y, -1)
    keys, values = lax.sort((wide, y), num_keys=1)
    _, parameters = lax.sort((y, w), num_keys=1)
    smallest = y.at[tokens].min(y)
    return keys @ w, values @ w, parameters @ w, smallest @ w, lax.cummax(y) @ w


@planned(X, W, INDICES)
def tables(x, w, tokens):
    """No embedding: a table of one number, rows that are compared, rows of a region.

    broadcast_in_dim in float32: 1 f32 -> f32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    broadcast_in_dim: i32 -> i32
    gather in float32: f32 i32 -> f32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    broadcast_in_dim: i32 -> i32
    gather in float32: f32 i32 -> f32
    transpose in float32: f32 -> f32
    eq in float32: f32 f32 -> bool
    lt: i32 i32 -> bool; the user asked for float32 here
    add: i32 i32 -> i32; the user asked for float32 here
    select_n: bool i32 i32 -> i32; the user asked for float32 here
    broadcast_in_dim: i32 -> i32; the user asked for float32 here
    gather in float32: f32 i32 -> f32; the user asked for float32 here
    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 f32 -> f16 saturated
      add; an operand is a float32 input as large as the result
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    convert_element_type in float32: i32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    select_n in half: bool f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    ones = jnp.ones((128, 128))[tokens]
    same = x[tokens].T == w
    inside = jmp.full_precision(lambda: x[tokens])()
    return (x @ w + ones) @ w, jnp.where(same, x @ w, 0) @ w, inside @ w


@planned(X, W)
def cases_of_a_bounded_result(x, w):
    """One plus and minus a bounded result; two minus it, and one minus any other, are half.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      tanh
      sub; near its bound a bounded function leaves few digits of one
    dot_general in half: f32>f16 f32>f16 -> f16
    mul in half: f32>f16 1 f32>f16 -> f16
    tanh in half: f32>f16 -> f16
    sub in half: 2 f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    sub in half: 1 f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = x @ w, x @ w
    return (jnp.tanh(y) - 1) @ w, (2 - jnp.tanh(y * 1)) @ w, (1 - z) @ w


@planned(X, W, struct(128, 128, dtype=jnp.int32))
def other_dtypes(x, w, counts):
    """Integers are no operands that decide.

    dot_general in half: f32>f16 f32>f16 -> f16
    convert_element_type in float32: i32 -> f32
    island, plain, apart: f32>f16 f32 -> f16
      mul; an operand is a float32 input as large as the result
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general: i32 i32 -> i32; the user chose other dtypes
    convert_element_type in float32: f32 -> i32
    add: i32 i32 -> i32
    """
    y = x @ w
    return (y * counts.astype(jnp.float32)) @ w, (counts @ counts), (y.astype(int) + counts)


@pytest.mark.skipif(not HAS_THESE_TRACES, reason="the traces of JAX 0.10")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fun.__name__)
def test_plan(case):
    assert "\n".join(listing_of(case)) == expected(case)
