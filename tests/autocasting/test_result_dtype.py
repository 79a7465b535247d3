"""Products of half operands with a float32 result, if a policy asks for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from tests.errors import largest_error, relative_error
from tests.products import named, product_dtypes

HALVES = ("float16", "bfloat16")
KEYS = jax.random.split(jax.random.key(7), 4)
X = jax.random.normal(KEYS[0], (32, 64))
W = {"body": jax.random.normal(KEYS[1], (64, 64)) / 8, "head": jax.random.normal(KEYS[2], (64, 96))}
B = jax.random.normal(KEYS[3], (1, 96))


def logits(w, x):
    hidden = jnp.tanh(x @ w["body"])
    with jax.named_scope("head"):
        return hidden @ w["head"] + B


def loss(w, x):
    return -jnp.mean(jax.nn.log_softmax(logits(w, x))[:, 3])


def only_head(half):
    return [("head", f"mixed_{half},result=f32")]


@pytest.mark.parametrize("half", HALVES)
def test_a_rule_gives_the_products_of_its_scope_float32_results(half):
    lowered = jmp.autocast(logits, f"mixed_{half}", rules=only_head(half))
    plain = jmp.autocast(logits, f"mixed_{half}")
    dtypes = set(product_dtypes(lowered, W, X))
    assert dtypes - {"float32"} == {half, f"{half} float32"}  # float32: JAX 0.10's CPU, bfloat16
    rounded = lambda x: np.asarray(x.astype(half), np.float64)
    # Both round the operands. The plain one rounds each logit too, and its bias.
    hidden = jnp.tanh(jnp.asarray(rounded(X) @ rounded(W["body"]), half))
    exact = rounded(hidden) @ rounded(W["head"]) + np.asarray(B, np.float64)
    error = lambda fun: np.median(np.abs(np.asarray(fun(W, X), np.float64) - exact))
    assert lowered(W, X).dtype == np.float32
    if half == "float16":  # XLA's CPU does not round each bfloat16 value
        assert error(lowered) < 1e-5 < 1e-4 < error(plain)


@pytest.mark.parametrize("half", HALVES)
def test_products_of_the_backward_pass_have_half_operands(half):
    lowered = jmp.autocast(loss, f"mixed_{half}", rules=only_head(half))
    products = named("dot_general", jax.grad(lowered), W, X)
    assert len(products) >= 4
    assert {str(v.aval.dtype) for equation in products for v in equation.invars} == {half}
    gradients = jax.grad(lowered)(W, X)
    assert {gradient.dtype for gradient in gradients.values()} == {np.dtype("float32")}
    assert largest_error(gradients, jax.grad(loss)(W, X)) < 4 * jnp.finfo(half).eps


@pytest.mark.parametrize("wide", ["", ",r=f32"])
@pytest.mark.parametrize("half", HALVES)
def test_a_policy_gives_all_products_float32_results(half, wide):
    lowered = jmp.autocast(loss, f"mixed_{half},result=f32{wide}")
    assert half not in product_dtypes(lowered, W, X)
    assert largest_error(jax.grad(lowered)(W, X), jax.grad(loss)(W, X)) < 4 * jnp.finfo(half).eps


def convolution(kernel, image):
    with jax.named_scope("head"):
        return lax.conv(image, kernel, (1, 1), "SAME")


def ragged(matrices, rows):
    with jax.named_scope("head"):
        return lax.ragged_dot(rows, matrices, jnp.array([2, 0, 4]))


OTHERS = {
    "convolution": (convolution, (4, 3, 3, 3), (2, 3, 8, 8)),
    "ragged": (ragged, (3, 8, 16), (6, 8)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("half", HALVES)
def test_other_products_too(name, half):
    fun, *shapes = OTHERS[name]
    operands = [jax.random.normal(key, shape) for key, shape in zip(KEYS, shapes, strict=False)]
    lowered = jmp.autocast(fun, f"mixed_{half}", rules=only_head(half))
    (dtypes,) = product_dtypes(lowered, *operands)
    assert dtypes.removesuffix(" int32") == f"{half} float32"
    rounded = [x.astype(half).astype(np.float32) for x in operands]
    np.testing.assert_allclose(lowered(*operands), fun(*rounded), rtol=1e-5, atol=1e-5)
    # In both modes, and once more.
    total = lambda fun: lambda *operands: jnp.sum(jnp.sin(fun(*operands)))
    for which in (0, 1):
        ours, exact = (jax.grad(total(f), which)(*operands) for f in (lowered, fun))
        assert ours.dtype == np.float32
        assert relative_error(ours, exact) < 4 * jnp.finfo(half).eps
    tangents = [jnp.ones_like(x) for x in operands]
    ours, exact = (jax.jvp(f, operands, tangents)[1] for f in (lowered, fun))
    assert relative_error(ours, exact) < 4 * jnp.finfo(half).eps
    jax.jvp(jax.grad(total(lowered)), operands, tangents)


def test_logits_beyond_float16_stay_finite():
    far = {"body": W["body"], "head": 1e4 * W["head"]}
    lowered = jmp.autocast(logits, "mixed_float16", rules=only_head("float16"))
    plain = jmp.autocast(logits, "mixed_float16")
    assert np.isfinite(lowered(far, X)).all() and not np.isfinite(plain(far, X)).all()


def test_a_rule_gives_a_half_product_of_a_float8_model_a_float32_result():
    lowered = jmp.autocast(logits, "mixed_float8", rules=only_head("bfloat16"))
    assert "bfloat16 float32" in product_dtypes(lowered, W, X)
