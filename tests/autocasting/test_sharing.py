"""Islands of layers that are alike are traced once, and each keeps its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from jmp import _jax_compat
from jmp.autocasting import _emit, _planner
from tests.products import equations, named

X = W = jnp.zeros((128, 128))
WIDE = jnp.zeros((128, 256))


def islands(fun, *args):
    """The equations of the islands that are computed again, in the order of the program."""
    return named(_jax_compat.REMAT, jmp.autocast(fun, "mixed_float16"), *args)


def traces(found):
    return len({id(equation.params["jaxpr"]) for equation in found})


def scopes(equation):
    return _jax_compat.scope_names(equation.source_info.name_stack)


def twelve_layers(x, w):
    for i in range(12):
        with jax.named_scope(f"layer_{i}"):
            y = x @ w
            with jax.named_scope("norm"):
                y = y * lax.rsqrt((y * y).mean(-1, keepdims=True))
            with jax.named_scope("act"):
                x = jax.nn.gelu(y)
    return x @ w


def test_twelve_layers_are_traced_once():
    found = islands(twelve_layers, X, W)
    assert (len(found), traces(found)) == (12, 1)


def test_the_derivative_of_layers_that_keep_is_taken_once_and_the_program_is_the_same(monkeypatch):
    loss, made, make = lambda *args: twelve_layers(*args).sum(), [], _emit._function_of
    monkeypatch.setattr(_emit, "_function_of", lambda island: made.append(island) or make(island))
    autocast = lambda: jmp.autocast(loss, "mixed_float16", recompute="none")
    shared = jax.jit(jax.grad(autocast())).lower(X, W).as_text()
    assert len(made) == 2  # the other one adds up
    monkeypatch.setattr(_planner, "sharing_functions", list)
    assert jax.jit(jax.grad(autocast())).lower(X, W).as_text() == shared


def test_each_layer_keeps_its_name_scopes():
    found = islands(twelve_layers, X, W)
    assert [scopes(e)[1:] for e in found] == [[f"layer_{i}"] for i in range(12)]
    inside = {e.primitive.name: scopes(e)[-1:] for e in equations(found[0].params["jaxpr"])}
    assert (inside["rsqrt"], inside["tanh"]) == (["norm"], ["act"])


def in_turn(layer, numbers):
    """Layers that differ in a number, and a head."""

    def layers(x, w):
        for number in numbers:
            x = layer(x @ w, number)
        return x @ w

    return layers


def lines(x, w):
    x = jnp.exp(x @ w)
    x = jnp.exp(x @ w)
    return x @ w


def plus_a_held_array(y, number):
    table = np.linspace(0, number, 128, dtype=np.float32)[None]
    return jax.jit(lambda y: jnp.exp(y + table))(y)


def what_leaves(x, w):
    halves, wide = [jnp.exp(x @ w) for _ in range(2)]
    return halves @ w, wide


def inside_a_scope(y, name):
    with jax.named_scope("layer"):
        y = jnp.exp(y)
        with jax.named_scope(name):
            return jnp.tanh(y)


def operands(x, w):
    y, z = x @ w, x @ w
    return [jnp.exp(jnp.arctan(u) / jnp.arctan(v)) @ w for u, v in ((y, z), (y, y))]


KEEP = jnp.zeros((128, 128), bool)
# Layers, further arguments; how many islands there are, and how many traces.
DIFFERENT = {
    "literals": (in_turn(lambda y, scale: jnp.exp(y * scale), (2.0, 3.0, 2.0)), (), (3, 2)),
    "parameters": (in_turn(lax.integer_pow, (3, 4, 3)), (), (3, 2)),
    "lines": (lines, (), (2, 2)),
    "shapes": (
        lambda x, w, wide: [jnp.exp(x @ v) @ v.T for v in (w, wide, w)], (WIDE,), (3, 2)),
    "held arrays": (in_turn(plus_a_held_array, (1.0, 2.0)), (), (2, 2)),
    "what leaves": (what_leaves, (), (2, 2)),
    "masks": (
        lambda x, w, keep: [(jnp.exp(x @ w) + v) @ w for v in (keep.astype(jnp.float32), x)],
        (KEEP,), (2, 1)),
    "dtypes that are read": (
        lambda x, w: [jnp.exp(y) @ w for y in (jnp.cumsum(x @ w, 0), x @ w)], (), (2, 2)),
    "scopes inside": (in_turn(inside_a_scope, ("a", "b")), (), (2, 2)),
    "operands": (operands, (), (2, 2)),
    "rewritten alike": (in_turn(lambda y, _: jax.nn.softmax(y), range(3)), (), (3, 1)),
}  # fmt: skip


@pytest.mark.parametrize(("layers", "others", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_islands_that_differ_are_traced_apart(layers, others, expected):
    found = islands(layers, X, W, *others)
    assert (len(found), traces(found)) == expected
