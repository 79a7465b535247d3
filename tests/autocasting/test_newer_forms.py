"""What JAX traces in newer forms under its upgrade flags, and primitives that nothing plans."""

import re
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
from tests.errors import largest_error
from tests.products import product_dtypes, tanh_layer

KEYS = jax.random.split(jax.random.key(5), 3)
W = jax.random.normal(KEYS[0], (16, 16)) / 4
X = jax.random.normal(KEYS[1], (8, 16))
HALVES = ("float16", "bfloat16")


@pytest.fixture
def flag(request):
    """Sets one of JAX's flags, by its name."""
    if not hasattr(jax.config, request.param):
        pytest.skip("JAX has no such flag")
    jax.config.update(request.param, True)
    yield request.param
    jax.config.update(request.param, False)


def under(name):
    return pytest.mark.parametrize("flag", [name], indirect=True)


def with_remat(w, x, **options):
    block = jax.checkpoint(lambda x: jax.nn.gelu(x @ w) @ w, **options)
    return jnp.sum(block(block(x)) ** 2)


def with_names(w, x):
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    block = lambda x: jax.ad_checkpoint.checkpoint_name(jax.nn.gelu(x @ w), "kept") @ w
    return jnp.sum(jax.checkpoint(block, policy=policy)(x) ** 2)


def with_custom_jvp(w, x):
    return jnp.sum(jax.nn.silu(jax.nn.relu(x @ w)) @ w)


def with_custom_vjp(w, x):
    return jnp.sum(tanh_layer(tanh_layer(x, w), w) @ w)


REMATS = {
    "plain": with_remat,
    "dots": lambda w, x: with_remat(w, x, policy=jax.checkpoint_policies.dots_saveable),
    "beside": lambda w, x: with_remat(w, x, prevent_cse=False),
    "names": with_names,
    "in a scan": lambda w, x: lax.scan(lambda c, _: (c, with_remat(w, x)), 0.0, None, 2)[1].sum(),
    "in a vmap": lambda w, x: jax.vmap(with_remat, (None, 0))(w, x[:, None]).sum(),
    "in a remat": lambda w, x: jax.checkpoint(with_remat)(w, x),
    "of a custom_jvp": lambda w, x: jax.checkpoint(with_custom_jvp)(w, x),
}


@under("jax_remat3")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", REMATS)
def test_products_in_a_remat_are_half(flag, name, half):
    lowered = jmp.autocast(REMATS[name], f"mixed_{half}")
    assert set(product_dtypes(lowered, W, X)) == {half}
    assert set(product_dtypes(jax.grad(lowered, (0, 1)), W, X)) == {half}
    ours, exact = (jax.grad(f, (0, 1))(W, X) for f in (lowered, REMATS[name]))
    assert largest_error(ours, exact) < 8 * jnp.finfo(half).eps


@under("jax_remat3")
def test_what_a_remat_keeps_is_what_its_policy_says(flag):
    def kept(policy):
        lowered = jmp.autocast(lambda w, x: with_remat(w, x, policy=policy), "mixed_float16")
        return str(jax.make_jaxpr(jax.grad(lowered))(W, X)).count("dot_general[")

    assert kept(jax.checkpoint_policies.dots_saveable) < kept(None)


@under("jax_remat3")
def test_what_is_kept_by_its_name_is_half(flag):
    text = str(jax.make_jaxpr(jmp.autocast(with_names, "mixed_float16"))(W, X))
    assert re.findall(r"(\w+)\[8,16\] = .*CheckpointName\[", text) == ["f16"]
    gradient = jax.jit(jax.grad(jmp.autocast(with_names, "mixed_float16"), (0, 1)))
    assert largest_error(gradient(W, X), jax.grad(with_names, (0, 1))(W, X)) < 0.01


@under("jax_custom_jvp3")
@pytest.mark.parametrize("half", HALVES)
def test_custom_jvps_are_planned_as_in_the_older_form(flag, half):
    lowered = jmp.autocast(with_custom_jvp, f"mixed_{half}")
    newer = str(jax.make_jaxpr(lowered)(W, X)).count(half)
    ours, exact = (jax.grad(f, (0, 1))(W, X) for f in (lowered, with_custom_jvp))
    assert largest_error(ours, exact) < 8 * jnp.finfo(half).eps
    jax.config.update(flag, False)
    again = jmp.autocast(lambda w, x: with_custom_jvp(w, x), f"mixed_{half}")
    assert str(jax.make_jaxpr(again)(W, X)).count(half) <= newer + 2


@under("jax_custom_vjp3")
@pytest.mark.parametrize("half", HALVES)
def test_custom_vjps_run_as_written(flag, half):
    as_written = jmp.autocast(with_custom_vjp, f"mixed_{half}")
    assert product_dtypes(as_written, W, X)[half] == 1
    ours, exact = (jax.grad(f, (0, 1))(W, X) for f in (as_written, with_custom_vjp))
    assert largest_error(ours, exact) < 8 * jnp.finfo(half).eps


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="it runs no matrix products yet")
@under("jax_scan3")
def test_a_newer_scan_runs_forwards_and_its_products_are_named(flag):
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
