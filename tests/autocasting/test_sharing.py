"""Islands of layers that are alike are traced once, and each keeps its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from jmp import _jax_compat
from tests.products import equations, equations_of

X = W = jax.ShapeDtypeStruct((128, 128), jnp.float32)
WIDE = jax.ShapeDtypeStruct((128, 256), jnp.float32)


def islands(fun, *args, policy="mixed_float16"):
    """The equations of the islands that are computed again, in the order of the program."""
    arrays = jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), args)
    found = equations_of(jmp.autocast(fun, policy), *arrays)
    return [e for e in found if e.primitive.name in _jax_compat.REMAT]


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


def test_each_layer_keeps_its_name_scopes():
    found = islands(twelve_layers, X, W)
    assert [scopes(e)[1:] for e in found] == [[f"layer_{i}"] for i in range(12)]
    inside = {e.primitive.name: scopes(e)[-1:] for e in equations(found[0].params["jaxpr"])}
    assert (inside["rsqrt"], inside["tanh"]) == (["norm"], ["act"])


def test_rewritten_islands_are_traced_once():
    def layers(x, w):
        for _ in range(3):
            x = jax.nn.softmax(x @ w, -1) @ w
        return x

    odd = jax.ShapeDtypeStruct((256, 67), jnp.float32), jax.ShapeDtypeStruct((67, 67), jnp.float32)
    found = islands(layers, *odd)
    assert (len(found), traces(found)) == (3, 1)


def literals(x, w):
    for scale in (2.0, 3.0, 2.0):
        x = jnp.exp(x @ w * scale)
    return x @ w


def parameters(x, w):
    for power in (3, 4, 3):
        x = lax.integer_pow(x @ w, power)
    return x @ w


def lines(x, w):
    x = jnp.exp(x @ w)
    x = jnp.exp(x @ w)
    return x @ w


def shapes(x, w, wide):
    return [jnp.exp(x @ v) @ v.T for v in (w, wide, w)]


def held_arrays(x, w):
    for number in (1.0, 2.0):
        table = np.linspace(0, number, 128, dtype=np.float32)[None]
        x = jax.jit(lambda y, table=table: jnp.exp(y + table))(x @ w)
    return x @ w


def what_leaves(x, w):
    halves, wide = [jnp.exp(x @ w) for _ in range(2)]
    return halves @ w, wide


def masks(x, w, keep):
    return [(jnp.exp(x @ w) + v) @ w for v in (keep.astype(jnp.float32), x)]


def dtypes_read(x, w):
    return [jnp.exp(y) @ w for y in (jnp.cumsum(x @ w, 0), x @ w)]


def scopes_inside(x, w):
    for name in ("a", "b"):
        y = x @ w
        with jax.named_scope("layer"):
            y = jnp.exp(y)
            with jax.named_scope(name):
                x = jnp.tanh(y)
    return x @ w


def operands(x, w):
    y, z = x @ w, x @ w
    return [jnp.exp(jnp.arctan(u) / jnp.arctan(v)) @ w for u, v in ((y, z), (y, y))]


KEEP = jax.ShapeDtypeStruct((128, 128), bool)


@pytest.mark.parametrize(
    ("layers", "args", "expected"),
    [
        (literals, (X, W), (3, 2)),
        (parameters, (X, W), (3, 2)),
        (lines, (X, W), (2, 2)),
        (shapes, (X, W, WIDE), (3, 2)),
        (held_arrays, (X, W), (2, 2)),
        (what_leaves, (X, W), (2, 2)),
        (masks, (X, W, KEEP), (2, 1)),
        (dtypes_read, (X, W), (2, 2)),
        (scopes_inside, (X, W), (2, 2)),
        (operands, (X, W), (2, 2)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_islands_that_differ_are_traced_apart(layers, args, expected):
    found = islands(layers, *args)
    assert (len(found), traces(found)) == expected
