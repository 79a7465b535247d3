"""Ways in which public code writes positions, counts and features inside its models.

A row is a small model, `loss(dtype, params, *inputs)`. With float32 it is what a user writes; with
a half dtype what the same user writes who does mixed precision by hand: weights and activations in
half, the rotated q and k and the softmax back in half, the loss in float32; and positions, angles,
counts and features in float32. These stand in the name scope "positions", so that a rule can say to
autocast what it should find by itself.

A row says how many products are half and how many are float32. Products that contract nothing, or
axes of length 1 alone, are not among them: they are multiplications.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOAT32 = jnp.float32
LENGTH = 320  # above 256, where bfloat16 does not hold a count
WIDTH = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model, the shapes of its parameters, and how many of its products are what."""

    loss: Callable[..., jax.Array]
    inputs: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    shapes: dict[str, Any]  # or a parameter itself
    half: int
    full: int
    mixed: int
    by_hand: Callable[..., jax.Array]  # a row that is the same model by hand

    @property
    def name(self) -> str:
        return self.loss.__name__

    def params(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        drawn = {
            name: np.float32(random.normal(size=shape) * shape[-2:][0] ** -0.5)
            for name, shape in self.shapes.items()
            if isinstance(shape, tuple)
        }
        return self.shapes | drawn


CASES: list[Case] = []


def in_float32():
    return jax.named_scope("positions")


def in_front_of(network, function):
    """Returns the loss of a network behind what a function computes in float32."""
    if network is None:
        return function

    @functools.wraps(function)
    def loss(dtype, params, *inputs):
        with in_float32():
            made = function(params, *inputs)
        return network(dtype, params, made, *inputs)

    return loss


def case(inputs, shapes, half, full=0, mixed=0, behind=None):
    """Adds a model to the table; with a network `behind` the function computes what it reads."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        loss = in_front_of(behind, function)
        CASES.append(Case(loss, inputs, shapes, half, full, mixed, by_hand=loss))
        return loss

    return add


def as_in(other, full=0, behind=None):
    """Adds another way to write a model of the table; by hand they are the same."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        loss = in_front_of(behind, function)
        (row,) = (case for case in CASES if case.loss is other)
        CASES.append(dataclasses.replace(row, loss=loss, full=full))
        return loss

    return add


# Networks that stand behind the positions.


def squared_error(y):
    target = jnp.sin(jnp.arange(y.size, dtype=FLOAT32)).reshape(y.shape)
    return jnp.mean((y.astype(FLOAT32) - target) ** 2)


def dense(dtype, x, weights):
    return x.astype(dtype) @ weights.astype(dtype)


MLP = {"hidden": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}


def mlp(dtype, params, x, *_):
    """Two products."""
    return squared_error(
        dense(dtype, jax.nn.gelu(dense(dtype, x, params["hidden"])), params["out"])
    )


ATTENTION = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}


def attend(dtype, params, x, rotate=lambda x: x, bias=None):
    """Six products: q, k, v, the scores, their mean and the projection; one head."""
    q, k, v = (dense(dtype, x, params[name]) for name in "qkv")
    q, k = (rotate(y.astype(FLOAT32)).astype(dtype) for y in (q, k))
    scores = (jnp.einsum("...qd,...kd->...qk", q, k) * q.shape[-1] ** -0.5).astype(FLOAT32)
    weights = jax.nn.softmax(scores if bias is None else scores + bias).astype(dtype)
    return dense(dtype, weights @ v, params["out"])


def attention(*args, **kwargs):
    return squared_error(attend(*args, **kwargs))


def rotated_halves(angles):
    """Rotates as GPT-NeoX and Llama do: a number and that half a vector further."""

    def rotate(x):
        x1, x2 = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

    return rotate


def rotary_attention(dtype, params, angles, x, *others):
    return attention(dtype, params, x[None] if angles.ndim > 2 else x, rotated_halves(angles))


def rotated_pairs(sin, cos):
    """Rotates as GPT-J does: a number and its neighbour."""

    def rotate(x):
        x1, x2 = x[..., ::2], x[..., 1::2]
        return jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).reshape(x.shape)

    return rotate


def frequencies(n=WIDTH // 2):
    return 1e4 ** -(jnp.arange(n, dtype=FLOAT32) / n)


def steps(n=LENGTH):
    return jnp.arange(n, dtype=FLOAT32)


def tokens(random):
    return (np.float32(random.normal(size=(LENGTH, WIDTH))),)


def tokens_and_positions(random):
    start = random.integers(1000)  # a chunk of a longer text
    return (*tokens(random), np.int32(start + np.arange(LENGTH)))


# Rotary angles.


@case(tokens, ATTENTION, half=6, behind=rotary_attention)
def rotary_by_einsum(params, x):
    return jnp.einsum("i,j->ij", steps(), frequencies())


@as_in(rotary_by_einsum, behind=rotary_attention)
def rotary_by_columns_and_rows(params, x):
    return steps()[:, None] @ frequencies()[None]


@case(tokens_and_positions, ATTENTION, half=6, behind=rotary_attention)
def rotary_of_hugging_face(params, x, positions):
    columns = frequencies()[None, :, None]
    rows = positions[None, None, :].astype(FLOAT32)
    return (columns @ rows).swapaxes(1, 2)


@case(tokens, ATTENTION | {"logarithms": (WIDTH // 2,)}, half=6, behind=rotary_attention)
def rotary_of_learned_frequencies(params, x):
    learned = frequencies() * jnp.exp(params["logarithms"] / 50)
    return jnp.einsum("i,j->ij", steps(), learned)


@case(tokens_and_positions, ATTENTION, half=6)
def rotary_of_gpt_j(dtype, params, x, positions):
    with in_float32():
        angles = jnp.einsum("i , j -> i j", steps(2 * 1024), frequencies())
        table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        sin, cos = jnp.split(jnp.take(table, positions, axis=0), 2, -1)
    return attention(dtype, params, x, rotated_pairs(sin, cos))


def grid(height, width):
    """The coordinates of pixels, row by row: [height * width, 2]."""
    y, x = jnp.meshgrid(steps(height), steps(width), indexing="ij")
    return jnp.stack([y, x], -1).reshape(-1, 2)


@case(tokens, ATTENTION, half=6, full=1, behind=rotary_attention)
def rotary_of_two_axes(params, x):
    of_axis = jnp.kron(jnp.eye(2), 100.0 ** -jnp.linspace(0, 1, WIDTH // 4)[None])
    return jnp.einsum("...i,ij->...j", grid(2, LENGTH // 2) * 2, of_axis)


def padded_tokens(random):
    words = random.integers(1, 50, LENGTH)
    words[: random.integers(9, 99)] = 0
    return (*tokens(random), np.int32(words))


@case(padded_tokens, ATTENTION, half=6, full=1, behind=rotary_attention)
def rotary_of_positions_behind_padding(params, x, words):
    positions = jnp.tril(jnp.ones((LENGTH, LENGTH))) @ (words != 0).astype(FLOAT32)
    return positions[:, None] @ frequencies()[None]


# Positions that are added to scores.


@case(tokens, {name: (3, WIDTH, WIDTH) for name in ATTENTION}, half=6)
def alibi(dtype, params, x):
    with in_float32():
        slopes = 2.0 ** -(jnp.arange(1, 4, dtype=FLOAT32) * 8 / 3)
        bias = jnp.einsum("h,s->hs", slopes, steps() - LENGTH + 1)[:, None]
    return attention(dtype, params, jnp.broadcast_to(x, (3, *x.shape)), bias=bias)


def buckets_of(distance, n=16):
    """T5's: distances up to n / 2 are their own bucket, those up to 256 share the others."""
    far = n // 2 + jnp.log(jnp.maximum(distance, 1) / (n // 2)) / jnp.log(512 / n) * (n // 2)
    return jnp.where(distance < n // 2, distance, jnp.minimum(far.astype(int), n - 1))


@case(tokens, ATTENTION | {"table": (16, 1)}, half=7)
def relative_buckets_of_t5(dtype, params, x):
    with in_float32():
        distance = jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None])
        bias = (jax.nn.one_hot(buckets_of(distance), 16) @ params["table"])[..., 0]
    return attention(dtype, params, x, bias=bias)


@case(tokens, ATTENTION | {"distance": (WIDTH, WIDTH)}, half=8)
def relative_shift_by_one_hot(dtype, params, x):
    """Transformer-XL's scores of distances, moved to their places by a product: half."""
    n = 64
    x = x.reshape(-1, n, WIDTH)[0]
    by_distance = dense(dtype, x, params["distance"]).astype(dtype)
    place = jax.nn.one_hot(jnp.arange(n)[:, None] - jnp.arange(n)[None], WIDTH, dtype=dtype)
    bias = jnp.einsum("qd,qkd->qk", by_distance, place).astype(FLOAT32)
    return attention(dtype, params, x, bias=bias)


# Times and depths.


def some_times(random):
    return (np.float32(random.uniform(0, 1000, LENGTH)),)


def waves(angles):
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


@case(some_times, MLP, half=2, behind=mlp)
def flow_times_by_einsum(params, t):
    return waves(jnp.einsum("b,d->bd", t / 1000 * 1000, frequencies()))


@case(some_times, MLP | {"rate": (WIDTH,), "phase": (WIDTH,)}, half=2, behind=mlp)
def time2vec(params, t):
    angles = jnp.einsum("b,k->bk", t / 10, params["rate"]) + params["phase"][None]
    return jnp.concatenate([angles[:, :1] / 100, jnp.sin(angles[:, 1:])], -1)


@case(
    some_times, MLP | {"decay": (WIDTH,), "turn": (WIDTH,), "out_of_state": (WIDTH, WIDTH)}, half=3
)
def kernel_of_s4d(dtype, params, t):
    """A Vandermonde matrix of exponentials; the kernel and what follows are half."""
    with in_float32():
        decay = jnp.einsum("n,l->nl", -jax.nn.softplus(params["decay"]) / 30, steps())
        turn = jnp.einsum("n,l->nl", params["turn"] / 10, steps())
        powers = jnp.exp(decay) * jnp.cos(turn)
    kernel = params["out_of_state"].astype(dtype) @ powers.astype(dtype)
    return mlp(dtype, params, kernel.T)


# Coordinates.


def points(random):
    return (np.float32(random.uniform(-1, 1, (LENGTH, 3))),)


def gaussian(rows, columns, scale):
    return scale * np.float32(np.random.default_rng(3).normal(size=(rows, columns)))


SAM = gaussian(2, WIDTH // 2, 16)


def image(random):
    return (np.float32(random.normal(size=(LENGTH, WIDTH))),)


@case(image, MLP, half=2, full=1)
def grid_of_sam(dtype, params, x):
    with in_float32():
        grid_ = (grid(16, LENGTH // 16) + 0.5) / jnp.array([[16, LENGTH // 16]])
        features = waves(2 * np.pi * ((2 * grid_ - 1) @ SAM))
    return mlp(dtype, params, x + features)


@case(points, MLP | {"b": (3, WIDTH // 2)}, half=2, full=1, behind=mlp)
def fourier_features_that_are_learned(params, x):
    return waves(2 * np.pi * (x @ (10 * params["b"])))


OF_NERF = {"hidden": (24, WIDTH), "out": (WIDTH, WIDTH)}


@case(points, OF_NERF, half=2, behind=mlp)
def octaves_of_nerf(params, x):
    angles = np.pi * x[..., None] * 2.0 ** jnp.arange(4, 8)
    return waves(angles.reshape(len(x), -1))


@as_in(octaves_of_nerf, full=1, behind=mlp)
def octaves_by_a_matrix(params, x):
    octaves = np.kron(np.eye(3, dtype=np.float32), 2 ** np.arange(4, 8, dtype=np.float32))
    return waves(np.pi * (x @ octaves))


def rays(random):
    rotation = np.linalg.qr(random.normal(size=(3, 3)))[0]
    return (*points(random), np.float32(rotation))


@case(rays, OF_NERF, half=2, full=1, behind=mlp)
def rays_of_a_camera(params, directions, rotation):
    x = directions @ rotation.T
    angles = np.pi * x[..., None] * 2.0 ** jnp.arange(4, 8)
    return waves(angles.reshape(len(x), -1))


def camera(random):
    f = random.uniform(40, 50)
    inverse = [[1 / f, 0, -3000 / f], [0, 1 / f, -3128 / f], [0, 0, 1]]
    return (np.float32(inverse),)


@case(camera, OF_NERF | {"hidden": (3, WIDTH)}, half=2, full=1, behind=mlp)
def pixels_through_a_camera(params, inverse):
    pixels = jnp.concatenate([3000 + grid(2, LENGTH // 2), jnp.ones((LENGTH, 1))], -1)
    return pixels @ inverse.T


@case(image, MLP, half=2, full=1)
def coordinates_times_a_hundred(dtype, params, x):
    """Above the largest number of float16."""
    with in_float32():
        far = (grid(2, LENGTH // 2) + 0.5) * 4 @ (100 * jnp.eye(2))
        angles = far[..., None] * (jnp.linspace(1, 4, WIDTH // 4) / 1000)
        features = waves(angles.reshape(len(x), -1))
    return mlp(dtype, params, x + features)


@case(points, OF_NERF | {"hidden": (9, WIDTH)}, half=2, behind=mlp)
def products_of_coordinates(params, x):
    """Features of second degree, of metres, above the largest number of float16."""
    metres = 1000 * x
    return jnp.einsum("bi,bj->bij", metres, metres).reshape(len(x), 9) / 1e6


LATTICE = gaussian(3, WIDTH, 20)


@case(points, MLP, half=2, full=1, behind=mlp)
def cells_of_a_lattice(params, x):
    """The fraction of a product."""
    return jnp.mod(x @ LATTICE, 1.0)


@case(points, MLP | {"table": (64, WIDTH)}, half=2, full=1)
def hash_grid(dtype, params, x):
    """Of Instant NGP: the corner below, hashed, and the weight of the corner."""
    with in_float32():
        scaled = x @ (50 * jnp.eye(3))
        corner = jnp.floor(scaled)
        hashed = (corner.astype(int) * jnp.array([[1, 37, 101]])).sum(-1) % 64
        weight = jnp.prod(1 - (scaled - corner), -1, keepdims=True)
    return mlp(dtype, params, params["table"][hashed].astype(dtype) * weight.astype(dtype))


@case(points, {"first": (3, WIDTH), "bias": (WIDTH,)} | MLP, half=2, full=1, behind=mlp)
def first_layer_of_siren(params, x):
    return jnp.sin(30 * (x @ params["first"] + params["bias"][None]))


@case(tokens, {name: (2, *shape) for name, shape in ATTENTION.items()}, half=6)
def rotary_outside_of_a_loop(dtype, params, x):
    with in_float32():
        angles = jnp.einsum("i,j->ij", steps(), frequencies())

    def layer(x, params):
        return x + attend(dtype, params, x, rotated_halves(angles)), None

    return squared_error(lax.scan(layer, x.astype(dtype), params)[0])


@as_in(rotary_outside_of_a_loop)
def rotary_inside_of_a_loop(dtype, params, x):
    @jax.checkpoint
    def layer(x, params):
        with in_float32():
            angles = jnp.einsum("i,j->ij", steps(), frequencies())
        return x + attend(dtype, params, x, rotated_halves(angles)), None

    return squared_error(lax.scan(layer, x.astype(dtype), params)[0])


# Counts and choices.


def sorted_tokens(random):
    """Most of the tokens are far on one side: the first expert's."""
    (x,) = tokens(random)
    x[:, 0] = np.where(random.uniform(size=LENGTH) < 0.95, 4, -4)
    return (x,)


EXPERTS = {
    "router": np.float32(np.outer(np.arange(WIDTH) == 0, [1, -1]) + gaussian(WIDTH, 2, 0.02)),
    "up": (2, WIDTH, WIDTH),
    "down": (2, WIDTH, WIDTH),
}


@case(sorted_tokens, EXPERTS, half=5, full=1)
def places_in_an_expert(dtype, params, x):
    """The places are counted; dispatch and combination are products in half."""
    capacity = 310
    gates = jax.nn.softmax(dense(dtype, x, params["router"]).astype(FLOAT32))
    expert = jax.nn.one_hot(jnp.argmax(gates, -1), 2)
    with in_float32():
        place = jnp.tril(jnp.ones((LENGTH, LENGTH))) @ expert
        place = (place * expert).sum(-1) - 1
    dispatch = expert[..., None] * jax.nn.one_hot(place.astype(int), capacity)[:, None]
    rows = jnp.einsum("tec,td->ecd", dispatch.astype(dtype), x.astype(dtype))
    rows = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", rows, params["up"].astype(dtype)))
    rows = jnp.einsum("ecf,efd->ecd", rows, params["down"].astype(dtype))
    combine = (dispatch * gates.max(-1)[:, None, None]).astype(dtype)
    return squared_error(jnp.einsum("tec,ecd->td", combine, rows))


def words(random):
    return (np.int32(random.integers(0, 50, LENGTH)),)


@case(words, MLP | {"table": (50, WIDTH)}, half=3)
def embedding_by_one_hot(dtype, params, words):
    chosen = jax.nn.one_hot(words, 50, dtype=dtype)
    return mlp(dtype, params, chosen @ params["table"].astype(dtype))


def labelled(random):
    x = np.float32(random.normal(size=(3000, WIDTH)))
    return (x, np.int32(random.choice(4, 3000, p=[0.8, 0.1, 0.05, 0.05])))


@case(labelled, {"hidden": (WIDTH, WIDTH), "out": (WIDTH, 4)}, half=2, full=1)
def weights_of_rare_classes(dtype, params, x, labels):
    """A histogram above 2048, where float16 does not hold a count."""
    chosen = jax.nn.one_hot(labels, 4)
    with in_float32():
        weight = 1 / (jnp.ones((1, len(labels))) @ chosen)
    hidden = jax.nn.gelu(dense(dtype, x, params["hidden"]))
    logits = jax.nn.log_softmax(dense(dtype, hidden, params["out"]).astype(FLOAT32))
    return -(logits * chosen * weight).sum() / 4


def segmented(random):
    first = np.arange(LENGTH) % 40  # nobody is alone
    return (*tokens(random), np.int32(np.where(random.uniform(size=LENGTH) < 0.9, 0, first)))


@case(segmented, MLP, half=3, full=1)
def means_of_segments(dtype, params, x, segments):
    """Sums of rows in half, their number in float32."""
    members = jax.nn.one_hot(segments, 40)
    with in_float32():
        number = members.T @ jnp.ones((LENGTH, 1))
    sums = members.T.astype(dtype) @ x.astype(dtype)
    return mlp(dtype, params, 10 * sums / jnp.maximum(number, 1))


def counted(random):
    return (np.int32(random.integers(0, 3000, (256, 20))),)


@case(counted, MLP | {"of_word": (20, WIDTH)}, half=2, mixed=1)
def integers_times_float32(dtype, params, counts):
    with in_float32():
        rows = lax.dot_general(
            counts, params["of_word"], (((1,), (0,)), ((), ())), preferred_element_type=FLOAT32
        )
    return mlp(dtype, params, rows / 1000)


# Fixed matrices in front of a model.


def sound(random):
    t = np.arange(128) / 128
    tone = np.sin(2 * np.pi * random.uniform(3, 40, (64, 1)) * t)
    return (np.float32(3000 * (tone + 0.01 * random.normal(size=(64, 128)))),)


def triangles(of_bins, bands=WIDTH):
    """A mel filterbank of NumPy: [bins, bands]."""
    centres = np.linspace(0, of_bins, bands + 2)[1:-1]
    distance = np.abs(np.arange(of_bins)[:, None] - centres[None])
    return np.float32(np.maximum(0, 1 - distance * bands / of_bins))


@case(sound, MLP, half=2, full=3, behind=mlp)
def mel_of_a_spectrum_by_products(params, frames):
    """The power of 16-bit sound is far above float16's range."""
    angles = steps(128)[:, None] @ steps(64)[None] * (2 * np.pi / 128)
    window = (0.5 - 0.5 * jnp.cos(2 * np.pi * steps(128) / 128))[:, None]
    power = (frames @ (window * jnp.cos(angles))) ** 2
    power = power + (frames @ (window * jnp.sin(angles))) ** 2
    return jnp.log(power @ triangles(64) + 1) / 10 - 1


def picture(random):
    return (np.float32(random.uniform(0, 255, (2 * WIDTH, 2 * WIDTH))),)


@case(picture, MLP, half=2, full=2, behind=mlp)
def bilinear_by_matrices(params, x):
    centres = (steps(WIDTH) + 0.5) * 2 - 0.5
    rows = jnp.maximum(0, 1 - jnp.abs(centres[:, None] - steps(2 * WIDTH)[None]))
    return (rows @ x @ rows.T - 128) / 64


@as_in(bilinear_by_matrices, full=2, behind=mlp)
def bilinear_of_jax(params, x):
    return (jax.image.resize(x, (WIDTH, WIDTH), "bilinear", antialias=False) - 128) / 64


# Thin products between weights and activations.


LORA = {"w": (WIDTH, WIDTH), "a": (WIDTH, 1), "b": (1, WIDTH)}


@case(tokens, MLP | LORA | {"c": (WIDTH, 8), "d": (8, WIDTH)}, half=6)
def lora_of_ranks_one_and_eight(dtype, params, x):
    y = dense(dtype, dense(dtype, x, params["a"]), params["b"])
    z = dense(dtype, dense(dtype, x, params["c"]), params["d"])
    return mlp(dtype, params, dense(dtype, x, params["w"]) + y + z)


@case(tokens, MLP | LORA, half=3)
def lora_of_rank_one_merged(dtype, params, x):
    weights = params["w"].astype(dtype) + dense(dtype, params["a"], params["b"])
    return mlp(dtype, params, dense(dtype, x, weights))


@case(tokens, ATTENTION | {"q": (WIDTH, 1), "k": (WIDTH, 1)}, half=5)
def heads_of_one_number(dtype, params, x):
    return attention(dtype, params, x)


# What float32 holds exactly: a function without parameters, its inputs, and the result in NumPy.


def routed(random):
    return (np.float32(random.normal(size=(700, 2))) + np.float32([[2, 0]]),)


def positions_by_a_triangle():
    return jnp.tril(jnp.ones((2100, 2100))) @ jnp.ones(2100)


def places_by_a_triangle(logits):
    expert = jax.nn.one_hot(jnp.argmax(logits, -1), 2)
    return jnp.tril(jnp.ones((700, 700))) @ expert


def histogram(words):
    return jnp.ones((1, len(words))) @ jax.nn.one_hot(words, 4)


def lengths_of_segments(words):
    return (words[:, None] == words[None]).astype(FLOAT32) @ jnp.ones((len(words), 1))


def unmasked_pairs(words):
    mask = (words != 0).astype(FLOAT32)
    return jnp.einsum("i,j->ij", mask, jnp.cumsum(mask))


def pixels_times_a_hundred():
    return grid(2, 700) @ (100 * jnp.eye(2))


def flat_indices():
    return (grid(50, 90) @ jnp.array([[90.0], [1.0]]))[:, 0]


def mixed_integers(counts):
    weights = jnp.full((3, 1), 1001.0)
    return lax.dot_general(
        counts, weights, (((1,), (0,)), ((), ())), preferred_element_type=FLOAT32
    )


_random = np.random.default_rng(0)
_words = np.int32(_random.choice(4, 5000, p=[0.85, 0.05, 0.05, 0.05]))
(_logits,) = routed(_random)
_pixels = np.indices((2, 700)).reshape(2, -1).T
_mask = _words[:900] != 0

EXACT = [
    (positions_by_a_triangle, (), np.arange(1, 2101)),
    (places_by_a_triangle, (_logits,), np.cumsum(_logits.argmax(-1)[:, None] == [[0, 1]], 0)),
    (histogram, (_words,), np.bincount(_words)[None]),
    (lengths_of_segments, (_words[:900],), np.bincount(_words[:900])[_words[:900]][:, None]),
    (unmasked_pairs, (_words[:900],), np.outer(_mask, np.cumsum(_mask))),
    (pixels_times_a_hundred, (), 100 * _pixels),
    (flat_indices, (), np.arange(4500)),
    (mixed_integers, (np.int32([[1, 2, 1001]]),), [[1004 * 1001]]),
]
