"""GPT-2 as Hugging Face writes it in Flax, with its names of modules, small and without dropout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Conv1D(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(0.02), (self.features, x.shape[-1]))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        dimensions = (((x.ndim - 1,), (0,)), ((), ()))
        return jax.lax.dot_general(x, kernel.T, dimensions) + bias[None, None]


class Attention(nn.Module):
    width: int
    heads: int = 4

    def setup(self):
        self.c_attn = Conv1D(3 * self.width)
        self.c_proj = Conv1D(self.width)

    def __call__(self, x):
        split = jnp.split(self.c_attn(x), 3, axis=-1)
        query, key, value = (y.reshape(*x.shape[:2], self.heads, -1) for y in split)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]), dtype=bool)
        bias = jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)
        weights = nn.dot_product_attention_weights(query, key, bias=bias)
        y = jnp.einsum("...hqk,...khd->...qhd", weights, value)
        return self.c_proj(y.reshape(x.shape))


class MLP(nn.Module):
    width: int

    def setup(self):
        self.c_fc = Conv1D(4 * self.width)
        self.c_proj = Conv1D(self.width)

    def __call__(self, x):
        return self.c_proj(nn.gelu(self.c_fc(x)))


class Block(nn.Module):
    width: int

    def setup(self):
        self.ln_1 = nn.LayerNorm(epsilon=1e-5)
        self.attn = Attention(self.width)
        self.ln_2 = nn.LayerNorm(epsilon=1e-5)
        self.mlp = MLP(self.width)

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Blocks(nn.Module):
    layers: int
    width: int

    def setup(self):
        self.blocks = [Block(self.width, name=str(i)) for i in range(self.layers)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Transformer(nn.Module):
    layers: int
    width: int
    vocabulary: int

    def setup(self):
        self.wte = nn.Embed(self.vocabulary, self.width)
        self.wpe = nn.Embed(1024, self.width)
        self.h = Blocks(self.layers, self.width)
        self.ln_f = nn.LayerNorm(epsilon=1e-5)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1])[None])
        return self.wte.attend(self.ln_f(self.h(x)))


class GPT2(nn.Module):
    layers: int
    width: int
    vocabulary: int

    def setup(self):
        self.transformer = Transformer(self.layers, self.width, self.vocabulary)

    def __call__(self, tokens):
        return self.transformer(tokens)


def gpt2(layers, width=64, vocabulary=128, batch=2, length=32):
    """Returns the loss, and the shapes of its parameters and tokens."""
    model = GPT2(layers, width, vocabulary)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn, params, tokens
