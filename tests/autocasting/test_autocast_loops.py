"""Loops under autocast: small steps add up in a float32 carry; a tolerance is met in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from jmp import diagnostics
from tests.errors import assert_all_derivatives, assert_near
from tests.products import half_product, product_dtypes

HALVES = ("float16", "bfloat16")
KEYS = jax.random.split(jax.random.key(0), 4)
TURNS, STEP = 1000, 1e-3
N = 8
W = jax.random.normal(KEYS[0], (N, N)) * 0.4
B = jax.random.normal(KEYS[1], (4, N))
XS = jax.random.normal(KEYS[2], (TURNS, 2, 4))
H = jax.random.normal(KEYS[3], (2, N))


# Steps of `h -> (1 - STEP) h + STEP f(h)`: what is lost in one of them, a thousand times over, is
# lost for good. Each takes the matrix product to use, a weight, the state and an input.


def drive(dot, w, h, x):
    return jnp.tanh(dot(h, w) + dot(x, B))


def decay_and_drive(dot, w, h, x):
    return (1 - STEP) * h + STEP * drive(dot, w, h, x)


def two_layers(dot, w, h, x):
    return (1 - STEP) * h + STEP * jnp.tanh(dot(drive(dot, w, h, x), w))


def reshaped_and_concatenated(dot, w, h, x):
    rest = ((1 - STEP) * h).reshape(-1)
    return jnp.concatenate([rest[N:], rest[:N]]).reshape(2, N) + STEP * drive(dot, w, h, x)


def in_a_branch(dot, w, h, x):
    move = lambda rest: rest + STEP * drive(dot, w, rest, x)
    return lax.cond(x[0, 0] > -9, move, lambda rest: rest, (1 - STEP) * h)


def in_a_scan(dot, w, h, x):
    step = lambda h, x: (decay_and_drive(dot, w, h, x), None)
    return lax.scan(step, (1 - STEP) * h, x[None])[0]


def oscillator(dot, w, state, x):
    position, velocity = state
    velocity = (1 - STEP) * velocity - STEP * dot(jnp.sin(position), w)
    return position + STEP * velocity, velocity


CELLS = {
    "decay and drive": decay_and_drive,
    "two layers": two_layers,
    "reshaped and concatenated": reshaped_and_concatenated,
    "in a branch": in_a_branch,
    "in a scan": in_a_scan,
    "oscillator": oscillator,
}
WS = dict.fromkeys(CELLS, W)
STATES = {name: (H, H) if name == "oscillator" else H for name in CELLS}


def all_cells(dot, ws):
    def step(states, x):
        states = {name: cell(dot, ws[name], states[name], x) for name, cell in CELLS.items()}
        return states, states

    last, stacked = lax.scan(step, STATES, XS)
    # Products read the states behind the loop too.
    return last, jax.tree.map(lambda states: dot(states[-1], W), stacked)


def counting_while(dot, w):
    def step(state):
        count, h, _ = state
        h = two_layers(dot, w, h, XS[0])
        return count + 1, h, dot(h, w)

    return lax.while_loop(lambda s: s[0] < TURNS, step, (0, H, H))[1:]


def states_and_gradients(function):
    def loss(ws):
        last, read = function(ws)
        return sum((x**2).sum() for x in jax.tree.leaves((last, read))), last

    exactly = {"xla_allow_excess_precision": False}  # each rounding that is asked for is made
    gradients, last = jax.jit(jax.grad(loss, has_aux=True), compiler_options=exactly)(WS)
    return last, gradients


def error(got, expected):
    differences = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), got, expected)
    return max(jax.tree.leaves(differences))


@pytest.fixture(scope="module")
def in_float32():
    return states_and_gradients(functools.partial(all_cells, jnp.matmul))


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("half", HALVES)
def test_small_steps_of_a_float32_carry_add_up(in_float32, half):
    autocast = jmp.autocast(functools.partial(all_cells, jnp.matmul), f"mixed_{half}")
    assert set(product_dtypes(autocast, WS)) == {half}
    states, gradients = states_and_gradients(autocast)
    by_hand = states_and_gradients(functools.partial(all_cells, half_product(half)))
    for name in CELLS:
        expected, expected_gradient = (tree[name] for tree in in_float32)
        assert error(states[name], expected) <= 2 * error(by_hand[0][name], expected), name
        bound = 1.05 * error(by_hand[1][name], expected_gradient)
        bound += 0.1 * jnp.finfo(half).eps * jnp.abs(expected_gradient).max()
        assert error(gradients[name], expected_gradient) <= bound, name


@pytest.mark.parametrize("half", HALVES)
def test_small_steps_of_a_while_loop_add_up(half):
    program = functools.partial(counting_while, jnp.matmul)
    autocast = jmp.autocast(program, f"mixed_{half}")
    assert set(product_dtypes(autocast, W)) == {half}
    expected = program(W)
    by_hand = counting_while(half_product(half), W)
    assert error(autocast(W), expected) <= 2 * error(by_hand, expected)


# Tolerances.


TOLERANCE = 1e-6
MAPS = 20
WEIGHTS = jax.random.normal(KEYS[0], (MAPS, 16, 16)) * 0.11
BIASES = jax.random.normal(KEYS[1], (MAPS, 16))


def fixed_point(w, b):
    def cond(state):
        _, x, before = state
        return jnp.abs(x - before).max() > TOLERANCE

    step = lambda s: (s[0] + 1, jnp.tanh(s[1] @ w + b), s[1])
    return lax.while_loop(cond, step, (0, b, b + 1))[:2]


def root(w, b):
    def solve(f, x):
        return lax.while_loop(lambda x: jnp.abs(f(x)).max() > TOLERANCE, lambda x: x - f(x), x)

    w, b = w[:1, :1], b[:1]
    tangent = lambda g, y: y / g(jnp.ones_like(y))
    return lax.custom_root(lambda x: x - jnp.tanh(x @ w + b), b, solve, tangent)


@pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")  # its products are the loop's
@pytest.mark.parametrize("half", HALVES)
def test_a_loop_that_runs_to_a_tolerance_ends_when_float32_ends(half):
    autocast = functools.partial(jmp.autocast, policy=f"mixed_{half}")
    assert product_dtypes(autocast(fixed_point), WEIGHTS[0], BIASES[0]) == {"float32": 1}
    expected_count, expected = jax.vmap(fixed_point)(WEIGHTS, BIASES)
    for run in (jax.vmap(autocast(fixed_point)), autocast(jax.vmap(fixed_point))):
        count, x = run(WEIGHTS, BIASES)
        np.testing.assert_array_equal(count, expected_count)
        np.testing.assert_allclose(x, expected, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")  # its products are the loop's
def test_a_root_and_its_gradient():
    def value_and_gradient(f):
        return jax.value_and_grad(lambda b: f(WEIGHTS[0], b).sum())(BIASES[0])

    autocast = jmp.autocast(root, "mixed_float16")
    # JAX 0.12 hides the products of a root.
    assert set(product_dtypes(autocast, WEIGHTS[0], BIASES[0])) <= {"float32"}
    (found, gradient), (wanted, wanted_gradient) = map(value_and_gradient, (autocast, root))
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=2e-3)


def test_an_integer_loop_around_a_loop_that_runs_to_a_tolerance_is_lowered():
    def function(w, b):
        step = lambda s: (s[0] + 1, fixed_point(w, s[1])[1] @ w)
        return lax.while_loop(lambda s: s[0] < 3, step, (0, b))

    autocast = jmp.autocast(function, "mixed_float16")
    assert product_dtypes(autocast, WEIGHTS[0], BIASES[0]) == {"float16": 1, "float32": 1}


# Which loops run to a tolerance.

X = jnp.ones(4)
TO_TOLERANCE = "in a loop that runs to a tolerance"
OF_VMAP = "in a loop that vmap gave a condition for each element"


def why_float32(fun, *args):
    """Why the products of a program are float32; None of one that is half."""
    rows = diagnostics.precision_report(fun, "mixed_float16")(*args).rows
    products = [row for row in rows if row.kind == "product"]
    assert products
    return {None if row.dtype_in == "float16" else row.why for row in products}


def loop(step, asked, *carry):
    """A loop while `asked(carry)`."""
    return lax.while_loop(lambda c: asked(*c), lambda c: step(*c), carry)


def outermost(step, asked, *carry):
    """A loop of which each turn has a product, too."""
    turn = lambda m, *c: (jnp.tanh(m @ m), *step(*c))
    return loop(turn, lambda _, *c: asked(*c), jnp.eye(4), *carry)


def is_positive(n, *_):
    return n > 0


def from_floats(how):
    """A loop over a counter and floating numbers, of which `how` makes the counter."""

    def fun(n, x):
        return outermost(lambda n, x: (how(n, x), x / 2), is_positive, n, x)

    return fun


def scanned(body, carry, rows=None):
    return lax.scan(body, carry, rows, length=2)


def carried(*args):
    return scanned(*args)[0]


def is_large(x):
    return (x[0] > 1).astype(int)


# How a turn makes the counter.
COUNTED_BY_FLOATING_NUMBERS = {
    "comparison": lambda n, x: is_large(x),
    "through a jit": lambda n, x: jax.jit(is_large)(x),
    "carry of a scan": lambda n, x: carried(lambda m, _: (m + (x[0] > 1), None), n),
    "second turn of a scan": lambda n, x: carried(
        lambda c, _: ((c[1], c[1] + (x[0] > 1)), None), (n, n)
    )[0],
    "rows of a scan": lambda n, x: carried(lambda m, row: (m + row, None), n, 1 * (x > 1)[:2]),
    "stacked by a scan": lambda n, x: scanned(lambda m, _: (m, m + (x[0] > 1)), n)[1].sum(),
    "constant of a scan": lambda n, x: (lambda c: carried(lambda m, _: (m + c, None), n))(x[0] > 1),
    "which branch": lambda n, x: lax.cond(x[0] > 1, lambda: 1, lambda: 0),
    "in one branch": lambda n, x: lax.cond(n > 3, lambda: 1, lambda: is_large(x)),
    "operand of a branch": lambda n, x: lax.cond(n > 3, lambda m: m, lambda m: 0, is_large(x)),
    "turns of a loop inside": lambda n, x: loop(
        lambda m, x: (m + 1, x / 2), lambda m, x: x[0] > 1, 0, x
    )[0],
    "body of a loop inside": lambda n, x: loop(
        lambda k, m: (k - 1, m + (x[0] > 1)), is_positive, n, 0
    )[1],
    "any of its operands": lambda n, x: jnp.where(n > 3, n, is_large(x)),
    "integers in a sort": lambda n, x: lax.sort((x, 1 * (x > 1)), num_keys=1)[1][0],
    "a callback": lambda n, x: jax.pure_callback(
        lambda x: n, jax.ShapeDtypeStruct((), jnp.int32), x
    ),
}
BY_FLOATING_NUMBERS = {
    **{name: from_floats(how) for name, how in COUNTED_BY_FLOATING_NUMBERS.items()},
    "condition reads them": lambda n, x: outermost(
        lambda n, x: (n, x / 2), lambda n, x: x[0] > 1, n, x
    ),
    "condition closes over them": lambda n, x: outermost(lambda n: (n - 1,), lambda n: x[0] > n, n),
    "second turn": lambda n, x: outermost(
        lambda n, m, x: (m, is_large(x), x / 2), is_positive, n, n, x
    ),
}

COUNTED_BY_INTEGERS = {
    "a counter": lambda n, x: n - 1,
    "which is the largest": lambda n, x: jnp.argmax(x),
    "which are the largest": lambda n, x: lax.top_k(x, 2)[1][0],
    "which is the smallest": lambda n, x: jnp.argsort(x)[0],
    "one of the largest": lambda n, x: lax.top_k(x, 2)[1][
        jax.random.categorical(jax.random.key(n), x[:2])
    ],
    "counted in a scan": lambda n, x: carried(lambda c, _: ((c[0] - 1, c[1] / 2), c[1]), (n, x))[0],
    "integers of a scan": lambda n, x: carried(lambda m, row: (m - row, x * m), n, jnp.arange(2)),
    "counted in branches": lambda n, x: lax.cond(
        n > 3, lambda x: (n - 1, x), lambda x: (n - 2, x / 2), x
    )[0],
    "counted in a loop": lambda n, x: loop(
        lambda k, m, x: (k - 1, m - 1, x / 2), is_positive, n, n, x
    )[1],
    "counted in a jit": lambda n, x: jax.jit(lambda n, x: (n - 1, x))(n, x)[0],
}
BY_INTEGERS = {
    **{name: from_floats(how) for name, how in COUNTED_BY_INTEGERS.items()},
    "a limit": lambda n, x: outermost(
        lambda m, end, x: (m + 1, end, x / 2), lambda m, end, x: m < end, 0, n, x
    ),
    "a limit that is closed over": lambda n, x: outermost(
        lambda m, x: (m + 1, x / 2), lambda m, x: m < n, 0, x
    ),
}


@pytest.mark.parametrize("fun", BY_FLOATING_NUMBERS.values(), ids=BY_FLOATING_NUMBERS)
def test_a_loop_whose_turns_depend_on_floating_numbers(fun):
    assert why_float32(fun, 3, X) == {TO_TOLERANCE}


@pytest.mark.parametrize("fun", BY_INTEGERS.values(), ids=BY_INTEGERS)
def test_a_loop_whose_turns_do_not(fun):
    assert why_float32(fun, 3, X) == {None}


def test_a_loop_with_a_condition_for_each_element_is_one_that_vmap_wrote():
    counts = jax.vmap(BY_INTEGERS["a limit"])
    assert why_float32(counts, jnp.arange(3), jnp.ones((3, 4))) == {OF_VMAP}


# Biases that each turn adds.


def biased(w, b, x):
    turn = lambda y, row: (jnp.tanh(y @ w + b[None] - row), None)
    return lax.scan(turn, x, 0.1 * x[:, :1].T.repeat(3, 0)[:, :, None])[0]


BIASED = (jnp.eye(8) / 2, jnp.linspace(-1, 1, 8), jnp.linspace(-2, 2, 64 * 8).reshape(64, 8))


@pytest.mark.parametrize("half", HALVES)
def test_a_bias_of_a_loop_has_every_derivative(half):
    autocast, bound = jmp.autocast(biased, f"mixed_{half}"), 12 * float(jnp.finfo(half).eps)
    gradient = lambda f: jax.jit(jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1, 2)))
    assert_near(gradient(autocast)(*BIASED), gradient(biased)(*BIASED), bound)
    for function in (autocast, jax.checkpoint(autocast)):
        assert_near(function(*BIASED), biased(*BIASED), bound)
        assert_all_derivatives(function, biased, bound, *BIASED, argnums=1)


def test_a_bias_of_a_loop_is_not_repeated_before_it_and_adds_up_in_float32():
    ones = lambda b, x: jnp.sum(lax.scan(lambda y, _: (y @ W1 + b[None], None), x, None, 2)[0])
    gradient = jax.grad(jmp.autocast(ones, "mixed_float16"))
    many = jnp.zeros((4096, 1))
    assert gradient(jnp.zeros(1), many) == 8192  # in half it would be 4096
    repeated = [e for e in jax.make_jaxpr(gradient)(jnp.zeros(1), many).eqns if e.outvars]
    before = [e for e in repeated if e.primitive.name == "broadcast_in_dim"]
    assert all(e.outvars[0].aval.size < 4096 or e.invars[0].aval.shape == () for e in before)


W1 = jnp.ones((1, 1))
