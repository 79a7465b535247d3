"""What JAX traces in newer forms under its upgrade flags."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
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
    "names": with_names,
    "in a scan": lambda w, x: lax.scan(lambda c, _: (c, with_remat(w, x)), 0.0, None, 2)[1].sum(),
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


def test_a_function_that_was_traced_before_is_seen_through():
    def loss(w, x, key):
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)
        return jnp.sum(jnp.log(jax.nn.relu(x @ w) - 1))

    arguments = W, X, KEYS[2]
    traced = jax.jit(loss).trace(*arguments)  # JAX 0.12 calls it by an equation of its own
    program = lambda w: traced(w, *arguments[1:])
    assert set(product_dtypes(jmp.autocast(program, "mixed_float16"), W)) == {"float16"}
    found = jmp.diagnostics.find_nonfinite(program)(W)
    assert found.operation == "log"
    report = str(jmp.diagnostics.gradient_report(lambda w: traced(w, X, KEYS[2]))(jnp.abs(W)))
    assert "log" in report
