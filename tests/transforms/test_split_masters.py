"""Split masters: exact for every pattern of bits, and as float32 masters in every step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp
from jmp import transforms
from jmp.transforms._parameter_storage import compiled
from jmp.transforms._wrapping import WRAPPERS
from tests.bits import bits
from tests.commands import in_full

LARGEST = float(jnp.finfo(jnp.bfloat16).max)
STORAGE = WRAPPERS[transforms.WithSplitMastersState].storage


def pattern_of(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def split(values):
    """Returns float32 values as parameters in bfloat16 and remainders."""
    like = jnp.zeros(values.shape, jnp.bfloat16)
    shown = STORAGE.visible(values, like, None)
    return shown.astype(jnp.bfloat16), STORAGE.beside(values, shown, like)


@jax.jit
def lost_among(patterns):
    """Returns how many float32 patterns are not what they were, of numbers and of NaNs."""
    values = jax.lax.bitcast_convert_type(patterns, jnp.float32)
    again = STORAGE.value(*split(values))
    size = patterns & 0x7FFFFFFF
    # What would round to an infinity becomes the largest number.
    kept = jnp.where(size >= 0x7F7F8000, jnp.copysign(LARGEST, values), values)
    same = pattern_of(again) == pattern_of(kept)
    is_nan = size > 0x7F800000
    return jnp.sum(~same & ~is_nan), jnp.sum(is_nan & ~jnp.isnan(again))


def test_split_and_join_are_exact_for_a_sample_of_all_patterns():
    # All higher halves with 256 lower ones: the ends, the middle, and some between.
    low = np.unique(np.r_[0:32, 0x7FF0:0x8010, 0xFFE0:0x10000, 0:0x10000:410]).astype(np.uint32)
    assert 250 <= len(low) <= 260
    for start in range(0, 2**16, 2**12):
        high = np.arange(start, start + 2**12, dtype=np.uint32) << 16
        lost, no_nan = lost_among(high[:, None] + low)
        assert int(lost) == int(no_nan) == 0


def test_the_parameter_is_the_nearest_half_and_ties_go_away_from_zero():
    rng = np.random.default_rng(0)
    master = jnp.float32(rng.standard_normal(10_000))
    high, _ = split(master)
    error = jnp.abs(high.astype(jnp.float32) - master)
    assert (error <= jnp.abs(master.astype(jnp.bfloat16).astype(jnp.float32) - master)).all()
    ties = jnp.float32([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8])
    assert split(ties)[0].tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2**-6]


def random_tree(key, size=1.0):
    keys = jax.random.split(key, 3)
    tree = {"w": jax.random.normal(keys[0], (8, 16)), "b": jax.random.normal(keys[1], (16,))}
    return jax.tree.map(lambda x: (size * x).astype(jnp.bfloat16), tree)


def patterns(tree):
    return jax.tree.map(pattern_of, tree)


@pytest.mark.parametrize("decay", in_full([0.1, 0.0], first=1))
def test_ten_thousand_steps_equal_those_of_float32_masters_bit_for_bit(decay):
    """Both run in one program, so that XLA contracts neither otherwise than the other."""
    inner = optax.adamw(1e-2, weight_decay=decay)
    scale = jmp.StaticLossScale(2.0**10)
    ours = transforms.with_loss_scale(transforms.with_split_masters(inner), scale)
    theirs = transforms.with_loss_scale(transforms.with_master_params(inner), scale)
    params = random_tree(jax.random.key(0))
    params["b"] = params["b"].at[:3].set(jnp.bfloat16([0.0, -0.0, 1e-39]))

    def step(carry, count):
        (a, a_state), (b, b_state), differing = carry
        key = jax.random.fold_in(jax.random.key(1), count)
        size = 10.0 ** jax.random.uniform(jax.random.fold_in(key, 1), minval=-8, maxval=2)
        gradients = jax.tree.map(lambda g: g * jnp.bfloat16(2.0**10), random_tree(key, size))
        gradients["b"] = gradients["b"].at[:3].multiply(jnp.bfloat16(0.0))
        skips = count % 50 == 7
        gradients["w"] = jnp.where(skips, jnp.inf, gradients["w"])
        updates, a_state = ours.update(gradients, a_state, a)
        a = optax.apply_updates(a, updates)
        updates, b_state = theirs.update(gradients, b_state, b)
        b = optax.apply_updates(b, updates)
        found = patterns(transforms.masters(a_state, a))
        expected = patterns(transforms.masters(b_state, b))
        differs = jax.tree.map(lambda x, y: jnp.sum(x != y), found, expected)
        return ((a, a_state), (b, b_state), differing + sum(jax.tree.leaves(differs))), None

    first = (params, ours.init(params)), (params, theirs.init(params)), jnp.int32(0)
    run = jax.jit(lambda: jax.lax.scan(step, first, jnp.arange(10_000))[0])
    (_, a_state), (_, b_state), differing = run()
    assert int(a_state.skipped_steps) == 200
    assert int(differing) == 0
    assert bits(a_state.inner_state.inner_state) == bits(b_state.inner_state.inner_state)


def stepped(tx, params, updates):
    """Returns parameters and state after one step whose updates of float32 values are these."""
    state = tx.init(params)
    changes, state = tx.update(updates, state, params)
    return optax.apply_updates(params, changes), state


ADD = optax.identity()  # the gradient is the update


def test_a_master_that_would_round_to_infinity_stays_at_the_largest_number():
    tx = transforms.with_split_masters(ADD)
    params = jnp.bfloat16([LARGEST, -LARGEST, LARGEST, 1.0])
    new, state = stepped(tx, params, jnp.float32([1e36, -1e36, jnp.inf, jnp.inf]))
    assert new.tolist() == [LARGEST, -LARGEST, LARGEST, LARGEST]
    assert transforms.masters(state, new).tolist() == new.tolist()
    changes, state = tx.update(jnp.full(4, -1e38, jnp.float32), state, new)
    assert jnp.isfinite(optax.apply_updates(new, changes)).all()


def test_a_shrinkage_that_no_difference_says_leaves_the_master_at_what_was_reached():
    tx = transforms.with_split_masters(ADD)
    params = jnp.bfloat16([1.0, 2.0**100, 3.0])
    new, state = stepped(tx, params, jnp.float32([-1 + 1e-9, -(2.0**100), -3.0]))
    assert bits(transforms.masters(state, new)) == bits(new.astype(jnp.float32))


def test_a_parameter_set_to_zero_is_no_nan():
    tx = transforms.with_split_masters(ADD)
    _, state = stepped(tx, jnp.ones(4, jnp.bfloat16), jnp.float32([jnp.nan, -1e-4, 1e-4, 0]))
    for zero in (0.0, -0.0):
        masters = transforms.masters(state, jnp.full(4, zero, jnp.bfloat16))
        assert (jnp.abs(masters) < 1e-37).all()


def test_a_parameter_changed_outside_keeps_a_remainder_that_rounds_to_it():
    tx = transforms.with_split_masters(ADD)
    rng = np.random.default_rng(0)
    params, state = stepped(tx, jnp.ones(1000, jnp.bfloat16), 1e-3 * rng.standard_normal(1000))
    other = jnp.bfloat16(rng.standard_normal(1000))
    masters = transforms.masters(state, other)
    assert (split(masters)[0] == other).all()
    assert (masters != other.astype(jnp.float32)).any()
    reset = transforms.reset_masters(state, other)
    assert bits(transforms.masters(reset, other)) == bits(other.astype(jnp.float32))


def test_float16_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"params\['w'\] of dtype float16; expected bfloat16"):
        transforms.with_split_masters(ADD).init({"w": jnp.ones(2, jnp.float16)})


def test_what_init_and_masters_compiled_is_used_again():
    params = {name: jnp.ones((8, 4), jnp.bfloat16) for name in "ab"}
    functions = [compiled(STORAGE.beside), compiled(STORAGE.value)]
    counts = []
    for _ in range(2):
        tx = transforms.with_split_masters(optax.sgd(0.1))
        transforms.masters(tx.init(params), params)
        counts.append([function._cache_size() for function in functions])
    assert counts[0] == counts[1]
    assert functions == [compiled(STORAGE.beside), compiled(STORAGE.value)]
