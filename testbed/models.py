"""The models that autocast is judged on, each in float32 and written in half by hand.

A model is a function of a dtype and sizes that returns `(loss, params, batch)`: `loss(params,
*batch)` is a float32 scalar, the parameters are float32 whatever the dtype is. With float32 it is
what a user writes; with a half dtype what the same user writes who does mixed precision by hand:
every layer's `dtype` in half, statistics of norms and the loss in float32.
"""

import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax


def cross_entropy(logits, labels, weights=None):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return jnp.mean(losses) if weights is None else jnp.sum(losses * weights) / jnp.sum(weights)


def linen_model(module, inputs, labels, mutable=()):
    # Parameters do not depend on `dtype`: the module is initialised as it is.
    variables = jax.jit(module.init)(jax.random.key(0), inputs)
    params = variables.pop("params")

    def loss(params, inputs, labels):
        logits = module.apply(
            {"params": params, **variables}, inputs, mutable=list(mutable) or False
        )
        if mutable:
            logits, statistics = logits
            return cross_entropy(logits, labels), statistics
        return cross_entropy(logits, labels)

    return loss, params, (inputs, labels)


# Convolutional networks.


class ResidualBlock(nn.Module):
    features: int
    strides: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        y = conv(self.features, strides=self.strides)(x)
        y = nn.relu(norm()(y))
        y = norm()(conv(self.features)(y))
        if x.shape != y.shape:
            x = norm()(
                nn.Conv(self.features, (1, 1), self.strides, use_bias=False, dtype=self.dtype)(x)
            )
        return nn.relu(x + y)


class ResNetModule(nn.Module):
    dtype: jnp.dtype
    widths: tuple = (64, 128, 256, 512)

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.widths[0], (3, 3), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        for i, width in enumerate(self.widths):
            x = ResidualBlock(width, 2 if i else 1, self.dtype)(x)
            x = ResidualBlock(width, 1, self.dtype)(x)
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


def resnet(dtype=jnp.float32, batch=256, widths=(64, 128, 256, 512)):
    images = jax.random.normal(jax.random.key(1), (batch, 32, 32, 3))
    labels = jax.random.randint(jax.random.key(2), (batch,), 0, 10)
    return linen_model(ResNetModule(dtype, widths), images, labels, mutable=("batch_stats",))


class UNetModule(nn.Module):
    dtype: jnp.dtype
    widths: tuple = (32, 64, 128)
    pool: Callable = nn.max_pool

    @nn.compact
    def __call__(self, x):
        def block(x, width):
            for _ in range(2):
                x = nn.Conv(width, (3, 3), dtype=self.dtype)(x)
                x = nn.silu(nn.GroupNorm(8, dtype=self.dtype)(x))
            return x

        skips = []
        for width in self.widths:
            x = block(x, width)
            skips.append(x)
            x = self.pool(x, (2, 2), (2, 2))
        x = block(x, self.widths[-1])
        for width, skip in zip(reversed(self.widths), reversed(skips), strict=True):
            x = nn.ConvTranspose(width, (2, 2), (2, 2), dtype=self.dtype)(x)
            x = block(jnp.concatenate([x, skip], -1), width)
        return nn.Conv(4, (1, 1), dtype=self.dtype)(x)


def unet(dtype=jnp.float32, batch=64, size=64, widths=(32, 64, 128), pool=nn.max_pool):
    images = jax.random.normal(jax.random.key(1), (batch, size, size, 3))
    labels = jax.random.randint(jax.random.key(2), (batch, size, size), 0, 4)
    return linen_model(UNetModule(dtype, widths, pool), images, labels)


# Transformers.


class Block(nn.Module):
    width: int
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(y))
        return x + nn.Dense(self.width, dtype=self.dtype)(y)


class ScannedBlock(nn.Module):
    width: int
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, mask):
        return Block(self.width, self.heads, self.dtype)(x, mask), None


class GPTModule(nn.Module):
    layers: int
    width: int
    vocabulary: int
    dtype: jnp.dtype
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        heads = max(1, self.width // 64)
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width)
        )
        x = x + positions.astype(x.dtype)
        mask = nn.make_causal_mask(tokens)
        if self.scanned:
            scanned = nn.scan(
                nn.remat(ScannedBlock, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=self.layers,
            )
            x, _ = scanned(self.width, heads, self.dtype)(x, mask)
        else:
            for _ in range(self.layers):
                x = Block(self.width, heads, self.dtype)(x, mask)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


def gpt(
    dtype=jnp.float32, batch=8, length=512, layers=4, width=512, vocabulary=8192, scanned=False
):
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)
    module = GPTModule(layers, width, vocabulary, dtype, scanned)
    return linen_model(module, tokens, jnp.roll(tokens, -1, 1))


scanned_gpt = functools.partial(gpt, scanned=True)


def plain_attention(x, layer, heads, rotate=lambda x: x):
    """Causal attention in plain JAX; scores are half where `x` is, and the softmax float32."""
    b, t, _ = x.shape
    qkv = x @ layer["qkv"].astype(x.dtype)
    q, k, v = jnp.split(qkv.reshape(b, t, 3 * heads, -1), 3, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, jnp.finfo(x.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, -1)
    return y @ layer["out"].astype(x.dtype)


def plain_transformer(dtype=jnp.float32, batch=8, length=512, layers=4, width=512, vocabulary=8192):
    """RMSNorm, rotary positions and SwiGLU in plain JAX."""
    heads = max(1, width // 64)
    hidden = 8 * width // 3 // 64 * 64
    keys = iter(jax.random.split(jax.random.key(0), 6 * layers + 2))

    def matrix(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    params = {
        "embedding": jax.random.normal(next(keys), (vocabulary, width)) * 0.02,
        "layers": [
            {
                "qkv": matrix(width, 3 * width),
                "out": matrix(width, width),
                "gate": matrix(width, hidden),
                "up": matrix(width, hidden),
                "down": matrix(hidden, width),
                "norm1": jnp.ones(width),
                "norm2": jnp.ones(width),
            }
            for _ in range(layers)
        ],
        "norm": jnp.ones(width),
        "head": matrix(width, vocabulary),
    }

    def rms_norm(x, scale):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
        return (y * scale).astype(dtype)

    def rotary(x):
        angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** -jnp.linspace(0, 1, x.shape[-1] // 2)
        cos, sin = (f(angles)[None, :, None].astype(dtype) for f in (jnp.cos, jnp.sin))
        x1, x2 = jnp.split(x, 2, -1)
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

    def loss(params, tokens, labels):
        x = params["embedding"].astype(dtype)[tokens]
        for layer in params["layers"]:
            x = x + plain_attention(rms_norm(x, layer["norm1"]), layer, heads, rotary)
            y = rms_norm(x, layer["norm2"])
            y = jax.nn.silu(y @ layer["gate"].astype(dtype)) * (y @ layer["up"].astype(dtype))
            x = x + y @ layer["down"].astype(dtype)
        logits = rms_norm(x, params["norm"]) @ params["head"].astype(dtype)
        return cross_entropy(logits, labels)

    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)
    return loss, params, (tokens, jnp.roll(tokens, -1, 1))


def checkpointed_gpt(dtype=jnp.float32, batch=8, length=512, layers=4, width=512, vocabulary=8192):
    """A GPT in plain JAX as code for TPUs is written: layers in a scan, each under checkpoint.

    The head is the transposed embedding.
    """
    heads = max(1, width // 64)
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def matrices(*shape):
        return jax.random.normal(next(keys), shape) * 0.02

    def norms(*shape):
        return {"scale": jnp.ones(shape), "bias": jnp.zeros(shape)}

    params = {
        "embedding": matrices(vocabulary, width),
        "positions": matrices(length, width),
        "layers": {
            "qkv": matrices(layers, width, 3 * width),
            "out": matrices(layers, width, width),
            "up": matrices(layers, width, 4 * width),
            "up_bias": jnp.zeros((layers, 4 * width)),
            "down": matrices(layers, 4 * width, width),
            "down_bias": jnp.zeros((layers, width)),
            "norm1": norms(layers, width),
            "norm2": norms(layers, width),
        },
        "norm": norms(width),
    }

    def layer_norm(x, norm):
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
        return (y * norm["scale"] + norm["bias"]).astype(dtype)

    @jax.checkpoint
    def block(x, layer):
        x = x + plain_attention(layer_norm(x, layer["norm1"]), layer, heads)
        y = layer_norm(x, layer["norm2"]) @ layer["up"].astype(dtype)
        y = jax.nn.gelu(y + layer["up_bias"].astype(dtype))
        return x + y @ layer["down"].astype(dtype) + layer["down_bias"].astype(dtype), None

    def loss(params, tokens, labels):
        table = params["embedding"].astype(dtype)
        x = table[tokens] + params["positions"].astype(dtype)
        x, _ = jax.lax.scan(block, x, params["layers"])
        return cross_entropy(layer_norm(x, params["norm"]) @ table.T, labels)

    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)
    return loss, params, (tokens, jnp.roll(tokens, -1, 1))


# Others.


class RecurrentModule(nn.Module):
    cell: type
    width: int
    vocabulary: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = nn.RNN(self.cell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


def lstm(
    dtype=jnp.float32, batch=64, length=128, width=512, vocabulary=1024, cell=nn.OptimizedLSTMCell
):
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)
    module = RecurrentModule(cell, width, vocabulary, dtype)
    return linen_model(module, tokens, jnp.roll(tokens, -1, 1))


gru = functools.partial(lstm, cell=nn.GRUCell)


def mixture_of_experts(dtype=jnp.float32, tokens=256, width=64, experts=4):
    """Tokens sorted by expert; `ragged_dot` multiplies each group by its expert's matrix."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "router": jax.random.normal(keys[0], (width, experts)) * width**-0.5,
        "up": jax.random.normal(keys[1], (experts, width, 2 * width)) * width**-0.5,
        "down": jax.random.normal(keys[2], (experts, 2 * width, width)) * (2 * width) ** -0.5,
        "inner": jax.random.normal(keys[3], (width, width)) * width**-0.5,
    }
    x = jax.random.normal(keys[4], (tokens, width))
    labels = jnp.arange(tokens) % width

    def loss(params, x, labels):
        params = jax.tree.map(lambda w: w.astype(dtype), params)
        x = jnp.tanh(x.astype(dtype) @ params["inner"])
        gates = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
        gate, expert = jax.lax.top_k(gates, 1)
        order = jnp.argsort(expert[:, 0])
        sizes = jnp.bincount(expert[:, 0], length=experts)
        y = jax.lax.ragged_dot(x[order], params["up"], sizes)
        y = jax.lax.ragged_dot(jax.nn.gelu(y), params["down"], sizes)
        y = y[jnp.argsort(order)] * gate.astype(dtype)
        return cross_entropy(x + y, labels)

    return loss, params, (x, labels)


def equinox_attention(dtype=jnp.float32, batch=4, length=32, width=64):
    keys = jax.random.split(jax.random.key(0), 5)
    model = {
        "attention": eqx.nn.MultiheadAttention(4, width, key=keys[0]),
        "norms": [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)],
        "mlp": eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1]),
        "inner": eqx.nn.Linear(width, width, key=keys[2]),
    }
    params, static = eqx.partition(model, eqx.is_inexact_array)
    x = jax.random.normal(keys[3], (batch, length, width))
    labels = jax.random.randint(keys[4], (batch, length), 0, width)

    def loss(params, x, labels):
        params = jax.tree.map(lambda w: w.astype(dtype), params)
        model = eqx.combine(params, static)

        def forward(x):
            x = jax.vmap(model["inner"])(x)
            y = jax.vmap(model["norms"][0])(x)
            x = x + model["attention"](y, y, y)
            return x + jax.vmap(model["mlp"])(jax.vmap(model["norms"][1])(x))

        return cross_entropy(jax.vmap(forward)(x.astype(dtype)), labels)

    return loss, params, (x, labels)


def haiku_resnet(dtype=jnp.float32, batch=8, size=16):
    def forward(x):
        network = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=10,
            bottleneck=False,
            channels_per_group=(16, 16, 32, 32),
            use_projection=(True, False, True, False),
            strides=(1, 1, 2, 1),
            bn_config={"decay_rate": 0.9},
        )
        return network(x, is_training=True)

    network = hk.without_apply_rng(hk.transform_with_state(forward))
    images = jax.random.normal(jax.random.key(1), (batch, size, size, 3))
    labels = jnp.arange(batch) % 10
    params, state = jax.jit(network.init)(jax.random.key(0), images)

    def loss(params, images, labels):
        half = jax.tree.map(lambda w: w.astype(dtype), params)
        logits, statistics = network.apply(half, state, images.astype(dtype))
        return cross_entropy(logits, labels), statistics

    return loss, params, (images, labels)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A row of the list: how to make it small, and whether its loss returns statistics."""

    name: str
    make: Callable
    small: dict
    has_aux: bool = False
    noisy: bool = False  # a ResNet at random initialisation amplifies any rounding


SMALL_GPT = {"batch": 2, "length": 64, "layers": 2, "width": 128, "vocabulary": 256}
MODELS = [
    Model("resnet", resnet, {"batch": 16, "widths": (16, 32)}, has_aux=True, noisy=True),
    # The gradient of a maximum jumps where a rounding changes the winner: here the mean instead.
    Model("unet", unet, {"batch": 2, "size": 16, "widths": (16,), "pool": nn.avg_pool}),
    Model("gpt", gpt, SMALL_GPT),
    Model("scanned_gpt", scanned_gpt, SMALL_GPT),
    Model("lstm", lstm, {"batch": 8, "length": 16, "width": 64, "vocabulary": 64}),
    Model("plain_transformer", plain_transformer, SMALL_GPT),
    Model("checkpointed_gpt", checkpointed_gpt, SMALL_GPT),
    Model("mixture_of_experts", mixture_of_experts, {}),
    Model("equinox_attention", equinox_attention, {}),
    Model("haiku_resnet", haiku_resnet, {}, has_aux=True, noisy=True),
]
