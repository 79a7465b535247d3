"""Ways to store half parameters and the states of optimizers: all together, and in adapters."""

import functools
import itertools
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import equinox, haiku, linen
from jmp.adapters import nnx as jmp_nnx
from jmp.transforms._half_parameters import STORAGES, ParameterStorage, stored_by
from jmp.transforms._wrapping import STORES_PARAMETERS, register_wrapper
from tests.bits import bits
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
every_way = pytest.mark.parametrize("way", WAYS)


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


@pytest.mark.full
def test_members_of_an_ensemble_train_as_each_would_alone():
    tx = scaled(transforms.with_split_masters(stored("int8", optax.trace(0.5))))
    many = {"small": jnp.stack([PARAMS["small"], 2 * PARAMS["small"]])}
    carry = jax.vmap(lambda p: (p, tx.init(p)))(many)
    run = jax.jit(jax.vmap(functools.partial(step, tx)))
    carry = run(run(carry))
    assert run._cache_size() == 1
    alone = jax.tree.map(lambda p: p[1], many)
    alone = alone, tx.init(alone)
    alone = jax.jit(lambda c: step(tx, step(tx, c)))(alone)
    assert bits(jax.tree.map(lambda x: x[1], carry)) == bits(alone)


ORDERS = {
    "a stored state around masters": (
        lambda store, way: transforms.with_stored_state(store(ADAM), "int8"),
        r"Swap the two: {way}\(with_stored_state\(adam, 'bfloat16'\)\)",
    ),
    "a stored state around loss scaling": (
        lambda store, way: store(transforms.with_stored_state(scaled(ADAM), "bfloat16")),
        r"Swap the two: with_loss_scale\(with_stored_state\(adam, 'bfloat16'\), loss_scale\)",
    ),
    "stored twice": (
        lambda store, way: store(stored("int8", stored("bfloat16"))),
        "contains with_stored_state; .* each at most once",
    ),
    "a storage in itself": (lambda store, way: store(store(ADAM)), "{way}; .* each at most once"),
    "a storage in another": (
        lambda store, way: store(WAYS["kahan" if "kahan" not in way else "split"](ADAM)),
        "one that stores the parameters, .* each at most once",
    ),
    "a chain after it": (
        lambda store, way: optax.chain(store(ADAM), optax.scale(0.5)),
        r"after {way}.*Move it inside: {way}\(optax.chain\(...\)\)",
    ),
    "inside schedule_free": (
        lambda store, way: optax.contrib.schedule_free(store(ADAM), 0.1),
        r"{way} inside optax.contrib.schedule_free.*Put it around: {way}\(optax",
    ),
    "around loss scaling": (
        lambda store, way: store(scaled(ADAM)),
        r"Swap the two: with_loss_scale\({way}\(adam\), loss_scale\)",
    ),
}


SEEN_FROM_OUTSIDE = ("a chain after it", "inside schedule_free")


@every_way
@pytest.mark.parametrize("order", ORDERS)
def test_orders_that_fail_are_refused_with_the_one_that_does_not(order, way):
    make, sentence = ORDERS[order]
    caller = WAYS[way].__name__
    with pytest.raises(ValueError, match=sentence.format(way=caller)):
        state = make(WAYS[way], caller).init(PARAMS)
        if order in SEEN_FROM_OUTSIDE:  # `init` itself refuses the others
            transforms.check_optimizer_state(state)


# The adapters.


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(name="norm")(nn.Dense(4, name="body")(x))


VARIABLES = jax.jit(Model().init)(jax.random.key(0), jnp.ones((1, 8)))


@pytest.mark.parametrize(("way", "kind"), in_full(PAIRS, but=["split"]))
def test_a_train_state_takes_each_way_saves_and_restores_it_and_lets_it_follow(way, kind):
    full = VARIABLES["params"]
    params = linen.cast_params(full, POLICY)
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
    whole = state.replace(params=full)
    assert whole.params["body"]["kernel"].dtype == jnp.bfloat16
    assert_close(masters(whole), full, way, atol=0)


def test_codes_of_another_kind_are_not_restored():
    make = lambda kind: stored(kind, optax.trace(0.9)).init({"w": jnp.ones((2, 8))})
    saved = serialization.to_state_dict(make("int8"))
    with pytest.raises(ValueError, match="codes of dtype uint8 .*expected float8.*encode_state"):
        serialization.from_state_dict(make("float8_e4m3fn"), saved)


@pytest.mark.parametrize(
    ("way", "kind"), in_full([("split", "int8"), ("stochastic", "bfloat16")], first=1)
)
def test_an_nnx_optimizer_trains_saves_and_resets(way, kind):
    model = jmp_nnx.cast_params(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), POLICY)
    rules = [("*mu*", "*kernel", kind), ("*nu*", "*", kind)]
    tx = mixed(stored(rules), way)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    loss_fn = jmp_nnx.autocast(lambda model, x: jnp.mean(model(x) ** 2), POLICY)
    train = nnx.jit(lambda m, o, x: jmp_nnx.train_step(loss_fn, m, o, x))
    structure = jax.tree.structure(nnx.as_pure(optimizer.opt_state))
    losses = [train(model, optimizer, jnp.ones((2, 8))) for _ in range(3)]
    assert losses[2] < losses[0]
    state = nnx.as_pure(optimizer.opt_state)
    assert jax.tree.structure(state) == structure
    adam = state.inner_state.inner_state.inner_state[0]
    assert adam.mu["kernel"].kind == adam.nu["bias"].kind == kind
    assert adam.mu["bias"].dtype == jnp.float32
    assert transforms.decode_state(adam).mu["kernel"].shape == (8, 4)
    before = bits(nnx.as_pure(nnx.state((model, optimizer.opt_state))))
    train(model, optimizer, jnp.full((2, 8), jnp.inf))
    after = nnx.as_pure(optimizer.opt_state)
    assert bits(after.inner_state) == bits(state.inner_state) and after.skipped_steps == 1
    assert bits(nnx.as_pure(nnx.state(model))) == before[: len(nnx.state(model).flat_state())]
    model.bias[...] = jnp.ones(4, jnp.bfloat16)
    jmp_nnx.reset_masters(model, optimizer)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    masters = transforms.masters(nnx.as_pure(optimizer.opt_state), params)
    assert bits(masters) == bits(jmp.cast_to_full(params))


def test_steps_of_equinox_and_haiku_take_them():
    tx = mixed(stored("int8"), "split")
    x = jnp.ones((2, 8))
    module = equinox.cast_params(eqx.nn.Linear(8, 4, key=jax.random.key(0)), POLICY)
    loss_fn = lambda module, x: jnp.mean(jax.vmap(module)(x) ** 2)
    take = eqx.filter_jit(lambda m, s: equinox.train_step(loss_fn, m, s, tx, x))
    first = take(module, tx.init(eqx.filter(module, eqx.is_inexact_array)))
    second = take(first.model, first.opt_state)
    assert second.loss < first.loss
    assert second.opt_state.inner_state.remainders.weight.dtype == jnp.uint16

    network = hk.without_apply_rng(hk.transform(lambda x: jnp.mean(hk.Linear(4)(x) ** 2)))
    params = haiku.cast_params(network.init(jax.random.key(0), x), POLICY)
    take = jax.jit(lambda p, s: haiku.train_step(network.apply, p, s, tx, x))
    first = take(params, tx.init(params))
    second = take(first.model, first.opt_state)
    assert second.loss < first.loss
    assert second.opt_state.inner_state.remainders["linear"]["w"].dtype == jnp.uint16


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


@pytest.mark.full
def test_a_killed_training_goes_on_with_the_same_bits(tmp_path):
    txs = {way: mixed(stored(kind), way) for way, kind in PAIRS}
    run = jax.jit(lambda carries: {way: step(txs[way], carry) for way, carry in carries.items()})
    carries = run({way: (PARAMS, tx.init(PARAMS)) for way, tx in txs.items()})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", carries)
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: carries)
        restored = checkpointer.restore(tmp_path / "saved", like)
    assert bits(restored) == bits(carries)
    assert bits(run(run(restored))) == bits(run(run(carries)))


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


@pytest.mark.full
def test_in_a_step_that_stores_its_state_the_first_infinity_is_found():
    tx = transforms.with_split_masters(stored("int8"))
    carry = PARAMS, tx.init(PARAMS)
    find = diagnostics.find_nonfinite(lambda carry, factor: step(tx, carry, factor))
    assert find(carry, jnp.float32(1.0)) is None
    named = find(carry, jnp.float32(1e30))
    assert named.operation == "integer_pow" and named.became == "infinity"


@register_wrapper("with_pairs", STORES_PARAMETERS)
class PairState(NamedTuple):
    rests: Any
    inner_state: Any


class Pair(ParameterStorage):
    """A half parameter and, in float32, what it lacks: no small state, but a short example."""

    def beside(self, new, shown, param):
        return new - shown

    def value(self, param, beside):
        return param.astype(jnp.float32) + beside


def test_a_way_of_ones_own_is_one_class(monkeypatch):
    monkeypatch.setitem(STORAGES, PairState, Pair())
    tx = stored_by(PairState, optax.sgd(1e-4))
    params = {"w": jnp.ones(4, jnp.float16), "b": jnp.ones(4)}
    state = tx.init(params)
    for _ in range(10):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    masters = transforms.masters(state, params)
    assert bits(masters["w"]) == bits(params["b"]) == bits(masters["b"])
    params, state = transforms.set_masters(state, params, jax.tree.map(lambda x: x / 3, masters))
    assert bits(transforms.masters(state, params)["w"]) == bits(masters["w"] / 3)
    with pytest.raises(ValueError, match=r"Move it inside: with_pairs\(optax.chain"):
        transforms.check_optimizer_state(optax.chain(tx, optax.scale(2.0)).init(params))
