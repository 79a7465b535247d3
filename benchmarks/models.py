"""The models of the benchmarks in Flax linen, at the sizes people train them.

`dtype` is the field that Flax's layers have for whoever does mixed precision by hand. With None
they are the unmodified models that the recipes of the libraries start from.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a shortcut."""

    features: int
    strides: int
    dtype: jnp.dtype | None

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), self.strides)(y)))
        y = norm()(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet-50 (He et al. 2015) with `stages=(3, 4, 6, 3)`.

    `small_images` leaves out what shrinks ImageNet's 224 pixels to 56 before the first block.
    """

    dtype: jnp.dtype | None
    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 10
    small_images: bool = True

    @nn.compact
    def __call__(self, x):
        kernel, strides = ((3, 3), 1) if self.small_images else ((7, 7), 2)
        x = nn.Conv(self.width, kernel, strides, use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        if not self.small_images:
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                strides = 2 if stage and not block else 1
                x = Bottleneck(self.width * 2**stage, strides, self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


def attention(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> jax.Array:
    """Returns what queries take of values, all of (batch, length, heads, width)."""
    mask = nn.make_causal_mask(jnp.ones((1, query.shape[1]))) if causal else None
    return nn.dot_product_attention(query, key, value, mask=mask)


def cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> jax.Array:
    """The same in one kernel of cuDNN; half precision alone, on a GPU of NVIDIA.

    For its gradient JAX asks for sequences of even length: ViT's 197 tokens are filled up with one
    that no query meets.
    """
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
    )
    batch, length = query.shape[:2]
    if length % 2 == 0:
        return attend(query, key, value)
    filled = [jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value)]
    return attend(*filled, key_value_seq_lengths=jnp.full(batch, length))[:, :length]


Attention = Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]


class Block(nn.Module):
    """A transformer's block: attention, its projections in one, and a network, each residual."""

    heads: int
    causal: bool
    dtype: jnp.dtype | None
    attention: Attention

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        y = nn.LayerNorm(dtype=self.dtype)(x)
        qkv = nn.Dense(3 * width, dtype=self.dtype)(y).reshape(batch, length, 3, self.heads, -1)
        y = self.attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], self.causal)
        x = x + nn.Dense(width, dtype=self.dtype)(y.reshape(x.shape))
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019) without dropout, the head tied to the embedding."""

    dtype: jnp.dtype | None
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304  # 50257, filled up to a multiple of 64
    attention: Attention = attention

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        positions = nn.Embed(tokens.shape[1], self.width, dtype=self.dtype)
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))[None]
        for _ in range(self.layers):
            x = Block(self.heads, True, self.dtype, self.attention)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


class ViT(nn.Module):
    """ViT-B/16 (Dosovitskiy et al. 2020) without dropout."""

    dtype: jnp.dtype | None
    layers: int = 12
    width: int = 768
    heads: int = 12
    patch: int = 16
    classes: int = 1000
    attention: Attention = attention

    @nn.compact
    def __call__(self, images):
        patches = (self.patch, self.patch)
        x = nn.Conv(self.width, patches, patches, dtype=self.dtype)(images)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate(
            [jnp.broadcast_to(token, (len(x), 1, self.width)).astype(x.dtype), x], 1
        )
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (1, x.shape[1], self.width)
        )
        x = x + positions.astype(x.dtype)
        for _ in range(self.layers):
            x = Block(self.heads, False, self.dtype, self.attention)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x[:, 0])
