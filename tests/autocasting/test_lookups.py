"""Rows that are looked up a few times have half gradients; others add up in float32."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jmp
from jmp.autocasting.attention._constants import constant_of
from testbed.passes import without_pass
from tests.autocasting.plans import plan_of

X, W = jnp.ones((32, 16)), jnp.ones((16, 16))
PAIRS = np.triu_indices(16, 1)

# The function, and whether each row or number is taken four times at most.
LOOKUPS = {
    "constants of which two are the same": (lambda x: x[:, np.array([3, 1, 3])], True),
    "each four times": (lambda x: x[np.repeat(np.arange(32), 4)], True),
    "one five times": (lambda x: x[np.array([1, 2, 1, 1, 1, 1])], False),
    "negative ones": (lambda x: x[:, np.array([3, 1, -1])], True),
    "one beyond the end": (lambda x: x[:, np.array([15, 1, 16])], False),
    "one before the beginning": (lambda x: x[:, np.array([0, 1, -17])], False),
    "a triangle": (lambda x: x[:16][PAIRS], True),
    "a triangle by jnp": (lambda x: x[:16][jnp.triu_indices(16, 1)], True),
    "both triangles": (lambda x: x[:16][np.concatenate([PAIRS, PAIRS[::-1]], 1)], False),
    "a range": (lambda x: x[jnp.arange(4) * 2], True),
    "parts of one row": (lambda x: x[np.array([1, 1]), np.array([0, 5])], True),
    "an order": (lambda x: x[jnp.argsort(x[:, 0])], False),
    "windows that overlap": (
        lambda x: jax.vmap(lambda i: jax.lax.dynamic_slice(x, (i, 0), (2, 16)))(jnp.arange(3)),
        False,
    ),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_of_few_repeated_rows_is_half(name):
    look_up, is_half = LOOKUPS[name]
    plan = plan_of(lambda x: look_up(x @ W), X)
    (gather,) = (step for step in plan.steps if step.node.name == "gather")
    assert gather.is_half == is_half


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_has_the_gradient_of_what_it_looks_up(name):
    look_up, _ = LOOKUPS[name]
    values = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (32, 16)), jnp.float32)
    loss = lambda x: (look_up(x) * 3.0).sum()  # each gradient is a small integer: exact in half
    found = jax.grad(jmp.autocast(lambda x: loss(x @ jnp.eye(16)), "mixed_float16"))(values)
    np.testing.assert_array_equal(found, jax.grad(loss)(values))


def test_indices_that_devices_divide_are_not_looked_at():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    places = jnp.array([0, 1, 2, 3, 0, 1, 2, 3], jnp.uint32)
    look_up = lambda x, places, w: x[places] @ w
    specs = {"in_specs": (P("d"), P("d"), P()), "out_specs": P("d")}
    mapped = jax.shard_map(look_up, mesh=mesh, **specs)
    found = jmp.autocast(lambda x, w: mapped(x, places, w), "mixed_float16")(X[:8], W)
    np.testing.assert_array_equal(found, jnp.full((8, 16), 16.0))


def test_a_gather_without_an_index_is_left_alone():
    numbers = jax.lax.GatherDimensionNumbers((0, 1), (), ())
    whole = lambda x: jax.lax.gather(x, jnp.zeros((0,), jnp.int32), numbers, (32, 16))
    found = jmp.autocast(lambda x: whole(x) @ W, "mixed_float16")(X)
    np.testing.assert_array_equal(found, X @ W)


CONSTANTS = {
    "an enlarged axis": lambda: jnp.floor((jnp.arange(9.0) + 0.5) / 3).astype(jnp.int32),
    "cut off": lambda: (-jnp.arange(7.0) / 2).astype(jnp.int32),
    "no integers": lambda: (jnp.arange(4.0) / jnp.arange(4.0) * 3e9).astype(jnp.int32),
    "divided integers": lambda: jax.lax.div(jnp.arange(-7, 7)[:, None], jnp.arange(-3, 4)[None]),
    "counts": lambda: jnp.zeros(3, int).at[jnp.array([1, 9, 1, -4, -1])].add(jnp.arange(5) + 1),
    "a triangle": lambda: jnp.triu_indices(4, 1)[1],
    "sums from behind": lambda: jax.lax.cumsum(jnp.arange(6).reshape(2, 3), 1, reverse=True),
    "by columns": lambda: jnp.ravel(jnp.arange(6).reshape(2, 3), order="F"),
    "turned": lambda: jnp.reshape(jnp.arange(8).reshape(2, 2, 2), (4, 2), order="F"),
    "too large for bytes": lambda: (jnp.arange(8) * 1.0 + 252).astype(jnp.uint8),
    "remainders": lambda: jax.lax.rem(jnp.arange(-3, 4), jnp.sign(jnp.arange(7))),
    "a mask": lambda: jnp.where(jnp.tri(4) > 0, 0.0, -jnp.inf),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_what_the_program_computes(name):
    plan = plan_of(lambda x: CONSTANTS[name]() + 0 * x, jnp.ones(()))
    (total,) = plan.graph.outputs
    numbers = constant_of(total.producer.inputs[0])
    expected = np.asarray(CONSTANTS[name](), numbers.dtype)
    np.testing.assert_array_equal(np.broadcast_to(numbers, expected.shape), expected)


# Zeros of their own, which change no number.

TAKEN = jnp.array([3, 1, 1, 40, -2, 0, 1, 5])  # one beyond the end


def messages(x, w, mode):
    w = w / 16
    rows = (x @ w).at[TAKEN].get(mode=mode, fill_value=3.0) @ w * jnp.arange(8.0)[:, None]
    sums = jax.ops.segment_sum(rows, TAKEN % 5, 32)
    return jnp.mean((jax.nn.elu(sums) @ w) ** 2)


TRANSFORMED = {
    "gradient": lambda f: jax.grad(f, argnums=(0, 1))(X, W),
    "by examples": lambda f: jax.vmap(jax.grad(f), (0, None))(jnp.stack([X, 2 * X]), W),
    "of a sum of examples": lambda f: jax.grad(
        lambda w: jax.vmap(f, (0, None))(jnp.stack([X, 2 * X]), w).sum()
    )(W),
    "forwards": lambda f: jax.jvp(f, (X, W), (W[:1] + X, X[:16])),
    "second derivative": lambda f: jax.jvp(jax.grad(f), (X, W), (X, W)),
    "differentiated inside": lambda f: jax.hessian(lambda a: f(a * X, W))(2.0),
}


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_zeros_of_their_own_change_no_number(name, mode, monkeypatch):
    monkeypatch.setattr("jmp.autocasting.targets._zeros.LARGE", 1)
    loss = partial(messages, mode=mode)
    run = lambda: jax.jit(lambda: TRANSFORMED[name](jmp.autocast(loss, "mixed_float16")))
    with without_pass("zeros of their own"):
        expected = run()()
    assert "optimization_barrier" in str(jax.make_jaxpr(run())())
    jax.tree.map(np.testing.assert_array_equal, run()(), expected)


def test_lookups_that_are_alike_have_zeros_of_their_own(monkeypatch):
    monkeypatch.setattr("jmp.autocasting.targets._zeros.LARGE", 1)

    def layers(w):
        x = X
        for _ in range(4):
            x = jnp.tanh(x @ w)[TAKEN * jnp.arange(8)] @ w
        return jnp.mean(x**2)

    program = str(jax.make_jaxpr(jax.grad(jmp.autocast(layers, "mixed_float16")))(W))
    assert len(set(re.findall(r"optimization_barrier (\d+)", program))) == 4
