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
    """Returns the parameters after these steps; a step of a text has such a gradient somewhere."""
    state = tx.init(params)
    for step in steps:
        is_bad = isinstance(step, str)
        grads = jax.tree.map(lambda g: g * scale, gradients(0 if is_bad else step))
        if is_bad:
            grads["bias"] = grads["bias"].at[1].set(float(step))
        before = params, getattr(state, "inner_state", None)
        more = {"value": squared_distance(params), "grad": grads, "value_fn": squared_distance}
        updates, state = tx.update(grads, state, params, **more)
        params = optax.apply_updates(params, updates)
        if is_bad:
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
    found, state = run(tx, params, ["inf", 1, "nan", 2], SCALE)
    assert bits(found) == bits(expected)
    assert state.skipped_steps == 2


@every_optimizer
@pytest.mark.parametrize(
    ("store", "dtype"),
    [(transforms.with_master_params, "float16"), (transforms.with_split_masters, "bfloat16")],
)
def test_its_masters_are_the_parameters_of_a_bare_float32_run(inner, store, dtype):
    half = jax.tree.map(lambda p: p.astype(dtype), parameters())
    expected, _ = run(bare(inner), jmp.cast_to_full(half), [1, 2])
    found, state = run(store(inner), half, [1, 2])
    masters = transforms.masters(state, found)
    assert bits(masters) == bits(expected)
    rounded = jmp.cast_floating(masters, dtype)
    if dtype == "float16":
        assert bits(found) == bits(rounded)
    else:  # split masters round halfway numbers away from zero
        assert jax.tree.all(
            jax.tree.map(lambda p, r: jnp.allclose(p, r, 2.0**-7, 0), found, rounded)
        )


# A part such as `scale_by_adam` has the state of the optimizer that is made of it.
WHOLE = {name: tx for name, tx in TRANSFORMATIONS.items() if not name.startswith("scale_by")}


@pytest.mark.parametrize("inner", in_full(WHOLE, but=["adam"]))
@pytest.mark.filterwarnings("ignore::jmp.UnusedRuleWarning")
def test_stored_in_one_byte_its_state_stays_finite_and_keeps_its_types(inner):
    tx = transforms.with_split_masters(transforms.with_stored_state(inner, [("*", "*", "int8")]))
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters())
    params, state = run(tx, half, [1, 2])
    of = lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False))
    assert jax.tree.map(of, (params, state)) == jax.tree.map(of, (half, tx.init(half)))
    assert jmp.all_finite((params, transforms.decode_state(state)))
