"""The patterns of published models that make mixed precision hard to add from outside.

They cast by a `dtype` of their own, float32 by default: in layers of their own that multiply their
own parameters, in norms whose statistics are float32 by an explicit cast, in masks made of the
dtype's most negative number. Nothing here is a copy; each pattern is written anew and kept small.

A model is a function of its own `dtype` option, a seed and `wrap`, which returns `(loss, params,
batch)` as those of testbed/models.py do. `wrap` takes what an adapter takes, the function that
applies a linen module or the nnx module, and gives it back in mixed precision.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmp.trees import path_string
from testbed.gpt2 import GPT2
from testbed.models import cross_entropy

WIDTH, HEADS, SIZE, HIDDEN = 32, 2, 16, 64
BATCH, LENGTH, VOCABULARY = 2, 16, 64


def as_it_is(model):
    return model


class Draws:
    """Random numbers of NumPy: compiling JAX's costs more than a model's gradient."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def integers(self, below, shape=(BATCH, LENGTH)):
        return self.generator.integers(0, below, shape, np.int32)

    def normal(self, shape, scale=1.0):
        return jnp.asarray(scale * self.generator.standard_normal(shape, np.float32))

    def like(self, shapes):
        """Parameters: matrices of scale 0.2, biases around zero, scales of norms around one."""

        def draw(path, leaf):
            mean = float(path_string(path).endswith("scale"))
            return mean + self.normal(leaf.shape, 0.2 if leaf.ndim > 1 else 0.1)

        return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def shapes(module, *inputs):
    """The shapes of the module's variables; `inputs` are shapes and dtypes."""
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)


def parameters(module, draws, *inputs):
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    return draws.like(shapes(module, *inputs)["params"])


# T5: dense layers of the model's own, which contract several axes and cast a float32 kernel.


class DenseGeneral(nn.Module):
    features: tuple[int, ...]
    axes: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        contracted = x.shape[x.ndim - self.axes :]
        flat = (math.prod(contracted), math.prod(self.features))
        kernel = self.param("kernel", nn.initializers.normal(), flat, jnp.float32)
        kernel = jnp.asarray(kernel, self.dtype).reshape(*contracted, *self.features)
        x = jnp.asarray(x, self.dtype)
        dimensions = (tuple(range(x.ndim - self.axes, x.ndim)), tuple(range(self.axes)))
        return jax.lax.dot_general(x, kernel, (dimensions, ((), ())))


class T5Norm(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = jnp.asarray(x, jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jax.lax.square(x), -1, keepdims=True) + 1e-6)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        return jnp.asarray(x, self.dtype) * jnp.asarray(scale, self.dtype)


class RelativeBias(nn.Module):
    """One number a head for each bucket of distances; looked up by a product with a one-hot."""

    both_ways: bool
    buckets: int = 8
    farthest: int = 16
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, queries, keys):
        distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
        count, offset = self.buckets, jnp.zeros_like(distance)
        if self.both_ways:
            count //= 2
            offset = jnp.where(distance > 0, count, 0)
            distance = jnp.abs(distance)
        else:
            distance = jnp.maximum(-distance, 0)
        near = count // 2
        # Logarithmic bins: half precision would put some distances into another bin.
        far = jnp.log(distance.astype(jnp.float32) / near + 1e-6) / math.log(self.farthest / near)
        far = jnp.minimum(near + (far * (count - near)).astype(jnp.int32), count - 1)
        bucket = offset + jnp.where(distance < near, distance, far)
        table = self.param("table", nn.initializers.normal(), (HEADS, self.buckets))
        one_hot = jnp.asarray(jnp.arange(self.buckets)[:, None, None] == bucket, self.dtype)
        bias = jax.lax.dot_general(
            jnp.asarray(table, self.dtype), one_hot, (((1,), (0,)), ((), ()))
        )
        return bias[None]


class T5Attention(nn.Module):
    dtype: Any = jnp.float32
    float32_logits: bool = False

    @nn.compact
    def __call__(self, x, context, mask, bias=None):
        project = functools.partial(DenseGeneral, (HEADS, SIZE), dtype=self.dtype)
        query = project(name="query")(x) / math.sqrt(SIZE)
        key, value = project(name="key")(context), project(name="value")(context)
        if self.float32_logits:
            query, key = query.astype(jnp.float32), key.astype(jnp.float32)
        forbidden = jax.lax.select(
            mask, jnp.zeros(mask.shape, self.dtype), jnp.full(mask.shape, -1e10).astype(self.dtype)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        scores = scores + (forbidden if bias is None else forbidden + bias)
        weights = jax.nn.softmax(scores).astype(self.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return DenseGeneral((WIDTH,), axes=2, dtype=self.dtype, name="out")(y)


class T5MLP(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        project = functools.partial(DenseGeneral, (HIDDEN,), dtype=self.dtype)
        x = nn.gelu(project(name="gate")(x)) * project(name="up")(x)
        return DenseGeneral((WIDTH,), dtype=self.dtype, name="down")(x)


class T5Module(nn.Module):
    """A layer of the encoder, one of the decoder with its cross attention."""

    dtype: Any = jnp.float32
    float32_logits: bool = False

    @nn.compact
    def __call__(self, inputs, targets):
        norm = functools.partial(T5Norm, dtype=self.dtype)
        attention = functools.partial(T5Attention, self.dtype, self.float32_logits)
        table = self.param("embedding", nn.initializers.normal(), (VOCABULARY, WIDTH))
        table = jnp.asarray(table, self.dtype)
        length = targets.shape[1]
        padding = (inputs > 0)[:, None, None, :]
        everywhere = jnp.broadcast_to(padding, (len(inputs), HEADS, length, inputs.shape[1]))
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), everywhere.shape)

        x = table[inputs]
        bias = RelativeBias(True, dtype=self.dtype, name="encoder_bias")(length, length)
        y = norm(name="encoder_norm1")(x)
        x = x + attention(name="encoder_attention")(y, y, everywhere, bias)
        x = x + T5MLP(self.dtype, name="encoder_mlp")(norm(name="encoder_norm2")(x))
        encoded = norm(name="encoder_norm")(x)

        x = table[jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]]
        bias = RelativeBias(False, dtype=self.dtype, name="decoder_bias")(length, length)
        y = norm(name="decoder_norm1")(x)
        x = x + attention(name="decoder_attention")(y, y, causal, bias)
        y = norm(name="decoder_norm2")(x)
        x = x + attention(name="cross_attention")(y, encoded, everywhere)
        x = x + T5MLP(self.dtype, name="decoder_mlp")(norm(name="decoder_norm3")(x))
        x = norm(name="decoder_norm")(x)
        # The published model asks for float32 here; in a float32 model that says nothing.
        head = jnp.float32 if self.float32_logits else self.dtype
        return DenseGeneral((VOCABULARY,), dtype=head, name="logits")(x)


def t5(dtype=jnp.float32, seed=0, wrap=as_it_is):
    draws = Draws(seed)
    inputs, targets = draws.integers(VOCABULARY), draws.integers(VOCABULARY)
    inputs[:, 0], inputs[1, -4:] = 1, 0  # the second row is padded
    module = T5Module(dtype, float32_logits=True)
    params = parameters(module, draws, inputs, targets)
    apply = wrap(module.apply)

    def loss(params, inputs, targets):
        return cross_entropy(apply({"params": params}, inputs, targets), targets)

    return loss, params, (inputs, targets)


# Gemma in nnx: an Einsum of the model's own, rotary positions, capped logits, a tied embedder.


def nnx_parameter(*shape):
    return nnx.Param(jnp.zeros(shape))  # `gemma` draws the values


class Einsum(nnx.Module):
    def __init__(self, shape, dtype):
        self.w = nnx_parameter(*shape)
        self.dtype = dtype

    def __call__(self, equation, x):
        return jnp.einsum(equation, x.astype(self.dtype), self.w[...].astype(self.dtype))


class GemmaNorm(nnx.Module):
    def __init__(self):
        self.gain_less_one = nnx_parameter(WIDTH)

    def __call__(self, x):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)
        return (y * (1 + self.gain_less_one[...])).astype(x.dtype)


def rotary(x):
    fractions = jnp.arange(SIZE // 2, dtype=jnp.float32) / (SIZE // 2)
    angles = jnp.arange(x.shape[1])[:, None, None] / 1e4**fractions
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(rotated, -1).astype(x.dtype)


class GemmaBlock(nnx.Module):
    def __init__(self, dtype):
        self.norm1, self.norm2 = GemmaNorm(), GemmaNorm()
        self.qkv = Einsum((3, HEADS, WIDTH, SIZE), dtype)
        self.out = Einsum((HEADS, SIZE, WIDTH), dtype)
        self.gate_and_up = Einsum((2, WIDTH, HIDDEN), dtype)
        self.down = Einsum((HIDDEN, WIDTH), dtype)

    def __call__(self, x):
        query, key, value = self.qkv("btd,shdk->sbthk", self.norm1(x))
        scores = jnp.einsum("bthk,bshk->bhts", rotary(query) * SIZE**-0.5, rotary(key))
        scores = jnp.tanh(scores / 50.0) * 50.0
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, -1).astype(key.dtype)
        x = x + self.out("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights, value))
        gate, up = self.gate_and_up("btd,sdf->sbtf", self.norm2(x))
        return x + self.down("btf,fd->btd", nnx.gelu(gate) * up)


class Gemma(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        self.embedding = nnx_parameter(VOCABULARY, WIDTH)
        self.blocks = nnx.List([GemmaBlock(dtype) for _ in range(2)])
        self.norm = GemmaNorm()
        self.dtype = dtype

    def __call__(self, ids):
        table = self.embedding[...].astype(self.dtype)
        x = table[ids] * jnp.sqrt(WIDTH).astype(self.dtype)
        for block in self.blocks:
            x = block(x)
        logits = jnp.dot(self.norm(x), table.T)
        return jnp.tanh(logits / 30.0) * 30.0


def gemma(dtype=jnp.float32, seed=0, wrap=as_it_is):
    draws = Draws(seed)
    graph, params = nnx.split(wrap(Gemma(dtype)))
    ids = draws.integers(VOCABULARY)

    def loss(params, ids, labels):
        return cross_entropy(nnx.merge(graph, params)(ids), labels)

    return loss, draws.like(params), (ids, np.roll(ids, -1, 1))


# GPT-2 as Hugging Face calls it: an object whose call takes the parameters as a keyword.


@flax.struct.dataclass
class CausalOutput:
    logits: jax.Array


class PretrainedGPT2:
    """Module and parameters in one object."""

    def __init__(self, module, params):
        self.module, self.params = module, params

    def __call__(self, input_ids, attention_mask=None, position_ids=None, params=None):
        if attention_mask is None:
            attention_mask = jnp.ones_like(input_ids)
        if position_ids is None:
            position_ids = jnp.broadcast_to(jnp.arange(input_ids.shape[1])[None], input_ids.shape)
        params = self.params if params is None else params
        logits = self.module.apply({"params": params}, input_ids, attention_mask, position_ids)
        return CausalOutput(logits)


def gpt2(dtype=jnp.float32, seed=0, wrap=as_it_is, through="call"):
    """`through` the object's call, or through `module.apply`."""
    draws = Draws(seed)
    ids = draws.integers(VOCABULARY)
    # One row is padded on the left, where no key is left to attend to, one on the right.
    mask = np.ones_like(ids)
    mask[0, :3] = mask[1, -3:] = 0
    positions = np.maximum(np.cumsum(mask, -1, dtype=np.int32) - 1, 0)
    module = GPT2(2, WIDTH, VOCABULARY, dtype, positions=LENGTH)
    params = parameters(module, draws, ids, mask, positions)
    model = PretrainedGPT2(module, params)
    apply = wrap({"call": model.__call__, "apply": module.apply}[through])

    def loss(params, ids, mask, positions):
        if through == "call":
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            logits = apply(**inputs, params=params).logits
        else:
            logits = apply({"params": params}, ids, mask, positions)
        return cross_entropy(logits[:, :-1], ids[:, 1:], (mask[:, 1:] * mask[:, :-1]))

    return loss, params, (ids, mask, positions)


# BERT: a mask of zeros and ones among the arguments, an epsilon below float16's range, two losses.


class BertLayer(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, bias):
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, epsilon=1e-12, dtype=self.dtype)

        def heads(name):
            return dense(WIDTH, name=name)(x).reshape(*x.shape[:2], HEADS, SIZE)

        scores = jnp.einsum("bqhd,bkhd->bhqk", heads("query"), heads("key")) / math.sqrt(SIZE)
        weights = jax.nn.softmax(scores + bias, -1)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, heads("value")).reshape(x.shape)
        x = norm(name="attention_norm")(x + dense(WIDTH, name="attention_output")(y))
        y = nn.gelu(dense(HIDDEN, name="intermediate")(x), approximate=False)
        return norm(name="output_norm")(x + dense(WIDTH, name="output")(y))


class BertModule(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, input_ids, attention_mask, token_type_ids):
        embed = functools.partial(nn.Embed, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        words = embed(VOCABULARY, WIDTH, name="word_embeddings")
        positions = jnp.arange(input_ids.shape[1])[None]
        x = words(input_ids) + embed(LENGTH, WIDTH, name="position_embeddings")(positions)
        x = x + embed(2, WIDTH, name="token_type_embeddings")(token_type_ids)
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype, name="embeddings_norm")(x)
        bias = (1.0 - attention_mask[:, None, None, :].astype(jnp.float32)) * -1e9
        for _ in range(2):
            x = BertLayer(self.dtype)(x, bias.astype(self.dtype))
        pooled = jnp.tanh(dense(WIDTH, name="pooler")(x[:, 0]))
        y = nn.gelu(dense(WIDTH, name="transform")(x), approximate=False)
        y = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype, name="transform_norm")(y)
        y = words.attend(y)
        y = y + jnp.asarray(self.param("bias", nn.initializers.zeros, (VOCABULARY,)), self.dtype)
        return y, dense(2, name="seq_relationship")(pooled)


def bert(dtype=jnp.float32, seed=0, wrap=as_it_is):
    draws = Draws(seed)
    labels, is_next = draws.integers(VOCABULARY), draws.integers(2, (BATCH,))
    attention_mask = np.ones_like(labels)
    attention_mask[1, -5:] = 0
    masked = (draws.integers(4) == 0) & (attention_mask > 0)
    masked[:, 0] = True
    types = np.broadcast_to(np.arange(LENGTH) >= LENGTH // 2, labels.shape).astype(np.int32)
    inputs = (np.where(masked, 1, labels), attention_mask, types)
    module = BertModule(dtype)
    params = parameters(module, draws, *inputs)
    apply = wrap(module.apply)

    def loss(params, inputs, labels, weights, is_next):
        words, relation = apply({"params": params}, *inputs)
        return cross_entropy(words, labels, weights) + cross_entropy(relation, is_next)

    return loss, params, (inputs, labels, masked.astype(np.float32), is_next)


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """A row of the list: how to make it, and what adapts it."""

    name: str
    make: Callable
    adapter: str = "linen"


PATTERNS = [
    Pattern("t5", t5),
    Pattern("gemma", gemma, adapter="nnx"),
    Pattern("gpt2", gpt2),
    Pattern("bert", bert),
]
