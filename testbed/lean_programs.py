"""Programs of a few lines on which a plan may move more bytes than the same program in half.

Each is one text: with float32 it is what a user writes, with a half type what the same user writes
by hand.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ROWS, WIDTH = 16384, 512


class LeanProgram(NamedTuple):
    """A loss of parameters and a batch, given the dtype of its products, and their shapes."""

    name: str
    loss: Callable[..., Callable[..., Any]]
    params: Any
    batch: tuple[Any, ...]

    def step(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step of SGD with such a loss."""

        def step(params: Any, *batch: Any) -> Any:
            gradients = jax.grad(loss)(params, *batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

        return step


def _struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def norm(x):
    """RMSNorm in float32, with a result in the dtype of its argument."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def mean_square(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


def gated(y):
    a, b = jnp.split(y, 2, -1)
    return a * jax.nn.sigmoid(b)


BRANCHES = {
    "product": lambda x, w: norm(x) @ w[:, :WIDTH],
    "tanh": lambda x, w: jnp.tanh(norm(x) @ w[:, :WIDTH]),
    "gate": lambda x, w: gated(norm(x) @ w),
    "norm after": lambda x, w: norm(x @ w[:, :WIDTH]),
    "norm before and after": lambda x, w: norm(norm(x) @ w[:, :WIDTH]),
    "dropped": lambda x, w: jnp.where(norm(x) > 0, 2.0, 0) * (norm(x) @ w[:, :WIDTH]),
}


def residual(dtype, branch):
    """A residual stream of eight branches."""

    def loss(params, x):
        x = x.astype(dtype) @ params[0][:, :WIDTH].astype(dtype)
        for w in params[1:]:
            x = x + BRANCHES[branch](x, w.astype(dtype))
        return mean_square(x @ params[0][:, -WIDTH:].astype(dtype))

    return loss


def normalised(x, dtype):
    """A batch normalisation in float32."""
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, (0, 1), keepdims=True)
    scale = lax.rsqrt(jnp.mean(y * y, (0, 1), keepdims=True) - mean * mean + 1e-5)
    return ((y - mean) * scale).astype(dtype)


def squeeze_and_excite(dtype):
    """A value that a float32 mean and a gate read, behind a batch normalisation."""

    def loss(params, x):
        x = x.astype(dtype)
        for w, gate in params:
            y = jax.nn.silu(normalised(x @ w.astype(dtype), dtype))
            pooled = jnp.mean(y.astype(jnp.float32), 1).astype(dtype)
            x = y * jax.nn.sigmoid(pooled @ gate.astype(dtype))[:, None]
        return mean_square(x @ params[0][0].astype(dtype))

    return loss


def force(dtype, forward, act=jax.nn.gelu):
    """A derivative inside the loss, as of forces and physics-informed networks."""

    def loss(params, x):
        def energy(x):
            for w, *bias in params:
                x = x @ w.astype(dtype)
                x = act(functools.reduce(jnp.add, [b.astype(dtype)[None] for b in bias], x))
            return x

        x = x.astype(dtype)
        if forward:
            return mean_square(jax.jvp(energy, (x,), (jnp.ones_like(x),))[1])
        return mean_square(jax.grad(lambda x: jnp.sum(energy(x).astype(jnp.float32)))(x))

    return loss


def spectral(dtype):
    """A convolution as long as the sequence, by Fourier transforms in float32, beside a product."""

    def loss(params, x):
        x = x.astype(dtype)
        for w, filters in params:
            waves = jnp.fft.rfft(x.astype(jnp.float32), axis=1)
            mixed = jnp.fft.irfft(waves * filters[None], axis=1).astype(dtype)
            x = jax.nn.gelu(mixed + x @ w.astype(dtype))
        return mean_square(x @ params[0][0].astype(dtype))

    return loss


def recurrent(dtype):
    """A GRU without biases; by hand its weights' gradients are added up in half."""

    def loss(params, x):
        wx, wh = (w.astype(dtype) for w in params)

        def turn(h, x):
            r, z, n = jnp.split(x @ wx, 3, -1)
            of_r, of_z, of_n = jnp.split(h @ wh, 3, -1)
            r, z = jax.nn.sigmoid(r + of_r), jax.nn.sigmoid(z + of_z)
            return (1 - z) * jnp.tanh(n + r * of_n) + z * h, None

        return mean_square(lax.scan(turn, jnp.zeros((64, WIDTH), dtype), x.astype(dtype))[0])

    return loss


def solved(dtype):
    """An ordinary differential equation by Heun's method; its state is float32 by hand too."""

    def loss(params, x):
        w, b = (array.astype(dtype) for array in params)
        slope = lambda x: jnp.tanh(x.astype(dtype) @ w + b[None])

        def turn(x, _):
            first = slope(x)
            return x + (first + slope(x + first / 8)) / 16, None

        return mean_square(lax.scan(turn, x, None, length=8)[0])

    return loss


def dense_block(dtype):
    """Layers that read all results before them, and a mean over places."""

    def loss(params, x):
        x = x.astype(dtype) @ params[0][: x.shape[-1]].astype(dtype)
        for w in params[1:-1]:
            x = jnp.concatenate([x, normalised(x, dtype) @ w[: x.shape[-1]].astype(dtype)], -1)
        pooled = jnp.mean(jax.nn.relu(normalised(x, dtype)).astype(jnp.float32), 1)
        return mean_square(pooled.astype(dtype) @ params[-1].astype(dtype))

    return loss


def lookup(dtype):
    """Rows taken by indices that do not repeat."""

    def loss(w, x, places):
        w = w.astype(dtype)
        rows = (x.astype(dtype) @ w).at[places].get(mode="fill", fill_value=0, unique_indices=True)
        return mean_square(jax.nn.relu(rows @ w))

    return loss


def messages(dtype):
    """A graph network: a softmax over the edges of a node weighs the messages that it adds up.

    Rows are looked up in float32, so that the gradients of all messages from a node add up so, by
    hand too.
    """

    def loss(params, x, sources, targets):
        x = x.astype(dtype)
        add_up = functools.partial(jax.ops.segment_sum, segment_ids=targets, num_segments=ROWS)
        for w, a in params:
            y = x @ w.astype(dtype)
            of_source, of_target = (y @ a.astype(dtype)).T
            score = (of_source[sources] + of_target[targets]).astype(jnp.float32)
            largest = jax.ops.segment_max(score, targets, ROWS)
            weight = jnp.exp(score - lax.stop_gradient(largest)[targets])
            weight = weight / add_up(weight)[targets]
            message = y.astype(jnp.float32)[sources] * weight[:, None]
            x = x + jnp.tanh(add_up(message)).astype(dtype)
        return mean_square(x)

    return loss


def elu_stream(dtype):
    """A stream that begins with an input, and a function that compares with zeros."""

    def loss(params, x):
        x = x.astype(dtype)
        for w in params:
            x = x + jax.nn.elu(norm(x) @ w.astype(dtype))
        return mean_square(x)

    return loss


def _matrices(count: int, columns: int = WIDTH, rows: int = WIDTH) -> list[Any]:
    return [_struct(rows, columns)] * count


_BATCH = (_struct(ROWS, WIDTH),)
_SQUARE, _WIDE = _struct(WIDTH, WIDTH), _matrices(9, 2 * WIDTH)
LEAN_PROGRAMS = (
    *(
        LeanProgram(f"residual, {name}", functools.partial(residual, branch=name), _WIDE, _BATCH)
        for name in BRANCHES
    ),
    LeanProgram(
        "squeeze and excite",
        squeeze_and_excite,
        [(_struct(64, 64),) * 2] * 2,
        (_struct(64, 4096, 64),),
    ),
    *(
        LeanProgram(
            f"{name} in the loss",
            functools.partial(force, forward=name == "jvp", act=act),
            [(_SQUARE, *biases)] * 3,
            _BATCH,
        )
        for name, act, *biases in (
            ("gradient", jax.nn.gelu),
            ("jvp", jax.nn.gelu),
            ("gradient of tanh", jnp.tanh),
            ("gradient of softplus", jax.nn.softplus, _struct(WIDTH)),
        )
    ),
    LeanProgram(
        "spectral", spectral, [(_SQUARE, _struct(129, WIDTH))] * 3, (_struct(64, 256, WIDTH),)
    ),
    LeanProgram("recurrent", recurrent, _matrices(2, 3 * WIDTH), (_struct(128, 64, WIDTH),)),
    LeanProgram("Heun's method", solved, [_SQUARE, _struct(WIDTH)], _BATCH),
    LeanProgram("dense block", dense_block, _matrices(4, 64, 192), (_struct(64, 1024, 64),)),
    LeanProgram("lookup", lookup, _SQUARE, (*_BATCH, _struct(ROWS, dtype=jnp.int32))),
    LeanProgram(
        "messages",
        messages,
        [(_SQUARE, _struct(WIDTH, 2))] * 2,
        (*_BATCH, *[_struct(4 * ROWS, dtype=jnp.int32)] * 2),
    ),
    LeanProgram("a stream from an input", elu_stream, _matrices(4), _BATCH),
)
