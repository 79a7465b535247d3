"""Attentions that are fused in programs for TPUs."""

import functools

import flax.linen as nn
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
)

LENGTH = 256
attention_of_jax = jax.nn.dot_product_attention

Q, K, V = (normal(i, 2, LENGTH, heads, 16) for i, heads in enumerate((4, 2, 2)))
TWO_HEADS = Q[:, :, :2]
X = normal(3, 2, LENGTH, 32)
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
PADDING = jnp.arange(LENGTH)[None] < jnp.array([LENGTH, 90])[:, None]
LEFT_PADDING = PADDING[:, ::-1]  # the first rows see no key before theirs
EMPTY = PADDING.at[1].set(False)  # an example without a key
PREFIX = CAUSAL | (np.arange(LENGTH) < 100)[None]  # of a language model that sees all of its prompt


def flax_causal_and_padded(params, x, pad):
    masks = nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(pad, pad)
    return flax_attention(params, x, nn.combine_masks(*masks))


FLAX = nn.MultiHeadDotProductAttention(4).init(jax.random.key(0), X, X)


def masked(mask, scale=0.25, fill=-1e9):
    """Returns an attention with a mask of the program's own."""

    def attend(q, k, v):
        found = jnp.where(mask.reshape(1, -1, *mask.shape[-2:]), scores(q, k, scale), fill)
        return weigh(jax.nn.softmax(found), v)

    return attend


def padded(q, k, v, pad, scale=0.25, mask=CAUSAL | ~CAUSAL):
    kept = pad[:, None, None] & np.asarray(mask)[None, None]
    return weigh(jax.nn.softmax(jnp.where(kept, scores(q, k, scale), LOWEST)), v)


def of_heads(q, k, v, pad):
    return attention_of_jax(q, k, v, mask=pad[:, None, None], is_causal=True)


def own_mask_of_each_head(q, k, v):
    return masked(np.stack([CAUSAL, PREFIX]))(q, k, v)


causal = functools.partial(attention_of_jax, is_causal=True)
window = functools.partial(causal, local_window_size=(100, 0))
WIDE = [normal(i, 1, LENGTH, heads, 128) for i, heads in enumerate((2, 1, 1))]

# Name: a function, its floating arguments, and others.
FOUND = {
    "no mask": (attention_of_jax, (TWO_HEADS, K, V), ()),
    "causal": (causal, (TWO_HEADS, K, V), ()),
    "causal, groups of heads": (causal, (Q, K, V), ()),
    "window": (window, (TWO_HEADS, K, V), ()),
    "other scale": (functools.partial(causal, scale=0.3), (TWO_HEADS, K, V), ()),
    "other scale, causal and padded": (
        functools.partial(padded, scale=0.3, mask=CAUSAL), (TWO_HEADS, K, V), (LEFT_PADDING,)),
    "wide heads": (causal, WIDE, ()),
    "padded": (padded, (TWO_HEADS, K, V), (PADDING,)),
    "an example without a key": (padded, (TWO_HEADS, K, V), (EMPTY,)),
    "causal and padded, groups of heads": (of_heads, (Q, K, V), (PADDING,)),
    "causal, rows without a key": (
        functools.partial(padded, mask=CAUSAL), (TWO_HEADS, K, V), (LEFT_PADDING,)),
    "window, rows without a key": (
        functools.partial(padded, mask=CAUSAL & ~np.tril(CAUSAL, -9)),
        (TWO_HEADS, K, V), (PADDING,)),
    "prefix and padded": (
        functools.partial(padded, mask=PREFIX), (TWO_HEADS, K, V), (LEFT_PADDING,)),
    "a mask of each head": (own_mask_of_each_head, (TWO_HEADS, K, V), ()),
    "-inf": (masked(CAUSAL, fill=-jnp.inf), (TWO_HEADS, K, V), ()),
    "Flax": (flax_attention, (FLAX, X), ()),
    "Flax, causal and padded": (flax_causal_and_padded, (FLAX, X), (PADDING,)),
    "heads repeated": (repeated_heads, (Q, K, V), ()),
    "one head of keys": (one_head_of_keys, (Q, K, V), ()),
    "fewer queries": (attention_of_jax, (TWO_HEADS[:, :128], K, V), ()),
    "values of another width": (masked(CAUSAL), (TWO_HEADS, K, V[..., :8]), ()),
}  # fmt: skip
