"""A frozen backbone in half, and small float32 matrices that are trained beside it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp
from tests.products import equations_of, product_dtypes

WIDTH, RANK, LAYERS, ROWS = 32, 4, 3, 8
KEYS = jax.random.split(jax.random.key(0), 4)
TRAINED = {
    "a": jax.random.normal(KEYS[0], (LAYERS, WIDTH, RANK)) / 8,
    "b": jax.random.normal(KEYS[1], (LAYERS, RANK, WIDTH)) / 8,
}
TOKENS = jnp.arange(ROWS)


def frozen(half):
    matrices = jax.random.normal(KEYS[2], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    table = jax.random.normal(KEYS[3], (100, WIDTH))
    return {"w": matrices.astype(half), "table": table.astype(half)}


def in_a_loop(step, x, params):
    for i in range(LAYERS):
        x, _ = step(x, jax.tree.map(lambda p: p[i], params))  # noqa: B023
    return x


def in_a_scan(step, x, params):
    return lax.scan(step, x, params)[0]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("over_layers", [in_a_loop, in_a_scan])
def test_gradients_of_a_frozen_backbone_are_neither_computed_nor_float32(over_layers, half):
    def loss(trained, backbone, is_stopped=False):
        if is_stopped:
            backbone = jax.tree.map(lax.stop_gradient, backbone)
        x = backbone["table"][TOKENS].astype(jnp.float32)

        def layer(x, params):
            w, a, b = params
            return x + jnp.tanh(x @ w + (x @ a) @ b), None

        return jnp.mean(over_layers(layer, x, (backbone["w"], trained["a"], trained["b"])) ** 2)

    count = lambda fun, *args: sum(product_dtypes(fun, *args).values())
    backbone, lowered = frozen(half), jmp.autocast(loss, f"mixed_{half}")
    stopped = jmp.autocast(lambda both: loss(*both, is_stopped=True), f"mixed_{half}")
    both = (TRAINED, backbone)
    plain = count(jax.grad(loss), *both)
    assert count(jax.grad(lowered), *both) == count(jax.grad(stopped), both) == plain
    assert count(jax.grad(lowered, (0, 1)), *both) > plain
    for fun, args in ((jax.grad(lowered), both), (jax.grad(stopped), (both,))):
        wide = [v.aval for e in equations_of(fun, *args) for v in e.outvars]
        large = [a for a in wide if getattr(a, "shape", ())[-2:] == (WIDTH, WIDTH)]
        assert all(aval.dtype != jnp.float32 for aval in large)
    gradients = jax.grad(lowered, (0, 1))(*both)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradients[0])} == {"float32"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradients[1])} == {half}
