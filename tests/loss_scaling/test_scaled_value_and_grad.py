"""`scaled_value_and_grad` against `jax.value_and_grad` in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from tests import cases

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((8, 4)), RANDOM.standard_normal(8)
W, B = RANDOM.standard_normal(4), RANDOM.standard_normal()
SCALE = 2.0**15


def loss_fn(w, b, x, y):
    """A mean of squares, in the dtype of its arguments."""
    return jnp.mean((jnp.tanh(x @ w + b) - y) ** 2)


def arguments(dtype):
    return [jnp.asarray(array, dtype) for array in (W, B, X, Y)]


@pytest.mark.parametrize("case", cases.LOSS_SCALES, ids=lambda case: case.name)
def test_in_float64_it_is_value_and_grad_times_the_scale_exactly(case, x64):
    # A power of two moves only the exponents: not one bit of a mantissa differs.
    scale = case.make()
    value, gradients = jmp.scaled_value_and_grad(loss_fn, scale, argnums=(0, 1))(*arguments("f8"))
    expected, oracle = jax.value_and_grad(loss_fn, argnums=(0, 1))(*arguments("f8"))
    assert value.dtype == np.float64
    assert float(value) == float(expected)
    for gradient, unscaled, truth in zip(gradients, scale.unscale(gradients), oracle, strict=True):
        assert gradient.dtype == np.float64
        np.testing.assert_array_equal(gradient, truth * float(scale.loss_scale))
        np.testing.assert_array_equal(unscaled, truth)


@pytest.mark.filterwarnings("ignore:The function returned a float16 loss")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_in_each_dtype_it_is_near_the_float64_oracle(dtype):
    with jax.enable_x64(True):
        expected, oracle = jax.value_and_grad(loss_fn)(*arguments("f8"))
    scale = jmp.StaticLossScale(256.0)
    value, gradient = jax.jit(jmp.scaled_value_and_grad(loss_fn, scale))(*arguments(dtype))
    assert value.dtype == np.float32
    assert gradient.dtype == dtype
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(float(value), float(expected), rtol=tolerance)
    np.testing.assert_allclose(scale.unscale(gradient), oracle, rtol=tolerance, atol=tolerance)


def test_gradients_that_underflow_in_float16_survive():
    def tiny(w):
        return jnp.sum(w.astype(jnp.float32) * 1e-8)

    w = jnp.ones(3, jnp.float16)
    np.testing.assert_array_equal(jax.grad(tiny)(w), np.zeros(3))
    scale = jmp.StaticLossScale(SCALE)
    _, gradient = jmp.scaled_value_and_grad(tiny, scale)(w)
    assert gradient.dtype == np.float16
    np.testing.assert_allclose(scale.unscale(gradient), np.full(3, 1e-8), rtol=2.0**-10)


@pytest.mark.filterwarnings("ignore:The function returned a float16 loss")
def test_the_loss_comes_unscaled_in_float32_whatever_the_gradient_becomes():
    three = lambda w: (w * 3).astype(jnp.float16)
    scale = jmp.StaticLossScale(2.0**16)
    value, gradient = jmp.scaled_value_and_grad(three, scale)(jnp.float16(1.0))
    assert value.dtype == np.float32 and float(value) == 3.0
    assert float(scale.scale(value)) == 3 * 2.0**16
    assert not bool(jmp.all_finite(gradient))  # in float16 it overflows
    for number in (np.inf, np.nan):
        value, _ = jmp.scaled_value_and_grad(lambda w: w, scale)(jnp.float32(number))
        np.testing.assert_array_equal(value, np.float32(number))


def test_an_integer_argnum_gives_one_gradient_and_a_tuple_gives_a_tuple():
    truth = jax.grad(loss_fn, argnums=(0, 1))(*arguments("f4"))
    for argnums in ((0, 1), [0, 1], (1,), 1):
        grad_fn = jmp.scaled_value_and_grad(loss_fn, jmp.StaticLossScale(SCALE), argnums)
        _, found = grad_fn(*arguments("f4"))
        assert isinstance(found, tuple) == (argnums != 1)
        chosen = [argnums] if argnums == 1 else argnums
        for gradient, index in zip(jax.tree.leaves(found), chosen, strict=True):
            np.testing.assert_array_equal(gradient, truth[index] * SCALE)


def test_trees_and_keyword_arguments_pass_through_and_an_auxiliary_output_is_untouched():
    def of_tree(params, *, factor):
        half = params["w"].astype(jnp.float16)
        value = factor * (params["w"] ** 2).sum() + params["b"]
        return value, {"half": half, "step": jnp.int32(3), "none": None}

    params = {"w": jnp.arange(3.0), "b": jnp.float32(1.0)}
    grad_fn = jmp.scaled_value_and_grad(of_tree, jmp.StaticLossScale(4.0), has_aux=True)
    (value, aux), gradients = grad_fn(params, factor=2.0)
    assert float(value) == 11.0
    np.testing.assert_array_equal(gradients["w"], 4 * 4 * np.arange(3.0))
    assert float(gradients["b"]) == 4.0
    np.testing.assert_array_equal(aux["half"], np.arange(3))
    assert aux["half"].dtype == np.float16 and aux["step"].dtype == np.int32
    assert aux["none"] is None


@pytest.mark.filterwarnings("ignore:The function returned a float16 loss")
def test_a_constant_loss_has_zero_gradients():
    for constant in (3.0, np.float32(3), np.float16(3), jnp.float16(3)):
        loss = lambda w, constant=constant: constant
        grad_fn = jmp.scaled_value_and_grad(loss, jmp.StaticLossScale(SCALE))
        value, gradient = grad_fn(jnp.ones(2))
        assert float(value) == 3.0
        assert value.dtype == np.float32
        np.testing.assert_array_equal(gradient, np.zeros(2))


def test_the_function_keeps_its_name_and_may_be_without_one():
    assert jmp.scaled_value_and_grad(loss_fn, jmp.NoOpLossScale()).__name__ == "loss_fn"
    nameless = functools.partial(lambda w, power: w**power, power=2)
    value, gradient = jmp.scaled_value_and_grad(nameless, jmp.StaticLossScale(8.0))(3.0)
    assert (float(value), float(gradient)) == (9.0, 48.0)


@pytest.mark.parametrize(
    ("got", "loss"),
    [
        (r"float32\[1\]", lambda w: w.sum(keepdims=True)),
        (r"bool\[\]", lambda w: True),
        (r"complex64\[\]", lambda w: w.sum() + 0j),
        (r"float8_e4m3fn\[\]", lambda w: w.sum().astype(jnp.float8_e4m3fn)),
        ("an object", lambda w: object()),
    ],
)
def test_a_loss_that_is_no_real_floating_scalar_is_refused(got, loss):
    with pytest.raises(TypeError, match=f"a loss of {got}; expected a real floating scalar, such"):
        jmp.scaled_value_and_grad(loss, jmp.StaticLossScale(8.0))(jnp.ones(3))


def test_a_loss_of_gathered_half_weights_and_of_integers_is_float16_and_a_warning_says_so():
    """Autocast keeps the dtype of results; with a scale of 65536 each step would be skipped."""

    def loss(params, tokens):
        half = jmp.cast_floating(params, "float16")  # as `jmp.gather_params` does
        return jnp.mean((half["table"][tokens] @ half["head"]) ** 2)

    params = {"table": jnp.ones((8, 8)) / 9, "head": jnp.ones((8, 4)) / 7}
    grad_fn = jmp.scaled_value_and_grad(jmp.autocast(loss, "mixed_float16"), jmp.torch_loss_scale())
    with pytest.warns(jmp.PrecisionWarning, match="float16 loss; expected float32"):
        _, gradients = jax.jit(grad_fn)(params, jnp.arange(8))
    assert not jnp.isfinite(gradients["head"]).any()
