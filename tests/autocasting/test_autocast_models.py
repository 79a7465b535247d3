"""Unmodified models of four frameworks: every product half, gradients float32 and right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from testbed.models import MODELS
from tests.commands import in_full
from tests.errors import assert_close, relative_error
from tests.products import equations, operand_dtypes_of, product_dtypes_of

pytestmark = pytest.mark.usefixtures("users_rank_promotion")

HALVES = {
    # Loss scale; error of the gradient, and of a ResNet's at random initialisation (the network
    # amplifies any rounding).
    "float16": (2.0**12, 5e-3, 0.15),
    "bfloat16": (1.0, 4e-2, 0.6),
}
# The error of the same model written in half by hand bounds ours, up to the luck of the roundings.
LUCK = 1.05
SUMS = ("reduce_sum", "reduce_window_sum", "cumsum", "scatter-add", "psum", "reduce_prod")


def gradient(loss, model, scale=1.0):
    def scaled(*args):
        result = loss(*args)
        return (result[0] * scale, result[1]) if model.has_aux else (result * scale, None)

    def unscaled(*args):
        gradients, aux = jax.grad(scaled, has_aux=True)(*args)
        return jax.tree.map(lambda g: g / scale, gradients), aux

    return unscaled


@functools.cache
def made(model):
    return model.make(**model.small)


@functools.cache
def in_float32(model):
    """The gradient of the model as it is, traced."""
    loss, params, batch = made(model)
    return jax.jit(gradient(loss, model)).trace(params, *batch)


@functools.cache
def under_autocast(model, half):
    loss, params, batch = made(model)
    ours = gradient(jmp.autocast(loss, f"mixed_{half}"), model, HALVES[half][0])
    return jax.jit(ours).trace(params, *batch)


def by_hand(model, half):
    # The loss is made inside: nothing is initialised again, for the parameters are the same.
    def loss(params, *batch):
        return model.make(jnp.dtype(half), **model.small)[0](params, *batch)

    _, params, batch = made(model)
    return jax.jit(gradient(loss, model, HALVES[half][0])).trace(params, *batch)


@functools.cache
def computed(traced, model):
    _, params, batch = made(model)
    return traced.lower().compile()(params, *batch)


# What differs with bfloat16 (numbers that float16 does not hold, masks) differs in these too; a
# GPT-2 and other masks are in tests/autocasting/test_published_models.py.
IN_BFLOAT16 = ("lstm", "mixture_of_experts", "resnet")
CASES = [(model, "float16") for model in MODELS]
CASES += [(model, "bfloat16") for model in MODELS if model.name in IN_BFLOAT16]


# The others run in `make test-all`.
IN_TEST = ("checkpointed_gpt", "mixture_of_experts")
each_model = pytest.mark.parametrize("model", in_full(MODELS, but=IN_TEST), ids=lambda m: m.name)


@pytest.mark.parametrize(
    ("model", "half"), in_full(CASES, but=IN_TEST), ids=lambda x: getattr(x, "name", x)
)
def test_every_product_half_and_the_gradient_right(model, half):
    reference, statistics = computed(in_float32(model), model)
    _, bound, bound_if_noisy = HALVES[half]
    ours = under_autocast(model, half)
    # int32: the groups of ragged_dot
    assert operand_dtypes_of(ours.jaxpr.jaxpr) <= {half, "int32"}
    got, got_statistics = computed(ours, model)
    assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype(np.float32)}
    ours_error = relative_error(got, reference)
    assert ours_error <= (bound_if_noisy if model.noisy else bound)
    hand, _ = computed(by_hand(model, half), model)
    assert ours_error <= LUCK * relative_error(hand, reference)
    assert_close(got_statistics, statistics, rtol=0.05, atol=0.05)  # BatchNorm's: float32


@each_model
def test_nothing_adds_up_in_half(model):
    for equation in equations(under_autocast(model, "float16").jaxpr.jaxpr):
        if equation.primitive.name in SUMS and not equation.params.get("unique_indices"):
            assert equation.outvars[0].aval.dtype != jnp.float16, equation


@each_model
def test_as_many_products_as_the_model_has(model):
    traced = in_float32(model), under_autocast(model, "float16")
    plain, ours = (sum(product_dtypes_of(each.jaxpr.jaxpr).values()) for each in traced)
    assert plain == ours
