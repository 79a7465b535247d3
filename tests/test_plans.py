"""What the planner decides, and why: a small program each, with its plan in the docstring.

A line is a step. `f32>f16` is a float32 operand that is read in half, `->` what is stored. Arrays
have 128 x 128 elements unless said otherwise: large enough to be recomputed.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import Precision

import jmp
from tests.plans import listing, plan_of

CASES = []


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X = W = struct(128, 128)
ROW = struct(128)
IMAGE, KERNEL = struct(8, 16, 16, 16), struct(3, 3, 16, 16)
SMALL = struct(8, 8)
INDICES = struct(128, dtype=jnp.int32)


def planned(*args, **options):
    """Adds a program to the cases; `args` are what it is planned for."""

    def add(fun):
        CASES.append((fun, args, options))
        return fun

    return add


# Products, and what stands between two of them.


@planned(X, W, ROW)
def bias_and_relu(x, w, b):
    """A bias is repeated in float32 and rounded; relu runs in half, its rule is planned later.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    add in half: f32>f16 f32>f16 repeated -> f16
    custom_jvp_call inside: f32>f16 -> f16
      function, stores f16
      max in half: f32>f16 0 f32>f16 -> f16
      function, not planned
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jax.nn.relu(x @ w + b) @ w


@planned(X, W, ROW)
def bias_behind_the_last_product(x, w, b):
    """What no product reads stays float32.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    island, plain, apart: f32>f16 f32 -> f32
      add; an operand is a float32 input, and no product reads the result
    """
    return x @ w + b


@planned(X, W, ROW)
def gelu(x, w, b):
    """The bias is peeled off; the rest is recomputed, and leaves half.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    add in half: f32>f16 f32>f16 repeated -> f16
    island, recompute, apart: f32>f16 -> f16
      integer_pow; full
      mul
      add
      mul
      tanh
      add; near its bound a bounded function leaves few digits of one
      mul
      mul
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jax.nn.gelu(x @ w + b) @ w


@planned(SMALL, SMALL)
def gelu_of_few_numbers(x, w):
    """A small island is plain.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16
      integer_pow; full
      mul
      add
      mul
      tanh
      add; near its bound a bounded function leaves few digits of one
      mul
      mul
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jax.nn.gelu(x @ w) @ w


@planned(X, W, ROW, ROW)
def layer_norm(x, w, scale, offset):
    """The sums of a norm over rows are kept; its input is cast once for all that read it.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    island, recompute but sums, apart, shared casts: f32>f16 f32 f32 -> f16
      reduce_sum; full
      broadcast_in_dim
      div
      sub
      mul; a square, whose range a half type does not hold
      reduce_sum; full
      broadcast_in_dim
      div
      add; float16 does not hold the constant 1e-06
      rsqrt; full
      mul
      mul
      add
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    return (y * scale + offset) @ w


@planned(X, W)
def residual_addition_before_a_norm(x, w):
    """An addition is peeled off: one half value enters the island then, not two.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    add in half: f32>f16 f32>f16 -> f16
    island, recompute but sums, apart, shared casts: f32>f16 -> f16
      mul; a square, whose range a half type does not hold
      reduce_sum; full
      broadcast_in_dim
      rsqrt; full
      mul
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = x @ w, x @ w
    s = y + z
    return (s * lax.rsqrt(jnp.sum(s * s, -1, keepdims=True))) @ w, s @ w


@planned(X, W)
def gates(x, w):
    """Parts of one value enter one by one.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16
      split
      add
      exp; full
    slice in float32: f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    a, b = jnp.split(y, 2, axis=1)
    return (jnp.exp(a + b)) @ w[:64]


@planned(X, W)
def attention(x, w):
    """A causal mask is cloned into the island of the softmax; -1e9 does not fit.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      clone iota
      clone iota
      clone ge
      clone convert_element_type
      clone broadcast_in_dim
      select_n; float16 does not hold the constant -1e+09
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
    scores = x @ w
    rows = lax.broadcasted_iota(jnp.int32, (128, 128), 0)
    columns = lax.broadcasted_iota(jnp.int32, (128, 128), 1)
    scores = jnp.where(rows >= columns, scores, -1e9)
    return jax.nn.softmax(scores, -1) @ x


@planned(struct(256, 67), struct(67, 67))
def softmax_over_odd_rows(x, w):
    """Rows that are padded: the derivative is taken from the half result.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      reduce_max
      max
      broadcast_in_dim
      stop_gradient
      sub
      exp; full
      reduce_sum; full
      broadcast_in_dim
      div [a softmax over padded rows, whose derivative is taken from its half result]
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jax.nn.softmax(x @ w, -1) @ w


@planned(struct(256, 67), struct(67, 67))
def log_of_a_softmax_over_odd_rows(x, w):
    """What reads the result inside would read the rounded one: no rewrite.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16 f16
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
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    p = jax.nn.softmax(x @ w, -1)
    return jnp.log(p) @ w, p @ w


@planned(X, W, INDICES)
def cross_entropy(x, w, labels):
    """One element of each row, as a masked sum; the loss stays float32.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim: i32 -> i32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    reshape: i32 -> i32
    island, recompute, apart: f32>f16 i32 -> f32
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
      gather [one element of each row, as a masked sum: its derivative writes no zeros]
      reduce_sum; full
      div
      neg
    """
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], -1).mean()


@planned(IMAGE, KERNEL, struct(16), struct(16))
def batch_norm(x, k, scale, offset):
    """Plain: its derivative needs two passes anyway. Behind its end all is half.

    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    island, plain, apart: f32>f16 f32 f32 -> f16
      reduce_sum; full
      div
      mul; a square, whose range a half type does not hold
      reduce_sum; full
      div
      mul; a square, whose range a half type does not hold
      sub
      broadcast_in_dim
      sub
      add
      rsqrt; full
      mul; an operand is a float32 input as large as the result
      broadcast_in_dim
      mul
      add
    max in half: f32>f16 0 f32>f16 -> f16
    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    """
    y = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    mean = y.mean((0, 1, 2))
    variance = (y * y).mean((0, 1, 2)) - mean * mean
    y = (y - mean) * (scale * lax.rsqrt(variance + 1e-3)) + offset
    return lax.conv_general_dilated(
        lax.max(y, 0.0), k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@planned(IMAGE, KERNEL)
def group_norm(x, k):
    """A norm over an image of the batch alone is recomputed but for its sums.

    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    island, recompute but sums, apart: f32>f16 -> f16
      reduce_sum; full
      broadcast_in_dim
      div
      sub
      mul; a square, whose range a half type does not hold
      reduce_sum; full
      broadcast_in_dim
      div
      add
      rsqrt; full
      mul
    logistic in half: f32>f16 -> f16
    mul in half: f32>f16 f32>f16 -> f16
    conv_general_dilated in half: f32>f16 f32>f16 -> f16
    """
    conv = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    y = conv(x, k)
    y = y - y.mean((1, 2), keepdims=True)
    y = y * lax.rsqrt((y * y).mean((1, 2), keepdims=True) + 1e-3)
    return conv(lax.logistic(y) * y, k)


@planned(X, W)
def bounded_functions(x, w):
    """tanh in half; one minus a bounded result in float32, also behind a reshape.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32>f16 -> f16 f16 f16
      tanh
      logistic
      sub; near its bound a bounded function leaves few digits of one
      add
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = jnp.tanh(x @ w)
    z = 1 - jnp.reshape(lax.logistic(x @ w), (128, 128))
    return y @ w, z @ w, (y + z) @ w


@planned(X, W)
def squares(x, w):
    """x * x is a square, x * y is not.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16
      mul; a square, whose range a half type does not hold
    dot_general in half: f32>f16 f32>f16 -> f16
    mul in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = x @ w, x @ w
    return (y * y) @ w, (y * z) @ w


# Neutral values: parameters, inputs, constants.


@planned(X, W)
def input_as_large_as_the_result(x, w):
    """A float32 input that is not repeated makes an addition float32.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 f32 -> f16 saturated
      add; an operand is a float32 input as large as the result
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return (x @ w + x) @ w


@planned(X, W, ROW)
def neutral_arithmetic(x, w, b):
    """What parameters alone decide runs in float32, whatever reads it.

    exp in float32: f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    mul in float32: f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    sin in float32: f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    add in half: f32>f16 f32>f16 repeated -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    scaled = w * jnp.exp(b)
    return (x @ scaled + jnp.sin(b)) @ w


@planned(X, W)
def constants(x, w):
    """2 fits a half type; 1e-12 and 1e9 do not, also negated and repeated.

    dot_general in half: f32>f16 f32>f16 -> f16
    mul in half: f32>f16 2 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16 saturated
      add; float16 does not hold the constant 1e-12
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: 1e+09 f32 -> f32
    neg in float32: f32 -> f32
    island, plain, apart: f32>f16 f32 -> f16 saturated
      max; float16 does not hold the constant -1e+09
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = (x @ w) * 2.0
    z = (x @ w) + 1e-12
    v = lax.max(x @ w, -jnp.full((128, 128), 1e9))
    return y @ w, z @ w, v @ w


@planned(X, W)
def arrays_of_the_program(x, w):
    """An array with numbers that do not fit makes float32; one with such that do is an input.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    island, plain, apart: f32>f16 f32 -> f16 saturated
      add; float16 does not hold an array of the program
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    add in half: f32>f16 f32>f16 repeated -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: f32 -> f32
    island, plain, apart: f32>f16 f32 -> f16
      mul; float16 does not hold an array of the program
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    hard = np.linspace(0, 1e6, 128, dtype=np.float32)
    easy = np.linspace(0, 1, 128, dtype=np.float32)
    return (x @ w + hard) @ w, (x @ w + easy) @ w, ((x @ w) * (hard * 2.0)) @ w


@planned(X, W, struct(128, 128, dtype=bool))
def masks(x, w, keep):
    """A boolean fits half; an input of several axes may be a mask and is saturated.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32, rounded: f32 -> f16
    stack in float32: f32 -> f32
    slice in float32: f32 -> f32
    add in half: f32>f16 f32>f16 repeated saturated -> f16
    convert_element_type in float32: bool -> f32
    mul in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    squeeze in half: f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    convert_element_type in float32: 0 f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    select_n in half: bool f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    z = (x @ w)[None] + jnp.stack([w] * 1)[:, :1]
    return (y * keep.astype(jnp.float32)) @ w, z[0] @ w, jnp.where(keep, y, 0.0) @ w


@planned(X, W, struct(1, 128, 1), policy="mixed_bfloat16")
def masks_in_bfloat16(x, w, mask):
    """bfloat16 holds -1e9: nothing is saturated.

    dot_general in half: f32>bf16 f32>bf16 -> bf16
    broadcast_in_dim in float32, rounded: f32 -> bf16
    add in half: f32>bf16 f32>bf16 repeated -> bf16
    squeeze in half: f32>bf16 -> bf16
    dot_general in half: f32>bf16 f32>bf16 -> bf16
    """
    return ((x @ w)[None] + mask)[0] @ w


@planned(X, W, struct(1, 128, 1))
def mask_in_an_island(x, w, mask):
    """What leaves an island where a mask was applied is saturated.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 f32 -> f16
      broadcast_in_dim
      exp; full
      add
      squeeze
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = jnp.exp((x @ w)[None])
    return (y + mask)[0] @ w


# Looking up, and other barriers.


@planned(X, W, INDICES)
def embedding(table, w, tokens):
    """Rows of a table are rounded after the lookup.

    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    broadcast_in_dim: i32 -> i32
    gather in float32, rounded: f32 i32 -> f16; rows of a float32 table, rounded after the lookup
    tanh in half: f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jnp.tanh(table[tokens]) @ w


@planned(X, W, INDICES)
def rows_that_are_compared(points, w, edges):
    """Coordinates that are subtracted from others stay float32.

    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    broadcast_in_dim: i32 -> i32
    gather in float32: f32 i32 -> f32
    slice in float32: f32 -> f32
    squeeze in float32: f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    sub in float32: f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return (points[edges] - points[0]) @ w


@planned(X, W, INDICES)
def rows_of_activations(x, w, tokens):
    """A gather reads float32, because its derivative adds up.

    dot_general in half: f32>f16 f32>f16 -> f16
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    broadcast_in_dim: i32 -> i32
    gather in float32, rounded: f32 i32 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return (x @ w)[tokens] @ w


@planned(X, W, INDICES)
def barriers(x, w, tokens):
    """Sums that scatter, sorts, solvers and random bits.

    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: 0 f32 -> f32
    lt: i32 i32 -> bool
    add: i32 i32 -> i32
    select_n: bool i32 i32 -> i32
    broadcast_in_dim: i32 -> i32
    scatter-add in float32: f32 i32 f32 -> f32
    sort in half: f32>f16 -> f16
    cumsum in float32: f32 -> f32
    transpose in half: f32>f16 -> f16
    add in half: f32>f16 f32>f16 -> f16
    div in half: f32>f16 2 f32>f16 -> f16
    cholesky in float32: f32 -> f32
    iota: -> i32
    add: i32 i32 -> i32
    iota: -> i32
    ge: i32 i32 -> bool
    broadcast_in_dim in float32: 0 f32 -> f32
    island, plain, apart: bool f32 f32 -> f16
      select_n; an operand is float32
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    added = jnp.zeros((128, 128)).at[tokens].add(y)
    ordered = jnp.sort(y, -1)
    summed = jnp.cumsum(y, -1)
    solved = jnp.linalg.cholesky(y)
    return added @ w, ordered @ w, summed @ w, solved @ w


@planned(X, W, INDICES)
def updates(x, w, tokens):
    """A scatter writes half into half, and float32 into float32.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    slice in half: f32>f16 -> f16
    dynamic_update_slice in half: f32>f16 f32>f16 i32 i32 -> f16
    slice in half: f32>f16 -> f16
    dynamic_update_slice in float32: f32 f32 i32 i32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = x @ w, x @ w
    inside = lax.dynamic_update_slice(y, z[:8], (0, 0))
    outside = lax.dynamic_update_slice(w, z[:8], (0, 0))
    return inside @ w, outside @ w


@planned(X, W)
def choices(x, w):
    """Which entry is the largest, and how many.

    dot_general in half: f32>f16 f32>f16 -> f16
    argmax in half: f32>f16 -> i32
    reduce_max in float32, rounded: f32 -> f16
    island, plain, apart: f32>f16 -> i32
      gt
      convert_element_type
      reduce_sum; full
    """
    y = x @ w
    return jnp.argmax(y, -1), jnp.max(y, -1), jnp.sum(y > 0)


@planned(X, W)
def random_numbers(x, w):
    """A jit that draws random bits stays whole.

    random_seed: i32 -> key<fry>
    jit in float32: key<fry> 0.5 f32 -> bool
    dot_general in half: f32>f16 f32>f16 -> f16
    convert_element_type in float32: 0 f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    select_n in half: bool f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    noise = jax.random.bernoulli(jax.random.key(0), 0.5, (128, 128))
    return jnp.where(noise, x @ w, 0.0) @ w


@planned(X, W)
def effects(x, w):
    """Effects stay, in their order; what nothing reads is left behind.

    dot_general in half: f32>f16 f32>f16 -> f16
    debug_callback in float32: f32 ->
    debug_callback in float32: f32 ->
    """
    y = x @ w
    jax.debug.callback(print, y)
    jax.debug.callback(print, x)
    jnp.exp(y)
    return y


@planned(X, W)
def constant_output(x, w):
    """A result that is a number, and one that is an argument.

    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return 1.5, x, x @ w


# What the user says.


@planned(X, W)
def full_precision(x, w):
    """No product is lowered inside; what comes out is float32.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      tanh; the user asked for float32 here
    dot_general in float32: f32 f32 -> f32; the user asked for float32 here
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    inside = jmp.full_precision(lambda y: jnp.tanh(y) @ w)
    return inside(x @ w) @ w


@planned(X, W, rules=[("head", "p=f32,c=f32,o=f16")])
def rule_with_a_half_output(x, w):
    """What leaves the scope is rounded, and nothing that stays inside.

    dot_general in float32: f32 f32 -> f32; the user asked for float32 here
    island, recompute, apart: f32 -> f16
      sin; the user asked for float32 here
    dot_general in float32: f32 f32 -> f16; the user asked for float32 here
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    with jax.named_scope("head"):
        y = jnp.sin(x @ w)
        y = y @ w
    return y @ w


@planned(X, W)
def inner_autocast(x, w):
    """An autocast inside has decided.

    dot_general in half: f32>f16 f32>f16 -> f16
    exp in float32: f32 -> f32; an inner autocast decided here
    convert_element_type in float32: f32 -> bf16; an inner autocast decided here
    convert_element_type in float32: f32 -> bf16; an inner autocast decided here
    dot_general: bf16 bf16 -> bf16; an inner autocast decided here
    island, plain, apart: bf16 -> f16
      convert_element_type; full
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    inner = jmp.autocast(lambda y: jnp.exp(y) @ w, "mixed_bfloat16")
    return inner(x @ w) @ w


@planned(X, W, full=["tanh"], low=["exp"], follow=["reduce_sum"])
def overrides(x, w):
    """Categories of this call.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      tanh; full
    dot_general in half: f32>f16 f32>f16 -> f16
    exp in half: f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    reduce_sum in half: f32>f16 -> f16
    broadcast_in_dim in float32, rounded: f32 -> f16
    broadcast_in_dim in float32, rounded: f32 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    return jnp.tanh(y) @ w, jnp.exp(y) @ w, jnp.broadcast_to(y.sum(-1)[:, None], (128, 128)) @ w


@planned(X, W)
def users_dtypes(x, w):
    """Precisions, algorithms, half operands and explicit casts are the user's word.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in float32: f32 f32 -> f32
    convert_element_type in float32: f32 -> f16
    convert_element_type in float32: f32 -> f16
    dot_general in float32: f16 f16 -> f32; the user chose half operands and a float32 result
    convert_element_type in float32: f32 -> bf16
    convert_element_type in float32: f32 -> bf16
    dot_general: bf16 bf16 -> bf16; the user chose other dtypes
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: bf16 -> f16
      convert_element_type; full
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    a = jnp.matmul(y, w, precision=Precision.HIGHEST)
    b = lax.dot(x.astype(jnp.float16), w.astype(jnp.float16), preferred_element_type=jnp.float32)
    c = jnp.matmul(y.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    return a @ w, b @ w, c.astype(jnp.float32) @ w


@planned(X, W)
def complex_operand(x, w):
    """A complex operand makes a real result float32.

    dot_general in half: f32>f16 f32>f16 -> f16
    convert_element_type in float32: f32 -> complex64
    mul: complex64 complex64 -> complex64
    island, plain, apart: f32>f16 complex64 -> f16
      convert_element_type
      add
      abs; an operand is complex64
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    return jnp.abs(y + 1j * w) @ w


@planned(X, ROW)
def inner_product(x, b):
    """An inner product is a sum.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in float32: f32 f32 -> f32
    """
    return (x @ b) @ (x @ b)


@planned(X, W, recompute="none")
def recompute_none(x, w):
    """Islands are plain.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 -> f16
      integer_pow; full
      mul
      add
      mul
      tanh
      add; near its bound a bounded function leaves few digits of one
      mul
      mul
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jax.nn.gelu(x @ w) @ w


@planned(SMALL, SMALL, recompute="all")
def recompute_all(x, w):
    """Islands are recomputed, also small ones.

    dot_general in half: f32>f16 f32>f16 -> f16
    island, recompute, apart: f32>f16 -> f16
      exp; full
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jnp.exp(x @ w) @ w


# What nests.


@planned(struct(4, 128, 128), W, W)
def scan_over_time(xs, w, u):
    """The hidden state of an RNN, read by products alone, is carried in half.

    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32 f32>f16 f32 -> f16 f16
      function, reads f32 f32 - -, stores f16 f16
      dot_general in half: f32>f16 f32>f16 -> f16
      dot_general in half: f32>f16 f32>f16 -> f16
      add in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
    """

    def step(h, x):
        h = jnp.tanh(x @ w + h @ u)
        return h, h

    return lax.scan(step, jnp.zeros((128, 128)), xs)


@planned(struct(4, 128, 128), W)
def scan_with_a_leak(xs, w):
    """What adds up over the turns is carried in float32, and not rounded on the way.

    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32 f32 -> f32
      function, reads f32 - -, stores f32
      island, plain: f32 -> f32
        mul; an operand is float32
      dot_general in half: f32>f16 f32>f16 -> f16
      island, recompute: f32>f16 f32 -> f32
        tanh
        mul
        add; an operand is float32
    dot_general in half: f32>f16 f32>f16 -> f16
    """

    def step(h, x):
        return 0.9 * h + 0.1 * jnp.tanh(x @ w), None

    return lax.scan(step, jnp.zeros((128, 128)), xs)[0] @ w


@planned(X, struct(4, 128, 128), W)
def scan_over_layers(x, ws, w):
    """A residual stream that comes in half is carried in half.

    dot_general in half: f32>f16 f32>f16 -> f16
    scan inside: f32>f16 f32 -> f16
      function, reads - -, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
      add in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x @ w, ws)[0] @ w


@planned(X, struct(200, 128, 128), W)
def scan_over_many_layers(x, ws, w):
    """But not in a loop that is too long for layers.

    dot_general in half: f32>f16 f32>f16 -> f16
    scan inside: f32 f32 -> f32
      function, reads - -, stores f32
      dot_general in half: f32>f16 f32>f16 -> f16
      island, recompute: f32>f16 f32 -> f32
        tanh
        add; an operand is float32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x @ w, ws)[0] @ w


@planned(struct(4, 8, 8), SMALL)
def scan_counts_its_turns(xs, w):
    """What is kept is kept for every turn: four turns of 64 elements are few.

    scan inside: i32 f32 f32 -> f16
      function, reads i32 f32 -, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      island, plain: f32>f16 -> f16
        exp; full
      dot_general in half: f32>f16 f32>f16 -> f16
    """
    return lax.scan(lambda c, x: (c, jnp.exp(x @ w) @ w), 0, xs)[1]


@planned(struct(400, 8, 8), SMALL)
def scan_counts_many_turns(xs, w):
    """400 turns are many.

    scan inside: i32 f32 f32 -> f16
      function, reads i32 f32 -, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      island, recompute: f32>f16 -> f16
        exp; full
      dot_general in half: f32>f16 f32>f16 -> f16
    """
    return lax.scan(lambda c, x: (c, jnp.exp(x @ w) @ w), 0, xs)[1]


@planned(X, W)
def while_loop(x, w):
    """A while loop carries float32; its condition runs as it was written.

    while inside: f32 i32 f32 -> i32 f32
      function, not planned
      function, stores i32 f32
      add: i32 i32 -> i32
      dot_general in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
    """
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


@planned(X, W)
def loop_to_a_tolerance(x, w):
    """A loop whose number of turns depends on floating numbers is float32 throughout.

    dot_general in half: f32>f16 f32>f16 -> f16
    while in float32: f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return lax.while_loop(lambda c: c.max() > 1e-3, lambda c: jnp.tanh(c @ w) / 2, x @ w) @ w


@planned(X, W, struct(dtype=jnp.int32))
def branches(x, w, index):
    """A result is half if every branch leaves it half.

    dot_general in half: f32>f16 f32>f16 -> f16
    clamp: i32 i32 i32 -> i32
    cond inside: i32 f32 f32>f16 -> f16
      function, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      function, stores f16
      tanh in half: f32>f16 -> f16
    clamp: i32 i32 i32 -> i32
    cond inside: i32 f32 f32>f16 -> f32
      function, stores f32
      dot_general in half: f32>f16 f32>f16 -> f16
      function, stores f32
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    halves = lax.switch(index, [lambda y: y @ w, lambda y: jnp.tanh(y)], y)
    mixed = lax.switch(index, [lambda y: y @ w, lambda y: w], y)
    return halves @ w, mixed @ w


@planned(X, W)
def remat(x, w):
    """The user's remat: islands inside are kept apart from the forward pass.

    dot_general in half: f32>f16 f32>f16 -> f16
    remat2 inside: f32 f32>f16 -> f16
      function
      dot_general in half: f32>f16 f32>f16 -> f16
      island, recompute, apart: f32>f16 -> f16
        integer_pow; full
        mul
        add
        mul
        tanh
        add; near its bound a bounded function leaves few digits of one
        mul
        mul
      dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jax.checkpoint(lambda y: jax.nn.gelu(y @ w) @ w)(x @ w)


@planned(X, W)
def remat_in_a_scan(x, w):
    """Also in a loop.

    dot_general in half: f32>f16 f32>f16 -> f16
    scan inside: f32 f32>f16 -> f16
      function, reads f32 -, stores f16
      remat2 inside: f32 f32>f16 -> f16
        function
        dot_general in half: f32>f16 f32>f16 -> f16
        island, recompute, apart: f32>f16 -> f16
          neg
          exp; full
        dot_general in half: f32>f16 f32>f16 -> f16
    """
    layer = jax.checkpoint(lambda h, _: (jnp.exp(-(h @ w)) @ w, None))
    return lax.scan(layer, x @ w, None, length=3)[0]


@planned(X, W)
def jit_that_pins_something(x, w):
    """A jit with donation is a level of its own; any other is inlined.

    dot_general in half: f32>f16 f32>f16 -> f16
    jit inside: f32 f32>f16 -> f16
      function
      island, recompute, apart: f32>f16 -> f16
        exp; full
      dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    donating = jax.jit(lambda y: jnp.exp(y) @ w, donate_argnums=0)
    return donating(x @ w), jax.jit(lambda y: y @ w)(x @ w)


@jax.custom_jvp
def doubled(x, w):
    return 2 * jnp.tanh(x @ w)


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


@jax.custom_vjp
def halved(x, w):
    return 0.5 * jnp.tanh(x @ w)


halved.defvjp(lambda x, w: (halved(x, w), None), lambda _, ct: (ct, ct))


@planned(X, W)
def custom_jvp(x, w):
    """A custom_jvp with a product is planned inside; its rule when a derivative is asked for.

    dot_general in half: f32>f16 f32>f16 -> f16
    custom_jvp_call inside: f32>f16 f32 -> f16
      function, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
      mul in half: 2 f32>f16 f32>f16 -> f16
      function, not planned
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return doubled(x @ w, w) @ w


@planned(X, W)
def custom_vjp(x, w):
    """A custom_vjp runs as written.

    dot_general in half: f32>f16 f32>f16 -> f16
    custom_vjp_call in float32: f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return halved(x @ w, w) @ w


@planned(X, W, inside_custom_vjp=True)
def inside_custom_vjp(x, w):
    """Unless the caller says otherwise.

    dot_general in half: f32>f16 f32>f16 -> f16
    custom_vjp_call inside: f32>f16 f32 -> f16
      function, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
      mul in half: 0.5 f32>f16 f32>f16 -> f16
      function, not planned
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return halved(x @ w, w) @ w


# Closer looks at single rules.


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
def constants_of_a_jit(x, w):
    """Arrays that a function inside holds by itself are neutral and fixed.

    dot_general in half: f32>f16 f32>f16 -> f16
    jit inside: f32 f32 f32>f16 -> f16
      function
      broadcast_in_dim in float32, rounded: f32 -> f16
      add in half: f32>f16 f32>f16 repeated saturated -> f16
      dot_general in half: f32>f16 f32>f16 -> f16
    """
    table = np.linspace(0, 1, 64 * 128, dtype=np.float32).reshape(64, 1, 128)
    return jax.jit(lambda y: (y[:, None] + table[:1]) @ w, donate_argnums=0)(x @ w)


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


@planned(struct(4, 128, dtype=jnp.int32), X, W)
def embedding_in_a_loop(tokens, table, w):
    """Rows that reach the float32 carry of a loop are not rounded; others are.

    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32 f32 i32 -> f32 f16
      function, reads f32 f32 - -, stores f32 f16
      lt: i32 i32 -> bool
      add: i32 i32 -> i32
      select_n: bool i32 i32 -> i32
      broadcast_in_dim: i32 -> i32
      gather in float32: f32 i32 -> f32
      island, plain: f32 f32 -> f32
        add; an operand is float32
      lt: i32 i32 -> bool
      add: i32 i32 -> i32
      select_n: bool i32 i32 -> i32
      broadcast_in_dim: i32 -> i32
      gather in float32, rounded: f32 i32 -> f16; rows of a float32 table, rounded after the lookup
      dot_general in half: f32>f16 f32>f16 -> f16
    """

    def step(total, ids):
        rows = table[ids]
        return total + rows, table[ids] @ w

    return lax.scan(step, jnp.zeros((128, 128)), tokens)


@planned(struct(4, 128, 64), W)
def carries_that_are_moved(xs, w):
    """A carry may be moved on its way to a product; one that is added to is float32.

    broadcast_in_dim in float32: 0 f32 -> f32
    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32>f16 f32 i32 f32 -> f16 f32 i32 f32
      function, reads f32 - - - -, stores f16 f32 i32 f32
      transpose in half: f32>f16 -> f16
      concatenate in half: f32>f16 f32>f16 saturated -> f16
      dot_general in half: f32>f16 f32>f16 -> f16
      slice in half: f32>f16 -> f16
      transpose in half: f32>f16 -> f16
      island, plain: f32 f32>f16 -> f32
        add; an operand is float32
      add: i32 i32 -> i32
      island, plain: f32 -> f32
        slice; an operand is float32
    """

    def step(carry, x):
        h, total, count = carry
        joined = jnp.concatenate([h.T.reshape(128, 64), x], 1) @ w
        return (joined[:, :64].T, total + joined, count + 1), total[:2]

    return lax.scan(step, (jnp.zeros((64, 128)), jnp.zeros((128, 128)), 0), xs)


@planned(struct(4, 128, 128), W)
def carry_that_is_handed_on(xs, w):
    """A half carry that becomes a float32 one is float32.

    broadcast_in_dim in float32: 0 f32 -> f32
    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32 f32 f32 -> f32 f32
      function, reads f32 - - -, stores f32 f32
      dot_general in half: f32>f16 f32>f16 -> f16
      dot_general in half: f32>f16 f32>f16 -> f16
      add in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
      island, plain: f32 f32 -> f32
        add; an operand is float32
    """

    def step(carry, x):
        h, before = carry
        return (jnp.tanh(x @ w + h @ w), h + before), None

    return lax.scan(step, (jnp.zeros((128, 128)), jnp.zeros((128, 128))), xs)[0]


@planned(X, W)
def carry_that_is_kept_outside(x, w):
    """A result that reaches a float32 carry outside is carried in float32 inside.

    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32 f32 -> f32
      function, reads f32 f32 -, stores f32
      scan inside: f32 f32 -> f32
        function, reads f32 -, stores f32
        dot_general in half: f32>f16 f32>f16 -> f16
        tanh in half: f32>f16 -> f16
      island, plain: f32 f32 -> f32
        add; an operand is float32
    """

    def outer(total, _):
        inner = lambda h, _: (jnp.tanh(h @ w), None)
        return total + lax.scan(inner, x, None, length=2)[0], None

    return lax.scan(outer, jnp.zeros((128, 128)), None, length=2)[0]


@planned(X, W, ROW)
def loop_with_constants(x, w, b):
    """What condition and body close over.

    dot_general in half: f32>f16 f32>f16 -> f16
    while inside: f32 f32 i32 f32 -> i32 f32
      function, not planned
      function, stores i32 f32
      add: i32 i32 -> i32
      dot_general in half: f32>f16 f32>f16 -> f16
      broadcast_in_dim in float32: f32 -> f32
      add in half: f32>f16 f32>f16 repeated -> f16
      island, recompute: f32>f16 -> f32
        sin
    """
    return lax.while_loop(
        lambda c: c[0] < b.shape[0] + jnp.int32(3),
        lambda c: (c[0] + 1, jnp.sin(c[1] @ w + b)),
        (jnp.int32(0), x @ w),
    )[1]


@planned(X, W)
def sharded(x, w):
    """What is mapped over devices is planned on the shards.

    dot_general in half: f32>f16 f32>f16 -> f16
    shard_map inside: f32 f32>f16 -> f16
      function
      island, recompute, apart: f32>f16 -> f16
        exp; full
      pvary in float32: f32 -> f32
      dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("devices")
    one = jax.shard_map(lambda y: jnp.exp(y) @ w, mesh=mesh, in_specs=rows, out_specs=rows)
    return one(x @ w) @ w


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


# Traces, and so plans, change with JAX's version.
@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="the traces of JAX 0.10")
@pytest.mark.parametrize(
    ("fun", "args", "options"), CASES, ids=lambda x: getattr(x, "__name__", "")
)
def test_plan(fun, args, options):
    _, _, expected = inspect.getdoc(fun).partition("\n\n")
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), args)
    with jax.numpy_rank_promotion("allow"):
        assert "\n".join(listing(plan_of(fun, *arrays, **options))) == expected
