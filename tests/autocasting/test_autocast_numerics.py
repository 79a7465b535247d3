"""Where half precision breaks: saturation, literals, masks, small constants, squares, bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jmp
from jmp.autocasting.targets._slopes import log_of_sum
from jmp.autocasting.targets.gpu import widen_bits
from tests.commands import in_full
from tests.errors import relative_error
from tests.products import eye, half, ones

HALVES = pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
TERMS = 16384  # float16 stops counting ones at 2048, bfloat16 at 256
ROWS = TERMS // 2  # of two numbers each
EYE = jnp.eye(4)


# Saturation: 16384 contributions of one.


def weight_in_a_scan(b):
    body = lambda carry, x: (carry, (x @ (b * eye(2))).sum())
    return lax.scan(body, 0.0, ones(ROWS, 1, 2))[1].sum()


def bias_in_a_scan(b):
    body = lambda carry, x: (carry, half(half(x) + b).sum())
    return lax.scan(body, 0.0, ones(ROWS, 1, 2))[1].sum()


def half_value_closed_over_by_a_scan(b):
    activation = half(jnp.full((1, 2), b))
    return lax.scan(lambda c, _: (c, (activation * 1.0).sum()), 0.0, None, length=ROWS)[1].sum()


def carry_of_a_scan(b):
    step = half(jnp.full((1, 2), b))
    return lax.scan(lambda c, _: (c + step, None), step * 0, None, length=ROWS)[0].sum()


SHARED = {
    "bias": lambda b: (half(ones(ROWS, 2)) + b).sum(),
    "bias before a product": lambda b: half(half(ones(ROWS, 2)) + b).sum(),
    # exp(0) is one, and so is its derivative. The island is recomputed.
    "bias before an island": lambda b: half(jnp.exp(half(ones(ROWS, 2) - 1) + (b - 1))).sum(),
    "scale": lambda b: half(half(ones(ROWS, 2)) * b).sum(),
    "row of an embedding": lambda b: half(jnp.full((1, 2), b)[jnp.zeros(ROWS, int)]).sum(),
    "weight in a scan": weight_in_a_scan,
    "bias in a scan": bias_in_a_scan,
    "half value closed over by a scan": half_value_closed_over_by_a_scan,
    "carry of a scan": carry_of_a_scan,
    "bias in a vmap": lambda b: jax.vmap(lambda x: half(half(x) + b).sum())(ones(ROWS, 1, 2)).sum(),
    "rows of a half value": lambda b: (half(ones(1, 2) * b)[jnp.zeros(ROWS, int)] * 1.0).sum(),
    "scattered rows": lambda b: (
        jnp.zeros((1, 2)).at[jnp.zeros(ROWS, int)].add(half(ones(ROWS, 2) * b)).sum()
    ),
}


@HALVES
@pytest.mark.parametrize("function", SHARED.values(), ids=SHARED)
def test_sixteen_thousand_contributions_count(function, policy):
    gradient = jax.jit(jax.grad(jmp.autocast(function, policy)))(jnp.ones(()))
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, TERMS, rtol=0.01)


@HALVES
def test_sums_and_means_of_many_terms(policy):
    x = jnp.ones((TERMS, 2))

    def sums(x):
        y = x @ (ones(2, 1) / 2)
        return y.sum(), y.mean(), jnp.cumsum(y)[-1], jnp.var(y + 1), jnp.linalg.norm(y)

    got = jmp.autocast(sums, policy)(x)
    np.testing.assert_allclose(got, (TERMS, 1, TERMS, 0, TERMS**0.5), rtol=1e-3)


# Literals, masks, small constants, squares.


def row_of(*numbers):
    return jnp.array([numbers], jnp.float32)


SECOND_HIDDEN, ALL_HIDDEN = jnp.array([[True, False]]), jnp.zeros((1, 2), bool)


def masked(kept, lowest):
    """A softmax of scores that a mask hides."""
    return lambda x: jax.nn.softmax(jnp.where(kept, half(x), lowest))


AT_ONE_TWO = {
    "literal of 1e6": lambda x: half(x) * 1e6,
    "largest float32": lambda x: jnp.minimum(half(x), 3e38),
    "mask of -1e9": masked(SECOND_HIDDEN, -1e9),
    "mask of the smallest float32": masked(SECOND_HIDDEN, jnp.finfo(jnp.float32).min),
    "softmax of a row masked throughout": masked(ALL_HIDDEN, -1e9),
    "infinite mask": masked(SECOND_HIDDEN, -jnp.inf),
    "added mask": lambda x: jax.nn.softmax(half(x) + jnp.where(ALL_HIDDEN, 0.0, -1e9)),
    "masked, then a product": lambda x: (
        jax.nn.softmax(half(x) + jnp.full((1, 2), -1e9)) @ jnp.ones((2, 2))
    ),
    "joined to large numbers": lambda x: jnp.concatenate([half(x), jnp.full((1, 2), 1e6)]),
}
FINITE_AND_RIGHT = {
    **{name: (function, row_of(1, 2)) for name, function in AT_ONE_TWO.items()},
    "eps of 1e-12": (lambda x: half(x) / jnp.sqrt((half(x) ** 2).sum() + 1e-12), row_of(0, 0)),
    "literal of 1e-8": (lambda x: 1 / (half(x) + 1e-8), row_of(0.0, 1.0)),
    "sum of squares at 300": (lambda x: (half(x) ** 2).sum(), row_of(300, 300)),
    "norm at 300": (lambda x: jnp.linalg.norm(half(x)), row_of(300, 300)),
    "inner product at 300": (lambda x: jnp.vdot(half(x), half(x)), row_of(300, 300)),
    "a number times itself": (lambda x: (lambda y: y * y)(half(x)), row_of(300, 300)),
    "variance at 300": (lambda x: jnp.var(half(x)), row_of(300, -300)),
    "squares": (lambda x: jnp.square(half(x)), row_of(300, 300)),
    "exp of 12": (lambda x: jnp.exp(half(x)), row_of(12, 20)),
    "logsumexp": (lambda x: jax.nn.logsumexp(half(x)), row_of(500, 400)),
    "log of a small number": (lambda x: jnp.log(half(x) * 1e-10), row_of(1, 1)),
    "softplus": (lambda x: jax.nn.softplus(half(x)), row_of(80, -80)),
    "cross entropy at 1000": (lambda x: -jax.nn.log_softmax(half(x))[0, 1], row_of(1000, -1000)),
    "real part of a Fourier transform": (
        lambda x: jnp.fft.fft(half(x) * jnp.ones((4096, 1)), axis=0).real,
        row_of(60, 60),
    ),
}


NESTED = {
    "plain": lambda f: f,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0],
    "closed over by a scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(x)), 0, None, 1)[1][0],
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > -jnp.inf, f, f, x),
}


@pytest.mark.parametrize(
    ("policy", "nested"),
    in_full(
        [("mixed_bfloat16", "plain"), *(("mixed_float16", nested) for nested in NESTED)], one_of=3
    ),
)
@pytest.mark.parametrize("name", FINITE_AND_RIGHT)
def test_finite_and_right(name, nested, policy):
    function, x = FINITE_AND_RIGHT[name]
    got = jax.jit(jmp.autocast(NESTED[nested](function), policy))(x)
    np.testing.assert_allclose(got, function(x), rtol=1e-2, atol=1e-6)


@HALVES
@pytest.mark.parametrize("nested", NESTED)
def test_a_small_constant_from_outside_is_known_inside(nested, policy):
    eps = jnp.array(1e-12)
    function = lambda x: half(half(x) / (half(x) + eps))
    got = jmp.autocast(NESTED[nested](function), policy)(jnp.zeros((1, 4)))
    np.testing.assert_array_equal(got, jnp.zeros((1, 4)))


@HALVES
@pytest.mark.parametrize(
    "shape",
    in_full([((2, 2, 4, 4),), ((4, 4),), ((2, 1, 1, 4),), ((1, 1, 1, 4),), ((4,),)], one_of=2),
)
def test_a_mask_given_as_an_argument_hides_without_infinities(policy, shape):
    # Every position of the first row is masked: what comes out is uniform, in float32 too.
    mask = jnp.full(shape, -1e9) if len(shape) == 1 else jnp.zeros(shape).at[..., 0, :].set(-1e9)

    def attention(x, mask):
        scores = jnp.einsum("bhqd,bhkd->bhqk", x, x) + mask
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), x)

    x = jax.random.normal(jax.random.key(0), (2, 2, 4, 8))
    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(attention)(x, mask)
        autocast = jmp.autocast(attention, policy)
        np.testing.assert_allclose(autocast(x, mask), expected, rtol=0.05, atol=0.03)
        gradient = jax.grad(lambda x: autocast(x, mask).sum())(x)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("shape", [(1, 4, 8), (4, 8), (3, 4, 8), (1, 1, 8)])
def test_a_mask_given_as_an_argument_stays_finite_in_front_of_a_loop(shape):
    def function(x, mask):
        scores = half(x) + jnp.broadcast_to(mask, (3, 4, 8))
        return lax.map(lambda s: jax.nn.softmax(s) @ jnp.eye(8), scores)

    x, mask = jnp.ones((3, 4, 8)), jnp.full(shape, -1e9)
    got = jmp.autocast(function, "mixed_float16")(x, mask)
    np.testing.assert_allclose(got, function(x, mask), rtol=1e-2)


SATURATED = {
    "tanh": lambda x: jnp.tanh(half(x)),
    "square of tanh": lambda x: jnp.tanh(half(x)) ** 2,
    "tanh between products": lambda x: half(jnp.tanh(half(x))),
    "logistic": lambda x: jax.nn.sigmoid(half(x)),
    "logistic between products": lambda x: half(jax.nn.sigmoid(half(x))),
    "silu": lambda x: half(jax.nn.silu(-half(x))),
}


@HALVES
@pytest.mark.parametrize("name", SATURATED)
def test_the_slope_of_a_saturated_function_in_a_gradient_of_the_programs_own(name, policy):
    # The cotangent is an array from outside: literal ones times a weight would be float32.
    gradient = jax.grad(lambda x: (SATURATED[name](x) * ones(1, 2)).sum())
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(row_of(4, -4), NamedSharding(mesh, PartitionSpec()))
    for row in (row_of(4, -4), placed):  # on a mesh JAX places the one of `1 - tanh(x)` there
        got = jmp.autocast(gradient, policy)(row)
        np.testing.assert_allclose(got, gradient(row), rtol=5e-3)


@HALVES
def test_what_is_left_of_one(policy):
    def function(x):
        x = half(half(x))  # one product of an input would stay float32, since a cosine reads it
        tails = [1 - jnp.tanh(x), 1 - lax.erf(x), -1 + jax.nn.sigmoid(x), lax.cos(x / 16) - 1]
        return half(jnp.stack(tails)[:, 0])

    got = jmp.autocast(function, policy)(row_of(2, 3))
    np.testing.assert_allclose(got, function(row_of(2, 3)), rtol=1e-2)


TAKEN_AWAY = [lambda y: 1 - jnp.abs(y), lambda y: y - y[:1], lambda y: y + 300 - 300]


@HALVES
@pytest.mark.parametrize("take_away", TAKEN_AWAY)
def test_what_is_left_of_a_bounded_function_of_a_biased_product(take_away, policy, monkeypatch):
    monkeypatch.setattr("jmp.autocasting._islands.SMALL", 1)
    function = lambda x, b: half(take_away(jnp.tanh(half(x) + b[None])) * x)
    x, b = jnp.arange(64.0).reshape(32, 2) / 128, jnp.full(2, 3.0)
    assert relative_error(jmp.autocast(function, policy)(x, b), function(x, b)) < 0.02


@HALVES
def test_a_straight_through_value_is_rounded_once(policy, monkeypatch):
    monkeypatch.setattr("jmp.autocasting._islands.SMALL", 1)

    def straight_through(x, table):
        x = half(x)
        y = table[jnp.argmax(half(x), -1)]
        return half(x + lax.stop_gradient(y - x)), y + jnp.mean((y - x) ** 2) * 0

    x, table = (jax.random.normal(jax.random.key(n), (n, 16)) for n in (256, 16))
    found, expected = jmp.autocast(straight_through, policy)(x, table)
    assert relative_error(found, expected) < 0.3 * jnp.finfo(policy.removeprefix("mixed_")).eps


@HALVES
def test_the_next_number_is_that_of_float32(policy):
    spacing = lambda x: (jnp.spacing(half(x)) * 2.0**23) @ EYE
    got = jmp.autocast(spacing, policy)(row_of(1, 2, 3, 4))
    np.testing.assert_array_equal(got, row_of(1, 2, 2, 4))


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 6)])
@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_picks_are_gathers(monkeypatch, shape, mode):
    from jmp.autocasting.targets import _cross_entropy as rewrite

    monkeypatch.setattr(rewrite, "LARGE", 1)
    x = jax.random.normal(jax.random.key(0), shape)
    limits = (0, shape[-1]) if mode == "promise_in_bounds" else (-9, 9)
    indices = jax.random.randint(jax.random.key(1), (*shape[:-1], 1), *limits)

    def pick(x):
        return jnp.take_along_axis(jax.nn.log_softmax(half(x)), indices, -1, mode=mode)

    autocast = jmp.autocast(pick, "mixed_bfloat16")
    assert " gather" not in str(jax.make_jaxpr(autocast)(x))
    expected = jax.jit(pick)(x.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(autocast(x), expected, rtol=1e-5)
    weights = jnp.where(jnp.isnan(expected), 0, 1)
    gradient = lambda f: jax.jit(jax.grad(lambda x: jnp.nansum(f(x) * weights)))(x)
    np.testing.assert_allclose(gradient(autocast), gradient(pick), atol=0.02)


# Random numbers.


DRAWS = {
    "normal": jax.random.normal,
    "uniform": jax.random.uniform,
    "gumbel": jax.random.gumbel,
    "truncated normal": lambda key, shape: jax.random.truncated_normal(key, -1, 1, shape),
    "permutation": lambda key, shape: jax.random.permutation(key, jnp.arange(shape[0])),
    "folded and split": lambda key, shape: jax.random.bits(
        jax.random.split(jax.random.fold_in(key, 3))[1], shape
    ),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("implementation", in_full(["threefry2x32", "rbg"], first=1))
def test_random_bits_are_identical(name, implementation):
    function = lambda key, x: (DRAWS[name](key, x.shape), half(x).sum())
    key, x = jax.random.key(3, impl=implementation), jnp.ones((4, 8))
    drawn, _ = jmp.autocast(function, "mixed_float16")(key, x)
    np.testing.assert_array_equal(drawn, jax.jit(function)(key, x)[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("function", "offset", "scale", "full", "ulps"),
    [
        (jnp.tanh, 0, 1e3, (), 1),
        (jnp.tanh, 2, 1e4, (), 1),
        (jnp.tanh, 3, 1e6, (), 6),  # by hand 4.9
        (jnp.tanh, 5, 1e9, ("tanh",), 1),  # else nothing is left, as by hand
        (jax.nn.softplus, 5, 1e4, (), 4),
    ],
)
def test_a_slope_that_the_loss_differentiates(dtype, function, offset, scale, full, ulps):
    keys = jax.random.split(jax.random.key(0), 3)
    first, last = (jax.random.normal(key, (32, 32)) / 24 for key in keys[:2])
    points = jax.random.normal(keys[2], (1024, 32))

    def loss(first):
        u = lambda x: function(x @ first + offset) @ last
        along = jax.jvp(u, (points,), (jnp.ones_like(points),))[1]
        return scale * jnp.mean(along**2)

    found = jax.grad(jmp.autocast(loss, f"mixed_{dtype}", full=full))(first)
    assert relative_error(found, jax.grad(loss)(first)) < ulps * jnp.finfo(dtype).eps


LEFT_OF_ONE = {
    "a logarithm": lambda y: half(y).sum() + jnp.log(1 - y).sum(),
    "a quotient": lambda y: half(y).sum() + 1e-3 * half(y / (1 - y)).sum(),
    "a product": lambda y: half(y).sum() + 1e3 * half(half(1 - y) * y).sum(),
    "a product of its half": lambda y: half(y).sum() + 1e3 * half(half((1 - y) / 2) * y).sum(),
    "a loss": lambda y: half(y).sum() + 1e3 * ((1 - y) * y).sum(),
    "the logarithm of a sum": lambda y: half(y).sum() + jnp.log(((1 - y) * y).sum(0)).sum(),
    "the logarithm of a square": lambda y: half(y).sum() + jnp.log(1 - jnp.square(y)).sum(),
}


@HALVES
@pytest.mark.parametrize("name", LEFT_OF_ONE)
def test_what_is_left_of_one_in_a_derivative_that_needs_its_digits(name, policy, monkeypatch):
    monkeypatch.setattr("jmp.autocasting._islands.SMALL", 1)
    function = jax.value_and_grad(lambda x: LEFT_OF_ONE[name](jnp.tanh(half(x))))
    _assert_close(function, policy)


@HALVES
def test_what_is_left_of_one_where_it_is_no_slope(policy, monkeypatch):
    monkeypatch.setattr("jmp.autocasting._islands.SMALL", 1)

    def gated(x):
        y = jnp.tanh(half(x))
        return half(y).sum(), half((1 - y) * half(x))

    def returned(x):
        y = jnp.tanh(half(x))
        return half(y).sum(), 1 - y

    def turned(x):
        y = jnp.cos(half(half(x)) + 1000)
        return half(y).sum() + half((1 - y) * half(x)).sum()

    _assert_close(gated, policy)
    _assert_close(jax.value_and_grad(turned), policy)
    _assert_close(jax.value_and_grad(returned, has_aux=True), policy)


def _assert_close(function, policy):
    found, expected = (f(row_of(3, 4)) for f in (jmp.autocast(function, policy), function))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-2), found, expected)


def test_all_bfloat16_numbers_are_widened_by_their_bits():
    numbers = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)
    widen = lambda x: widen_bits(x, None, None)
    np.testing.assert_array_equal(jax.jit(widen)(numbers), numbers.astype(np.float32))
    slopes = jax.vmap(jax.grad(lambda x: widen(x) * 3))(numbers)
    np.testing.assert_array_equal(slopes, jnp.full(2**16, 3, jnp.bfloat16))


def test_what_an_island_moves_for_others_than_fourier_transforms_is_not_rounded():
    def sums(x):
        y = jnp.exp(half(x))  # some are beyond float16's range; a product reads them too
        return jnp.log(jnp.cumsum(y.T, 0)[-1]), half(y)

    x = 12 * jax.random.uniform(jax.random.key(0), (256, 64))
    found, expected = (f(x)[0] for f in (jmp.autocast(sums, "mixed_float16"), sums))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_a_split_of_which_a_fourier_transform_reads_one_part_stays_in_its_island():
    def transformed(x):
        y = jax.nn.gelu(half(x))
        first, last = lax.split(y, (128, 128))
        return half(y), jnp.fft.rfft(first).real, half(jnp.exp(last))

    x = jax.random.normal(jax.random.key(0), (256, 64))
    assert relative_error(jmp.autocast(transformed, "mixed_float16")(x), transformed(x)) < 1e-3


@pytest.mark.parametrize("y", [0.0, -80.0, -np.inf])
def test_the_slopes_of_a_log_of_a_sum_of_powers(y):
    x = np.array([0, 1e-40, 1, -1, 80, -80, 1e30, -1e30, np.inf])
    slope = lambda x, y: (1 + np.tanh((x - y) / 2)) / 2
    exact = [np.logaddexp(x, y), slope(x, y), slope(x, y) * slope(y, x)]
    functions = [log_of_sum, jax.grad(log_of_sum), jax.grad(jax.grad(log_of_sum))]
    got = [jax.vmap(lambda x, f=f: f(x, y))(x.astype(np.float32)) for f in functions]
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-7)


BOUNDED = [(jnp.tanh, lambda y: (1 - y) * (1 + y)), (jax.nn.sigmoid, lambda y: y * (1 - y))]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(("function", "slope"), BOUNDED, ids=["tanh", "sigmoid"])
def test_the_slope_of_a_bounded_function_in_a_loop_is_of_its_half(function, slope, half):
    turn = lambda y, _: (function(y @ jnp.eye(2)), None)
    of_rows = lambda x: lax.scan(turn, jnp.full((1, 2), x), None, length=1)[0][0, 0]
    run = jmp.autocast(of_rows, f"mixed_{half}")
    x = jnp.array([0, 0.5, -3, 4, 9, -60000, np.nan])
    y = jax.vmap(run)(x)
    np.testing.assert_allclose(jax.vmap(jax.grad(run))(x), slope(y), rtol=2e-3)
    second = jax.vmap(jax.grad(slope))(y) * slope(y)
    np.testing.assert_allclose(jax.vmap(jax.hessian(run))(x), second, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_the_gradient_of_a_maximum_that_is_nan_is_nan(half):
    w, x = jnp.eye(4), jnp.ones((3, 4)).at[1, 2].set(jnp.nan)
    gradient = jax.grad(jmp.autocast(lambda x: jnp.sum(jnp.max(x @ w, 0) @ w), f"mixed_{half}"))
    assert jnp.isnan(gradient(x)).all()
