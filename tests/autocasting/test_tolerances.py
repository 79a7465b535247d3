"""Which loops run to a tolerance: a small loop each."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp.autocasting.kinds.while_loop import has_many_conditions, runs_to_tolerance
from tests.products import equations_of

X = jnp.ones(4)


def outermost_loop(fun, *args):
    """The first while loop of a program."""
    found = equations_of(fun, *args)
    return next(equation for equation in found if equation.primitive.name == "while")


def loop(step, asked, *carry):
    """A loop while `asked(carry)`."""
    return lax.while_loop(lambda c: asked(*c), lambda c: step(*c), carry)


def is_positive(n, *_):
    return n > 0


def from_floats(how):
    """A loop over a counter and floating numbers, of which `how` makes the counter."""

    def fun(n, x):
        return loop(lambda n, x: (how(n, x), x / 2), is_positive, n, x)

    return fun


def scanned(body, carry, rows=None):
    return lax.scan(body, carry, rows, length=2)


TO_A_TOLERANCE = {
    "condition reads them": lambda n, x: loop(lambda n, x: (n, x / 2), lambda n, x: x[0] > 1, n, x),
    "condition closes over them": lambda n, x: loop(lambda n: (n - 1,), lambda n: x[0] > n, n),
    "comparison": from_floats(lambda n, x: (x[0] > 1).astype(int)),
    "through a jit": from_floats(lambda n, x: jax.jit(lambda x: (x[0] > 1).astype(int))(x)),
    "carry of a scan": from_floats(lambda n, x: scanned(lambda m, _: (m + (x[0] > 1), None), n)[0]),
    "second turn of a scan": from_floats(
        lambda n, x: scanned(lambda c, _: ((c[1], c[1] + (x[0] > 1)), None), (n, n))[0][0]
    ),
    "rows of a scan": from_floats(
        lambda n, x: scanned(lambda m, row: (m + row, None), n, (x > 1).astype(int)[:2])[0]
    ),
    "stacked by a scan": from_floats(
        lambda n, x: scanned(lambda m, _: (m, m + (x[0] > 1)), n)[1].sum()
    ),
    "constant of a scan": from_floats(
        lambda n, x: (lambda flag: scanned(lambda m, _: (m + flag, None), n)[0])(x[0] > 1)
    ),
    "which branch": from_floats(lambda n, x: lax.cond(x[0] > 1, lambda: 1, lambda: 0)),
    "in one branch": from_floats(
        lambda n, x: lax.cond(n > 3, lambda: 1, lambda: (x[0] > 1).astype(int))
    ),
    "operand of a branch": from_floats(
        lambda n, x: lax.cond(n > 3, lambda m: m, lambda m: 0, (x[0] > 1).astype(int))
    ),
    "turns of a loop inside": from_floats(
        lambda n, x: loop(lambda m, x: (m + 1, x / 2), lambda m, x: x[0] > 1, 0, x)[0]
    ),
    "body of a loop inside": from_floats(
        lambda n, x: loop(lambda k, m: (k - 1, m + (x[0] > 1)), lambda k, m: k > 0, n, 0)[1]
    ),
    "second turn": lambda n, x: loop(
        lambda n, m, x: (m, (x[0] > 1).astype(int), x / 2), is_positive, n, n, x
    ),
    "any of its operands": from_floats(lambda n, x: jnp.where(n > 3, n, (x[0] > 1).astype(int))),
    "a callback": from_floats(
        lambda n, x: jax.pure_callback(lambda x: n, jax.ShapeDtypeStruct((), jnp.int32), x)
    ),
}

NOT_TO_A_TOLERANCE = {
    "a counter": from_floats(lambda n, x: n - 1),
    "a limit": lambda n, x: loop(
        lambda m, end, x: (m + 1, end, x / 2), lambda m, end, x: m < end, 0, n, x
    ),
    "a limit that is closed over": lambda n, x: loop(
        lambda m, x: (m + 1, x / 2), lambda m, x: m < n, 0, x
    ),
    "which is the largest": from_floats(lambda n, x: jnp.argmax(x)),
    "counted in a scan": from_floats(
        lambda n, x: scanned(lambda c, _: ((c[0] - 1, c[1] / 2), c[1]), (n, x))[0][0]
    ),
    "integers of a scan": from_floats(
        lambda n, x: scanned(lambda m, row: (m - row, x * m), n, jnp.arange(2))[0]
    ),
    "counted in branches": from_floats(
        lambda n, x: lax.cond(n > 3, lambda x: (n - 1, x), lambda x: (n - 2, x / 2), x)[0]
    ),
    "counted in a loop": from_floats(
        lambda n, x: loop(lambda k, m, x: (k - 1, m - 1, x / 2), is_positive, n, n, x)[1]
    ),
    "counted in a jit": from_floats(lambda n, x: jax.jit(lambda n, x: (n - 1, x))(n, x)[0]),
}


@pytest.mark.parametrize("name", TO_A_TOLERANCE)
def test_a_loop_whose_turns_depend_on_floating_numbers(name):
    assert runs_to_tolerance(outermost_loop(TO_A_TOLERANCE[name], 3, X))


@pytest.mark.parametrize("name", NOT_TO_A_TOLERANCE)
def test_a_loop_whose_turns_do_not(name):
    assert not runs_to_tolerance(outermost_loop(NOT_TO_A_TOLERANCE[name], 3, X))


def test_vmap_alone_writes_a_condition_for_each_element():
    counts = NOT_TO_A_TOLERANCE["a limit"]
    assert not has_many_conditions(outermost_loop(counts, 3, X))
    assert has_many_conditions(outermost_loop(jax.vmap(counts), jnp.arange(3), jnp.ones((3, 4))))
