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
from collections.abc import Callable

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

    def tokens(self):
        return self.generator.integers(0, VOCABULARY, (BATCH, LENGTH), np.int32)

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
    ids = draws.tokens()

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

    def __call__(self, input_ids, attention_mask, position_ids, params=None):
        params = self.params if params is None else params
        logits = self.module.apply({"params": params}, input_ids, attention_mask, position_ids)
        return CausalOutput(logits)


def gpt2(dtype=jnp.float32, seed=0, wrap=as_it_is, through="call"):
    """`through` the object's call, or through `module.apply`."""
    draws = Draws(seed)
    ids = draws.tokens()
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


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """A row of the list: how to make it, and what adapts it."""

    name: str
    make: Callable
    adapter: str = "linen"


PATTERNS = [
    Pattern("gemma", gemma, adapter="nnx"),
    Pattern("gpt2", gpt2),
]
