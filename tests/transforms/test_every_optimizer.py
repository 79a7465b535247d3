"""Every optimizer of optax: under loss scaling and with masters it does what it does bare."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp
from jmp import transforms
from tests.bits import bits
from tests.commands import in_full
from tests.transforms.every_optimizer import TRANSFORMATIONS, gradients, parameters

pytestmark = pytest.mark.usefixtures("users_rank_promotion")

SCALE = 1024.0  # a power of two: scaling and unscaling change no bit
COMMON = ("sgd", "adam", "lion", "muon", "partition", "MultiSteps")
every_optimizer = pytest.mark.parametrize("inner", in_full(TRANSFORMATIONS, but=COMMON))


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
        more = {"value": squared_distance(params), "grad": grads, "value_fn": squared_distance}
        updates, state = tx.update(grads, state, params, **more)
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
    for store in (transforms.with_master_params, transforms.with_split_masters):
        found, state = run(store(inner), half, [1, 2])
        assert bits(transforms.masters(state, found)) == bits(expected)


SMALL, LARGE = (3, 4), (64, 512)
RULES = [("*", "*bfloat16", "bfloat16"), ("*", "*int8", "int8")]
KERNELS = {"bfloat16": SMALL, "int8": LARGE}


def kernels(value):
    """A tree like `parameters()`, with several kernels for its one."""
    made = {name: jnp.full(shape, value, jnp.bfloat16) for name, shape in KERNELS.items()}
    return {"kernel": made, "bias": jnp.full(4, value, jnp.bfloat16)}


def avals(tree):
    of = lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False))
    return jax.tree.structure(tree), [of(leaf) for leaf in jax.tree.leaves(tree)]


# A part such as `scale_by_adam` has the state of the optimizer that is made of it.
WHOLE = {name: tx for name, tx in TRANSFORMATIONS.items() if not name.startswith("scale_by")}


@pytest.mark.parametrize("inner", in_full(WHOLE, but=["adam"]))
@pytest.mark.filterwarnings("ignore::jmp.UnusedRuleWarning")
def test_stored_in_one_or_two_bytes_its_state_stays_finite_and_keeps_its_types(inner):
    tx = transforms.with_split_masters(transforms.with_stored_state(inner, RULES))

    @jax.jit
    def step(params, state, grads):
        more = {"value": jnp.float32(1.0), "grad": grads, "value_fn": squared_distance}
        updates, state = tx.update(grads, state, params, **more)
        return optax.apply_updates(params, updates), state

    params = kernels(0.5)
    state = tx.init(params)
    first = avals((params, state))
    for number in range(2):
        params, state = step(params, state, kernels(0.1 * number + 0.01))
        assert avals((params, state)) == first
    assert jmp.all_finite((params, transforms.decode_state(state)))
