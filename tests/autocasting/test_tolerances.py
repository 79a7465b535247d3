"""Which loops run to a tolerance: a small loop each."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp import diagnostics

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


TO_A_TOLERANCE = {
    "condition reads them": lambda n, x: outermost(
        lambda n, x: (n, x / 2), lambda n, x: x[0] > 1, n, x
    ),
    "condition closes over them": lambda n, x: outermost(lambda n: (n - 1,), lambda n: x[0] > n, n),
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
    "second turn": lambda n, x: outermost(
        lambda n, m, x: (m, (x[0] > 1).astype(int), x / 2), is_positive, n, n, x
    ),
    "any of its operands": from_floats(lambda n, x: jnp.where(n > 3, n, (x[0] > 1).astype(int))),
    "a callback": from_floats(
        lambda n, x: jax.pure_callback(lambda x: n, jax.ShapeDtypeStruct((), jnp.int32), x)
    ),
}

NOT_TO_A_TOLERANCE = {
    "a counter": from_floats(lambda n, x: n - 1),
    "a limit": lambda n, x: outermost(
        lambda m, end, x: (m + 1, end, x / 2), lambda m, end, x: m < end, 0, n, x
    ),
    "a limit that is closed over": lambda n, x: outermost(
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


@pytest.mark.parametrize("fun", TO_A_TOLERANCE.values(), ids=TO_A_TOLERANCE)
def test_a_loop_whose_turns_depend_on_floating_numbers(fun):
    assert why_float32(fun, 3, X) == {TO_TOLERANCE}


@pytest.mark.parametrize("fun", NOT_TO_A_TOLERANCE.values(), ids=NOT_TO_A_TOLERANCE)
def test_a_loop_whose_turns_do_not(fun):
    assert why_float32(fun, 3, X) == {None}


def test_a_loop_with_a_condition_for_each_element_is_one_that_vmap_wrote():
    counts = jax.vmap(NOT_TO_A_TOLERANCE["a limit"])
    assert why_float32(counts, jnp.arange(3), jnp.ones((3, 4))) == {OF_VMAP}
