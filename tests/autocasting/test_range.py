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


squared = jax.custom_jvp(jnp.square)
squared.defjvp(lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0]))

# How a number is made of the result of a product `h` (ROWS, WIDTH) of standard deviation 30, or of
# arguments: one for each row, or one for all of them.
OF_A_PRODUCT = {
    "sum of magnitudes": lambda h: jnp.abs(h).sum(),
    "sum of squares": lambda h: (h**2).sum(0).max(),
    "square": lambda h: (9 * h[:, 0]) ** 2 + 1,
    "product with itself": lambda h: h[:, 0] * h[:, 0] * 81 + 1,
    "third power": lambda h: jnp.abs(h[:, 0]) ** 3 + 1,
    "power": lambda h: jnp.power(jnp.abs(h[:, 0]) + 1, 3.3),
    "norm": lambda h: jnp.linalg.norm(jnp.square(h)),
    "root of a sum": lambda h: jnp.sqrt((h**4).sum(0)).sum(),
    "variance": lambda h: jnp.var(20 * h),
    "mean of squares": lambda h: jnp.mean((20 * h) ** 2),
    "exponential": lambda h: jnp.exp(jnp.abs(h[:, 0]) / 6),
    "exponential of two": lambda h: jnp.exp2(jnp.abs(h[:, 0]) / 4),
    "expm1": lambda h: jnp.expm1(jnp.abs(h[:, 0]) / 6) + 1,
    "hyperbolic": lambda h: jnp.cosh(h[:, 0] / 6),
    "sum of exponentials": lambda h: jnp.exp(jnp.clip(h, -9, 9)).sum(-1).sum(),
    "running sum": lambda h: jnp.cumsum(jnp.abs(h).sum(-1)),
    "running product": lambda h: jnp.cumprod(1 + jnp.abs(h[:3]), axis=0).sum(0),
    "product of numbers": lambda h: jnp.prod(1 + jnp.abs(h[:, :4]), axis=-1),
    "sum of products": lambda h: jnp.abs(h * h[:, ::-1]).sum(),
    "sum of parts": lambda h: jnp.abs(h).reshape(-1, 4).sum(0).sum(),
    "total of sums": lambda h: jnp.abs(h).sum(0).sum(),
    "largest square": lambda h: (20 * jnp.abs(h).max()) ** 2,
    "distance": lambda h: ((h[:, None, :] - h[None, :9]) ** 2).sum((1, 2)),
    "sum over segments": lambda h: segment_sum(jnp.abs(h).sum(-1), GRAPHS[:ROWS], 2),
    "sum that is moved": lambda h: jnp.abs(h).sum(0).sum()[None, None].T.ravel()[0],
    "sum that is looked up": lambda h: jnp.abs(h).sum(0)[GRAPHS[:ROWS]] * 8,
    "sum with a floor": lambda h: jnp.maximum(jnp.abs(h).sum(), 1.0),
    "sum with an end": lambda h: jnp.minimum(jnp.abs(h).sum(), 1e30),
    "sum that is selected": lambda h: jnp.where(h[:, 0] > 0, jnp.abs(h).sum(), 1e5),
    "sums side by side": lambda h: jnp.concatenate([jnp.abs(h).sum()[None], h[:, 0] ** 2 + 9])[0],
    "trapezoids": lambda h: jnp.trapezoid(jnp.abs(h).sum(-1)),
    "softplus of a square": lambda h: jax.nn.softplus((9 * h[:, 0]) ** 2),
    "prefix sum": lambda h: jax.lax.associative_scan(jnp.add, jnp.abs(h).sum(-1)),
    "in a custom derivative": lambda h: squared(20 * h[:, 0]) + 1,
    "in a jit": lambda h: jax.jit(lambda h: jnp.abs(h).sum(), inline=False)(h),
    "in a remat": lambda h: jax.checkpoint(lambda h: jnp.abs(h).sum())(h),
    "in a branch": lambda h: jax.lax.cond(h[0, 0] > 0, lambda h: h.sum() ** 2, jnp.sum, jnp.abs(h)),
    "in a loop": lambda h: jax.lax.scan(lambda c, row: (c + row.sum(), None), 1.0, jnp.abs(h))[0],
}
OF_ARGUMENTS = {
    "count of rows": lambda many, count: (many > -1).sum() * 1.0,
    "count in segments": lambda many, count: segment_sum(jnp.ones(MANY), GRAPHS, 2)[GRAPHS[:ROWS]],
    "sum of memberships": lambda many, count: jnp.maximum(many.sum(0), 1.0),
    "count as an argument": lambda many, count: count,
    "count as an integer": lambda many, count: count.astype(jnp.int32) * 1.0,
    "sum of two counts": lambda many, count: count + many.sum(0),
    "bins": lambda many, count: jnp.bincount((many > 0).astype(int), length=2).max() * 1.0,
}
WAYS = {**OF_A_PRODUCT, **OF_ARGUMENTS}
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
    z = OF_A_PRODUCT[way](h) if way in OF_A_PRODUCT else OF_ARGUMENTS[way](many, count)
    v = product(jnp.tanh(product(x, second)), third)  # behind more products than z
    y = product(ROLES[role](v, rows_of(z)[:, None]), fourth)
    return 1024 * jnp.mean(y**2)


def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    normal = jax.random.normal
    weights = [30 * normal(keys[0], (WIDTH, WIDTH)) / WIDTH**0.5]
    weights += [normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:4]]
    return weights, normal(keys[4], (ROWS, WIDTH)), jnp.ones(MANY), jnp.float32(MANY)


# Of every four cases `make test` runs one: ways take turns with roles and half types.
CASES = [
    (way, list(ROLES)[(i + j) % 4], HALVES[(i // 4 + j) % 2])
    for i, way in enumerate(WAYS)
    for j in range(4)
]


@pytest.mark.parametrize(("way", "role", "half"), in_full(CASES, one_of=4))
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


def test_a_mean_over_a_large_graph_is_no_zero():
    mean = lambda member, h, w: member.T @ (h @ w) / jnp.maximum(member.sum(0), 1.0)[:, None]
    member, h = jnp.ones((MANY, 2)), jnp.full((MANY, 4), 2.0**-8)
    mixed = jmp.autocast(lambda *args: mean(*args) @ jnp.eye(4), "mixed_float16")
    found = mixed(member, h, jnp.eye(4))
    np.testing.assert_allclose(found, np.full((2, 4), 2.0**-8), rtol=1e-3)


def test_a_lookup_beyond_the_end_gives_the_number_that_was_asked_for():
    def reciprocals(x, w):
        rows = (x @ w).at[jnp.array([1, 100])].get(mode="fill", fill_value=1e5)
        return (1e5 / rows) @ w

    of_a_sine = lambda x, w: reciprocals(jnp.sin(x), w)
    for fun in (reciprocals, of_a_sine, lambda x, w: of_a_sine(x @ w, w)):
        found = jmp.autocast(fun, "mixed_float16")(jnp.ones((4, 4)), jnp.eye(4))
        np.testing.assert_allclose(found[1], jnp.ones(4), rtol=1e-3)


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
ORDER = jnp.asarray(np.random.default_rng(0).permutation(SAMPLES))

# Each makes of numbers near zero, through numbers that lie beside an offset, numbers of that size.
BESIDE_A_CONSTANT = {
    "kelvin": lambda h: ((h * 10 + 288) - 288) / 10,
    "fahrenheit": lambda h: ((h + 273.15) * 1.8 - 491.67) / 2,
    "before": lambda h: (1000 - h) - 1000,
    "twice": lambda h: ((h + 300) + 700) - 1000,
    "sine": lambda h: jnp.sin(h + 1000),
    "cosine": lambda h: jnp.cos(400 - h),
    "interpolation": lambda h: jnp.interp(h + 1000, GRID, jnp.sin(GRID)),
    "logarithm": lambda h: 300 * (jnp.log(h + 300) - np.log(300)),
    "root": lambda h: 40 * (jnp.sqrt(h + 500) - 500**0.5),
    "square": lambda h: ((h + 300) ** 2 - 300**2) / 600,
    "magnitude": lambda h: jnp.abs(h + 128) - 128,
    "larger": lambda h: jnp.maximum(h + 256, 256) - 256,
    "clipped": lambda h: jnp.clip(h + 512, 511.5, 512.5) - 512,
    "chosen": lambda h: jnp.where(h > 0, h + 512, 512 + h / 2) - 512,
    "moved": lambda h: ((h + 1000).T.reshape(-1) - 1000).reshape(h.shape[::-1]).T,
    "joined": lambda h: jnp.concatenate([h + 1000, h + 2000])[: h.shape[0]] - 1000,
    "looked up": lambda h: (h + 1000)[ORDER] - 1000,
    "in a jit": lambda h: jax.jit(lambda h: h + 1000)(h) - 1000,
    "in a remat": lambda h: jax.checkpoint(lambda h: jnp.sin(h + 1000))(h),
    "into a scan": lambda h: lax.scan(lambda c, row: (c, row - 1000), 0.0, h + 1000)[1],
    "in a scan": lambda h: lax.scan(lambda c, row: (c, jnp.sin(row + 1000)), 0.0, h)[1],
    "in a branch": lambda h: lax.cond(h[0, 0] > 9, jnp.cos, lambda h: jnp.sin(h + 1000), h),
    "an array of the program": lambda h: jnp.sin(h + MEANS),
}
BESIDE_AN_ARGUMENT = {
    "by row": lambda h, mean, std: ((h * std + mean) - mean) / std,
    "by number": lambda h, mean, std: ((h * 90 + mean[0, 0]) - mean[0, 0]) / 90,
    "repeated": lambda h, mean, std: (h + jnp.tile(mean, (SAMPLES, 1))) - mean,
    "with a square between": lambda h, mean, std: jnp.sqrt((h + mean) ** 2) - mean,
}
OFFSETS = {**BESIDE_A_CONSTANT, **BESIDE_AN_ARGUMENT}


def beside_an_offset(way, product, weights, x, *more):
    h = jnp.tanh(product(x, weights[0])) / 2
    v = BESIDE_A_CONSTANT[way](h) if way in BESIDE_A_CONSTANT else BESIDE_AN_ARGUMENT[way](h, *more)
    return jnp.mean(product(v, weights[1]) ** 2)


def arguments_beside_an_offset():
    keys = jax.random.split(jax.random.key(1), 3)
    weights = [jax.random.normal(key, (COLUMNS, COLUMNS)) / COLUMNS**0.5 for key in keys[:2]]
    x, std = jax.random.normal(keys[2], (SAMPLES, COLUMNS)), jnp.full((1, COLUMNS), 90.0)
    return weights, x, 300 * jnp.asarray(MEANS), std


OFFSET_CASES = [(way, half) for way in OFFSETS for half in HALVES]


@pytest.mark.usefixtures("users_rank_promotion")
@pytest.mark.parametrize(("way", "half"), in_full(OFFSET_CASES, one_of=4))
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


READ = {
    "computed": lambda w, x: (jnp.tanh(x @ w) + 1000) @ w,
    "an input": lambda w, x: (2 * x + 288) @ w,
    "in a scan": lambda w, x: lax.scan(lambda c, _: ((c + 500) @ w / 900, None), x, None, 2)[0],
    "of a convolution": lambda w, x: lax.conv((x[None, None] + 300), w[None, None], (1, 1), "SAME"),
}
NOT_READ = {
    "taken away": lambda w, x: (((x @ w) + 1000) - 1000) @ w,
    "small": lambda w, x: (jax.nn.relu(x @ w) + 3) @ w,
    "beside large numbers": lambda w, x: (4000 * x + 1000) @ w,
    "a mask": lambda w, x: jax.nn.softmax(x @ w - 1e9 * (x > 0)) @ w,
    "in float32": lambda w, x: jmp.full_precision(jnp.matmul)(x + 1000, w) @ w,
}


@pytest.mark.parametrize("half", HALVES)
def test_a_product_that_reads_numbers_beside_an_offset_is_a_hazard(half):
    def hazards(fun):
        report = diagnostics.precision_report(fun, f"p=f32,c={half.__name__},o=f32")
        return [sentence for sentence in report(weight, x).hazards if "larger one" in sentence]

    weight, x = jnp.ones((COLUMNS, COLUMNS)), jnp.ones((SAMPLES, COLUMNS))
    assert {name: len(hazards(fun)) for name, fun in READ.items()} == dict.fromkeys(READ, 1)
    assert [name for name, fun in NOT_READ.items() if hazards(fun)] == []
    known = {jnp.float16: "0.5", jnp.bfloat16: "4"}[half]
    assert f"{half.__name__} knows 1000 to {known}" in hazards(READ["computed"])[0]
