"""What the planner decides, and why: a small program each, whose plan is in `plan_listings/`.

`tests/autocasting/plans.py` says how to read and write them. Arrays have 128 x 128 elements unless
said otherwise: large enough to be recomputed.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import Precision

import jmp
from testbed.planned.cases import IMAGE, INDICES, KERNEL, ROW, SMALL, W, X, conv, new_cases, struct

CASES, planned = new_cases()

# Products, and what stands between two of them.


@planned(X, W, ROW)
def bias_and_relu(x, w, b):
    """A bias is repeated in float32 and rounded; relu runs in half, its rule is planned later."""
    return jax.nn.relu(x @ w + b) @ w


@planned(X, W, ROW)
def bias_behind_the_last_product(x, w, b):
    """What no product reads stays float32."""
    return x @ w + b


@planned(X, W, ROW)
def gelu(x, w, b):
    """The bias is peeled off; the rest is recomputed, and leaves half."""
    return jax.nn.gelu(x @ w + b) @ w


@planned(X, W, ROW, ROW)
def layer_norm(x, w, scale, offset):
    """The sums of a norm over rows are kept; its input is cast once for all that read it."""
    y = x @ w
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    return (y * scale + offset) @ w


@planned(X, W)
def residual_addition_before_a_norm(x, w):
    """An addition is peeled off: one half value enters the island then, not two."""
    y, z = x @ w, x @ w
    s = y + z
    return (s * lax.rsqrt(jnp.sum(s * s, -1, keepdims=True))) @ w, s @ w


@planned(X, W)
def attention(x, w):
    """A causal mask is cloned into the island of the softmax; -1e9 does not fit."""
    scores = x @ w
    rows = lax.broadcasted_iota(jnp.int32, (128, 128), 0)
    columns = lax.broadcasted_iota(jnp.int32, (128, 128), 1)
    scores = jnp.where(rows >= columns, scores, -1e9)
    return jax.nn.softmax(scores, -1) @ x


@planned(struct(256, 67), struct(67, 67))
def softmax_over_odd_rows(x, w):
    """Rows that are padded: the derivative is taken from the half result."""
    return jax.nn.softmax(x @ w, -1) @ w


@planned(struct(256, 67), struct(67, 67))
def log_of_a_softmax_over_odd_rows(x, w):
    """What reads the result inside would read the rounded one: no rewrite."""
    p = jax.nn.softmax(x @ w, -1)
    return jnp.log(p) @ w, p @ w


@planned(X, W, INDICES)
def cross_entropy(x, w, labels):
    """One element of each row, as a masked sum; the loss stays float32."""
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], -1).mean()


@planned(IMAGE, KERNEL, struct(16), struct(16))
def batch_norm(x, k, scale, offset):
    """Plain: its derivative needs two passes anyway. Behind its end all is half."""
    y = conv(x, k)
    mean = y.mean((0, 1, 2))
    variance = (y * y).mean((0, 1, 2)) - mean * mean
    y = (y - mean) * (scale * lax.rsqrt(variance + 1e-3)) + offset
    return conv(lax.max(y, 0.0), k)


@planned(X, W)
def bounded_functions(x, w):
    """tanh in half; one minus a bounded result in float32, also behind a reshape."""
    y = jnp.tanh(x @ w)
    z = 1 - jnp.reshape(lax.logistic(x @ w), (128, 128))
    return y @ w, z @ w, (y + z) @ w


@planned(X, W)
def squares(x, w):
    """x * x is a square, x * y is not."""
    y, z = x @ w, x @ w
    return (y * y) @ w, (y * z) @ w


# Neutral values: parameters, inputs, constants.


@planned(X, W)
def input_as_large_as_the_result(x, w):
    """A float32 input that is not repeated makes an addition float32."""
    return (x @ w + x) @ w


@planned(X, W, ROW)
def neutral_arithmetic(x, w, b):
    """What parameters alone decide runs in float32, whatever reads it."""
    scaled = w * jnp.exp(b)
    return (x @ scaled + jnp.sin(b)) @ w


@planned(X, W)
def constants(x, w):
    """2 fits a half type; 1e-12 and 1e9 do not, also negated and repeated."""
    y = (x @ w) * 2.0
    z = (x @ w) + 1e-12
    v = lax.max(x @ w, -jnp.full((128, 128), 1e9))
    return y @ w, z @ w, v @ w


@planned(X, W, struct(128, 128, dtype=bool))
def masks(x, w, keep):
    """A boolean fits half; an input of several axes may be a mask and is saturated."""
    y = x @ w
    z = (x @ w)[None] + jnp.stack([w] * 2)[:, :1]
    return (y * keep.astype(jnp.float32)) @ w, z[0] @ w, jnp.where(keep, y, 0.0) @ w


@planned(X, W, struct(1, 128, 1))
def mask_in_an_island(x, w, mask):
    """What leaves an island where a mask was applied is saturated."""
    y = jnp.exp((x @ w)[None])
    return (y + mask)[0] @ w


# Looking up, and other barriers.


@planned(X, W, INDICES)
def embedding(table, w, tokens):
    """Rows of a table are rounded after the lookup."""
    return jnp.tanh(table[tokens]) @ w


@planned(X, W, INDICES)
def barriers(x, w, tokens):
    """Sums that scatter, sorts, solvers and random bits."""
    y = x @ w
    added = jnp.zeros((128, 128)).at[tokens].add(y)
    ordered = jnp.sort(y, -1)
    summed = jnp.cumsum(y, -1)
    solved = jnp.linalg.cholesky(y)
    return added @ w, ordered @ w, summed @ w, solved @ w


@planned(X, W, INDICES)
def updates(x, w, tokens):
    """A scatter writes half into half, and float32 into float32."""
    y, z = x @ w, x @ w
    inside = lax.dynamic_update_slice(y, z[:8], (0, 0))
    outside = lax.dynamic_update_slice(w, z[:8], (0, 0))
    return inside @ w, outside @ w


@planned(X, W)
def random_numbers(x, w):
    """A jit that draws random bits stays whole."""
    noise = jax.random.bernoulli(jax.random.key(0), 0.5, (128, 128))
    return jnp.where(noise, x @ w, 0.0) @ w


# What the user says.


@planned(X, W)
def full_precision(x, w):
    """No product is lowered inside; what comes out is float32."""
    inside = jmp.full_precision(lambda y: jnp.tanh(y) @ w)
    return inside(x @ w) @ w


@planned(X, W, rules=[("head", "p=f32,c=f32,o=f16")])
def rule_with_a_half_output(x, w):
    """What leaves the scope is rounded, and nothing that stays inside."""
    with jax.named_scope("head"):
        z = jnp.sin(x @ w)
        y = z @ w
    return y @ w, z @ w


@planned(X, W, rules=[("head", "p=f32,c=f32,o=f16")])
def positions_made_in_the_scope_of_a_rule(x, w):
    """What an island computes of constants made there is computed inside it, and not stored."""
    x = x @ w
    with jax.named_scope("head"):
        x = jnp.exp(x + jnp.sin(lax.iota(jnp.float32, 128)))
    return x @ w


@planned(X, W)
def inner_autocast(x, w):
    """An autocast inside has decided."""
    inner = jmp.autocast(lambda y: jnp.exp(y) @ w, "mixed_bfloat16")
    return inner(x @ w) @ w


@planned(X, W, full=["tanh"], low=["exp"], follow=["reduce_sum"])
def overrides(x, w):
    """Categories of this call."""
    y = x @ w
    return jnp.tanh(y) @ w, jnp.exp(y) @ w, jnp.broadcast_to(y.sum(-1)[:, None], (128, 128)) @ w


@planned(X, W)
def users_dtypes(x, w):
    """Precisions, algorithms, half operands and explicit casts are the user's word."""
    y = x @ w
    a = jnp.matmul(y, w, precision=Precision.HIGHEST)
    b = lax.dot(x.astype(jnp.float16), w.astype(jnp.float16), preferred_element_type=jnp.float32)
    c = jnp.matmul(y.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    return a @ w, b @ w, c.astype(jnp.float32) @ w


@planned(X, W)
def complex_operand(x, w):
    """A complex operand makes a real result float32."""
    y = x @ w
    return jnp.abs(y + 1j * w) @ w


@planned(X, ROW)
def inner_product(x, b):
    """An inner product is a sum."""
    return (x @ b) @ (x @ b)


@planned(X, W, recompute="none")
def recompute_none(x, w):
    """Islands are plain."""
    return jax.nn.gelu(x @ w) @ w


@planned(SMALL, SMALL, recompute="all")
def recompute_all(x, w):
    """Islands are recomputed, also small ones."""
    return jnp.exp(x @ w) @ w
