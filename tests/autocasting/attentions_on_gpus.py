"""Attentions that are fused in programs for GPUs."""

import functools

import equinox as eqx
import flax.linen as nn
import flax.nnx as nnx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from tests.autocasting.attentions import (
    LOWEST,
    flax_attention,
    normal,
    one_head_of_keys,
    repeated_heads,
    scores,
    weigh,
    with_mask_of_keys,
)

LENGTH = 14
attention_of_jax = jax.nn.dot_product_attention


Q, K, V = (normal(i, 2, LENGTH, heads, 8) for i, heads in enumerate((4, 2, 2)))
X = normal(3, 2, LENGTH, 32)
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
PADDING = jnp.arange(LENGTH)[None] < jnp.array([LENGTH, 9])[:, None]
EMPTY = PADDING.at[1].set(False)  # an example without a key


def softmax_by_hand(x):
    powers = jnp.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def haiku_attention(x):
    initializer = hk.initializers.VarianceScaling()
    return hk.MultiHeadAttention(4, 8, w_init=initializer)(x, x, x, mask=CAUSAL[None, None])


FLAX = jax.jit(nn.MultiHeadDotProductAttention(4).init)(jax.random.key(0), X, X)
HAIKU = hk.without_apply_rng(hk.transform(haiku_attention))
EQUINOX = eqx.partition(eqx.nn.MultiheadAttention(4, 32, key=jax.random.key(1)), eqx.is_array)
NNX = nnx.split(nnx.MultiHeadAttention(4, 32, 32, decode=False, rngs=nnx.Rngs(0)))


def equinox_attention(params, x):
    module = eqx.combine(params, EQUINOX[1])
    return jax.vmap(lambda row: module(row, row, row, mask=jnp.asarray(CAUSAL)))(x)


def heads_first(q, k, v):
    q, k, v = (array[:, :, :2].swapaxes(1, 2) for array in (q, k, v))
    weights = softmax_by_hand(jnp.where(CAUSAL[None, None], q @ k.swapaxes(-1, -2) / 3, -jnp.inf))
    return (weights @ v).swapaxes(1, 2)


def heads_by_vmap(q, k, v):
    one = lambda q, k, v: jax.nn.softmax(q @ k.T) @ v
    return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(q[:, :, :2], k, v)


def added_mask(q, k, v, padding):
    added = (1 - padding.astype(jnp.float32)) * LOWEST
    return weigh(jax.nn.softmax(scores(q[:, :, :2], k) + added[:, None, None]), v)


def with_slopes(q, k, v):
    """ALiBi (Press et al. 2021): a bias that the program computes."""
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None]
    slopes = jnp.array([0.5, 0.25])[:, None, None]
    x = scores(q[:, :, :2], k) - (slopes * distance[None])[None]
    return weigh(jax.nn.softmax(jnp.where(CAUSAL[None, None], x, -1e9)), v)


def far_from_zero(q, k, v):
    """ALiBi with only the place of the key, and numbers that make no difference."""
    x = scores(q[:, :, :2], k) + (3000 + 0.5 * jnp.arange(LENGTH))[None, None, None]
    return weigh(jax.nn.softmax(jnp.where(CAUSAL[None, None], x, -1e9) - 3.0), v)


jax_attention = functools.partial(attention_of_jax, is_causal=True)

# Name: a function, its floating arguments, and others.
FOUND = {
    "Flax": (flax_attention, (FLAX, X), ()),
    "Flax, causal": (
        lambda p, x: flax_attention(p, x, nn.make_causal_mask(x[..., 0])), (FLAX, X), ()),
    "Flax, causal and padded": (
        lambda p, x, pad: flax_attention(
            p, x, nn.combine_masks(nn.make_causal_mask(x[..., 0]), pad[:, None, None])),
        (FLAX, X), (PADDING,)),
    "nnx": (
        lambda s, x: nnx.merge(NNX[0], s)(x, mask=nn.make_causal_mask(x[..., 0])),
        (NNX[1], X), ()),
    "Haiku": (HAIKU.apply, (HAIKU.init(jax.random.key(0), X), X), ()),
    "Equinox": (equinox_attention, (EQUINOX[0], X), ()),
    "jax.nn, groups of heads": (jax_attention, (Q, K, V), ()),
    "jax.nn, window": (
        functools.partial(jax_attention, local_window_size=(3, 0)), (Q, K, V), ()),
    "jax.nn, learned bias": (
        lambda q, k, v, bias: attention_of_jax(q, k, v, bias),
        (Q, K, V, normal(9, 1, 4, LENGTH, LENGTH)), ()),
    "jax.nn, mask": (with_mask_of_keys, (Q, K, V), (PADDING,)),
    "heads repeated": (repeated_heads, (Q, K, V), ()),
    "one head of keys": (one_head_of_keys, (Q, K, V), ()),
    "heads first, a softmax by hand, -inf": (heads_first, (Q, K, V), ()),
    "heads by vmap": (heads_by_vmap, (Q, K, V), ()),
    "an added mask": (added_mask, (Q, K, V), (PADDING,)),
    "a bias that is computed": (with_slopes, (Q, K, V), ()),
    "numbers far from zero": (far_from_zero, (Q, K, V), ()),
    "one query": (attention_of_jax, (Q[:, :1], K, V), ()),
    "heads of 80": (attention_of_jax, [normal(i, 1, 6, 2, 80) for i in range(3)], ()),
    "heads of 64": (attention_of_jax, [normal(i, 1, 6, 2, 64) for i in range(3)], ()),
    "heads of 128": (attention_of_jax, [normal(i, 1, 6, 2, 128) for i in range(3)], ()),
    "an odd length": (attention_of_jax, (Q[:, :7], K[:, :7], V[:, :7]), ()),
    "an odd length, causal": (jax_attention, (Q[:, :7], K[:, :7], V[:, :7]), ()),
    "an odd number of keys, padded": (
        with_mask_of_keys, (Q, K[:, :7], V[:, :7]), (PADDING[:, :7].at[:, 5:].set(False),)),
}  # fmt: skip
