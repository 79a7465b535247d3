"""Every optimizer of optax: under loss scaling and with masters it does what it does bare."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp
from jmp import transforms
from tests.bits import bits
from tests.transforms.every_optimizer import TRANSFORMATIONS, gradients, parameters

pytestmark = pytest.mark.usefixtures("users_rank_promotion")

SCALE = 1024.0  # a power of two: scaling and unscaling change no bit
every_optimizer = pytest.mark.parametrize(
    "inner", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys()
)


def squared_distance(params):
    return sum(jnp.sum((p - 1) ** 2) for p in jax.tree.leaves(params))


def run(tx, params, steps, scale=1.0):
    """Returns the parameters after these steps; a step of None has an infinite gradient."""
    state = tx.init(params)
    for step in steps:
        grads = jax.tree.map(lambda g: g * scale, gradients(step or 0))
        if step is None:
            grads["bias"] = grads["bias"].at[1].set(jnp.inf)
        before = params, getattr(state, "inner_state", None)
        value = squared_distance(params)
        updates, state = tx.update(
            grads, state, params, value=value, grad=grads, value_fn=squared_distance
        )
        params = optax.apply_updates(params, updates)
        if step is None:
            assert bits((params, state.inner_state)) == bits(before)
    return params, state


def bare(inner):
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    return optax.with_extra_args_support(inner)


@every_optimizer
def test_scaled_and_skipped_it_ends_where_it_ends_bare(inner):
    params = parameters()
    tx = transforms.with_loss_scale(inner, jmp.StaticLossScale(SCALE))
    expected, _ = run(bare(inner), params, [1, 2])
    found, state = run(tx, params, [1, None, 2], SCALE)
    assert bits(found) == bits(expected)
    assert state.skipped_steps == 1


@every_optimizer
def test_its_masters_are_the_parameters_of_a_bare_float32_run(inner):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters())
    expected, _ = run(bare(inner), jmp.cast_to_full(half), [1, 2])
    found, state = run(transforms.with_master_params(inner), half, [1, 2])
    assert bits(transforms.masters(state, found)) == bits(expected)
