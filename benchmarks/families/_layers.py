"""What the families share: weights in the order of their use, and layers as a careful user's.

A model is one text for every precision. `Net.dtype` is its only word of it: a weight is cast to it
at its use, and norms, softmaxes and losses are computed in float32 by `full`. With float32 the text
is what a user writes who knows nothing of half precision, with a half type what the same user
writes by hand, with float64 the model that errors are measured against.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax


def full(x):
    """Casts to float32, or leaves what is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Weight(NamedTuple):
    shape: tuple[int, ...]
    mean: float
    deviation: float

    def draw(self, key):
        return self.mean + self.deviation * jax.random.normal(key, self.shape)


class Net(SimpleNamespace):
    """The sizes of a model, and its weights, handed out in the order in which it asks for them.

    Without `params` it notes which weights are asked for in `weights`, and hands out zeros.
    """

    def __init__(self, dtype, layers, params=None, **sizes):
        super().__init__(dtype=dtype, layers=layers, params=params, weights=[], place=0, **sizes)

    def master(self, *shape, mean=0.0, deviation=0.02):
        """Returns a weight as it is stored."""
        place, self.place = self.place, self.place + 1
        if self.params is not None:
            return self.params[place]
        if place == len(self.weights):
            self.weights.append(Weight(shape, mean, deviation))
        return jnp.zeros(shape)

    def again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with the same weights in all of its calls."""
        start = self.place

        def call(*arguments):
            self.place = start
            return function(*arguments)

        return call

    def half(self, x):
        return x.astype(self.dtype)

    def kernel(self, *shape):
        """Returns a weight of a product, cast."""
        return self.half(self.master(*shape, deviation=math.prod(shape[:-1]) ** -0.5))

    def bias(self, n):
        return self.half(self.master(n))

    def scale(self, n):
        """Returns the scale of a norm, as it is stored."""
        return self.master(n, mean=1.0)

    def table(self, words, n):
        return self.half(self.master(words, n, deviation=1.0))

    def dense(self, x, n, bias=True):
        y = x @ self.kernel(x.shape[-1], n)
        return y + self.bias(n) if bias else y

    def mlp(self, x, *widths, act=jax.nn.gelu):
        *inner, last = widths
        for width in inner:
            x = act(self.dense(x, width))
        return self.dense(x, last)

    def conv(self, x, n, size, strides=1, dilation=1, groups=1, padding="SAME"):
        """A convolution over all axes but the first and the last."""
        axes = x.ndim - 2
        layout = {1: ("NTC", "TIO", "NTC"), 2: ("NHWC", "HWIO", "NHWC")}[axes]
        kernel = self.kernel(*[size] * axes, x.shape[-1] // groups, n)
        if padding == "CAUSAL":
            padding = [(dilation * (size - 1), 0)]
        return lax.conv_general_dilated(
            x,
            kernel,
            [strides] * axes,
            padding,
            rhs_dilation=[dilation] * axes,
            dimension_numbers=layout,
            feature_group_count=groups,
        )

    def norm(self, x, axes=-1, centred=True, affine=True):
        """LayerNorm; with other axes BatchNorm or GroupNorm, not centred RMSNorm."""
        y = full(x)
        if centred:
            y = y - jnp.mean(y, axes, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axes, keepdims=True) + 1e-5)
        if affine:
            y = y * self.scale(x.shape[-1])
        return self.half(y + self.master(x.shape[-1]) if centred and affine else y)

    def rms_norm(self, x):
        return self.norm(x, centred=False)

    def batch_norm(self, x):
        return self.norm(x, tuple(range(x.ndim - 1)))

    def heads(self, x, count, width=None):
        """Returns a projection in heads: batch, length, head, channel."""
        width = width or x.shape[-1] // count
        return self.dense(x, count * width, bias=False).reshape(*x.shape[:-1], count, width)

    def attention(self, x, others=None, change=lambda scores: scores, turn=lambda heads: heads):
        """Attention of `h` heads; `change` gets the scores in float32."""
        others = x if others is None else others
        q, k, v = (self.heads(y, self.h) for y in (x, others, others))
        q, k = turn(q), turn(k)
        scores = full(jnp.einsum("bqhc,bkhc->bhqk", q, k)) * q.shape[-1] ** -0.5
        weights = self.half(jax.nn.softmax(change(scores), -1))
        y = jnp.einsum("bhqk,bkhc->bqhc", weights, v)
        return self.dense(y.reshape(x.shape), x.shape[-1])

    def block(self, x, **attention):
        """A layer of a transformer, norms before the branches."""
        x = x + self.attention(self.norm(x), **attention)
        return x + self.mlp(self.norm(x), 4 * self.d, self.d)


# Losses, in float32.


def mean_square(x):
    return jnp.mean(jnp.square(full(x)))


def cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(full(logits), labels)
    return jnp.mean(losses)


def causal(scores):
    """Hides what comes later from each place."""
    places = jnp.arange(scores.shape[-1])
    return jnp.where(places <= places[:, None], scores, -1e9)


# The list of families.


class Family(NamedTuple):
    """A model.

    Attributes:
      name, title: as in `--only`, and as on the page.
      kind: under which the page has it.
      loss: a function of a `Net` and the inputs.
      inputs: shapes in letters of `sizes`; "<v" are integers below v.
      sizes: the full ones; `small` has those of tests.
    """

    name: str
    title: str
    kind: str
    loss: Callable[..., Any]
    inputs: tuple[str, ...]
    sizes: dict[str, int]

    @property
    def small(self) -> dict[str, int]:
        return {name: min(value, SMALL.get(name, value)) for name, value in self.sizes.items()}


# Batch, length, width, heads, words or classes, nodes, edges, side of an image, of a window.
SMALL = {"b": 4, "t": 16, "d": 32, "h": 4, "v": 64, "n": 32, "e": 96, "s": 8, "w": 4}
FAMILIES: list[Family] = []


def family(title: str, kind: str, *inputs: str, **sizes: int) -> Callable[..., Any]:
    """Adds a model to the families."""

    def add(loss: Callable[..., Any]) -> Callable[..., Any]:
        name = loss.__name__.replace("_", "-")
        FAMILIES.append(Family(name, title, kind, loss, inputs, sizes))
        return loss

    return add
