"""What the planner decides, and why: a small program each, with its plan in the docstring.

A line is a step. `f32>f16` is a float32 operand that is read in half, `->` what is stored. Arrays
have 128 x 128 elements unless said otherwise: large enough to be recomputed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import Precision

import jmp
from tests.autocasting.plans import (
    IMAGE,
    INDICES,
    KERNEL,
    ROW,
    SMALL,
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
      add; near its bound, 1 minus a bounded function has few digits left
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
      add; near its bound, 1 minus a bounded function has few digits left
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
      sub; near its bound, 1 minus a bounded function has few digits left
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
    add in half: f32>f16 f32>f16 -> f16
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
    stack in float32: f32 f32 -> f32
    slice in float32: f32 -> f32
    add in half: f32>f16 repeated f32>f16 repeated saturated -> f16
    convert_element_type in float32: bool -> f32
    mul in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    slice in half: f32>f16 -> f16
    squeeze in half: f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    convert_element_type in float32: 0 f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    select_n in half: bool f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    z = (x @ w)[None] + jnp.stack([w] * 2)[:, :1]
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
    island, recompute, apart: f32>f16 -> f32
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
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    with jax.named_scope("head"):
        z = jnp.sin(x @ w)
        y = z @ w
    return y @ w, z @ w


@planned(X, W, rules=[("head", "p=f32,c=f32,o=f16")])
def positions_made_in_the_scope_of_a_rule(x, w):
    """What an island computes of constants made there is computed inside it, and not stored.

    dot_general in half: f32>f16 f32>f16 -> f16
    iota in float32: -> f32; the user asked for float32 here
    island, recompute, apart: f32 f32>f16 -> f16
      sin; the user asked for float32 here
      broadcast_in_dim; the user asked for float32 here
      add; the user asked for float32 here
      exp; the user asked for float32 here
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    x = x @ w
    with jax.named_scope("head"):
        x = jnp.exp(x + jnp.sin(lax.iota(jnp.float32, 128)))
    return x @ w


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
      add; near its bound, 1 minus a bounded function has few digits left
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


test_plan = plan_test(CASES)
