"""Attentions of published models, each on its own, that autocast fuses into one kernel."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import jmp


def rotary(x):
    frequencies = 1e-4 ** jnp.linspace(0, 1, x.shape[-1] // 2)
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies[None])[None, :, None]
    first, second = jnp.split(x, 2, -1)
    rotated = (first * jnp.cos(angles) - second * jnp.sin(angles),
               second * jnp.cos(angles) + first * jnp.sin(angles))  # fmt: skip
    return jnp.concatenate(rotated, -1).astype(x.dtype)


class Llama(nn.Module):
    """Attention of a Llama: rotary positions, groups of heads, a mask that is causal and padded."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, padding):
        heads = lambda n, name: nn.DenseGeneral(
            (n, 64), use_bias=False, dtype=self.dtype, name=name
        )
        q, k, v = heads(8, "q")(x), heads(2, "k")(x), heads(2, "v")(x)
        k, v = (jnp.repeat(array, 4, axis=2) for array in (rotary(k), v))
        causal = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        mask = nn.combine_masks(causal, padding[:, None, None])
        y = nn.dot_product_attention(rotary(q), k, v, mask=mask)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, dtype=self.dtype)(y)


class Bert(nn.Module):
    """Attention of a BERT: a bias over the keys that is added to the scores."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, padding):
        heads = lambda name: nn.DenseGeneral((8, 64), dtype=self.dtype, name=name)(x)
        bias = jnp.where(padding, 0, jnp.finfo(jnp.float32).min)[:, None, None]
        y = nn.dot_product_attention(heads("q"), heads("k"), heads("v"), bias=bias)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=self.dtype)(y)


class ViT(nn.Module):
    """Attention over an odd number of patches, without a mask."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, padding):
        x = x[:, :-3]
        return nn.MultiHeadDotProductAttention(8, dtype=self.dtype)(x, x)


X = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32)
PADDING = jax.ShapeDtypeStruct((8, 512), jnp.bool_)


def step(module, **options):
    apply = module.apply
    if options:
        apply = jmp.autocast(apply, "mixed_float16", **options)

    def loss(params, x, padding):
        return (apply(params, x, padding).astype(jnp.float32) ** 2).mean()

    return jax.grad(loss, (0, 1))
