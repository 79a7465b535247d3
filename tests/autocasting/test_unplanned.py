"""Primitives that nothing plans, such as the forms that JAX traces under its upgrade flags."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jmp
from jmp import _jax_compat
from tests.products import tanh_layer

KEYS = jax.random.split(jax.random.key(5), 3)
W = jax.random.normal(KEYS[0], (16, 16)) / 4
X = jax.random.normal(KEYS[1], (8, 16))


@pytest.fixture
def newer_scans():
    jax.config.update("jax_scan3", True)
    yield
    jax.config.update("jax_scan3", False)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="it runs no matrix products yet")
def test_a_newer_scan_runs_forwards_and_its_products_are_named(newer_scans):
    def loop(w, x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x @ w, None, length=3)[0]

    lowered = jmp.autocast(loop, "mixed_float16")
    with pytest.warns(jmp.NoHalfProductWarning, match="stay float32: 1 in Scan3. "):
        result = lowered(W, X)
    np.testing.assert_allclose(result, jax.jit(loop)(W, X), atol=0.01)


# A primitive of somebody's.

holder_p = Primitive("holder")
holder_p.def_impl(lambda *xs, jaxpr: _jax_compat.as_function(jaxpr)(*xs)[0])
holder_p.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals[0])
mlir.register_lowering(
    holder_p, mlir.lower_fun(lambda *xs, jaxpr: _jax_compat.as_function(jaxpr)(*xs)[0], False)
)


def held(w, x):
    return holder_p.bind(w, x, jaxpr=jax.make_jaxpr(lambda w, x: jnp.tanh(x @ w))(w, x))


def in_a_kernel(w, x):
    def kernel(w, x, result):
        result[...] = x[...] @ w[...]

    return pallas.pallas_call(kernel, out_shape=jax.typeof(x), interpret=True)(w, x)


def said(fun):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jmp.autocast(fun, "mixed_float16")(W, X)
    return [str(warning.message) for warning in caught]


def test_products_that_nothing_plans_are_named_once():
    (message,) = said(lambda w, x: held(w, x @ w) + held(w, x))
    assert "does not plan what holds these products, which stay float32: 2 in holder. " in message
    (message,) = said(held)
    assert "computes no product" in message and "inside holder, which runs as written" in message


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jmp.full_precision(held)(w, x @ w),
        lambda w, x: jnp.sort(x @ w, axis=0) + jnp.zeros_like(x).at[0].add(1.0),
        lambda w, x: lax.reduce(x @ w, 0.0, lambda a, b: a + b, (0,)),
        lambda w, x: jnp.linalg.solve(w, (x @ w).T),
        lambda w, x: tanh_layer(x @ w, w),
        lambda w, x: in_a_kernel(w, x @ w),
    ],
    ids=["full_precision", "sort and scatter", "reduce", "solve", "custom_vjp", "kernel"],
)
def test_what_is_known_or_marked_is_not_named(fun):
    assert said(fun) == []
