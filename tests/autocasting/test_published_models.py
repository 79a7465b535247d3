"""Published models as they are: every product half, gradients and training as good as by hand."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp
from jmp import transforms
from jmp.adapters import linen, nnx
from testbed.published_models import PATTERNS
from tests.products import product_dtypes, product_dtypes_of

pytestmark = [
    pytest.mark.usefixtures("quick_compilation", "users_rank_promotion"),
    pytest.mark.full,
]
SEEDS = 32
# The error of the model's own half option bounds ours, up to the luck of the roundings: the mean
# over the seeds of the logarithm of their ratio has a standard error of at most 0.035. Measured are
# ratios of 0.79 to 1.002; exp, rsqrt and sums in half give 1.4 and more.
LUCK = 1.05
STEPS = 20
# How far a loss may lie from float32's, in units of what float32 gains in these steps: four
# roundings. A loss is a mean of many numbers, each rounded a few times on its way, by errors that
# partly cancel; in these steps it amplifies none of them. Measured is at most one rounding.
FOLLOWS = {half: 4 * float(jnp.finfo(half).eps / 2) for half in ("float16", "bfloat16")}


def by_autocast(pattern, policy, **options):
    return jmp.autocast(pattern.make()[0], policy, **options)


def by_adapter(pattern, policy, **options):
    adapt = {"linen": linen.autocast, "nnx": nnx.autocast}[pattern.adapter]
    return pattern.make(wrap=lambda model: adapt(model, policy, **options))[0]


WAYS = {"autocast": by_autocast, "adapter": by_adapter}

each_way = pytest.mark.parametrize("way", WAYS)
# An adapter hands its policy on to autocast: which half it is makes no difference to it.
each_way_and_half = pytest.mark.parametrize(
    ("way", "half"), [("autocast", "float16"), ("autocast", "bfloat16"), ("adapter", "float16")]
)
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)


@functools.cache
def draws(pattern):
    """Parameters and a batch for each seed."""
    return [pattern.make(jnp.float32, seed)[1:] for seed in range(SEEDS)]


@functools.partial(jax.jit, static_argnums=0)
def update(tx, gradients, opt_state, params):
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


class Run:
    """A model's gradient, compiled once: its products, its value for each seed, its training."""

    def __init__(self, pattern, loss, tx):
        def value_and_grad(scale, params, batch):
            return jmp.scaled_value_and_grad(loss, scale)(params, *batch)

        params, batch = draws(pattern)[0]
        scale = tx.init(params).loss_scale
        traced = jax.jit(value_and_grad).trace(scale, params, batch)
        self.compiled = traced.lower().compile()
        self.products = product_dtypes_of(traced.jaxpr.jaxpr)
        outputs = [self.compiled(scale, *drawn) for drawn in draws(pattern)]
        unscaled = jax.jit(scale.unscale)
        self.gradients = [flat(unscaled(gradients)) for _, gradients in outputs]
        self.dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(outputs[0][1])}

    def train(self, tx, params, batch):
        """Returns the losses and the last state of the optimizer."""
        opt_state, losses = tx.init(params), []
        for _ in range(STEPS):
            value, gradients = self.compiled(opt_state.loss_scale, params, batch)
            params, opt_state = update(tx, gradients, opt_state, params)
            losses.append(float(value))
        return np.array(losses), opt_state

    def errors(self, reference):
        """The relative L2 error of the gradient for each seed."""
        ours, right = np.array(self.gradients), np.array(reference.gradients)
        return np.linalg.norm(ours - right, axis=1) / np.linalg.norm(right, axis=1)


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@functools.cache
def optimizer(half=None):
    scale = jmp.DynamicLossScale(2.0**12, period=5) if half == "float16" else jmp.NoOpLossScale()
    return transforms.with_loss_scale(optax.adam(3e-3), scale)


@functools.cache
def in_float32(pattern):
    return Run(pattern, pattern.make()[0], optimizer())


@functools.cache
def trained_in_float32(pattern):
    """The losses of the first seed."""
    return in_float32(pattern).train(optimizer(), *draws(pattern)[0])[0]


@functools.cache
def by_its_own_option(pattern, half):
    return Run(pattern, pattern.make(jnp.dtype(half))[0], optimizer(half))


@functools.cache
def in_half(pattern, way, half):
    return Run(pattern, WAYS[way](pattern, f"mixed_{half}"), optimizer(half))


@each_way_and_half
@each_pattern
def test_every_product_is_half_forward_and_backward(pattern, way, half):
    assert in_half(pattern, way, half).products == {half: in_float32(pattern).products["float32"]}


@each_way_and_half
@each_pattern
def test_the_gradient_is_as_near_to_float32_as_by_the_models_own_option(pattern, way, half):
    reference, run = in_float32(pattern), in_half(pattern, way, half)
    own = by_its_own_option(pattern, half).errors(reference)
    assert np.mean(np.log(run.errors(reference) / own)) <= math.log(LUCK)
    assert run.dtypes == {"float32"}


@each_way_and_half
@each_pattern
def test_twenty_steps_follow_those_of_float32(pattern, way, half):
    right = trained_in_float32(pattern)
    losses, opt_state = in_half(pattern, way, half).train(optimizer(half), *draws(pattern)[0])
    gain = right[0] - right[-1]
    assert gain > 0.8 * right[0]
    assert np.abs(losses - right).max() <= FOLLOWS[half] * gain
    if half == "float16":
        assert opt_state.skipped_steps == 0
        assert opt_state.loss_scale.loss_scale == 2.0**16  # it grew every five steps


def products_of_gradient(pattern, way, **options):
    loss = WAYS[way](pattern, "mixed_float16", **options)
    _, params, batch = pattern.make()
    return product_dtypes(jax.grad(loss), params, *batch)


GPT2 = next(pattern for pattern in PATTERNS if pattern.name == "gpt2")


@each_way
def test_a_rule_gives_a_product_of_each_block_float32(way):
    products = products_of_gradient(GPT2, way, rules=[("*c_fc", "float32")])
    assert products["float32"] == 2 * 3  # forward, its kernel's gradient, its input's
    assert set(products) == {"float16", "float32"}


@each_way
def test_the_wrapper_objects_call_and_the_modules_apply_give_one_program(way):
    through_apply = dataclasses.replace(GPT2, make=functools.partial(GPT2.make, through="apply"))
    products = [products_of_gradient(pattern, way) for pattern in (GPT2, through_apply)]
    assert products[0] == products[1] and set(products[0]) == {"float16"}
