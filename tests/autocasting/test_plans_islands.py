"""What becomes an island, and how it runs: a program each, with its plan in the docstring.

A line is a step. `f32>f16` is a float32 operand that is read in half, `->` what is stored. Arrays
have 128 x 128 elements unless said otherwise: large enough to be recomputed.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import jmp
from tests.autocasting.plans import (
    IMAGE,
    INDICES,
    KERNEL,
    ROW,
    Case,
    W,
    X,
    add_case,
    conv,
    plan_test,
    struct,
)

CASES: list[Case] = []
planned = functools.partial(add_case, CASES)

# What stands in front of an island, and what it keeps.


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
      tanh
      mul
      tanh
      mul
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = x @ w, x @ w
    return (jnp.exp(y + z) * jnp.tanh(y) * jnp.tanh(z)) @ w


@planned(X, W, ROW, recompute="all")
def linear_island(x, w, b):
    """An island that is linear throughout is not peeled away.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32 -> f16 saturated
      sub; an operand is a float32 input as large as the result
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    island, recompute, apart: f32>f16 f32 -> f32
      add; an operand is a float32 input, and no product reads the result
    """
    return (x @ w - w) @ w, x @ w + b


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


@planned(struct(16, 8), struct(8, 16392))
def softmax_over_long_rows(x, w):
    """Of rows too long for one kernel the maxima and the sums are kept, and come in one pass.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f32
      reduce_max [one number a row, kept for the backward pass: the rows are not read again]
      max
      broadcast_in_dim
      stop_gradient
      sub
      exp; full
      reduce_sum; full [sums of powers in one pass with the maxima of their rows, on a GPU; kept]
      broadcast_in_dim
      div
    """
    return jax.nn.softmax(x @ w, -1)


@planned(X, W)
def log_sum_exp(x, w):
    """So are those of shorter rows, if no row is made of them.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: 0 f32 -> f32
    island, recompute, apart: f32>f16 f32 -> f32
      reduce_max [one number a row, kept for the backward pass: the rows are not read again]
      max
      is_finite
      select_n
      stop_gradient
      broadcast_in_dim
      sub
      exp; full
      reduce_sum; full [sums of powers in one pass with the maxima of their rows, on a GPU; kept]
      abs
      log; full
      add
    """
    return jax.nn.logsumexp(x @ w, -1)


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
    y = conv(x, k)
    z = (y - y.mean((0, 1, 2))) * scale - 0.5
    return conv(jnp.tanh(z) + y, k), conv(z * x, k)


@planned(X, W)
def two_islands_of_one_depth(x, w):
    """Islands that do not touch are two.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = x @ w, x @ w
    return jnp.exp(y) @ w, jnp.exp(z) @ w


@planned(X, W)
def sums_of_both_kinds(x, w):
    """Sums over rows are kept, but a softmax is computed again as a whole.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute but sums, apart, shared casts: f32>f16 -> f16
      reduce_sum; full
      broadcast_in_dim
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      reduce_max
      broadcast_in_dim
      stop_gradient
      sub
      exp; full
      reduce_sum; full
      broadcast_in_dim
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16
      mul; float16 does not hold the constant 1e+09
      reduce_sum; full
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z, v = x @ w, x @ w, x @ w
    shifted = z - lax.stop_gradient(z.max(-1, keepdims=True))
    return (
        (y / jnp.sum(y, -1, keepdims=True)) @ w,
        (jnp.exp(shifted) / jnp.sum(shifted, -1, keepdims=True)) @ w,
        (v / jnp.sum(v * 1e9)) @ w,
    )


@planned(struct(127, 128), W)
def just_too_few_numbers(x, w):
    """127 x 128 elements are fewer than 16384.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jnp.exp(x @ w) @ w


@planned(X, W)
def expensive_but_small(x, w):
    """An expensive function of few numbers costs nothing in the backward pass.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16
      slice
      exp; full
      mul
      mul; float16 does not hold the constant 1e+09
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    return (y * jnp.exp(y[:1]) * 1e9) @ w


@planned(X, W, struct(128, 128, dtype=bool), ROW)
def what_islands_compute_for_themselves(x, w, keep, b):
    """Cheap large values made of small ones: masks and repetitions, but no sine, and no input.

    iota: -> i32
    broadcast_in_dim: i32 -> i32
    broadcast_in_dim: i32 -> i32
    ge: i32 i32 -> bool
    broadcast_in_dim in float32: 0 f32 -> f32
    broadcast_in_dim in float32: -1e+09 f32 -> f32
    select_n in float32: bool f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    sin in float32: f32 -> f32
    convert_element_type in float32: -1e+09 f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    select_n in float32: bool f32 f32 -> f32
    island, recompute, apart: f32>f16 -> f16
      clone iota
      clone broadcast_in_dim
      clone broadcast_in_dim
      clone ge
      clone broadcast_in_dim
      clone broadcast_in_dim
      clone select_n
      clone convert_element_type
      add; float16 does not hold an array of the program
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    convert_element_type in float32: f32 -> f32
    island, recompute, apart: f32>f16 f32 -> f16
      add; an operand is a float32 input as large as the result
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32 -> f16
      add; float16 does not hold an array of the program
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    rows = jnp.arange(128)
    causal = jnp.where(rows[:, None] >= rows, 0.0, -1e9)
    y, z, v = x @ w, x @ w, x @ w
    sine = jnp.sin(causal)
    given = jnp.where(keep, b, -1e9)
    return jnp.exp(y + causal) @ w, jnp.exp(z + sine) @ w, jnp.exp(v + given) @ w


@planned(X, W, ROW)
def two_linear_nodes_in_front(x, w, b):
    """A chain of additions is peeled off as one.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    add in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    add in half: f32>f16 f32>f16 repeated -> f16
    island, recompute, apart: f32>f16 -> f16
      reshape
      exp; full
      reshape
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = x @ w, x @ w
    s = (y + z + b).reshape(64, 256)
    return jnp.exp(s).reshape(128, 128) @ w


@planned(X, W, ROW)
def half_and_float32_in_front(x, w, b):
    """No addition of a float32 operand is peeled off, nor one whose operand the island reads.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    cumsum in float32: f32 -> f32
    island, recompute, apart: f32>f16 f32 -> f16
      add; an operand is float32
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    island, recompute, apart: f32>f16 f32 -> f16
      add
      exp; full
      mul
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = x @ w, x @ w
    summed = jnp.cumsum(x @ w, 0)
    return jnp.exp(y + summed) @ w, (jnp.exp(z + b) * z) @ w


@planned(struct(256, 128), W)
def part_beside_the_whole(x, w):
    """Parts of one value count as values by themselves, also where the whole enters too.

    dot_general in half: f32>f16 f32>f16 -> f16
    split in half: f32>f16 -> f16 f16
    add in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32>f16 -> f16
      exp; full
      slice
      tanh
      mul
    slice in float32: f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    a, b = jnp.split(y, 2, axis=1)
    return (jnp.exp(a + b) * jnp.tanh(y[:, 1:65])) @ w[:64]


@planned(X, W)
def three_values_and_their_sum(x, w):
    """Nothing is peeled off where all operands enter the rest anyway.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32>f16 f32>f16 -> f16
      add
      add
      exp; full
      tanh
      mul
      tanh
      mul
      tanh
      mul
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z, v = x @ w, x @ w, x @ w
    return (jnp.exp(y + z + v) * jnp.tanh(y) * jnp.tanh(z) * jnp.tanh(v)) @ w


@planned(X, W, ROW)
def numbers_in_front(x, w, b):
    """A number that is added is no bias; a full addition and a region stay in the island.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      add
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32; the user asked for float32 here
    island, recompute, apart: f32>f16 f32 -> f16
      add; the user asked for float32 here
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = x @ w, x @ w
    inside = jmp.full_precision(lambda z: z + b)
    return jnp.exp(y + 2.0) @ w, jnp.exp(inside(z)) @ w


@planned(X, W, ROW)
def scores_of_a_mask(x, w, b):
    """A bias in front of a maximum over rows is peeled off only where no product follows.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    add in half: f32>f16 f32>f16 repeated -> f16
    island, recompute, apart: f32>f16 f32 -> f16 saturated
      add
      mul; float16 does not hold the constant 1e+09
      reduce_max
      broadcast_in_dim
      sub
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f32
      mul; float16 does not hold the constant 1e+09
      reduce_max
      broadcast_in_dim
      sub
      reduce_sum; full
    """
    y, z = x @ w + b, x @ w + b
    return (y * 1e9 - y.max(-1, keepdims=True)) @ w, (z * 1e9 - z.max(-1, keepdims=True)).sum()


@planned(X, W, struct(16384))
def vector_as_large_as_the_result(x, w, b):
    """A vector as large as the result is no bias.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32 -> f16
      reshape
      add; an operand is a float32 input as large as the result
      exp; full
      reshape
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = jnp.exp((x @ w).reshape(-1) + b)
    return y.reshape(128, 128) @ w


@planned(X, W, ROW)
def repetition_of_a_sine(x, w, b):
    """The small value that a large one is made of is read, whatever it is made of.

    sin in float32: f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32 f32>f16 -> f16
      clone broadcast_in_dim
      clone mul
      add; an operand is a float32 input as large as the result
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    row = jnp.broadcast_to(jnp.sin(b), (128, 128))
    return jnp.exp(x @ w + row * 2) @ w


@planned(X, W, ROW)
def softmax_that_the_loss_reads_too(x, w, mask):
    """A mask over the keys stays in the island if any of its results feeds a product.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    island, recompute, apart: f32>f16 f32 -> f16 f32
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
      log; full
      reduce_sum; full
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    p = jax.nn.softmax(x @ w + mask, -1)
    return p @ w, jnp.log(p).sum()


# Norms over leading axes.


@planned(IMAGE, KERNEL)
def norm_over_the_batch_and_one_over_images(x, k):
    """One sum over the batch is enough to need two passes.

    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16
      reduce_sum; full
      div
      broadcast_in_dim
      sub
      mul; a square, whose range a half type does not hold
      reduce_sum; full
      broadcast_in_dim
      div
      rsqrt; full
      mul
    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    """
    y = conv(x, k)
    y = y - y.mean((0, 1, 2))
    return conv(y * lax.rsqrt((y * y).mean((1, 2), keepdims=True)), k)


@planned(IMAGE, KERNEL)
def norm_of_what_is_added_behind_it(x, k):
    """The end of a norm stands between, also where both sides read one value.

    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16 f16
      tanh
      reduce_sum; full
      div
      broadcast_in_dim
      sub
    tanh in half: f32>f16 -> f16
    add in half: f32>f16 f32>f16 -> f16
    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    """
    y = jnp.tanh(conv(x, k))
    z = y - y.mean((0, 1, 2))
    return conv(jnp.tanh(z) + y, k)


@planned(X, W, ROW)
def norm_over_the_batch(x, w, b):
    """A norm over the rows of a batch, and a centred value that is divided by a statistic.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    island, plain, apart: f32>f16 f32 f32 -> f16
      reduce_sum; full
      div
      broadcast_in_dim
      sub
      mul; a square, whose range a half type does not hold
      reduce_sum; full
      div
      add; float16 does not hold the constant 1e-05
      sqrt; full
      broadcast_in_dim
      div
      mul
      add
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    centred = y - y.mean(0)
    scaled = centred / jnp.sqrt((centred * centred).mean(0) + 1e-5)
    return (scaled * b + b) @ w


@planned(X, W)
def mean_that_is_added(x, w):
    """One sum over everything is a number, and no norm.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16
      reduce_sum; full
      div
      sub
    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16
      reduce_sum; full
      div
      broadcast_in_dim
      mul
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    return (y - y.mean()) @ w, (y * y.mean(0)) @ w


@planned(X, W)
def effects_around_an_island(x, w):
    """An effect that waits for an island keeps those behind it waiting.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f32 f16
      exp; full
      mul
    debug_callback in float32: f32 ->
    debug_callback in float32: f32 ->
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = jnp.exp(x @ w)
    jax.debug.callback(print, y)
    jax.debug.callback(print, x)
    return (y * 2) @ w


# Rewrites.


@planned(X, W, INDICES)
def picks(x, w, labels):
    """One element of each row is one; of each column it is not, nor of any axis but the last.

    dot_general in half: f32>f16 f32>f16 -> f16
    reshape: i32 -> i32
    broadcast_in_dim: i32 -> i32
    reshape: i32 -> i32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    reshape: i32 -> i32
    broadcast_in_dim: i32 -> i32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    reshape: i32 -> i32
    broadcast_in_dim: i32 -> i32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    reshape: i32 -> i32
    island, recompute, apart: f32>f16 i32 i32 i32 -> f32 f32 f32
      exp; full
      reshape
      gather
      gather [one element of each row, as a masked sum: its derivative writes no zeros]
      gather
    """
    y, take = jnp.exp(x @ w), jnp.take_along_axis
    in_the_middle = take(y.reshape(4, 32, 128), labels.reshape(1, 1, 128).repeat(4, 0), 1)
    return take(y, labels[:, None], 1), take(y, labels[None], 0), in_the_middle


@planned(X, W, INDICES)
def gathers_that_are_no_picks(x, w, labels):
    """Several elements of a row, rows, elements of their own, and one of each of few rows.

    dot_general in half: f32>f16 f32>f16 -> f16
    stack: i32 i32 -> i32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    reshape: i32 -> i32
    slice: i32 -> i32
    broadcast_in_dim: i32 -> i32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    reshape: i32 -> i32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    broadcast_in_dim: i32 -> i32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    broadcast_in_dim: i32 -> i32
    broadcast_in_dim: i32 -> i32
    concatenate: i32 i32 -> i32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    broadcast_in_dim: i32 -> i32
    island, recompute, apart: f32>f16 i32 i32 i32 i32 i32 -> f32 f32 f32 f32 f32 f32
      exp; full
      gather
      slice
      gather
      gather
      gather
      gather
      slice
      squeeze
    """
    y, take = jnp.exp(x @ w), jnp.take_along_axis
    several = take(y, jnp.stack([labels, labels], 1), 1)
    few = take(y[:127], labels[:127, None], 1)
    return several, few, y[labels], y[labels, labels], y[:, labels], y[3]


def powers(y):
    return jnp.exp(y - y.max(-1, keepdims=True))


@planned(struct(256, 67), struct(67, 67))
def what_looks_like_a_softmax(x, w):
    """Sums of something else or of everything, and quotients of something else.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      reduce_max
      broadcast_in_dim
      sub
      exp; full
      mul; a square, whose range a half type does not hold
      reduce_sum; full
      broadcast_in_dim
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      reduce_max
      broadcast_in_dim
      sub
      exp; full
      slice
      tanh
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      reduce_max
      broadcast_in_dim
      sub
      exp; full
      reduce_sum; full
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      reduce_max
      broadcast_in_dim
      sub
      exp; full
      tanh
      tanh
      reduce_sum; full
      broadcast_in_dim
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      reduce_max
      broadcast_in_dim
      sub
      exp; full
      reduce_prod; full
      broadcast_in_dim
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z, v, u, t = (powers(x @ w) for _ in range(5))
    return (
        (y / (y * y).sum(-1, keepdims=True)) @ w,
        (z / jnp.tanh(z[:, :1])) @ w,
        (v / v.sum()) @ w,
        (jnp.tanh(u) / jnp.tanh(u).sum(-1, keepdims=True)) @ w,
        (t / t.prod(-1, keepdims=True)) @ w,
    )


@planned(struct(256, 67), struct(67, 67), struct(256, 1))
def quotients_of_values_from_outside(x, w, given):
    """Powers or sums that an island only reads are no softmax.

    dot_general in half: f32>f16 f32>f16 -> f16
    cumsum in float32: f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32 -> f16
      reduce_max
      broadcast_in_dim
      sub
      exp; full
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32 -> f16
      reduce_max; an operand is float32
      broadcast_in_dim
      sub; an operand is float32
      exp; full
      reduce_sum; full
      broadcast_in_dim
      div; an operand is float32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    solved = jnp.cumsum(x @ w, 0)
    return (powers(x @ w) / given) @ w, (solved / powers(solved).sum(-1, keepdims=True)) @ w


@planned(struct(64, 4, 67), struct(67, 67))
def softmax_over_two_axes(x, w):
    """A softmax over the last axes is one too; one by the sums of other rows is not.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      reduce_max
      broadcast_in_dim
      sub
      exp; full
      reduce_sum; full
      broadcast_in_dim
      div [a softmax over padded rows, whose derivative is taken from its half result]
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      reduce_max
      broadcast_in_dim
      sub
      exp; full
      reduce_sum; full
      reshape
      reshape
      broadcast_in_dim
      reduce_sum; full
      broadcast_in_dim
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = (x @ w for _ in range(2))
    y = jnp.exp(y - y.max((1, 2), keepdims=True))
    z = powers(z)
    turned = jnp.broadcast_to(z.sum(-1).reshape(4, 64).reshape(64, 1, 4), (64, 4, 4)).sum(-1)
    return (y / y.sum((1, 2), keepdims=True)) @ w, (z / turned[:, :, None]) @ w


@planned(struct(4, 67, 67), struct(67, 67))
def columns_by_the_sums_of_rows(x, w):
    """A quotient by the sum of another row is no softmax.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      reduce_max
      broadcast_in_dim
      sub
      exp; full
      reduce_sum; full
      broadcast_in_dim
      div
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = powers(x @ w)
    return (y / y.sum(-1)[:, None]) @ w


@planned(struct(256, 67), struct(67, 67))
def softmax_that_nothing_rounds(x, w):
    """A float32 result has the derivative that it had.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f32
      reduce_max
      max
      broadcast_in_dim
      stop_gradient
      sub
      exp; full
      reduce_sum; full
      broadcast_in_dim
      div
    """
    return jax.nn.softmax(x @ w, -1)


test_plan = plan_test(CASES)
