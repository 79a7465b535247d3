"""What becomes an island, and how it runs: a program each, whose plan is in `plan_listings/`.

Arrays have 128 x 128 elements unless said otherwise: large enough to be recomputed.
"""

import jax
import jax.numpy as jnp
from jax import lax

import jmp
from testbed.planned.cases import IMAGE, INDICES, KERNEL, ROW, W, X, conv, new_cases, struct

CASES, planned = new_cases()

# What stands in front of an island, and what it keeps.


@planned(X, W, ROW)
def mask_over_the_keys(x, w, mask):
    """What is added to the scores of an attention stays in the island."""
    return jax.nn.softmax(x @ w + mask, -1) @ w


@planned(X, W, ROW, recompute="all")
def linear_island(x, w, b):
    """An island that is linear throughout is not peeled away."""
    return (x @ w - w) @ w, x @ w + b


@planned(struct(16, 8), struct(8, 16392))
def softmax_over_long_rows(x, w):
    """Of rows too long for one kernel the maxima and the sums are kept, and come in one pass."""
    return jax.nn.softmax(x @ w, -1)


@planned(X, W)
def log_sum_exp(x, w):
    """So are those of shorter rows, if no row is made of them."""
    return jax.nn.logsumexp(x @ w, -1)


@planned(IMAGE, KERNEL, struct(16))
def norm_and_residual(x, k, scale):
    """The end of a norm is its last affine step; what is added then is half."""
    y = conv(x, k)
    z = (y - y.mean((0, 1, 2))) * scale - 0.5
    return conv(jnp.tanh(z) + y, k), conv(z * x, k)


@planned(struct(127, 128), W)
def just_too_few_numbers(x, w):
    """127 x 128 elements are fewer than 16384."""
    return jnp.exp(x @ w) @ w


@planned(X, W)
def expensive_but_small(x, w):
    """An expensive function of few numbers costs nothing in the backward pass."""
    y = x @ w
    return (y * jnp.exp(y[:1]) * 1e9) @ w


@planned(X, W, struct(128, 128, dtype=bool), ROW)
def what_islands_compute_for_themselves(x, w, keep, b):
    """Cheap large values made of small ones: masks and repetitions, but no sine, and no input."""
    rows = jnp.arange(128)
    causal = jnp.where(rows[:, None] >= rows, 0.0, -1e9)
    y, z, v = x @ w, x @ w, x @ w
    sine = jnp.sin(causal)
    given = jnp.where(keep, b, -1e9)
    return jnp.exp(y + causal) @ w, jnp.exp(z + sine) @ w, jnp.exp(v + given) @ w


@planned(struct(256, 128), W)
def part_beside_the_whole(x, w):
    """Parts of one value count as values by themselves, also where the whole enters too."""
    y = x @ w
    a, b = jnp.split(y, 2, axis=1)
    return (jnp.exp(a + b) * jnp.tanh(y[:, 1:65])) @ w[:64]


@planned(X, W)
def three_values_and_their_sum(x, w):
    """Nothing is peeled off where all operands enter the rest anyway."""
    y, z, v = x @ w, x @ w, x @ w
    return (jnp.exp(y + z + v) * jnp.tanh(y) * jnp.tanh(z) * jnp.tanh(v)) @ w


@planned(X, W, ROW)
def numbers_in_front(x, w, b):
    """A number that is added is no bias; a full addition and a region stay in the island."""
    y, z = x @ w, x @ w
    inside = jmp.full_precision(lambda z: z + b)
    return jnp.exp(y + 2.0) @ w, jnp.exp(inside(z)) @ w


@planned(X, W, ROW)
def scores_of_a_mask(x, w, b):
    """A bias in front of a maximum over rows is peeled off only where no product follows."""
    y, z = x @ w + b, x @ w + b
    return (y * 1e9 - y.max(-1, keepdims=True)) @ w, (z * 1e9 - z.max(-1, keepdims=True)).sum()


@planned(X, W, struct(16384))
def vector_as_large_as_the_result(x, w, b):
    """A vector as large as the result is no bias."""
    y = jnp.exp((x @ w).reshape(-1) + b)
    return y.reshape(128, 128) @ w


# Norms over leading axes.


@planned(X, W, ROW)
def norm_over_the_batch(x, w, b):
    """A norm over the rows of a batch, and a centred value that is divided by a statistic."""
    y = x @ w
    centred = y - y.mean(0)
    scaled = centred / jnp.sqrt((centred * centred).mean(0) + 1e-5)
    return (scaled * b + b) @ w


@planned(X, W)
def effects_around_an_island(x, w):
    """An effect that waits for an island keeps those behind it waiting."""
    y = jnp.exp(x @ w)
    jax.debug.callback(print, y)
    jax.debug.callback(print, x)
    return (y * 2) @ w


# Rewrites.


@planned(X, W, INDICES)
def picks(x, w, labels):
    """One element of each row is one; of each column it is not, nor of any axis but the last."""
    y, take = jnp.exp(x @ w), jnp.take_along_axis
    in_the_middle = take(y.reshape(4, 32, 128), labels.reshape(1, 1, 128).repeat(4, 0), 1)
    return take(y, labels[:, None], 1), take(y, labels[None], 0), in_the_middle


@planned(X, W, INDICES)
def gathers_that_are_no_picks(x, w, labels):
    """Several elements of a row, rows, elements of their own, and one of each of few rows."""
    y, take = jnp.exp(x @ w), jnp.take_along_axis
    several = take(y, jnp.stack([labels, labels], 1), 1)
    few = take(y[:127], labels[:127, None], 1)
    return several, few, y[labels], y[labels, labels], y[:, labels], y[3]


def powers(y):
    return jnp.exp(y - y.max(-1, keepdims=True))


@planned(struct(256, 67), struct(67, 67))
def what_looks_like_a_softmax(x, w):
    """Sums of something else or of everything, and quotients of something else."""
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
    """Powers or sums that an island only reads are no softmax."""
    solved = jnp.cumsum(x @ w, 0)
    return (powers(x @ w) / given) @ w, (solved / powers(solved).sum(-1, keepdims=True)) @ w


@planned(struct(64, 4, 67), struct(67, 67))
def softmax_over_two_axes(x, w):
    """A softmax over the last axes is one too; one by the sums of other rows is not."""
    y, z = (x @ w for _ in range(2))
    y = jnp.exp(y - y.max((1, 2), keepdims=True))
    z = powers(z)
    turned = jnp.broadcast_to(z.sum(-1).reshape(4, 64).reshape(64, 1, 4), (64, 4, 4)).sum(-1)
    return (y / y.sum((1, 2), keepdims=True)) @ w, (z / turned[:, :, None]) @ w


@planned(struct(4, 67, 67), struct(67, 67))
def columns_by_the_sums_of_rows(x, w):
    """A quotient by the sum of another row is no softmax."""
    y = powers(x @ w)
    return (y / y.sum(-1)[:, None]) @ w


@planned(struct(256, 67), struct(67, 67))
def softmax_that_nothing_rounds(x, w):
    """A float32 result has the derivative that it had."""
    return jax.nn.softmax(x @ w, -1)


# What is half between islands.


def _scaled(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@planned(X, W)
def gate_by_a_mean(x, w):
    """What a mean and a gate behind a product read is half."""
    y = jax.nn.silu(x @ w)
    return (y * jax.nn.sigmoid(jnp.mean(y, 0, keepdims=True) @ w)) @ w


@planned(X, W)
def stream_that_begins_with_an_input(x, w):
    """An input is rounded for the sum of a stream; the zeros of elu are made in its island.

    A gated sum restores nothing, and is half.
    """
    x = x + jax.nn.elu(x @ w)
    x = x + jax.nn.sigmoid(x @ w) * (_scaled(x @ w) - x)
    return (_scaled(x) @ w + x) @ w


@planned(X, W, ROW)
def sum_with_a_bias(x, w, b):
    """The sum of a normalised value and a bias stays in the island."""
    y = _scaled(x @ w) + b
    return (y + _scaled(y) @ w) @ w


@planned(X, W)
def unbounded_stream(x, w):
    """A sum that nothing bounds stays float32 in float16."""
    y = jnp.exp(x @ w)
    y = y + jnp.exp(x @ w + 1)
    return ((y + jnp.tanh(_scaled(y) @ w)) / y.sum()) @ w


@planned(X, W)
def derivative_in_the_loss(x, w):
    """Islands of a derivative keep what they compute; tanh is half there."""
    energy = lambda x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
    return jnp.sum(jax.grad(energy)(x) ** 2)


@planned(X, W, struct(128, dtype=jnp.int32))
def rows_that_do_not_repeat(x, w, places):
    """A lookup of rows that are each taken once is half."""
    rows = (x @ w).at[places].get(mode="fill", fill_value=0, unique_indices=True)
    return (rows + (x @ w)[places]) @ w
