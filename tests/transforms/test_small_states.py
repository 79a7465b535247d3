"""Ways to store half parameters and the states of optimizers: all together, and in adapters."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen
from jmp.adapters import nnx as jmp_nnx
from tests.bits import bits
from tests.cases import HALF
from tests.commands import in_full

POLICY = "p=bf16,c=bf16,o=f32"
SCALE = jmp.DynamicLossScale(2.0**4, period=100)
ADAM = optax.adam(1e-2)
WAYS = {
    "full": transforms.with_master_params,
    "split": transforms.with_split_masters,
    "stochastic": transforms.with_stochastic_rounding,
    "kahan": transforms.with_kahan_summation,
}
KINDS = ("bfloat16", "float16", "float8_e4m3fn", "int8")
PAIRS = list(zip(WAYS, itertools.cycle(KINDS), strict=False))
CLOSE = {"stochastic": 2.0**-8, "kahan": 2.0**-17}  # how near a value is stored; others are exact
PARAMS = {
    "dense": {"kernel": jnp.linspace(-1, 1, 640, dtype=jnp.bfloat16).reshape(2, 320)},
    "small": jnp.linspace(-2, 3, 12, dtype=jnp.bfloat16).reshape(3, 4),
    "norm": jnp.ones(4),
}


def stored(kind, inner=ADAM):
    return transforms.with_stored_state(inner, kind)


def scaled(inner):
    return transforms.with_loss_scale(inner, SCALE)


def mixed(inner, way):
    return transforms.mixed_precision(inner, POLICY, SCALE, masters=way)


def step(tx, carry, factor=1.0):
    """One step whose scaled gradients are 16 times the parameters, by a factor."""
    params, state = carry
    gradients = jax.tree.map(lambda p: (16 * factor * p).astype(p.dtype), params)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def assert_close(found, expected, way, atol):
    """Compares values that were stored in one of the ways with those that were given."""
    close = functools.partial(np.testing.assert_allclose, rtol=CLOSE.get(way, 0), atol=atol)
    jax.tree.map(close, found, expected)


def avals(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


EVERY_PAIR = PAIRS + [(way, "int8") for way in WAYS if way != "kahan"]


@pytest.mark.parametrize(("way", "kind"), in_full(EVERY_PAIR, one_of=4))
def test_whatever_is_combined_a_state_keeps_its_structure_and_types(way, kind):
    """So that the second step compiles nothing, and a scan takes it."""
    store = WAYS[way]
    for tx in (
        store(stored(kind)),
        store(stored(kind, optax.MultiSteps(ADAM, 2))),
        store(optax.MultiSteps(stored(kind), 2)),
        optax.MultiSteps(store(stored(kind)), 2),
        store(stored(kind, optax.inject_hyperparams(optax.adam)(1e-2))),
        optax.inject_hyperparams(lambda rate: store(stored(kind, optax.adam(rate))))(rate=1e-2),
        store(stored(kind, optax.chain(optax.clip_by_global_norm(1.0), ADAM))),
        optax.masked(store(stored(kind)), {"dense": True, "small": True, "norm": False}),
    ):
        tx = scaled(tx)
        carry = jax.eval_shape(lambda p, tx=tx: (p, tx.init(p)), PARAMS)
        transforms.check_optimizer_state(carry[1])
        after = jax.eval_shape(functools.partial(step, tx), carry)
        assert avals(after) == avals(carry)


@pytest.mark.parametrize(("way", "kind"), in_full(PAIRS, first=1))
def test_a_skipped_step_changes_no_bit_and_one_program_takes_every_step(way, kind):
    tx = transforms.mixed_precision(stored(kind), POLICY, SCALE, masters=way)
    run = jax.jit(functools.partial(step, tx), donate_argnums=0)
    carry = run(jax.tree.map(jnp.copy, (PARAMS, tx.init(PARAMS))), 1.0)
    before = bits((carry[0], carry[1].inner_state))
    given = carry
    carry = run(carry, jnp.inf)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((given[0], given[1].inner_state)))
    assert bits((carry[0], carry[1].inner_state)) == before
    assert carry[1].skipped_steps == 1
    carry = run(carry, 1.0)
    assert bits((carry[0], carry[1].inner_state)) != before and run._cache_size() == 1
    scan = lambda carry: jax.lax.scan(lambda c, f: (step(tx, c, f), None), carry, jnp.ones(3))[0]
    assert avals(jax.eval_shape(scan, carry)) == avals(carry)


def test_each_group_is_stored_in_its_own_way_and_frozen_parts_stay():
    params = {name: PARAMS["dense"]["kernel"] for name in (*WAYS, "frozen")} | {"norm": jnp.ones(4)}
    groups = {way: WAYS[way](stored(kind)) for way, kind in PAIRS}
    groups |= {"frozen": optax.set_to_zero(), "norm": ADAM}
    tx = scaled(optax.partition(groups, {name: name for name in params}))
    carry = params, tx.init(params)
    run = jax.jit(functools.partial(step, tx))
    for _ in range(3):
        carry = run(carry)
    new, state = carry
    assert bits(new["frozen"]) == bits(params["frozen"])
    masters = transforms.masters(state, new)
    for way in WAYS:
        np.testing.assert_allclose(masters[way], masters["full"], rtol=2.0**-7, atol=3e-3)
    # And back: every group takes the values that it gives. (Of a sum halfway between two numbers
    # Kahan summation may take either for the parameter.)
    again, state = transforms.set_masters(state, new, masters)
    for name in ("full", "split", "norm", "frozen"):
        assert bits(again[name]) == bits(new[name]), name
    assert bits(transforms.masters(state, again)) == bits(masters)


# The adapters.


FULL = {"body": jax.random.normal(jax.random.key(0), (8, 4)), "norm": jnp.ones(4)}


@pytest.mark.parametrize(("way", "kind"), in_full(PAIRS, but=["split"]))
def test_a_train_state_takes_each_way_saves_and_restores_it_and_lets_it_follow(way, kind):
    params = FULL | {"body": FULL["body"].astype(jnp.bfloat16)}
    tx = transforms.mixed_precision(stored(kind), POLICY, SCALE, masters=way)
    state = linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    take = jax.jit(lambda state: state.apply_gradients(grads=state.params))
    state = take(state)
    assert take._cache_size() == 1 and bits(state.params) != bits(params)
    restored = serialization.from_bytes(state, serialization.to_bytes(state))
    assert bits(restored) == bits(state)
    masters = lambda state: transforms.masters(state.opt_state, state.params)
    # What stays half keeps the digits beyond it, what is new has none.
    assert bits(masters(state.replace(params=state.params))) == bits(masters(state))
    assert bits(masters(state.replace(params=params))) == bits(jmp.cast_to_full(params))
    # Float32 is stored as exactly as can be.
    whole = state.replace(params=FULL)
    assert whole.params["body"].dtype == jnp.bfloat16
    assert_close(masters(whole), FULL, way, atol=0)


def test_codes_of_another_kind_are_not_restored():
    make = lambda kind: stored(kind, optax.trace(0.9)).init({"w": jnp.ones((2, 8))})
    saved = serialization.to_state_dict(make("int8"))
    with pytest.raises(ValueError, match="codes=uint8.*expected float8.*docs/checkpoints.md"):
        serialization.from_state_dict(make("float8_e4m3fn"), saved)


@pytest.mark.parametrize(
    ("way", "kind"), in_full([("split", "int8"), ("stochastic", "bfloat16")], first=1)
)
def test_an_nnx_optimizer_trains_skips_and_resets(way, kind):
    model = jmp_nnx.cast_params(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), POLICY)
    optimizer = nnx.Optimizer(model, mixed(stored([("*", "*", kind)]), way), wrt=nnx.Param)
    loss_fn = jmp_nnx.autocast(lambda model, x: jnp.mean(model(x) ** 2), POLICY)
    train = nnx.jit(lambda m, o, x: jmp_nnx.train_step(loss_fn, m, o, x))
    structure = jax.tree.structure(nnx.as_pure(optimizer.opt_state))
    losses = [train(model, optimizer, jnp.ones((2, 8))) for _ in range(3)]
    assert losses[2] < losses[0]
    state = nnx.as_pure(optimizer.opt_state)
    assert jax.tree.structure(state) == structure
    assert transforms.decode_state(state).inner_state.inner_state.inner_state[0].mu[
        "bias"
    ].shape == (4,)
    before = bits((nnx.as_pure(nnx.state(model)), state.inner_state))
    train(model, optimizer, jnp.full((2, 8), jnp.inf))
    state = nnx.as_pure(optimizer.opt_state)
    assert bits((nnx.as_pure(nnx.state(model)), state.inner_state)) == before
    model.bias[...] = jnp.ones(4, jnp.bfloat16)
    jmp_nnx.reset_masters(model, optimizer)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    masters = transforms.masters(nnx.as_pure(optimizer.opt_state), params)
    assert bits(masters) == bits(jmp.cast_to_full(params))


# From one way to another.


def test_a_training_goes_through_every_way_and_back_to_float32():
    rng = np.random.default_rng(0)
    full = jax.tree.map(lambda p: jnp.float32(rng.standard_normal(p.shape)), PARAMS)
    half = jax.tree.map(lambda p, like: p.astype(like.dtype), full, PARAMS)
    _, adam = ADAM.update(full, ADAM.init(full), full)
    # Float32 to each way, and from there to each other.
    for first, store in WAYS.items():
        tx = store(ADAM)
        state = tx.init(half)._replace(inner_state=adam)
        params, state = transforms.set_masters(state, half, full)
        values = transforms.masters(state, params)
        if first in ("full", "split"):
            assert bits(values) == bits(full)
        for second, other in WAYS.items():
            new = other(ADAM).init(params)._replace(inner_state=state.inner_state)
            after, new = transforms.set_masters(new, params, values)
            found = transforms.masters(new, after)
            assert_close(found, values, second, atol=1e-30)
            assert bits(new.inner_state) == bits(adam)
            if first == "stochastic":  # only parameters: every way holds them
                assert bits(after) == bits(params)


@pytest.mark.parametrize("kind", in_full(KINDS, but=["int8"]))
def test_a_float32_state_is_stored_and_what_was_stored_is_stored_again_as_it_is(kind):
    rng = np.random.default_rng(0)
    params = {"w": jnp.float32(rng.standard_normal((4, 320)))}
    _, adam = ADAM.update(params, ADAM.init(params), params)
    fresh = stored(kind).init(params)
    state = fresh._replace(inner_state=transforms.encode_state(fresh.inner_state, adam))
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    decoded = transforms.decode_state(state.inner_state)
    assert jax.tree.structure(decoded) == jax.tree.structure(adam)
    close = {"bfloat16": 2.0**-8, "float16": 2.0**-10}.get(kind, 2.0**-4)
    np.testing.assert_allclose(decoded[0].nu["w"], adam[0].nu["w"], rtol=close, atol=1e-5)
    again = transforms.decode_state(transforms.encode_state(state.inner_state, decoded))
    assert bits(again) == bits(decoded)


# Diagnostics.


def test_reports_count_and_show_what_is_stored():
    tx = scaled(transforms.with_split_masters(stored("int8")))
    loss = lambda p: jnp.sum(p["dense"]["kernel"].astype(jnp.float32) ** 2) + p["norm"].sum()
    report = diagnostics.memory_report(loss, optimizer=tx, compiled=False)(PARAMS)
    found = report.optimizer_bytes
    numbers = 640 + 12
    assert found["uint16"] == 2 * numbers and found["uint8"] == 2 * numbers
    assert found["float32"] == 4 * 2 * 4 + 4  # the norm's moments, and the loss scale
    assert found["bfloat16"] == 2 * 2 * (2 * 2 + 3)  # scales of blocks of 160, and of rows

    ranges = diagnostics.range_report(stored("int8").init(PARAMS))
    (row,) = [row for row in ranges.rows if row.path.endswith("nu/dense/kernel")]
    assert row.dtype == "float32" and row.size == 640


# Beyond the range of a half dtype.


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("way", "dtype"), [(w, d) for w in WAYS for d in HALF if (w, d) != ("split", "float16")]
)
def test_a_parameter_beyond_its_range_is_the_largest_number_and_comes_back(way, dtype, sign):
    largest = float(jnp.finfo(dtype).max)
    # Rounded it would be infinite; half a spacing is also what Kahan summation can keep beside it.
    beyond = largest + {"float16": 16.0, "bfloat16": 2.0**119}[dtype]
    tx = WAYS[way](optax.sgd(1.0))
    params = jnp.array([sign], dtype)
    state = tx.init(params)
    # The way back takes two steps: one difference in float32 cannot say so large a change exactly.
    steps = [(beyond, largest), (1000.0, None), (1000.0, 1000.0), (jnp.nan, jnp.nan)]
    for target, expected in steps:
        gradient = transforms.masters(state, params) - jnp.array([sign * target], jnp.float32)
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        if expected is None:
            assert jnp.isfinite(params).all()
        else:
            np.testing.assert_array_equal(np.float32(params), np.float32([sign * expected]))
