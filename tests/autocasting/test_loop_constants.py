"""What the body of a scan joins of its constants, such as the kernels of gates."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp
from tests.errors import relative_error
from tests.products import PRODUCTS, equations, named

SIZE, ROWS, TURNS = 16, 4, 12
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {n: jax.random.normal(k, (SIZE, SIZE)) / 4 for n, k in zip("abc", KEYS, strict=True)}
X = jax.random.normal(jax.random.key(1), (TURNS, ROWS, SIZE))


def scanned(cell, params=PARAMS, x=X):
    def loss(params, x):
        turn = lambda h, row: (cell(params, h, row), None)
        return jnp.sum(lax.scan(turn, jnp.zeros((ROWS, SIZE)), x)[0] ** 2)

    return loss


def gates(params, h, x):
    """An LSTM of Flax joins its kernels in each turn."""
    joined = jnp.concatenate([params["a"], params["b"]], -1)
    gate, y = jnp.split(h @ joined + jnp.tile(x, 2), 2, -1)
    return jax.nn.sigmoid(gate) * jnp.tanh(y)


def sliced(params, h, x):
    return jnp.tanh(h @ params["a"][::-1] + x @ params["b"].T)


def stacked(params, h, x):
    kernels = jnp.stack([params["a"], params["b"]])
    return jnp.tanh(jnp.einsum("bi,kij->bj", h, kernels) + x)


def of_a_carry(params, h, x):
    return jnp.tanh(jnp.concatenate([h, x], -1) @ jnp.concatenate([params["a"], params["c"]]))


CELLS = [gates, sliced, stacked, of_a_carry]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_are_those_of_float32(cell, half):
    lowered = jmp.autocast(scanned(cell), f"mixed_{half}")
    found, expected = (jax.jit(jax.grad(f))(PARAMS, X) for f in (lowered, scanned(cell)))
    assert relative_error(found, expected) < 8 * float(jnp.finfo(half).eps)


@pytest.mark.parametrize(
    ("cell", "count"), [(gates, 0), (sliced, 2), (stacked, 0), (of_a_carry, 1)]
)
def test_constants_are_joined_before_the_loop(cell, count):
    """What a carry is part of is joined in each turn, and what is only sliced stays there."""
    (scan,) = named("scan", jmp.autocast(scanned(cell), "mixed_float16"), PARAMS, X)
    arranges = ("concatenate", "transpose", "rev")
    inside = [e.primitive.name for e in equations(scan.params["jaxpr"].jaxpr)]
    assert sum(name in arranges for name in inside) == count


def test_a_joined_weight_has_one_product_for_all_turns():
    gradient = jax.grad(jmp.autocast(scanned(gates), "mixed_float16"))
    products = named(PRODUCTS, gradient, PARAMS, X)
    assert sum(len(e.params["dimension_numbers"][0][0]) == 2 for e in products) == 1


def test_what_is_repeated_stays_in_the_loop():
    """Before it, it would be stored."""

    def cell(params, h, x):
        return jnp.tanh(h @ params["a"] + jnp.broadcast_to(params["b"][0], h.shape) + x)

    (scan,) = named("scan", jmp.autocast(scanned(cell), "mixed_float16"), PARAMS, X)
    assert "broadcast_in_dim" in str(scan.params["jaxpr"])


def test_a_scan_with_effects_stays_as_it_is(capfd):
    def cell(params, h, x):
        jax.debug.print("turn", ordered=True)
        return gates(params, h, x)

    jmp.autocast(scanned(cell), "mixed_float16")(PARAMS, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("turn") == TURNS
