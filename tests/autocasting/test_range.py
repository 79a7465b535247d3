"""Numbers that nothing bounds, and numbers beside an offset, stay float32.

Each program makes such a number and uses it as a divisor, a factor or an addend beside the result
of another product. It is compared with the model whose products are half and whose other operations
are float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ops import segment_sum

import jmp
from jmp import diagnostics
from tests.commands import in_full
from tests.errors import errors_beside_half_products, largest_error, relative_error

ROWS, WIDTH = 2048, 8
HALVES = (jnp.float16, jnp.bfloat16)
MANY = 70_000  # more rows than float16 counts
GRAPHS = jnp.asarray(np.arange(MANY) % 3 // 2)  # one of two graphs for each row


def rows_of(x):
    """Makes an array over some rows one over the rows of a batch."""
    return jnp.broadcast_to(x, (ROWS,)) if x.ndim == 0 else jnp.resize(x, (ROWS,))


def added_row(total, row):
    return total + row.sum(), None


def square_of_sum(h):
    return h.sum() ** 2


def autocorrelation(h, power):
    return 1 + jnp.abs(jnp.fft.irfft(power(jnp.fft.rfft(h[:, 0])), ROWS))


# How a number is made of the result of a product `h` (ROWS, WIDTH) of standard deviation 30, or of
# arguments, many rows of ones and their count: one for each row, or one for all of them.
WAYS = {
    "sum of magnitudes": lambda h, *_: jnp.abs(h).sum(),
    "sum of squares": lambda h, *_: (h**2).sum(0).max(),
    "square": lambda h, *_: (9 * h[:, 0]) ** 2 + 1,
    "power": lambda h, *_: jnp.power(jnp.abs(h[:, 0]) + 1, 3.3),
    "norm": lambda h, *_: jnp.linalg.norm(jnp.square(h)),
    "variance": lambda h, *_: jnp.var(20 * h),
    "exponential": lambda h, *_: jnp.exp(jnp.abs(h[:, 0]) / 6),
    "running sum": lambda h, *_: jnp.cumsum(jnp.abs(h).sum(-1)),
    "product of numbers": lambda h, *_: jnp.prod(1 + jnp.abs(h[:, :4]), axis=-1),
    "distance": lambda h, *_: ((h[:, None, :] - h[None, :9]) ** 2).sum((1, 2)),
    "sum over segments": lambda h, *_: segment_sum(jnp.abs(h).sum(-1), GRAPHS[:ROWS], 2),
    "sum that is looked up": lambda h, *_: jnp.abs(h).sum(0)[GRAPHS[:ROWS]] * 8,
    "sum that is selected": lambda h, *_: jnp.where(h[:, 0] > 0, jnp.abs(h).sum(), 1e5),
    "softplus of a square": lambda h, *_: jax.nn.softplus((9 * h[:, 0]) ** 2),
    "prefix sum": lambda h, *_: lax.associative_scan(jnp.add, jnp.abs(h).sum(-1)),
    "autocorrelation": lambda h, *_: autocorrelation(h, lambda f: jnp.abs(f) ** 2),
    "autocorrelation, conjugate": lambda h, *_: autocorrelation(h, lambda f: f * f.conj()),
    "in a jit": lambda h, *_: jax.jit(lambda h: jnp.abs(h).sum(), inline=False)(h),
    "in a loop": lambda h, *_: lax.scan(added_row, 1.0, jnp.abs(h))[0],
    "in a branch": lambda h, *_: lax.cond(h[0, 0] > 0, square_of_sum, jnp.sum, jnp.abs(h)),
    "count of rows": lambda h, many, count: (many > -1).sum() * 1.0,
    "sum of memberships": lambda h, many, count: jnp.maximum(many.sum(0), 1.0),
    "count as an argument": lambda h, many, count: count,
    "count as an integer": lambda h, many, count: count.astype(jnp.int32) * 1.0,
    "bins": lambda h, many, count: jnp.bincount((many > 0).astype(int), length=2).max() * 1.0,
}
# What is done with the number `z` and the result `v` of a product: a value near one, of all digits.
ROLES = {
    "divisor": lambda v, z: (v * z.mean()) / jnp.maximum(z, z.mean()),
    "factor": lambda v, z: jnp.log1p(jnp.abs(v) * z) / 8,
    "reciprocal": lambda v, z: (v * z.mean()) * (1 / jnp.maximum(z, z.mean())),
    "addend": lambda v, z: jnp.log(z.mean() * jnp.abs(v) + z) / 8,
}


def program(way, role, product, weights, x, many, count):
    """A loss, scaled so that its gradients do not underflow."""
    first, second, third, fourth = weights
    h = product(x, first)
    z = WAYS[way](h, many, count)
    v = product(jnp.tanh(product(x, second)), third)  # behind more products than z
    y = product(ROLES[role](v, rows_of(z)[:, None]), fourth)
    return 1024 * jnp.mean(y**2)


def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    normal = jax.random.normal
    weights = [30 * normal(keys[0], (WIDTH, WIDTH)) / WIDTH**0.5]
    weights += [normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:4]]
    return weights, normal(keys[4], (ROWS, WIDTH)), jnp.ones(MANY), jnp.float32(MANY)


# Of every three cases `make test` runs one: ways take turns with roles and half types.
CASES = [
    (way, list(ROLES)[(i + j) % 4], HALVES[(i // 4 + j) % 2])
    for i, way in enumerate(WAYS)
    for j in range(4)
]


@pytest.mark.parametrize(("way", "role", "half"), in_full(CASES, one_of=3))
def test_a_number_that_nothing_bounds_stays_float32_beside_half_values(way, role, half):
    this = functools.partial(program, way, role)
    found, reference = errors_beside_half_products(this, half, arguments())
    assert np.isfinite(reference) and found <= 1.05 * reference, (found, reference)


def linear_attention(weights, x):
    q, k, v, out = (x @ w for w in weights)
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    y = q @ (k.T @ v) / (q @ k.sum(0))[:, None]
    return jnp.mean((y + out - jnp.sin(3 * x)) ** 2)


def test_linear_attention_over_many_tokens_has_its_gradients():
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (64, 64)) / 8 for key in keys[:4]]
    x = jax.random.normal(keys[4], (4096, 64))
    scaled = lambda loss: jax.jit(jax.grad(lambda *args: 2.0**20 * loss(*args)))
    wanted = scaled(linear_attention)(weights, x)
    found = scaled(jmp.autocast(linear_attention, "mixed_float16"))(weights, x)
    assert largest_error(found, wanted) < 3e-3


SHIFTED = {
    "exponential": lambda h, bias: jnp.mean(1 / (1 + jnp.abs(h + jnp.exp(12 + bias))), 0),
    "reciprocal": lambda h, bias: jnp.mean(jnp.minimum(h + 1e6 / bias, 2e6), 0) / 1e6,
    "taken away": lambda h, bias: jnp.abs((h + 1000 * bias) - 1000 * bias).mean(0),
    "spectra": lambda h, bias: jnp.tanh(1e-7 * convolved(100 * (h + bias)))[0],
}


def convolved(h):
    return jnp.fft.irfft(jnp.fft.rfft(h) * jnp.fft.rfft(h[::-1]), h.shape[-1])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", SHIFTED)
def test_large_values_at_the_front_of_an_island_keep_range_and_digits(name, half):
    def this(product, w, x, bias):
        return jnp.mean(product(SHIFTED[name](product(x, w), bias)[None], w) ** 2)

    w, x = (jax.random.normal(jax.random.key(i), (256, 256)) for i in range(2))
    arguments = w / 16, x, jnp.linspace(1, 2, 256)[None]
    found, reference = errors_beside_half_products(this, half, arguments)
    assert np.isfinite(reference) and found <= 1.05 * reference, (found, reference)


@pytest.mark.parametrize("rows", [8, 512])
def test_logits_add_their_bias_in_float32_whatever_the_batch(rows):
    def labels(x, w, bias):
        logits = x @ w + bias[None]
        return logits, logits.argmax(-1)

    shapes = ((rows, 64), (64, 1024), (1024,))
    program = jax.make_jaxpr(jmp.autocast(labels, "mixed_float16"))(*map(jnp.ones, shapes))
    assert f"f32[{rows},1024] = add" in program.pretty_print(use_color=False)


def test_what_an_operation_in_full_reads_stays_float32():
    def quotient(x, w):
        h = x @ w
        small = jnp.exp(-jnp.abs(h).mean())  # between zero and one: half, if no one asks
        return ((jnp.tanh(h) @ w * 1e-4) / small) @ w

    x, w = jnp.full((8, 8), 14.0), jnp.eye(8)  # exp(-14) has four digits of two in float16
    wanted = quotient(x, w)
    plain, in_full = (
        relative_error(jmp.autocast(quotient, "mixed_float16", full=full)(x, w), wanted)
        for full in ((), ("div",))
    )
    assert in_full < 1e-3 and not plain < 1e-3


# Offsets that are added and taken away again: between the two half types have few digits left.

SAMPLES, COLUMNS = 256, 16
MEANS = np.linspace(250, 350, COLUMNS, dtype=np.float32)[None]
GRID = jnp.linspace(990, 1010, 41)

# Each makes of numbers near zero, through numbers that lie beside an offset, numbers of that size.
WAYS_BESIDE_AN_OFFSET = {
    "kelvin": lambda h, *_: ((h * 10 + 288) - 288) / 10,
    "sine": lambda h, *_: jnp.sin(h + 1000),
    "interpolation": lambda h, *_: jnp.interp(h + 1000, GRID, jnp.sin(GRID)),
    "root": lambda h, *_: 40 * (jnp.sqrt(h + 500) - 500**0.5),
    "square": lambda h, *_: ((h + 300) ** 2 - 300**2) / 600,
    "clipped": lambda h, *_: jnp.clip(h + 512, 511.5, 512.5) - 512,
    "chosen": lambda h, *_: jnp.where(h > 0, h + 512, 512 + h / 2) - 512,
    "moved": lambda h, *_: ((h + 1000).T.reshape(-1) - 1000).reshape(h.shape[::-1]).T,
    "in a jit": lambda h, *_: jax.jit(lambda h: h + 1000)(h) - 1000,
    "in a scan": lambda h, *_: lax.scan(lambda c, row: (c, jnp.sin(row + 1000)), 0.0, h)[1],
    "in a branch": lambda h, *_: lax.cond(h[0, 0] > 9, jnp.cos, lambda h: jnp.sin(h + 1000), h),
    "an array of the program": lambda h, *_: jnp.sin(h + MEANS),
    "by row": lambda h, mean, std: ((h * std + mean) - mean) / std,
    "by number": lambda h, mean, std: ((h * 90 + mean[0, 0]) - mean[0, 0]) / 90,
    "with a square between": lambda h, mean, std: jnp.sqrt((h + mean) ** 2) - mean,
}


def beside_an_offset(way, product, weights, x, *more):
    h = jnp.tanh(product(x, weights[0])) / 2
    return jnp.mean(product(WAYS_BESIDE_AN_OFFSET[way](h, *more), weights[1]) ** 2)


def arguments_beside_an_offset():
    keys = jax.random.split(jax.random.key(1), 3)
    weights = [jax.random.normal(key, (COLUMNS, COLUMNS)) / COLUMNS**0.5 for key in keys[:2]]
    x, std = jax.random.normal(keys[2], (SAMPLES, COLUMNS)), jnp.full((1, COLUMNS), 90.0)
    return weights, x, 300 * jnp.asarray(MEANS), std


OFFSET_CASES = [(way, half) for way in WAYS_BESIDE_AN_OFFSET for half in HALVES]


@pytest.mark.usefixtures("users_rank_promotion")
@pytest.mark.parametrize(("way", "half"), in_full(OFFSET_CASES, one_of=3))
def test_what_is_added_and_taken_away_again_keeps_its_digits(way, half):
    this = functools.partial(beside_an_offset, way)
    found, reference = errors_beside_half_products(this, half, arguments_beside_an_offset())
    # One addition of half values, as of two rows, is below half a unit in the last place.
    limit = max(1.05 * reference, 0.4 * jnp.finfo(half).eps)
    assert reference < 0.1 and found <= limit, (found, reference)


@pytest.mark.parametrize("half", HALVES)
def test_a_bias_and_a_small_constant_are_added_in_half(half):
    def network(weights, bias, x):
        h = jax.nn.relu(x @ weights[0] + bias)
        return ((h + 1) * (2 - h)) @ weights[1] + bias - 0.5

    weights, bias, x = jnp.ones((2, 8, 8)), jnp.ones((1, 8)), jnp.ones((4, 8))
    traced = jax.make_jaxpr(jmp.autocast(network, f"p=f32,c={half.__name__},o=f32"))
    sums = [e for e in traced(weights, bias, x).eqns if e.primitive.name in ("add", "sub")]
    assert [str(e.outvars[0].aval.dtype) for e in sums[:3]] == 3 * [half.__name__]


# A function of a weight and an input, and whether a product reads numbers beside an offset in it.
READ = {
    "computed": (lambda w, x: (jnp.tanh(x @ w) + 1000) @ w, True),
    "an input": (lambda w, x: (2 * x + 288) @ w, True),
    "in a scan": (
        lambda w, x: lax.scan(lambda c, _: ((c + 500) @ w / 900, None), x, None, 2)[0], True),
    "of a convolution": (
        lambda w, x: lax.conv(x[None, None] + 300, w[None, None], (1, 1), "SAME"), True),
    "taken away": (lambda w, x: (((x @ w) + 1000) - 1000) @ w, False),
    "small": (lambda w, x: (jax.nn.relu(x @ w) + 3) @ w, False),
    "beside large numbers": (lambda w, x: (4000 * x + 1000) @ w, False),
    "a mask": (lambda w, x: jax.nn.softmax(x @ w - 1e9 * (x > 0)) @ w, False),
    "in float32": (lambda w, x: jmp.full_precision(jnp.matmul)(x + 1000, w) @ w, False),
}  # fmt: skip


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", READ)
def test_a_product_that_reads_numbers_beside_an_offset_is_a_hazard(name, half):
    fun, is_hazard = READ[name]
    weight, x = jnp.ones((COLUMNS, COLUMNS)), jnp.ones((SAMPLES, COLUMNS))
    report = diagnostics.precision_report(fun, f"p=f32,c={half.__name__},o=f32")(weight, x)
    hazards = [sentence for sentence in report.hazards if "larger one" in sentence]
    assert len(hazards) == is_hazard
    if name == "computed":
        known = {jnp.float16: "0.5", jnp.bfloat16: "4"}[half]
        assert f"{half.__name__} knows 1000 to {known}" in hazards[0]
