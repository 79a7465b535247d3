"""Numbers that nothing bounds: what a half type would round to infinity or zero stays float32.

Each program makes such a number and uses it as a divisor, a factor or an addend beside the result
of another product. It is compared with the model whose products are half and whose other operations
are float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ops import segment_sum

import jmp
from tests.commands import in_full
from tests.errors import errors_beside_half_products, largest_error, relative_error

ROWS, WIDTH = 2048, 8
HALVES = (jnp.float16, jnp.bfloat16)
MANY = 70_000  # more rows than float16 counts
GRAPHS = jnp.asarray(np.arange(MANY) % 3 // 2)  # one of two graphs for each row


def rows_of(x):
    """Makes an array over some rows one over the rows of a batch."""
    return jnp.broadcast_to(x, (ROWS,)) if x.ndim == 0 else jnp.resize(x, (ROWS,))


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


# Ways take turns with roles.
CASES = [(way, [*ROLES, *ROLES][i % 4 + j]) for i, way in enumerate(WAYS) for j in (0, 2)]


@pytest.mark.parametrize(("way", "role"), in_full(CASES, one_of=2))
def test_a_number_that_nothing_bounds_stays_float32_beside_half_values(way, role):
    half = HALVES[(CASES.index((way, role)) // 2) % 2]
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
    found = jmp.autocast(lambda *args: mean(*args) @ jnp.eye(4), "mixed_float16")(
        member, h, jnp.eye(4)
    )
    np.testing.assert_allclose(found, np.full((2, 4), 2.0**-8), rtol=1e-3)


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
