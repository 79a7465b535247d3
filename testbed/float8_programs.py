"""Random programs for float8: chains of random steps between products, a loss of each.

Steps are what moves numbers (reshapes, slices, copies, jits), biases, functions, gates, and blocks
that hold a chain of their own (remat, scan, vmap, a branch). Programs are numbered: the same number
is the same program, with the same arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jmp
from testbed.random_programs import clip_gradient

Array = Any
Step = Callable[[Sequence[Array], Array], Array]  # of the parameters and an activation


class Sizes(NamedTuple):
    """Of the input, whose last axis is multiplied and whose others are moved; of activations."""

    shape: tuple[int, int, int]
    widths: tuple[int, ...]


SMALL = Sizes((4, 16, 16), (16, 32))
# Products that are float8 by themselves. Their arrays are too large to be drawn, so programs have
# only their shapes.
LARGE = Sizes((8, 128, 512), (512, 1024))


# Steps. Each maker draws what it needs and returns a function of the parameters and the activation.


class Drawing:
    """A program that is being drawn: its random numbers and its parameters so far."""

    def __init__(self, number: int, sizes: Sizes) -> None:
        self.random = np.random.default_rng(number)
        self.sizes = sizes
        self.params: list[Any] = []
        self.names: list[str] = []
        self.products = 0

    def choice(self, among: Sequence[Any]) -> Any:
        return among[self.random.integers(len(among))]

    def param(self, *shape: int, scale: float = 1.0) -> int:
        """Adds a parameter, and returns its place among them."""
        self.params.append(self.array(shape, scale))
        return len(self.params) - 1

    def array(self, shape: tuple[int, ...], scale: float = 1.0) -> Any:
        """Returns random numbers; of a large program only their shape."""
        if self.sizes == LARGE:
            return jax.ShapeDtypeStruct(shape, jnp.float32)
        return self.random.normal(size=shape, scale=scale).astype(np.float32)

    def matrix(self, rows: int, columns: int) -> int:
        self.products += 1
        return self.param(rows, columns, scale=rows**-0.5)


def product(draw: Drawing, shape: tuple[int, ...]) -> Step:
    rows, columns = shape[-1], draw.choice(draw.sizes.widths)
    form = draw.choice(["matmul", "transposed", "einsum", "heads", "reshaped"])
    if form == "transposed":
        i = draw.matrix(columns, rows)
        if draw.sizes != LARGE:
            draw.params[i] *= (columns / rows) ** 0.5
        return lambda ws, h: h @ ws[i].T
    i = draw.matrix(rows, columns)
    if form == "einsum":
        return lambda ws, h: jnp.einsum("...i,io->...o", h, ws[i])
    if form == "heads":
        split = lambda w: w.reshape(rows, 2, columns // 2)
        return lambda ws, h: jnp.einsum("...i,ihd->...hd", h, split(ws[i])).reshape(
            *h.shape[:-1], columns
        )
    if form == "reshaped":
        return lambda ws, h: (h.reshape(-1, rows) @ ws[i]).reshape(*h.shape[:-1], columns)
    return lambda ws, h: h @ ws[i]


def flattened(h: Array) -> Array:
    return h.reshape(-1, h.shape[-1])


def split_rows(h: Array) -> Array:
    h = flattened(h)
    return h.reshape(2, -1, h.shape[-1]) if h.shape[0] % 2 == 0 else h[None]


def halved(h: Array) -> Array:
    return h[: max(8, h.shape[0] // 2)] if h.ndim == 2 else h[:, : max(1, h.shape[1] // 2)]


@jax.custom_jvp
def doubled(h: Array) -> Array:
    return 2.0 * h


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2.0 * tangents[0]))


MOVES: dict[str, Callable[[Array], Array]] = {
    "flatten": flattened,
    "split rows": split_rows,
    "squeeze": lambda h: h[None].squeeze(0),
    "expand": lambda h: jnp.expand_dims(h, 0) if h.ndim < 4 else flattened(h),
    "swap": lambda h: jnp.swapaxes(h, 0, h.ndim - 2),
    "swap twice": lambda h: jnp.swapaxes(jnp.swapaxes(h, -1, -2), -1, -2),
    "index": lambda h: h[0] if h.ndim > 2 and h[0].size >= 256 else h,
    "index at the front of a new axis": lambda h: h[None][0],
    "halve": halved,
    "dynamic slice": lambda h: lax.dynamic_slice_in_dim(h, h.shape[0] // 2, h.shape[0] // 2 or 1),
    "take": lambda h: h[jnp.arange(h.shape[0])[::-1]],
    "reverse": lambda h: h[::-1],
    "roll": lambda h: jnp.roll(h, 1, 0),
    "roll features": lambda h: jnp.roll(h, 1, -1),
    "copy": lambda h: jnp.array(h, copy=True),
    "jit": lambda h: jax.jit(lambda h: h)(h),
    "jit of a reshape": lambda h: jax.jit(flattened)(h),
    "jit that stays": lambda h: jax.jit(flattened, donate_argnums=0)(h),
    "remat of a reshape": lambda h: jax.checkpoint(flattened)(h),
    "concatenate": lambda h: jnp.concatenate([h, 0.5 * h]),
    "concatenate halves": lambda h: jnp.concatenate(jnp.split(h, 2, -1)[::-1], -1),
    "stack": lambda h: jnp.stack([h, h]) if h.size <= 2**11 else h,
    "pad": lambda h: jnp.pad(h, [(0, 1)] + [(0, 0)] * (h.ndim - 1)),
    "repeat": lambda h: jnp.broadcast_to(h[None], (2, *h.shape)) if h.size <= 2**11 else h,
    "name": lambda h: checkpoint_name(h, "h"),
    "barrier": lax.optimization_barrier,
    "device": jax.device_put,
    "cast": lambda h: h.astype(jnp.bfloat16).astype(jnp.float32),
    "stop": lambda h: h + lax.stop_gradient(0.5 * h),
    "named call": lambda h: jax.named_call(flattened)(h),
    "nothing": lambda h: h,
}
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "exact gelu": lambda h: jax.nn.gelu(h, approximate=False),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "leaky": lambda h: jnp.where(h > 0, h, 0.1 * h),
    "maximum": lambda h: jnp.maximum(h, -0.5),
    "softplus": jax.nn.softplus,
    "sine": jnp.sin,
    "scale": lambda h: 0.5 * h,
    "shift": lambda h: h + 1.0,
    "from one": lambda h: 1.0 - h,
    "absolute": jnp.abs,
    "exponential": lambda h: jnp.exp(-jnp.abs(h)),
    "square": lambda h: 0.25 * h * h,
    "clip": lambda h: jnp.clip(h, -2.0, 2.0),
    "custom jvp": doubled,
    "custom vjp": clip_gradient,
    "softmax": lambda h: h.shape[-1] ** 0.5 * jax.nn.softmax(h),
    "norm": lambda h: h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-3),
    "jit of gelu": jax.jit(lambda h: jax.nn.gelu(flattened(h))),
    "remat of gelu": jax.checkpoint(jax.nn.gelu),
    "full precision": jmp.full_precision(lambda h: jnp.tanh(h) + h),
}
if jax.__version_info__ >= (0, 12):  # whose erf has no gradient in shard_map(check_vma=True)
    del FUNCTIONS["exact gelu"]


def move(draw: Drawing, shape: tuple[int, ...]) -> Step:
    name = draw.choice(sorted(MOVES))
    draw.names.append(name)
    return lambda ws, h: MOVES[name](h)


def function(draw: Drawing, shape: tuple[int, ...]) -> Step:
    name = draw.choice(sorted(FUNCTIONS))
    draw.names.append(name)
    return lambda ws, h: FUNCTIONS[name](h)


def bias(draw: Drawing, shape: tuple[int, ...]) -> Step:
    i = draw.param(shape[-1], scale=0.5)
    row = lambda b, h: b.reshape((1,) * (h.ndim - 1) + b.shape)
    return draw.choice(
        [
            lambda ws, h: h + row(ws[i], h),
            lambda ws, h: h - row(ws[i], h),
            lambda ws, h: row(ws[i], h) - h,
            lambda ws, h: h + row(jnp.tanh(ws[i]), h),
            lambda ws, h: h + row(ws[i], h) + row(2.0 * ws[i][::-1], h),
            lambda ws, h: h * row(1.0 + 0.1 * ws[i], h),
            lambda ws, h: (flattened(h) + row(ws[i], flattened(h))).reshape(h.shape),
        ]
    )


def gate(draw: Drawing, shape: tuple[int, ...]) -> Step:
    columns = draw.choice(draw.sizes.widths)
    i, j = (draw.matrix(shape[-1], columns) for _ in range(2))
    moved = MOVES[draw.choice(["nothing", "flatten", "copy", "jit of a reshape", "swap twice"])]
    form = draw.choice([jax.nn.silu, jax.nn.gelu, jnp.tanh, lambda h: h])
    return draw.choice(
        [
            lambda ws, h: moved(form(h @ ws[i])) * moved(h @ ws[j]),
            lambda ws, h: moved(form(h @ ws[i]) * (h @ ws[j])),
            lambda ws, h: form(moved(h @ ws[i])) * moved(h @ ws[j]),
        ]
    )


def attention(h: Array, queries: Array, keys: Array) -> Array:
    return jax.nn.softmax((h @ queries) @ (h @ keys).T / h.shape[-1] ** 0.5) @ h


def two_readers(draw: Drawing, shape: tuple[int, ...]) -> Step:
    """Of one value: two products, or a product and something else; by different ways."""
    i, j = (draw.matrix(shape[-1], shape[-1]) for _ in range(2))
    first, second = (MOVES[draw.choice(["nothing", "flatten", "copy", "jit"])] for _ in range(2))
    back = lambda x, h: x.reshape(h.shape)
    return draw.choice(
        [
            lambda ws, h: (back(first(h) @ ws[i], h) + back(second(h) @ ws[j], h)) / 2,
            lambda ws, h: h + back(jnp.tanh(first(h) @ ws[i]) @ ws[j], h) / 2,
            lambda ws, h: (back(first(h) @ ws[i], h) + jnp.tanh(h)) / 2,
            lambda ws, h: back(first(h) @ ws[i], h) * (1 + jnp.mean(second(h))),
            lambda ws, h: back(attention(flattened(h), ws[i], ws[j]), h),
        ]
    )


# Each as often as it stands here.
STEPS = (*[product] * 5, *[move] * 4, *[function] * 2, bias, gate, two_readers)


def chain(draw: Drawing, shape: tuple[int, ...], length: int, depth: int) -> Step:
    """Draws steps until there are `length`, blocks among them; at most six products or so."""
    steps: list[Step] = []
    for _ in range(length):
        is_block = depth < 2 and draw.random.random() < 0.15
        makers = STEPS if draw.products < 5 else (move, function, bias)
        step = block(draw, shape, depth) if is_block else draw.choice(makers)(draw, shape)
        steps.append(step)
        shape = jax.eval_shape(step, draw.params, jax.ShapeDtypeStruct(shape, jnp.float32)).shape

    def run(ws: Sequence[Array], h: Array) -> Array:
        for step in steps:
            h = step(ws, h)
        return h

    return run


def block(draw: Drawing, shape: tuple[int, ...], depth: int) -> Step:
    """Draws a chain inside a transformation."""
    name = draw.choice(["remat", "remat dots", "scan", "vmap", "cond", "jit", "jit that stays"])
    draw.names.append(name)
    if name == "vmap" and len(shape) < 3:
        name = "remat"
    inner = chain(draw, shape[1:] if name == "vmap" else shape, 2, depth + 1)
    if name == "vmap":
        return lambda ws, h: jax.vmap(lambda h: inner(ws, h))(h)
    if name == "scan":

        def turns(ws: Sequence[Array], h: Array) -> Array:
            def turn(carry: Array, _: None) -> tuple[Array, None]:
                change = inner(ws, carry)
                same = change.shape == carry.shape
                return carry + (change if same else jnp.mean(change)) / 2, None

            return lax.scan(turn, h, None, length=2)[0]

        return turns
    if name == "cond":
        other = lambda ws, h: 0.5 * inner(ws, h)
        return lambda ws, h: lax.cond(jnp.max(h) > -1e3, inner, other, ws, h)
    policy = jax.checkpoint_policies.dots_saveable if name == "remat dots" else None
    if name.startswith("remat"):
        return lambda ws, h: jax.checkpoint(inner, policy=policy)(ws, h)
    donated = {"donate_argnums": 1} if name == "jit that stays" else {}
    return lambda ws, h: jax.jit(inner, **donated)(ws, h)


# Programs.


class Program(NamedTuple):
    """A loss, its parameters and its input; what stands in it, for a report."""

    loss: Callable[..., Array]
    params: list[Any]  # arrays, or their shapes
    x: Any
    names: list[str]


def program(number: int, sizes: Sizes = SMALL) -> Program:
    """Returns the program of a number."""
    draw = Drawing(number, sizes)
    first = product(draw, sizes.shape)
    opened = jax.eval_shape(first, draw.params, jax.ShapeDtypeStruct(sizes.shape, jnp.float32))
    middle = chain(draw, opened.shape, int(draw.random.integers(2, 7)), 0)
    closed = jax.eval_shape(middle, draw.params, opened)
    last, head = (draw.matrix(closed.shape[-1], closed.shape[-1]) for _ in range(2))
    x = draw.array(sizes.shape)
    weights = draw.random.normal(size=closed.shape).astype(np.float32)

    def loss(ws: Sequence[Array], x: Array) -> Array:
        h = middle(ws, first(ws, x))
        y = (h @ ws[last]) @ ws[head]
        return jnp.mean(y * y) + jnp.mean(y * weights[: y.shape[0]])

    return Program(loss, draw.params, x, draw.names)
