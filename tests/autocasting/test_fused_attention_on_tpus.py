"""Attention in one Pallas kernel: that it computes the same, and what is left as it is.

The kernels are JAX's own. Here a CPU interprets them, tile by tile; the program is the one that is
lowered for a TPU otherwise.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

import jmp
from jmp.autocasting.attention import _pallas
from tests.autocasting.test_fused_attention import attentions, plans_of
from tests.errors import relative_error

LENGTH = 256
LOWEST = float(np.finfo(np.float32).min)
attention_of_jax = jax.nn.dot_product_attention


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


Q, K, V = (normal(i, 2, LENGTH, heads, 16) for i, heads in enumerate((4, 2, 2)))
TWO_HEADS = Q[:, :, :2]
X = normal(3, 2, LENGTH, 32)
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
PADDING = jnp.arange(LENGTH)[None] < jnp.array([LENGTH, 90])[:, None]
LEFT_PADDING = PADDING[:, ::-1]  # the first rows see no key before theirs
EMPTY = PADDING.at[1].set(False)  # an example without a key
PREFIX = CAUSAL | (np.arange(LENGTH) < 100)[None]  # of a language model that sees all of its prompt


def scores(q, k, scale=0.25):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale


def weigh(weights, v):
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def flax_attention(params, x, mask=None):
    return nn.MultiHeadDotProductAttention(4).apply(params, x, x, mask=mask)


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


def repeated_heads(q, k, v):
    k, v = (jnp.repeat(array, 2, axis=2) for array in (k, v))
    return masked(CAUSAL)(q, k, v)


def one_head_of_keys(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("btnd,bsd->bnts", q, k[:, :, 0]) / 4)
    return jnp.einsum("bnts,bsd->btnd", weights, v[:, :, 0])


def heads_first(q, k, v):
    q, k, v = (array[:, :, :2].swapaxes(1, 2) for array in (q, k, v))
    weights = jax.nn.softmax(jnp.where(CAUSAL[None, None], q @ k.swapaxes(-1, -2) / 4, -jnp.inf))
    return (weights @ v).swapaxes(1, 2)


def heads_by_vmap(q, k, v):
    one = lambda q, k, v: jax.nn.softmax(q @ k.T / 4) @ v
    return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(q[:, :, :2], k, v)


def own_mask_of_each_head(q, k, v):
    masks = np.stack([CAUSAL, PREFIX])
    return masked(masks)(q, k, v)


causal = functools.partial(attention_of_jax, is_causal=True)
window = functools.partial(causal, local_window_size=(100, 0))
WIDE = [normal(i, 1, LENGTH, heads, 128) for i, heads in enumerate((2, 1, 1))]
HALF = [array[:, :128] for array in (Q, K, V)]

# Name: a function, its floating arguments, and others.
FOUND = {
    "no mask": (attention_of_jax, (TWO_HEADS, K, V), ()),
    "causal": (causal, (TWO_HEADS, K, V), ()),
    "causal, groups of heads": (causal, (Q, K, V), ()),
    "causal, one tile": (causal, HALF, ()),
    "window": (window, (TWO_HEADS, K, V), ()),
    "window, groups of heads": (window, (Q, K, V), ()),
    "other scale": (functools.partial(causal, scale=0.3), (TWO_HEADS, K, V), ()),
    "other scale, no mask": (functools.partial(attention_of_jax, scale=0.3), (TWO_HEADS, K, V), ()),
    "other scale, groups of heads": (functools.partial(causal, scale=0.3), (Q, K, V), ()),
    "other scale, padded": (functools.partial(padded, scale=0.3), (TWO_HEADS, K, V), (PADDING,)),
    "other scale, causal and padded": (
        functools.partial(padded, scale=0.3, mask=CAUSAL), (TWO_HEADS, K, V), (LEFT_PADDING,)),
    "wide heads": (causal, WIDE, ()),
    "wide heads, scaled by hand": (functools.partial(causal, scale=0.125), WIDE, ()),
    "padded": (padded, (TWO_HEADS, K, V), (PADDING,)),
    "an example without a key": (padded, (TWO_HEADS, K, V), (EMPTY,)),
    "causal and padded, groups of heads": (of_heads, (Q, K, V), (PADDING,)),
    "causal, rows without a key": (
        functools.partial(padded, mask=CAUSAL), (TWO_HEADS, K, V), (LEFT_PADDING,)),
    "window, rows without a key": (
        functools.partial(padded, mask=CAUSAL & ~np.tril(CAUSAL, -9)),
        (TWO_HEADS, K, V), (PADDING,)),
    "prefix": (masked(PREFIX), (TWO_HEADS, K, V), ()),
    "prefix and padded": (
        functools.partial(padded, mask=PREFIX), (TWO_HEADS, K, V), (LEFT_PADDING,)),
    "a mask of each head": (own_mask_of_each_head, (TWO_HEADS, K, V), ()),
    "-inf": (masked(CAUSAL, fill=-jnp.inf), (TWO_HEADS, K, V), ()),
    "Flax": (flax_attention, (FLAX, X), ()),
    "Flax, causal and padded": (flax_causal_and_padded, (FLAX, X), (PADDING,)),
    "heads repeated": (repeated_heads, (Q, K, V), ()),
    "one head of keys": (one_head_of_keys, (Q, K, V), ()),
    "heads first": (heads_first, (Q, K, V), ()),
    "heads by vmap": (heads_by_vmap, (Q, K, V), ()),
    "fewer queries": (attention_of_jax, (TWO_HEADS[:, :128], K, V), ()),
    "values of another width": (masked(CAUSAL), (TWO_HEADS, K, V[..., :8]), ()),
}  # fmt: skip


@pytest.fixture
def as_on_tpu(monkeypatch):
    """A CPU runs what a TPU would, and interprets the kernels; a tile is 128 by 128."""
    compiled = pallas.pallas_call

    def interpreted(*args, **options):
        return compiled(*args, **options | {"interpret": True})

    monkeypatch.setattr(pallas, "pallas_call", interpreted)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, tpu, default: tpu(*args))
    monkeypatch.setattr(_pallas, "LARGEST_TILE", 128)


on_tpu = functools.partial(
    jmp.autocast, policy="mixed_bfloat16", attention="fused", platform="tpu"
)


@pytest.mark.parametrize(("function", "args", "others"), FOUND.values(), ids=FOUND)
def test_a_fused_attention_and_its_gradient_are_those_of_the_plain_one(
    function, args, others, as_on_tpu
):
    def gradient(run, args):
        return jax.jit(jax.value_and_grad(lambda args: (run(*args, *others) ** 2).mean()))(args)

    plain = jmp.autocast(function, "mixed_bfloat16", platform="tpu")
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), args)
        value, exact = gradient(function, wide)
        value, exact = jax.tree.map(np.asarray, (value, exact))
    _, of_plain = gradient(plain, args)
    fused_value, of_fused = gradient(on_tpu(function), args)
    assert abs(fused_value - value) < 2.0**-8 * value
    print(relative_error(of_fused, exact) / relative_error(of_plain, exact))
    assert relative_error(of_fused, exact) < 1.1 * relative_error(of_plain, exact)
    assert relative_error(of_fused, of_plain) > 0  # it is not the plain one
