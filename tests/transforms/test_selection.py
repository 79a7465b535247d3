"""What a skipped step leaves as it was, whatever its dtype and size, mapped and sharded."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import NamedSharding, P

import jmp
from jmp import transforms
from jmp.adapters._atomic import keep_if_skipped
from jmp.transforms._few_kernels import SHORTER_THAN_A_LAUNCH, selected_by_all
from tests.bits import bits

TX = transforms.with_loss_scale(optax.sgd(0.5, momentum=0.5), jmp.DynamicLossScale(4.0))
GRADIENTS = {True: jnp.ones(3), False: jnp.array([1.0, jnp.inf, 1.0])}


def before():
    """What a step may carry: numbers that are awkward, of many dtypes, small and large."""
    special = jnp.array([0.0, -0.0, jnp.nan, -jnp.inf, 1e-45, 1.0])
    return {
        "mean": special,
        "var": special[::-1],
        "half": special.astype(jnp.bfloat16),
        "count": jnp.array(2**31 - 1, jnp.int32),
        "bytes": jnp.arange(6, dtype=jnp.uint8),
        "seen": jnp.array([True, False, True]),
        "key": jax.random.key(3),
        "large": jnp.arange(SHORTER_THAN_A_LAUNCH + 1, dtype=jnp.float32),
        "nothing": None,
    }


def after():
    moved = {name: jnp.flip(leaf) for name, leaf in before().items() if getattr(leaf, "ndim", 0)}
    return before() | moved | {"count": jnp.int32(-1), "key": jax.random.key(4)}


def step(old, gradients, state):
    _, new_state = TX.update(gradients, state, jnp.zeros(3))
    return keep_if_skipped(after(), old, new_state, state)[0]


WAYS = {"eager": step, "jit": jax.jit(step), "donated": jax.jit(step, donate_argnums=0)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("finite", [True, False])
def test_a_step_leaves_all_that_is_after_it_or_all_that_was_before_it(way, finite):
    kept = WAYS[way](before(), GRADIENTS[finite], TX.init(jnp.zeros(3)))
    assert bits(kept) == bits(after() if finite else before())


def test_each_element_of_a_mapped_step_is_skipped_by_itself():
    gradients = jnp.stack([GRADIENTS[True], GRADIENTS[False]])
    mapped = jax.jit(jax.vmap(step, in_axes=(None, 0, None)))
    kept = mapped(before(), gradients, TX.init(jnp.zeros(3)))
    for row, expected in enumerate((after(), before())):
        assert bits(jax.tree.map(lambda leaf, row=row: leaf[row], kept)) == bits(expected)


def test_updates_and_moments_of_every_size_are_those_of_the_optimizer_alone():
    params = {
        "small": jnp.ones(5),
        "large": jnp.ones(SHORTER_THAN_A_LAUNCH + 1),
        "scalar": jnp.float32(1),
    }
    gradients = jax.tree.map(lambda p: 3 * p, params)
    inner = optax.adam(0.1)
    scaled = transforms.with_loss_scale(inner, jmp.DynamicLossScale(1.0))
    updates, state = jax.jit(scaled.update)(gradients, scaled.init(params), params)
    expected, expected_state = jax.jit(inner.update)(gradients, inner.init(params), params)
    assert bits((updates, state.inner_state)) == bits((expected, expected_state))
    infinite = gradients | {"scalar": jnp.float32(jnp.inf)}
    updates, skipped = jax.jit(scaled.update)(infinite, state, params)
    assert bits(skipped.inner_state) == bits(state.inner_state)
    assert bits(updates) == bits(jax.tree.map(lambda p: -0.0 * p, params))


@pytest.mark.parametrize("finite", [True, False])
def test_sharded_statistics_are_selected_where_they_lie(finite):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    old, new = jnp.arange(64.0), jnp.arange(64.0) ** 2

    @functools.partial(jax.jit, in_shardings=(sharding, sharding, None, None))
    def sharded(new, old, gradients, state):
        _, new_state = TX.update(gradients, state, jnp.zeros(3))
        return keep_if_skipped({"mean": new}, {"mean": old}, new_state, state)[0]

    compiled = sharded.lower(new, old, GRADIENTS[finite], TX.init(jnp.zeros(3))).compile()
    assert not re.search("all-gather|all-to-all|collective-permute", compiled.as_text())
    put = jax.device_put((new, old), sharding)
    kept = compiled(*put, GRADIENTS[finite], TX.init(jnp.zeros(3)))["mean"]
    assert kept.sharding.is_equivalent_to(sharding, 1)
    assert bits(kept) == bits(new if finite else old)


def test_what_is_selected_with_the_parameters_on_a_tpu_stays_for_every_pattern():
    halves = jnp.arange(2**16, dtype=jnp.uint16)
    singles = jnp.asarray(np.linspace(0, 2**32 - 1, 2**16).astype(np.uint32))
    others = (halves.view(jnp.bfloat16), halves, singles.view(jnp.float32))
    assert bits(selected_by_all(halves, *others)) == bits(halves)
    numbers = jnp.where(jnp.isnan(others[0]), jnp.nan, others[0])  # payloads of NaN do not stay
    assert bits(selected_by_all(numbers, *others)) == bits(numbers)
    passes_on = jax.grad(lambda x: selected_by_all(x, *others).sum())(jnp.ones(2**16, jnp.bfloat16))
    assert (passes_on == 1).all()
