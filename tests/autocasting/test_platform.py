"""`platform=`: what a plan may take from it, and when it is asked for."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from jmp import diagnostics
from jmp.autocasting import _passes
from testbed.models import MODELS
from tests.commands import in_full
from tests.errors import relative_error
from tests.products import convolved

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def loss(w, x):
    return jnp.mean(jax.nn.softmax(x @ w) @ w)


@pytest.mark.parametrize(("asked", "planned"), [("gpu", "gpu"), ("cpu", "gpu"), ("tpu", "tpu")])
def test_the_report_says_what_was_planned_for(asked, planned):
    report = diagnostics.precision_report(loss, "mixed_bfloat16", platform=asked)(W, X)
    assert report.platform == report.to_dict()["platform"] == planned
    assert f"planned for a {planned.upper()}" in str(report)


@pytest.mark.parametrize(("backend", "planned"), [("cpu", "gpu"), ("gpu", "gpu"), ("tpu", "tpu")])
def test_left_out_it_is_that_of_the_default_backend(monkeypatch, backend, planned):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    report = diagnostics.precision_report(loss, "mixed_bfloat16")(W, X)
    assert report.platform == planned


def test_the_backend_is_asked_for_when_a_call_is_traced_and_not_before(monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: asked.append(1) or "cpu")
    mixed = jmp.autocast(loss, "mixed_bfloat16")
    assert not asked
    jax.eval_shape(mixed, W, X)
    assert asked


def test_no_backend_is_asked_for_where_the_platform_is_given(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: pytest.fail("asked"))
    jax.eval_shape(jmp.autocast(loss, "mixed_bfloat16", platform="tpu"), W, X)


def test_float16_on_a_tpu_warns_once():
    mixed = jmp.autocast(loss, "mixed_float16", platform="tpu")
    with pytest.warns(jmp.Float16OnTpuWarning, match="mixed_bfloat16") as caught:
        jax.eval_shape(mixed, W, X)
        jax.eval_shape(mixed, W, jnp.ones((5, 8)))
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jmp.autocast(loss, "mixed_bfloat16", platform="tpu"), W, X)
        jax.eval_shape(jmp.autocast(loss, "mixed_float16", platform="gpu"), W, X)


def test_float16_is_warned_of_by_the_name_of_any_target_without_a_unit_for_it(monkeypatch):
    monkeypatch.setattr(_passes, "_TARGETS", dict(_passes._TARGETS))
    target = _passes.HardwareTarget("neural", (), multiplies_float16=False)
    _passes.register_target(["neural"], target)
    with pytest.warns(jmp.Float16OnTpuWarning, match="platform='neural', which has no matrix"):
        jax.eval_shape(jmp.autocast(loss, "mixed_float16", platform="neural"), W, X)


@functools.cache
def made(model):
    return model.make(**model.small)


@pytest.mark.parametrize("model", in_full(MODELS, but=["lstm"]), ids=lambda model: model.name)
@pytest.mark.usefixtures("users_rank_promotion")
def test_dtypes_are_the_same_on_all_platforms(model):
    loss, params, batch = made(model)
    gpu, tpu = (
        diagnostics.precision_report(loss, "mixed_bfloat16", platform=platform)(params, *batch)
        for platform in ("gpu", "tpu")
    )
    dtypes = [(row.kind, row.operation, row.dtype_in, row.dtype_out) for row in gpu.rows]
    assert dtypes == [(row.kind, row.operation, row.dtype_in, row.dtype_out) for row in tpu.rows]


@pytest.mark.full
@pytest.mark.parametrize("name", ["lstm", "gpt", "plain_transformer"])
@pytest.mark.usefixtures("users_rank_promotion")
def test_gradients_are_as_exact_on_all_platforms(name):
    (model,) = (model for model in MODELS if model.name == name)
    loss, params, batch = made(model)

    gradient = lambda function: jax.jit(jax.grad(function))(params, *batch)
    exact = gradient(loss)
    on_gpu, on_tpu = (
        relative_error(gradient(jmp.autocast(loss, "mixed_bfloat16", platform=platform)), exact)
        for platform in ("gpu", "tpu")
    )
    assert on_tpu <= 1.1 * on_gpu
    assert on_gpu <= 1.1 * on_tpu


def test_a_bias_over_many_rows_adds_up_on_a_tpu_by_a_product_with_ones():
    """Its gradient is the same sum in float32, in the matrix unit: 16384 ones are 16384."""
    rows = jnp.zeros((16384, 16))

    loss = lambda bias, x: jnp.sum((x @ jnp.eye(16) + bias[None]) @ jnp.eye(16))
    of_ones = r"f32\[16,8\] = \w+.*preferred_element_type=float32"
    grad = jax.grad(jmp.autocast(loss, "mixed_bfloat16", platform="tpu"))
    assert re.search(of_ones, str(jax.make_jaxpr(grad)(jnp.zeros(16), rows)), re.S)
    on_gpu = jax.grad(jmp.autocast(loss, "mixed_bfloat16", platform="gpu"))
    assert not re.search(of_ones, str(jax.make_jaxpr(on_gpu)(jnp.zeros(16), rows)), re.S)
    np.testing.assert_array_equal(grad(jnp.zeros(16), rows), 16384)
    many = jax.vmap(grad, (None, 0))(jnp.zeros(16), rows.reshape(2, 8192, 16))
    np.testing.assert_array_equal(many, 8192)


@pytest.mark.parametrize("shape", [(4, 256, 16), (1024, 16), (4, 16, 16, 16), (64, 16)])
def test_the_gradient_of_a_bias_is_that_of_float64_on_all_platforms(shape):
    """1024 cotangents of one sign are rounded once each; half sums would stop growing at 256."""
    rng = np.random.default_rng(0)
    x, bias, w, v = (rng.normal(size=size) / 4 for size in (shape, 16, (16, 16), (16, 16)))
    v = abs(v)

    def loss(bias, x, w, v):
        bias = jnp.expand_dims(bias, range(x.ndim - 1))
        return jnp.mean(jnp.tanh(x @ w + bias) @ v)

    slopes = (1 - np.tanh(x @ w + bias) ** 2) * v.sum(1) / x.size  # of the loss, in float64
    exact = slopes.reshape(-1, 16).sum(0)
    arrays = [jnp.asarray(array, jnp.float32) for array in (bias, x, w, v)]
    for platform in ("gpu", "tpu"):
        found = jax.grad(jmp.autocast(loss, "mixed_bfloat16", platform=platform))(*arrays)
        assert found.dtype == jnp.float32
        # What is multiplied is rounded too, before the cotangents.
        np.testing.assert_allclose(found, exact, rtol=2.0**-7)


def test_a_bias_after_a_convolution_adds_up_on_a_tpu_as_on_a_gpu():
    """XLA has the sum in the kernel that makes the cotangent, as by hand."""

    def loss(bias, images):
        channels = convolved(images, jnp.ones((1, 1, 3, 4)))
        return jnp.sum((channels + bias[None, None, None]) @ jnp.eye(4))

    bias, images = jnp.zeros(4), jnp.ones((2, 8, 8, 3))
    on_gpu, on_tpu = (
        jax.make_jaxpr(jax.grad(jmp.autocast(loss, "mixed_bfloat16", platform=name)))(bias, images)
        for name in ("gpu", "tpu")
    )
    assert str(on_gpu) == str(on_tpu)
