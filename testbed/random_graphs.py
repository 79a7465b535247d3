"""Random graphs: products, what stands between them, and functions inside functions.

A program has a number, and all that it is depends on it and on the shapes of its arguments. It is
drawn while it is traced: each step takes one of the arrays that are there and adds what it
computes of it. So a program has no list of steps; it is a function that draws the same steps each
time. Nothing is meant to be run: numbers may overflow, and arrays may be larger than memory.
"""

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jmp
from testbed import float8_programs, op_cases
from testbed.float8_programs import flattened

Array = Any
Step = Callable[["Draw", Array], Array]

# More elements than this do not go on, and of constants not more than the second.
LARGEST, LARGEST_CONSTANT = 2**28, 2**14
# Rows and width of the arguments. Decisions depend on sizes, and on odd ones.
SIZES = (
    *[(8, 8), (16, 32), (7, 12)],
    *[(128, 128), (96, 257), (320, 64)],
    *[(1024, 1024), (4096, 512), (2048, 2050)],
)
LAYERS, CLASSES = 3, 50


class Draw:
    """What is drawn from: random numbers, the arrays that are there, and the parameters.

    Attributes:
      pool: floating arrays of one axis or more, the latest last.
      params: arrays by name, as `arguments` gives their shapes.
      depth: how many functions are around.
    """

    def __init__(self, seed: int, pool: Sequence[Array], params: dict[str, Array], depth: int):
        self.random = random.Random(seed)
        self.pool = list(pool)
        self.params = params
        self.depth = depth

    def choice(self, among: Sequence[Any]) -> Any:
        return self.random.choice(among)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def seed(self) -> int:
        return self.random.getrandbits(40)

    def pick(self) -> Array:
        """Returns an array of the pool, a late one more often."""
        last = len(self.pool) - 1
        return self.pool[last - min(last, int(self.random.expovariate(0.6)))]

    def constant(self, *shape: int) -> np.ndarray:
        """Returns numbers of a shape; it has more than one axis only where it is small."""
        if math.prod(shape) > LARGEST_CONSTANT:
            shape = (1,) * (len(shape) - 1) + (min(shape[-1], LARGEST_CONSTANT),)
        return _numbers(self.random.randrange(3), shape)

    def matrix(self, rows: int) -> Array:
        """Returns a matrix of so many rows: a parameter if there is one."""
        given = [w for w in self.params.values() if w.ndim == 2 and w.shape[0] == rows]
        given += [w.T for w in self.params.values() if w.ndim == 2 and w.shape[1] == rows]
        if given and self.chance(0.9):
            return self.choice(given)
        return self.constant(rows, self.choice([4, 16])) if rows <= 1024 else jnp.ones((rows, 4))

    def row(self, length: int) -> Array:
        """Returns a vector of a length: a parameter if there is one."""
        given = [w for w in self.params.values() if w.shape == (length,) and _is_float(w)]
        return self.choice(given) if given and self.chance(0.8) else self.constant(length)

    def like(self, x: Array) -> Array:
        """Returns an array that an operation may take beside this one."""
        given = [y for y in self.pool if y is not x and _broadcasts(y.shape, x.shape)]
        if given and self.chance(0.7):
            return self.choice(given[-4:])
        form = self.choice(["row", "column", "scalar", "constant"])
        if form == "column" and x.ndim > 1:
            return self.constant(x.shape[-2], 1)
        if form == "scalar":
            return jnp.mean(self.pick())
        return self.constant(*x.shape) if form == "constant" else self.row(x.shape[-1])

    def given(self, name: str) -> Array:
        """Returns an argument that is no matrix, or a constant in its place."""
        if name in self.params:
            return self.params[name]
        if name == "key":
            with jax.ensure_compile_time_eval():
                return jax.random.key(0)
        return {"table": self.constant(CLASSES, 16), "indices": np.arange(8), "length": 5}[name]

    def mask(self, x: Array) -> Array:
        """Returns truths that broadcast to an array's shape."""
        forms: dict[str, Callable[[], Array]] = {
            "constant": lambda: np.arange(x.shape[-1]) % 3 > 0,
            "compared": lambda: x > jnp.asarray(self.like(x)),
            "triangle": lambda: jnp.tril(jnp.ones(x.shape[-2:], bool)),
            "triangle of numbers": lambda: _positions(x, -2) >= _positions(x, -1),
            "lengths": lambda: jnp.arange(x.shape[-1]) < self.given("length"),
        }
        return forms[self.choice(sorted(forms) if x.ndim > 1 else ["constant", "compared"])]()

    def indices(self, length: int) -> Array:
        """Returns as many numbers below `length`, as drawn, as counted or as given."""
        given = self.given("indices") % length
        return self.choice([given, np.arange(length)[::-1], jnp.arange(length) // 2])


@functools.lru_cache(maxsize=256)
def _numbers(which: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(which).normal(size=shape).astype(np.float32)


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    shape = (1,) * (len(to) - len(shape)) + shape
    return len(shape) == len(to) and all(a in (1, b) for a, b in zip(shape, to, strict=True))


def _positions(x: Array, axis: int) -> Array:
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    return jnp.arange(x.shape[axis]).reshape(shape)


def fitted(y: Array, x: Array) -> Array:
    """Returns what an array gives in the shape and dtype of another."""
    y = y.astype(x.dtype)
    if y.shape == x.shape:
        return y
    if y.size == x.size:
        return y.reshape(x.shape)
    if _broadcasts(y.shape, x.shape):
        return jnp.broadcast_to(y, x.shape)
    return x * jnp.mean(y) if y.size else x


# Steps between products. Some of them are also operations of other tables.

UNARY: dict[str, Callable[[Array], Array]] = {
    **{name: call for name, (call, _) in op_cases.UNARY.items()},
    **float8_programs.FUNCTIONS,
    "log of an absolute": lambda x: jnp.log(jnp.abs(x) + 1e-6),
    "sqrt of a square": lambda x: jnp.sqrt(x * x + 1e-12),
    "rsqrt of a square": lambda x: lax.rsqrt(x * x + 1e-5),
    "reciprocal": lambda x: 1 / (jnp.abs(x) + 0.1),
    "waves": lambda x: jnp.concatenate([jnp.sin(x), jnp.cos(x)], -1),
    "power": lambda x: (jnp.abs(x) + 0.1) ** 1.7,
    "fraction": lambda x: x - jnp.floor(x),
    "small scale": lambda x: 1e-6 * x,
    "large scale": lambda x: 1e5 * x,
    "one minus a bounded value": lambda x: 1.0 - jnp.tanh(x),
    "maximum with a mask's number": lambda x: jnp.maximum(x, -1e9),
    "to float16 and back": lambda x: x.astype(jnp.float16).astype(jnp.float32),
    "to integers and back": lambda x: x.astype(jnp.int32).astype(jnp.float32),
}
MOVES: dict[str, Callable[[Array], Array]] = {
    **float8_programs.MOVES,
    "transpose": lambda x: jnp.swapaxes(x, -1, -2),
    "reverse features": lambda x: x[..., ::-1],
    "pairs": lambda x: x[..., ::2],
    "pad features": lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]),
    "causal shift": lambda x: jnp.pad(x, [(1, 0)] + [(0, 0)] * (x.ndim - 1))[:-1],
    "heads": lambda x: (
        x.reshape(*x.shape[:-1], 2, -1) if x.ndim < 4 and x.shape[-1] % 2 == 0 else x
    ),
    "tile": lambda x: jnp.tile(x, (1,) * (x.ndim - 1) + (2,)),
}


def add(d: Draw, x: Array) -> Array:
    return x + d.like(x)


def subtract(d: Draw, x: Array) -> Array:
    return d.like(x) - x if d.chance(0.4) else x - d.like(x)


def multiply(d: Draw, x: Array) -> Array:
    return x * d.like(x)


def gate(d: Draw, x: Array) -> Array:
    return d.choice([jax.nn.silu, jax.nn.sigmoid, jax.nn.gelu, jnp.tanh])(x) * d.like(x)


def divide(d: Draw, x: Array) -> Array:
    return x / (jnp.abs(d.like(x)) + d.choice([1.0, 1e-6, 1e-12]))


def extreme(d: Draw, x: Array) -> Array:
    return d.choice([jnp.maximum, jnp.minimum])(x, d.like(x))


def residual(d: Draw, x: Array) -> Array:
    inner = d.choice([jnp.tanh, jax.nn.gelu, lambda y: y])
    return x + fitted(inner(x @ d.matrix(x.shape[-1])), x)


def blended(d: Draw, x: Array) -> Array:
    rate = d.choice([0.9, 0.999, 0.5])
    return rate * x + (1 - rate) * d.like(x)


def masked(d: Draw, x: Array) -> Array:
    other = d.choice([0.0, -1e9, float(jnp.finfo(jnp.float32).min), -jnp.inf])
    return jnp.where(d.mask(x), x, other)


def masked_by_addition(d: Draw, x: Array) -> Array:
    return x + (1.0 - d.mask(x).astype(jnp.float32)) * d.choice([-1e9, -1e4])


def masked_by_product(d: Draw, x: Array) -> Array:
    return x * d.mask(x)


def dropped(d: Draw, x: Array) -> Array:
    kept = jax.random.bernoulli(d.given("key"), 0.9, x.shape)
    return jnp.where(kept, x / 0.9, 0.0)


# Sums, norms, softmaxes.


def reduced(d: Draw, x: Array) -> Array:
    forms = [jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.var, jnp.std, jnp.prod, jax.nn.logsumexp]
    axis = d.choice([-1, 0, None])
    result = d.choice(forms)(x, axis=axis, keepdims=True)
    return d.choice([lambda: result, lambda: x - result, lambda: x * result])()


def accumulated(d: Draw, x: Array) -> Array:
    forms = [jnp.cumsum, jnp.cumprod, lax.cumlogsumexp, lax.cummax]
    return d.choice(forms)(x, axis=d.choice([0, x.ndim - 1]))


def layer_norm(d: Draw, x: Array) -> Array:
    y = x - x.mean(-1, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + d.choice([1e-5, 1e-6, 1e-12]))
    return y * d.row(x.shape[-1]) + d.row(x.shape[-1])


def rms_norm(d: Draw, x: Array) -> Array:
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)
    return (y * (1 + d.row(x.shape[-1]))).astype(x.dtype)


def batch_norm(d: Draw, x: Array) -> Array:
    axes = tuple(range(x.ndim - 1))
    return jax.nn.standardize(x, axes, epsilon=1e-5) * d.row(x.shape[-1])


def group_norm(d: Draw, x: Array) -> Array:
    groups = 2 if x.shape[-1] % 2 == 0 else 1
    y = x.reshape(*x.shape[:-1], groups, -1)
    return jax.nn.standardize(y, -1).reshape(x.shape)


def unit_length(d: Draw, x: Array) -> Array:
    return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


def softmax(d: Draw, x: Array) -> Array:
    scaled = x / d.choice([1.0, 8.0, math.sqrt(x.shape[-1])])
    scaled = d.choice([lambda: scaled, lambda: masked(d, scaled), lambda: add(d, scaled)])()
    return d.choice([jax.nn.softmax, jax.nn.softmax, jax.nn.log_softmax])(scaled)


def softmax_by_hand(d: Draw, x: Array) -> Array:
    powers = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
    return powers / powers.sum(-1, keepdims=True)


def cross_entropy(d: Draw, x: Array) -> Array:
    x = flattened(x)
    labels = jnp.arange(x.shape[0]) % x.shape[1]
    form = d.choice(["gathered", "one-hot", "logsumexp"])
    if form == "one-hot":
        return -(jax.nn.one_hot(labels, x.shape[1]) * jax.nn.log_softmax(x)).sum(-1)
    if form == "logsumexp":
        picked = jnp.take_along_axis(x, labels[:, None], 1)[:, 0]
        return jax.nn.logsumexp(x, axis=-1) - picked
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1)[:, 0]


# Products.


def product(d: Draw, x: Array) -> Array:
    w = d.matrix(x.shape[-1])
    form = d.choice(["matmul", "matmul", "einsum", "bias", "flattened", "twice"])
    if form == "einsum":
        return jnp.einsum("...i,io->...o", x, w)
    if form == "bias":
        return x @ w + d.row(w.shape[1])
    if form == "flattened":
        return (flattened(x) @ w).reshape(*x.shape[:-1], w.shape[1])
    if form == "twice":
        y = x @ w
        return y @ d.matrix(y.shape[-1])
    return x @ w


def product_as_asked(d: Draw, x: Array) -> Array:
    """A product with a word of the user's."""
    w = d.matrix(x.shape[-1])
    options: list[dict[str, Any]] = [
        {"precision": lax.Precision.HIGHEST},
        {"precision": "high"},
        {"preferred_element_type": jnp.float32},
    ]
    if d.chance(0.2):
        return jmp.full_precision(lambda x: x @ w)(x)
    return jnp.matmul(x, w, **d.choice(options))


def product_of_halves(d: Draw, x: Array) -> Array:
    half = d.choice([jnp.float16, jnp.bfloat16])
    y = x.astype(half) @ d.matrix(x.shape[-1]).astype(half)
    return y.astype(jnp.float32)


def mlp(d: Draw, x: Array) -> Array:
    y = x @ d.matrix(x.shape[-1]) + 0.0
    y = d.choice([jax.nn.gelu, jax.nn.relu, jax.nn.silu])(y + d.row(y.shape[-1]))
    return y @ d.matrix(y.shape[-1])


def attention(d: Draw, x: Array) -> Array:
    """One head; of rows that are not too many."""
    x = x if x.ndim > 1 else x[None]
    q, k, v = (x @ d.matrix(x.shape[-1]) for _ in range(3))
    width = min(q.shape[-1], k.shape[-1])
    scores = jnp.einsum("...qd,...kd->...qk", q[..., :width], k[..., :width]) * width**-0.5
    scores = d.choice([lambda: scores, lambda: masked(d, scores)])()
    weights = d.choice([jax.nn.softmax, functools.partial(softmax_by_hand, d)])(scores)
    return jnp.einsum("...qk,...kd->...qd", weights, v)


def gram(d: Draw, x: Array) -> Array:
    x = flattened(x)
    return x.T @ x


def convolution(d: Draw, x: Array) -> Array:
    x = flattened(x)[None]
    kernel = d.constant(3, x.shape[-1], 4)
    if kernel.shape[:2] != (3, x.shape[-1]):
        kernel = jnp.ones((3, x.shape[-1], 4))
    kernel = jnp.asarray(kernel, x.dtype)
    layout = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=layout)


def outer(d: Draw, x: Array) -> Array:
    first = flattened(x)[:, 0]
    angles = d.choice(
        [
            lambda: jnp.einsum("i,j->ij", first, d.constant(x.shape[-1])),
            lambda: jnp.outer(jnp.arange(len(first), dtype=jnp.float32), d.constant(16)),
            lambda: first[:, None] @ d.constant(1, 16),
        ]
    )()
    return d.choice([jnp.sin, jnp.cos, lambda x: x])(angles)


def counted(d: Draw, x: Array) -> Array:
    """Counts, by a product with ones."""
    chosen = jax.nn.one_hot(jnp.argmax(flattened(x), -1), CLASSES)
    return d.choice([lambda: chosen.sum(0), lambda: jnp.ones((1, len(chosen))) @ chosen])()


# Rows that are looked up, written and sorted.


def looked_up(d: Draw, x: Array) -> Array:
    form = d.choice(["table", "rows", "one-hot", "along", "take"])
    if form == "table":
        return jnp.asarray(d.given("table"))[d.given("indices")]
    if form == "one-hot":
        return jax.nn.one_hot(d.given("indices"), CLASSES) @ d.given("table")
    if form == "along":
        return jnp.take_along_axis(x, jnp.argsort(x, -1), -1)
    return x[d.indices(x.shape[0])] if form == "rows" else jnp.take(x, np.array([0, 0]), axis=0)


def written(d: Draw, x: Array) -> Array:
    rows = d.indices(x.shape[0])
    values = fitted(d.pick(), x)[rows]
    at = jnp.zeros_like(x).at[rows] if d.chance(0.4) else x.at[rows]
    return d.choice([at.add, at.set, at.max, at.min])(values)


def summed_by_segments(d: Draw, x: Array) -> Array:
    return jax.ops.segment_sum(x, jnp.arange(x.shape[0]) // 2, x.shape[0])


def ordered(d: Draw, x: Array) -> Array:
    forms: list[Callable[[Array], Array]] = [
        lambda x: jnp.sort(x, -1),
        lambda x: lax.top_k(x, min(4, x.shape[-1]))[0],
        lambda x: jnp.argmax(x, -1, keepdims=True).astype(jnp.float32),
    ]
    return d.choice(forms)(x)


def unary(d: Draw, x: Array) -> Array:
    return UNARY[d.choice(sorted(UNARY))](x)


def moved(d: Draw, x: Array) -> Array:
    return MOVES[d.choice(sorted(MOVES))](x if x.ndim > 1 else x[None])


# Each as often as it stands here.
STEPS: tuple[Step, ...] = (
    *[product] * 9, *[unary] * 10, *[moved] * 4, *[add] * 3, *[multiply] * 2,
    subtract, gate, divide, extreme, residual, residual, blended, masked, masked_by_addition,
    masked_by_product, dropped, reduced, reduced, accumulated, layer_norm, layer_norm, rms_norm,
    batch_norm, group_norm, unit_length, softmax, softmax, softmax_by_hand, cross_entropy,
    product_as_asked, product_of_halves, mlp, attention, gram, convolution, outer, counted,
    looked_up, looked_up, written, summed_by_segments, ordered,
)  # fmt: skip


# Functions inside functions. A maker draws one around `inner`, which takes and returns an array.


def body(d: Draw, is_closed: bool = False) -> Callable[..., Array]:
    """Returns a function of an array, and of others that it may read, that draws its steps.

    It closes over parameters, and sometimes over arrays outside; if it `is_closed`, over none: the
    rule of a custom derivative is traced when the program has been.
    """
    seed, steps, depth = d.seed(), d.choice([2, 3, 4, 6]), d.depth - 1
    outside = d.pool[-2:] if d.chance(0.3) and not is_closed else []
    params = {} if is_closed else d.params

    def inner(x: Array, *others: Array, **given: Array) -> Array:
        drawn = Draw(seed, [*outside, *others, x], params | given, depth)
        grow(drawn, steps)
        return drawn.pool[-1]

    return inner


def in_jit(d: Draw, x: Array) -> Array:
    inner = body(d)
    options = d.choice([{}, {"inline": True}, {"donate_argnums": 0}, {"keep_unused": True}])
    return jax.jit(inner, **options)(x)


def in_remat(d: Draw, x: Array) -> Array:
    policies = jax.checkpoint_policies
    policy = d.choice(
        [
            None, policies.dots_saveable, policies.nothing_saveable,
            policies.save_only_these_names("h"), policies.everything_saveable,
        ]
    )  # fmt: skip
    return jax.checkpoint(body(d), policy=policy, prevent_cse=d.chance(0.7))(x)


def in_scan_of_steps(d: Draw, x: Array) -> Array:
    inner = body(d)
    form = d.choice(["carried", "residual", "leak", "half"])

    def turn(carry: Array, _: Any) -> tuple[Array, None]:
        y = fitted(inner(carry), carry)
        if form == "residual":
            y = carry + y
        if form == "leak":
            y = 0.9 * carry + 0.1 * y
        return y, None

    start = x.astype(jnp.bfloat16) if form == "half" else x
    length, reverse = d.choice([2, 3, 130, 400]), d.chance(0.2)
    return lax.scan(turn, start, None, length=length, reverse=reverse)[0].astype(jnp.float32)


def in_scan_of_layers(d: Draw, x: Array) -> Array:
    if "layers" not in d.params:
        return in_scan_of_steps(d, x)
    inner, layers = body(d), d.params["layers"]
    y = fitted(x @ d.matrix(x.shape[-1]), x) if d.chance(0.5) else x
    turn = lambda h, w: (h + fitted(inner(h, w=w), h), None)
    return lax.scan(jax.checkpoint(turn) if d.chance(0.3) else turn, y, layers)[0]


def in_scan_over_rows(d: Draw, x: Array) -> Array:
    """Over time: a state that products read, one that adds up, and what each turn gives."""
    if x.ndim < 2:
        return in_jit(d, x)
    inner, w = body(d), d.matrix(x.shape[-1])

    def turn(carry: Any, row: Array) -> tuple[Any, Array]:
        number, state, total = carry
        state = jnp.tanh(fitted(row @ w, state) + fitted(inner(row), state) * 0.5)
        return (number + 1, state, total + state.sum()), state

    start = (0, jnp.zeros_like(x[0] @ w), jnp.float32(0))
    (_, _, total), states = lax.scan(turn, start, x, unroll=d.choice([1, 1, 2]))
    return states * total


def in_while(d: Draw, x: Array) -> Array:
    inner = body(d)
    form = d.choice(["counted", "counted by an argument", "to a tolerance"])
    if form == "to a tolerance":
        step = lambda c: 0.5 * fitted(inner(c), c)
        return lax.while_loop(lambda c: jnp.max(jnp.abs(c)) > 1e-3, step, x)
    turns = 3 if form == "counted" else d.given("length")
    return lax.fori_loop(0, turns, lambda i, c: fitted(inner(c), c) * (1 + i), x)


def in_cond(d: Draw, x: Array) -> Array:
    first, second = body(d), body(d)
    is_large = jnp.max(x) > 1.0 if d.chance(0.5) else d.given("length") > 3
    others = d.choice([lambda y: y, jnp.tanh, lambda y: jnp.zeros_like(y), None])
    branch = lambda f: lambda y: fitted(f(y), y)
    return lax.cond(is_large, branch(first), others or branch(second), x)


def in_switch(d: Draw, x: Array) -> Array:
    branches = [body(d) for _ in range(d.choice([2, 3]))]
    fits = [lambda y, f=f: fitted(f(y), y) for f in branches]
    return lax.switch(d.given("length"), fits, x)


def in_vmap(d: Draw, x: Array) -> Array:
    if x.ndim < 2:
        return in_jit(d, x)
    inner, axis = body(d), d.choice([0, 0, 1])
    form = d.choice(["plain", "summed", "gathered", "twice"])

    def of_one(x: Array) -> Array:
        y = inner(x) if x.ndim else x
        if form == "summed":
            return y - lax.pmean(y, "i")
        return lax.all_gather(y, "i").mean(0) if form == "gathered" else y

    if form == "twice" and x.ndim > 2:
        return jax.vmap(jax.vmap(of_one))(x)
    return jax.vmap(of_one, in_axes=axis, axis_name="i")(x)


def in_custom_jvp(d: Draw, x: Array) -> Array:
    inner, tangent = (body(d, is_closed=True) for _ in range(2))
    function = jax.custom_jvp(lambda x: fitted(inner(x), x))

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        slope = fitted(tangent(primals[0]), primals[0])
        return function(*primals), tangents[0] * slope

    return function(x)


def in_custom_vjp(d: Draw, x: Array) -> Array:
    inner, slope = (body(d, is_closed=True) for _ in range(2))
    w = d.matrix(x.shape[-1])
    run = lambda x, w: fitted(inner(x), x) + (x @ w).sum()
    function = jax.custom_vjp(run)

    def backward(kept: Any, cotangent: Array) -> Any:
        x, w = kept
        return cotangent * fitted(slope(x), x), jnp.zeros_like(w) + cotangent.sum()

    function.defvjp(lambda x, w: (run(x, w), (x, w)), backward)
    return function(x, w)


def in_derivative(d: Draw, x: Array) -> Array:
    inner = body(d)
    total = lambda x: fitted(inner(x), x).sum()
    form = d.choice(["grad", "jvp", "step"])
    if form == "jvp":
        return jax.jvp(lambda x: fitted(inner(x), x), (x,), (jnp.ones_like(x),))[1]
    gradient = jax.grad(total)(x)
    return gradient if form == "grad" else x - 0.1 * gradient


def in_map(d: Draw, x: Array) -> Array:
    inner = body(d)
    return lax.map(lambda row: fitted(inner(row), row) if row.ndim else row, x)


def in_associative_scan(d: Draw, x: Array) -> Array:
    combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    decays = jax.nn.sigmoid(x) if d.chance(0.5) else jnp.full_like(x, 0.9)
    return lax.associative_scan(combine, (decays, x))[1]


def in_scope(d: Draw, x: Array) -> Array:
    with jax.named_scope(d.choice(SCOPES)):
        return body(d)(x)


def in_named_call(d: Draw, x: Array) -> Array:
    return jax.named_call(body(d), name="called")(x)


def in_full_precision(d: Draw, x: Array) -> Array:
    return jmp.full_precision(body(d))(x)


def _gathered_in_half(w: Array) -> Array:
    return jmp.gather_params(w, "d", jnp.bfloat16, jnp.float32)


def on_devices(d: Draw, x: Array) -> Array:
    """A part of the rows on each of two devices, which send each other something.

    They have a matrix whole, or a half of its rows each, which they gather in some dtype.
    """
    if x.shape[0] % 2:
        return in_jit(d, x)
    inner, form = body(d), d.choice(["mean", "gathered", "sent on", "scattered", "nothing"])
    w = d.matrix(x.shape[-1])
    gather = d.choice([None, lambda w: lax.all_gather(w, "d", tiled=True), _gathered_in_half])
    gather = gather if w.shape[0] % 2 == 0 else None

    def of_shard(x: Array, w: Array) -> Array:
        w = w if gather is None else gather(w)
        y = fitted(inner(x @ w), x)
        if form == "mean":
            return y - lax.pmean(y, "d")
        if form == "gathered":
            return y + lax.all_gather(y, "d", tiled=True).sum(0)
        if form == "sent on":
            return lax.ppermute(y, "d", [(0, 1), (1, 0)])
        if form == "scattered" and y.shape[0] % 2 == 0:
            return jnp.tile(lax.psum_scatter(y, "d", tiled=True), (2,) + (1,) * (y.ndim - 1))
        return y

    mesh = AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,))
    of_matrix = P() if gather is None else P("d")
    specs = {"in_specs": (P("d"), of_matrix), "out_specs": P("d"), "check_vma": False}
    # What is outside of it is not of its mesh: only arguments and constants go in.
    d.pool = [y for y in d.pool if y is x]
    return jax.shard_map(of_shard, mesh=mesh, **specs)(x, w)


SCOPES = ("head", "norm", "block/dense")
NESTS: tuple[Step, ...] = (
    in_jit, in_jit, in_remat, in_remat, in_scan_of_steps, in_scan_of_steps, in_scan_of_layers,
    in_scan_over_rows, in_while, in_cond, in_cond, in_switch, in_vmap, in_vmap, in_custom_jvp,
    in_custom_vjp, in_derivative, in_map, in_associative_scan, in_scope, in_named_call,
    in_full_precision,
)  # fmt: skip


# Programs.


def grow(d: Draw, steps: int, nests: float = 0.3) -> None:
    """Adds what so many steps compute to the pool; some are nests, where depth is left."""
    for _ in range(steps):
        x = d.pick()
        step = d.choice(NESTS) if d.depth > 0 and d.chance(nests) else d.choice(STEPS)
        y = step(d, x)
        if _is_float(y) and y.ndim and 0 < y.size <= LARGEST:
            d.pool.append(y)


class Program(NamedTuple):
    """A function of parameters and an array, and shapes of them."""

    fun: Callable[[dict[str, Array], Array], Any]
    args: tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]


def arguments(rows: int, width: int, batch: int) -> Any:
    """Returns the shapes of parameters and of the array that a program computes with."""
    shapes = {
        "square": (width, width),
        "other": (width, width),
        "up": (width, 2 * width),
        "down": (2 * width, width),
        "scale": (width,),
        "bias": (width,),
        "layers": (LAYERS, width, width),
        "table": (CLASSES, width),
    }
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    params["indices"] = jax.ShapeDtypeStruct((rows,), jnp.int32)
    params["length"] = jax.ShapeDtypeStruct((), jnp.int32)
    params["key"] = jax.eval_shape(lambda: jax.random.key(0))
    shape = (batch, rows, width) if batch else (rows, width)
    return params, jax.ShapeDtypeStruct(shape, jnp.float32)


def graph(number: int) -> Program:
    """Returns the graph of a number: 5 to 40 steps on one level."""
    return _program(number, depth=0)


def nest(number: int) -> Program:
    """Returns the nest of a number: up to three functions inside one another."""
    return _program(number, depth=1 + number % 3)


def sharded(number: int) -> Program:
    """Returns a nest of a number that computes on two devices."""
    return _program(number, depth=2, first=on_devices)


def _program(number: int, depth: int, first: Step | None = None) -> Program:
    seeded = random.Random(f"{number} {depth} {first is None}")
    rows, width = seeded.choice(SIZES)
    args = arguments(rows, width, seeded.choice([0, 0, 2]))
    steps = seeded.randint(2, 8) if depth else seeded.randint(5, 40)
    form, seed = seeded.choice(["loss", "mean", "last", "several"]), seeded.getrandbits(40)

    def fun(params: dict[str, Array], x: Array) -> Any:
        d = Draw(seed, [x], params, depth)
        start = product if first is None else first
        d.pool.append(start(d, x))
        grow(d, steps, nests=0.5)
        with jax.named_scope("head"):
            last = product(d, d.pool[-1])
        if form == "loss":
            return cross_entropy(d, last).mean()
        if form == "mean":
            return jnp.mean(last**2)
        return last if form == "last" else (last, d.pool[-1], jnp.argmax(last, -1))

    return Program(fun, args)
