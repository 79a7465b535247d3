"""GPT-2 as Hugging Face writes it in Flax, with its names of modules, small and without dropout.

A `dtype` of the model's own is that of its layers, and of the mask's most negative number.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Conv1D(nn.Module):
    """A dense layer whose kernel is stored transposed."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        x = jnp.asarray(x, self.dtype)
        kernel = self.param("kernel", nn.initializers.normal(0.02), (self.features, x.shape[-1]))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        dimensions = (((x.ndim - 1,), (0,)), ((), ()))
        y = jax.lax.dot_general(x, jnp.asarray(kernel.T, self.dtype), dimensions)
        return y + jnp.asarray(bias, self.dtype)[None, None]


class Attention(nn.Module):
    width: int
    dtype: Any
    heads: int = 4

    def setup(self):
        self.c_attn = Conv1D(3 * self.width, self.dtype)
        self.c_proj = Conv1D(self.width, self.dtype)

    def __call__(self, x, attention_mask):
        split = jnp.split(self.c_attn(x), 3, axis=-1)
        query, key, value = (y.reshape(*x.shape[:2], self.heads, -1) for y in split)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]), dtype=bool)
        if attention_mask is not None:
            mask = nn.combine_masks(mask, attention_mask[:, None, None, :]) > 0
        bias = jnp.where(mask, 0.0, jnp.finfo(self.dtype).min)
        weights = nn.dot_product_attention_weights(query, key, bias=bias, dtype=self.dtype)
        y = jnp.einsum("...hqk,...khd->...qhd", weights, value)
        return self.c_proj(y.reshape(x.shape))


class MLP(nn.Module):
    width: int
    dtype: Any

    def setup(self):
        self.c_fc = Conv1D(4 * self.width, self.dtype)
        self.c_proj = Conv1D(self.width, self.dtype)

    def __call__(self, x):
        return self.c_proj(nn.gelu(self.c_fc(x)))


class Block(nn.Module):
    width: int
    dtype: Any

    def setup(self):
        self.ln_1 = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)
        self.attn = Attention(self.width, self.dtype)
        self.ln_2 = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)
        self.mlp = MLP(self.width, self.dtype)

    def __call__(self, x, attention_mask):
        x = x + self.attn(self.ln_1(x), attention_mask)
        return x + self.mlp(self.ln_2(x))


class Blocks(nn.Module):
    layers: int
    width: int
    dtype: Any

    def setup(self):
        self.blocks = [Block(self.width, self.dtype, name=str(i)) for i in range(self.layers)]

    def __call__(self, x, attention_mask):
        for block in self.blocks:
            x = block(x, attention_mask)
        return x


class Transformer(nn.Module):
    layers: int
    width: int
    vocabulary: int
    dtype: Any
    positions: int

    def setup(self):
        self.wte = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        self.wpe = nn.Embed(self.positions, self.width, dtype=self.dtype)
        self.h = Blocks(self.layers, self.width, self.dtype)
        self.ln_f = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)

    def __call__(self, tokens, attention_mask, position_ids):
        if position_ids is None:
            position_ids = jnp.arange(tokens.shape[1])[None]
        x = self.wte(tokens) + self.wpe(position_ids)
        return self.wte.attend(self.ln_f(self.h(x, attention_mask)))


class GPT2(nn.Module):
    """The logits of tokens; `attention_mask` is 0 where a token is padding."""

    layers: int
    width: int
    vocabulary: int
    dtype: Any = jnp.float32
    positions: int = 1024

    def setup(self):
        self.transformer = Transformer(
            self.layers, self.width, self.vocabulary, self.dtype, self.positions
        )

    def __call__(self, tokens, attention_mask=None, position_ids=None):
        return self.transformer(tokens, attention_mask, position_ids)


def gpt2(layers, width=64, vocabulary=128, batch=2, length=32):
    """Returns the loss, and the shapes of its parameters and tokens."""
    model = GPT2(layers, width, vocabulary)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn, params, tokens
