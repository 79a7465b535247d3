"""Weights of a loop: gradients that are summed after it, what is joined before it, and states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from tests.errors import relative_error
from tests.products import PRODUCTS, equations, named

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


def scanned(cell):
    """Returns the loss of a loop over a cell."""

    def loss(params, x):
        turn = lambda h, row: (cell(params, h, row), None)
        return jnp.sum(lax.scan(turn, jnp.zeros(x.shape[1:]), x)[0] ** 2)

    return loss


def of_two_weights(params, h, x):
    return jnp.tanh(h @ (params["w"] @ params["v"]) + x)


def with_effect(params, h, x):
    """Its forms would stand in a custom derivative, in which JAX takes no effects."""
    jax.debug.callback(seen.append, x[0, 0])
    return gates(params, h, x)


def gates(params, h, x):
    """An LSTM of Flax joins its kernels in each turn."""
    joined = jnp.concatenate([params["w"], params["v"]], -1)
    gate, y = jnp.split(h @ joined + jnp.tile(x, 2), 2, -1)
    return jax.nn.sigmoid(gate) * jnp.tanh(y)


def sliced(params, h, x):
    return jnp.tanh(h @ params["w"][::-1] + x @ params["v"].T)


def stacked(params, h, x):
    kernels = jnp.stack([params["w"], params["v"]])
    return jnp.tanh(jnp.einsum("bi,kij->bj", h, kernels) + x)


def joined_carry(params, h, x):
    joined = jnp.concatenate([params["w"], params["v"]])
    return jnp.tanh(jnp.concatenate([h, x], -1) @ joined)


def added_up(params, h, x):
    return jnp.tanh(h @ params["w"] + x @ params["v"])


def added_to_itself(params, h, x):
    y = h @ params["w"]
    return jnp.tanh(y + y + x @ params["v"])


def added_up_in_parts(params, h, x):
    """A gate is a sum of parts of both products; what else it reads is a part of one."""
    of_gate, of_h = jnp.split(h @ params["w"], 2, -1)
    also_of_gate, of_x = jnp.split(x @ params["v"], 2, -1)
    gate = jax.nn.sigmoid(of_gate + also_of_gate)
    y = jnp.tanh(of_x + gate * of_h)
    return jnp.concatenate([y, gate * y], -1)


def repeated(params, h, x):
    """Before the loop it would be stored."""
    return jnp.tanh(h @ params["w"] + jnp.broadcast_to(params["b"][0], h.shape) + x)


seen = []
PARAMS = {"w": W, "v": V, "b": BIAS}
# A loss, its rows, and how many products of its gradient sum over turns and rows at once.
FORMS = {
    "many turns": (recurrent, inputs(48), 2),
    "256 turns together": (recurrent, inputs(512), 2),
    "a prime number of turns": (recurrent, inputs(37), 2),
    "a large prime number, turn by turn": (recurrent, inputs(257), 0),
    "in reverse": (functools.partial(recurrent, reverse=True), inputs(48), 2),
    "without rows": (functools.partial(recurrent, length=48), None, 2),
    "on the left": (left, inputs(48), 3),
    "results that are larger than the weights": (
        lambda params, x: of_one_weight(params["w"], x), jnp.ones((48, 4 * SIZE, SIZE)), 0),
    "two weights": (scanned(of_two_weights), inputs(48), 0),
    "an effect": (scanned(with_effect), inputs(12), 0),
    "joined": (scanned(gates), inputs(12), 1),
    "sliced": (scanned(sliced), inputs(12), 0),
    "stacked": (scanned(stacked), inputs(12), 0),
    "joined with a carry": (scanned(joined_carry), inputs(12), 1),
    "added up": (scanned(added_up), inputs(12), 2),
    "added to itself": (scanned(added_to_itself), inputs(12), 2),
    "added up in parts": (scanned(added_up_in_parts), inputs(12), 4),
}  # fmt: skip


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_has_one_product_for_all_turns_and_its_gradient(form, half):
    loss, x, count = FORMS[form]
    lowered = jmp.autocast(loss, f"mixed_{half}")
    products = named(PRODUCTS, jax.grad(lowered), PARAMS, x)
    sums = [e for e in products if len(e.params["dimension_numbers"][0][0]) == 2]
    assert len(sums) == count and {e.outvars[0].aval.dtype.name for e in sums} <= {"float32"}
    found, expected = (jax.jit(jax.grad(f))(PARAMS, x) for f in (lowered, loss))
    assert relative_error(found, expected) < 8 * float(jnp.finfo(half).eps)
    inside = jmp.autocast(jax.grad(loss), f"mixed_{half}")  # nothing is summed later there
    assert relative_error(jax.jit(inside)(PARAMS, x), expected) < 8 * float(jnp.finfo(half).eps)


ARRANGED = {gates: [], sliced: ["rev", "transpose"], stacked: [], joined_carry: ["concatenate"]}
ARRANGED |= {repeated: ["broadcast_in_dim"]}


@pytest.mark.parametrize("cell", ARRANGED)
def test_constants_are_joined_before_the_loop(cell):
    """What a carry is part of is joined in each turn, and what is only sliced stays there."""
    (scan,) = named("scan", jmp.autocast(scanned(cell), "mixed_float16"), PARAMS, inputs(12))
    inside = [e.primitive.name for e in equations(scan.params["jaxpr"].jaxpr)]
    arranges = ("concatenate", "transpose", "rev", "broadcast_in_dim")
    assert [name for name in inside if name in arranges] == ARRANGED[cell]


def test_a_scan_with_effects_stays_as_it_is():
    seen.clear()
    jmp.autocast(scanned(with_effect), "mixed_float16")(PARAMS, inputs(12))
    jax.effects_barrier()
    assert len(seen) == 12


def test_a_program_that_runs_forwards_has_no_probes():
    lowered = jmp.autocast(lambda params: recurrent(params, inputs(48)), "mixed_float16")
    assert [e.params["length"] for e in named("scan", lowered, PARAMS)] == [48]


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
@pytest.mark.parametrize(("cell", "start"), [(normalised, 1e-3), (steep, 100.0)])
def test_states_that_half_does_not_hold_are_kept_in_float32(cell, start, half):
    """Rounded, a small one has no logarithm, and two large ones no difference."""

    def loss(w, x):
        turn = lambda h, x: cell(h, w, x)
        return jnp.mean(lax.scan(turn, start + jnp.abs(BIAS) * jnp.full((ROWS, 1), 1e-3), x)[1])

    x = inputs(24) / 8 - 1
    lowered = jmp.autocast(loss, f"mixed_{half}", recompute="all")
    found, expected = (jax.jit(jax.grad(f, 1))(W / 8, x) for f in (lowered, loss))
    assert relative_error(found, expected) < 4 * float(jnp.finfo(half).eps)
