"""Gradients of a loop's weights that are summed after it, and what it keeps for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from tests.errors import largest_error, relative_error
from tests.products import PRODUCTS, named

SIZE, ROWS = 32, 4
KEYS = jax.random.split(jax.random.key(0), 5)
W, V = (jax.random.normal(key, (SIZE, SIZE)) / SIZE**0.5 for key in KEYS[:2])
BIAS = jax.random.normal(KEYS[2], (1, SIZE)) / 4


def inputs(turns):
    return jax.random.normal(KEYS[3], (turns, ROWS, SIZE))


def recurrent(params, x, reverse=False, length=None):
    """A gated network: products of a carry and of rows, and a bias."""

    def turn(h, x):
        x = jnp.tanh(h + BIAS) if x is None else x
        gate = jax.nn.sigmoid(h @ params["w"] + params["b"])
        h = gate * h + (1 - gate) * jnp.tanh(x @ params["v"])
        return h, jnp.mean(h, -1)

    h, means = lax.scan(turn, jnp.zeros((ROWS, SIZE)), x, reverse=reverse, length=length)
    return jnp.sum(h**2) + jnp.sum(means)


def left(params, x):
    """Weights that stand on the left, and one that two products read."""

    def turn(h, x):
        return jnp.tanh(params["w"] @ h + params["v"] @ x.T + params["w"] @ x.T), None

    return jnp.sum(lax.scan(turn, jnp.ones((SIZE, ROWS)), x)[0] ** 2) + jnp.sum(params["b"])


def of_one_weight(w, x, **options):
    """A network whose turns have one product."""
    turn = lambda h, x: (jnp.tanh(h @ w + x), None)
    return jnp.sum(lax.scan(turn, jnp.zeros(x.shape[1:]), x, **options)[0])


PARAMS = {"w": W, "v": V, "b": BIAS}
FORMS = {
    "in reverse": (functools.partial(recurrent, reverse=True), inputs(48)),
    "a prime number of turns": (recurrent, inputs(37)),
    "without rows": (functools.partial(recurrent, length=48), None),
    "on the left": (left, inputs(48)),
}


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_float32(form, half):
    loss, x = FORMS[form]
    lowered = jmp.autocast(loss, f"mixed_{half}")
    found, expected = (jax.jit(jax.grad(f))(PARAMS, x) for f in (lowered, loss))
    assert relative_error(found, expected) < 8 * float(jnp.finfo(half).eps)
    inside = jmp.autocast(jax.grad(loss), f"mixed_{half}")  # nothing is summed later there
    assert relative_error(jax.jit(inside)(PARAMS, x), expected) < 8 * float(jnp.finfo(half).eps)


def stacked_products(loss, x):
    """Returns how many products of the gradient sum over turns and rows at once."""
    lowered = jmp.autocast(lambda params: loss(params, x), "mixed_float16")
    products = named(PRODUCTS, jax.grad(lowered), PARAMS)
    return sum(len(product.params["dimension_numbers"][0][0]) == 2 for product in products)


def test_a_weight_has_one_product_for_all_turns():
    assert stacked_products(recurrent, inputs(48)) == 2
    assert stacked_products(recurrent, inputs(37)) == 2
    assert stacked_products(recurrent, inputs(512)) == 2  # 256 turns together
    assert stacked_products(recurrent, inputs(257)) == 0  # a prime number: turn by turn


def test_results_that_are_larger_than_the_weights_are_not_stacked():
    x = jnp.ones((48, 4 * SIZE, SIZE))
    assert stacked_products(lambda params, x: of_one_weight(params["w"], x), x) == 0


def test_a_program_that_runs_forwards_has_no_probes():
    lowered = jmp.autocast(lambda params: recurrent(params, inputs(48)), "mixed_float16")
    assert [e.params["length"] for e in named("scan", lowered, PARAMS)] == [48]


def test_a_product_of_two_weights_is_not_stacked():
    def loss(params):
        turn = lambda h, x: (jnp.tanh(h @ (params["w"] @ params["v"]) + x), None)
        return jnp.sum(lax.scan(turn, jnp.zeros((ROWS, SIZE)), inputs(48))[0] ** 2)

    found, expected = (jax.grad(f)(PARAMS) for f in (jmp.autocast(loss, "mixed_float16"), loss))
    assert largest_error({n: found[n] for n in "wv"}, {n: expected[n] for n in "wv"}) < 0.005


@pytest.mark.parametrize("shape", [(48, 0, SIZE), (0, ROWS, SIZE)])
def test_without_rows_or_turns_gradients_are_zero(shape):
    gradient = jax.grad(jmp.autocast(of_one_weight, "mixed_float16"))
    np.testing.assert_array_equal(gradient(W, jnp.ones(shape)), 0)


def test_turns_are_unrolled_as_they_were():
    loss = functools.partial(of_one_weight, unroll=4)
    gradient = jax.grad(jmp.autocast(loss, "mixed_float16"))
    assert 4 in {e.params["unroll"] for e in named("scan", gradient, W, inputs(48))}


def tangent(f, w):
    return sum(jax.jvp(lambda scale: f(w, scale), (1.0,), (1.0,)))


def of_gradient(f, w):
    return jnp.sum(jax.grad(f)(w, 1.0)) * 2.0**-9


@pytest.mark.parametrize("first", [tangent, of_gradient])
@pytest.mark.parametrize(("half", "limit"), [("float16", 0.03), ("bfloat16", 0.15)])
def test_derivatives_of_derivatives_do_not_stop_growing(half, limit, first):
    """If the weight is in motion in the first, JAX adds up in half, but not over all 4096 turns."""
    w, x = jnp.full((256, 4), 2.0**-9), jnp.ones((4096, 1, 256))

    def loss(w, scale):
        turn = lambda total, x: (total + jnp.sum(jnp.tanh(scale * (x @ w))), None)
        return lax.scan(turn, 0.0, x)[0]

    gradient = lambda f: jax.jit(jax.grad(lambda w: first(f, w)))(w)
    found, expected = gradient(jmp.autocast(loss, f"mixed_{half}")), gradient(loss)
    assert relative_error(found, expected) < limit


def test_the_sum_is_float32():
    """16,384 rows and turns of equal sign: in half the sum would stop growing, and overflow."""
    x = jnp.full((64, 256, 8), 8.0)
    w = jnp.full((8, 2048), 2.0**-14)

    def loss(w):
        return lax.scan(lambda total, x: (total + jnp.sum(jnp.tanh(x @ w)), None), 0.0, x)[0]

    found = jax.jit(jax.grad(jmp.autocast(loss, "mixed_float16")))(w)
    np.testing.assert_allclose(found, jax.grad(loss)(w), rtol=2e-3)


@pytest.mark.parametrize("prints", [False, True])
def test_a_loop_with_effects_is_not_taken_apart(prints):
    """Its forms would stand in a custom derivative, in which JAX takes no effects."""

    def loss(params, x):
        def turn(h, x):
            if prints:
                jax.debug.print("{}", x[0, 0])
            return jnp.tanh(h @ params["w"] + x), None

        return jnp.sum(lax.scan(turn, jnp.zeros((ROWS, SIZE)), x)[0] ** 2)

    assert stacked_products(loss, inputs(48)) == (not prints)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_states_are_stacked_in_half_and_carried_in_float32(half):
    """Of a gated unit: a product reads its states behind the loop."""

    def loss(params, x):
        def turn(h, x):
            gate = jax.nn.sigmoid(h @ params["w"] + x)
            h = gate * h + (1 - gate) * jnp.tanh(x)
            return h, h

        h, states = lax.scan(turn, jnp.zeros((ROWS, SIZE)), x @ params["v"])
        return jnp.sum(h**2) + jnp.sum((states @ params["v"]) ** 2)

    x = inputs(48)
    lowered = jmp.autocast(loss, f"mixed_{half}")
    (scan,) = named("scan", lowered, PARAMS, x)
    assert [value.aval.dtype for value in scan.outvars] == [jnp.float32, half]
    found, expected = (jax.jit(jax.grad(f))(PARAMS, x) for f in (lowered, loss))
    assert relative_error(found, expected) < 4 * float(jnp.finfo(half).eps)


def normalised(h, w, x):
    """The forward pass of a hidden Markov model."""
    h = (h @ jnp.abs(w)) * jnp.exp(x)
    return h / h.sum(-1, keepdims=True), jnp.log(h)


def steep(h, w, x):
    return h + 1e-3 * jnp.tanh(h @ w + x), jax.nn.sigmoid(20 * (h - 100))


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("cell", "start"),
    [(normalised, 1e-3), (steep, 100.0)],
)
def test_states_that_half_does_not_hold_are_kept_in_float32(cell, start, half):
    """Rounded, a small one has no logarithm, and two large ones no difference."""

    def loss(w, x):
        turn = lambda h, x: cell(h, w, x)
        return jnp.mean(lax.scan(turn, start + jnp.abs(BIAS) * jnp.full((ROWS, 1), 1e-3), x)[1])

    x = inputs(24) / 8 - 1
    lowered = jmp.autocast(loss, f"mixed_{half}", recompute="all")
    found, expected = (jax.jit(jax.grad(f, 1))(W / 8, x) for f in (lowered, loss))
    assert relative_error(found, expected) < 4 * float(jnp.finfo(half).eps)
