"""`find_float32` finds planted culprits, and nothing if there is none."""

import contextlib
import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp
from jmp import adapters, diagnostics
from jmp.diagnostics._find_float32 import rules_for, search
from tests.commands import in_full

F16, BF16 = "mixed_float16", "mixed_bfloat16"
WIDTH = 8


# Culprits, none of which can be seen before the program runs: what a layer does to w @ x.


def harmless(w, x):
    return jnp.tanh(x @ w)


def overflows(w, x):
    return jnp.tanh((x @ (2e5 * w)) / 2e5)  # beyond 65504 on the way


def cancels(w, x):
    return jnp.tanh((x + 100) @ w - 100 * w.sum(axis=0, keepdims=True))


def underflows(w, x):
    return jnp.tanh((x @ (w * 1e-7)) * 1e7)


def network(layers):
    """A loss of a stack of layers, each in a scope of its own, and its arguments."""

    def loss(params, x):
        for index, layer in enumerate(layers):
            with jax.named_scope(f"layer_{index}"):
                x = x + layer(params[index], x)
        return jnp.mean(x**2)

    generator = np.random.default_rng(0)
    shape = (len(layers), WIDTH, WIDTH)
    params = (generator.normal(size=shape) / WIDTH**0.5).astype(np.float32)
    x = generator.uniform(0.5, 1.0, size=(4, WIDTH)).astype(np.float32)
    return loss, params, x


def paths_of(found):
    return [path for path, policy in found.rules if policy == "float32"]


@pytest.mark.parametrize(
    ("count", "culprits"),
    in_full(
        {
            "3 of 8": (8, {1: overflows, 4: cancels, 6: underflows}),
            "1 of 1": (1, {0: overflows}),
            "2 of 2": (2, {0: cancels, 1: overflows}),
        },
        first=1,
    ),
)
def test_planted_culprits_are_found(count, culprits):
    loss, params, x = network([culprits.get(i, harmless) for i in range(count)])
    found = diagnostics.find_float32(loss, F16, tolerance=0.005)(params, x)
    assert sorted(paths_of(found)) == sorted(f"layer_{i}" for i in culprits)
    assert max(found.all_low) == np.inf
    assert found.is_within
    assert "with these rules" in str(found)
    # `compare` says the same of these rules.
    again = diagnostics.compare(loss, F16, rules=found.rules)(params, x)
    errors = {row.kind: row.relative_error for row in again.by_module(0)}
    assert errors["gradient"] == pytest.approx(found.gradient_error, rel=1e-3)
    assert errors["gradient"] <= 0.005


def test_where_there_is_no_culprit_no_rule_is_found():
    loss, params, x = network([harmless] * 8)
    found = diagnostics.find_float32(loss, F16, tolerance=0.005)(params, x)
    assert (found.rules, found.scopes, found.is_within) == ([], [], True)
    assert 0 < found.gradient_error < 0.005
    assert "no scope has to stay in float32" in str(found) and "all scopes" in str(found)


def test_what_is_not_finite_in_float32_is_counted():
    product = lambda params: jax.named_call(jnp.matmul, name="head")(params["a"], params["a"]).sum()
    params = {"a": jnp.ones((2, 2)), "b": jnp.zeros(2)}
    divided = lambda params: product(params) / params["b"].sum()
    with pytest.raises(ValueError, match="the loss and 2 more infinite or NaN in float32"):
        diagnostics.find_float32(divided, F16)(params)
    root = lambda params: product(params) + jnp.sqrt(params["b"]).sum()
    with pytest.raises(ValueError, match="found the gradient of b infinite or NaN in float32"):
        diagnostics.find_float32(root, F16)(params)


def in_a_scan(culprits):
    """The same with two layers a turn of a scan, and one behind it."""

    def loss(params, x):
        def turn(x, w):
            for name in ("first", "second"):
                with jax.named_scope(name):
                    x = x + culprits.get(name, harmless)(w, x)
            return x, None

        with jax.named_scope("trunk"):
            x, _ = jax.lax.scan(turn, x, params[:-1])
        with jax.named_scope("head"):
            return jnp.mean(culprits.get("head", harmless)(params[-1], x) ** 2)

    _, params, x = network([harmless] * 4)
    return loss, params, x


@pytest.mark.parametrize(
    ("culprits", "paths"),
    [
        ({"second": cancels}, ["trunk/second"]),
        ({"first": overflows, "head": underflows}, ["head", "trunk/first"]),
        ({}, []),
    ],
    ids=["one in the loop", "one in it, one behind it", "none"],
)
def test_in_a_loop(culprits, paths):
    loss, params, x = in_a_scan(culprits)
    found = diagnostics.find_float32(loss, F16, tolerance=0.005)(params, x)
    assert sorted(paths_of(found)) == paths
    assert found.is_within


# Float8.

F8 = "mixed_float8"


def crushed(w, x):
    """One number takes all of float8's range; bfloat16 and float32 do not mind."""
    return jnp.tanh((x / 10).at[0, 0].set(1e5) @ (10 * w).at[0].set(0.0))


def crushed_backward(w, x):
    """The same in the backward pass: one result is zero, and its cotangent is multiplied."""
    factors = jnp.ones_like(x).at[0, 0].set(1e6)
    return jnp.tanh((x @ w.at[:, 0].set(0.0)) * factors)


FLOAT8_CULPRITS = {"2": {0: crushed, 3: crushed_backward}, "0": {}}


@pytest.mark.parametrize("culprits", in_full(FLOAT8_CULPRITS, first=1))
@pytest.mark.usefixtures("small_is_float8")
def test_float8_culprits_among_8_are_taken_out_of_float8(culprits):
    loss, params, x = network([culprits.get(i, harmless) for i in range(8)])
    found = diagnostics.find_float32(loss, F8)(params, x)
    assert sorted(found.rules) == [(f"layer_{i}", BF16) for i in culprits]
    assert found.tolerance == 0.125 and found.is_within
    assert (max(found.all_low) > 0.25) == bool(culprits)
    assert {f"layer_{i}" for i in culprits} == {x.path for x in found.scopes if x.is_kept}
    if culprits:
        assert "2 scopes must stay out of float8" in str(found)
        return
    assert "no scope has to stay out of float8" in str(found)
    assert found.all_low[1] == found.gradient_error
    assert found.gradient_error > 0.03


@pytest.mark.usefixtures("small_is_float8")
def test_what_bfloat16_cannot_is_asked_first_and_then_what_float8_cannot():
    loss, params, x = network([harmless, crushed, harmless, cancels, harmless])
    half = diagnostics.find_float32(loss, BF16, tolerance=0.07)(params, x)
    assert half.rules == [("layer_3", "float32")]
    find = diagnostics.find_float32(loss, F8, tolerance=0.07, rules=half.rules)
    found = find(params, x)
    assert found.rules == [("layer_3", "float32"), ("layer_1", BF16)]
    assert found.is_within
    assert "1 scope must stay out of float8" in str(found)
    data = json.loads(json.dumps(found.to_dict()))["scopes"]
    assert [s["path"] for s in data if s["is_kept"]] == ["layer_1"]


@pytest.mark.usefixtures("small_is_float8")
def test_a_float8_culprit_in_a_loop_leaves_its_neighbours_in_float8():
    def loss(params, x):
        def turn(x, w):
            with jax.named_scope("first"):
                x = crushed(w, x)
            with jax.named_scope("second"):
                x = harmless(w, x)
            return harmless(w, x), None

        with jax.named_scope("trunk"):
            x, _ = jax.lax.scan(turn, x, params)
        return jnp.mean((x @ params[0]) ** 2)

    _, params, x = network([harmless] * 2)
    found = diagnostics.find_float32(loss, F8)(params, x)
    assert found.rules == [("trunk/first", BF16)]
    assert found.is_within
    (second,) = (scope for scope in found.scopes if scope.path == "trunk/second")
    assert not second.is_kept


# Programs of other sorts.


def with_a_culprit_in(wrap):
    """A loss whose culprit is called through `wrap(function)`, and its arguments."""

    def loss(params, x):
        with jax.named_scope("body"):
            x = jnp.tanh(x @ params[0])

        def culprit(w, x):
            with jax.named_scope("culprit"):
                return overflows(w, x)

        return jnp.mean(wrap(culprit)(params[1], x) ** 2)

    _, params, x = network([harmless] * 2)
    return loss, params, x


def in_a_branch(function):
    return lambda w, x: jax.lax.cond(x.sum() > 1e9, harmless, function, w, x)


def with_a_custom_derivative(function):
    return lambda w, x: jax.nn.relu(function(w, jax.nn.silu(x)))


def four_devices():
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def in_shard_map(function):
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
    return jax.shard_map(function, mesh=four_devices(), **specs)


def under_vmap(function):
    return jax.vmap(function, in_axes=(None, 0))


def beside_a_while_loop(function):
    def call(w, x):
        turns = jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
        return function(w, x) * turns

    return call


@pytest.mark.parametrize(
    "wrap",
    in_full(
        [
            jax.checkpoint,
            jax.jit,
            in_a_branch,
            with_a_custom_derivative,
            in_shard_map,
            under_vmap,
            beside_a_while_loop,
        ],
        one_of=2,
    ),
)
def test_a_culprit_is_found_inside(wrap):
    loss, params, x = with_a_culprit_in(wrap)
    found = diagnostics.find_float32(loss, F16, tolerance=0.005)(params, x)
    assert paths_of(found) == ["culprit"]
    assert found.is_within


LARGE = 2e5  # a factor of weights whose products go beyond 65504


class NnxModel(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(2)])
        self.layers[1].kernel[...] *= LARGE
        self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(jnp.tanh(self.layers[1](jnp.tanh(self.layers[0](x))) / LARGE))


class EquinoxModel(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __init__(self):
        first, second = (eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(i)) for i in range(2))
        second = eqx.tree_at(lambda layer: layer.weight, second, LARGE * second.weight)
        self.layers = [first, second]

    def __call__(self, x):
        return jnp.tanh(jax.vmap(self.layers[1])(jnp.tanh(jax.vmap(self.layers[0])(x))) / LARGE)


@pytest.mark.parametrize(
    ("make", "adapter"), [(NnxModel, adapters.nnx), (EquinoxModel, adapters.equinox)]
)
def test_modules_that_open_no_scopes_are_named_as_their_adapters_rules_name_them(make, adapter):
    model, loss = make(), lambda model, x: jnp.mean(model(x) ** 2)
    with jax.numpy_rank_promotion("allow"):
        x = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
        before = jax.tree.leaves(model)
        found = diagnostics.find_float32(loss, F16)(model, x)
        assert found.rules == [("layers/1", "float32")]
        assert found.is_within
        assert all(a is b for a, b in zip(jax.tree.leaves(model), before, strict=True))
        lowered = adapter.autocast(loss, F16, rules=found.rules)
        products = str(jax.make_jaxpr(lowered)(model, x)).count("preferred_element_type=float16")
    assert products == 1  # the layer that is no culprit


@pytest.mark.parametrize("make", [NnxModel, EquinoxModel])
def test_rules_that_were_given_beside_modules_name_their_paths(make):
    model, loss = make(), lambda model, x: jnp.mean(model(x) ** 2)
    with jax.numpy_rank_promotion("allow"):
        x = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
        given = [("layers/1", "float32")]
        found = diagnostics.find_float32(loss, F16, rules=given)(model, x)
    assert found.rules == given
    assert found.is_within
    assert "layers/1" not in [scope.path for scope in found.scopes]


class EquinoxTop(eqx.Module):
    """Its own operations need float32, the module in it does not."""

    linear: eqx.nn.Linear

    def __call__(self, x):
        return overflows(self.linear.weight, self.linear(x)[None])


def test_a_rule_for_the_outermost_module_leaves_those_inside_in_half():
    model = EquinoxTop(eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0)))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    x = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    found = diagnostics.find_float32(loss, F16)(model, x)
    assert found.rules == [("linear", F16), ("", "float32")]
    assert "'' is what is in no scope" in str(found)
    lowered = adapters.equinox.autocast(loss, F16, rules=found.rules)
    assert str(jax.make_jaxpr(lowered)(model, x)).count("preferred_element_type=float16") == 1


# The search and its parts.


@pytest.mark.parametrize("culprits", [{3}, {0, 7}, {1, 2, 6}, {0, 1, 2, 3, 4, 5, 6, 7}])
def test_culprits_that_make_everything_infinite_are_found_in_few_trials(culprits):
    asked = set()

    def errors(low):
        asked.add(low)
        return 1e-4, np.inf if culprits & low else 1e-4

    found = search(range(8), errors, 0.01)
    assert found == culprits
    assert len(asked) <= 2 + 2 * 3 * len(culprits)  # 8 scopes are split three times


def test_errors_that_are_too_large_only_together_take_the_worst_out_and_no_more():
    sizes = [1.0, 3.0, 2.0, 5.0, 4.0]
    together = lambda low: (sum(sizes[i] for i in low), 0.0)
    assert search(range(5), together, 6.0) == {3, 4}
    # The worst by itself is not needed if another does all of the harm in company.
    alone = [0.9, 0.8, 0.7]
    pair = lambda low: (alone[min(low)] if len(low) == 1 else 9.0 if {1, 2} <= low else 0.5, 0.0)
    assert len(search(range(3), pair, 1.0)) == 1


STATES = [
    {"net": True, "net/mlp": False, "net/mlp/out": True, "head": False},
    {"mlp": True, "block/mlp": False, "block": False},
    {"": True, "a": False, "a/b": True},
    {"a/b": True, "b": False, "b/a": False, "a/b/a": False},
    {"block[0]": True, "block0": False, "block*": False, "what?": True, "whats": False},
    {"a": True, "a/a": False, "a/a/a": True},
]


@pytest.mark.parametrize("states", STATES, ids=lambda states: " ".join(states))
def test_rules_name_the_scopes_that_were_found_and_no_others(states):
    def loss(w, x):
        for path in states:
            with jax.named_scope(path) if path else contextlib.nullcontext():
                x = x @ w
        return x.sum()

    w = jnp.ones((8, 8))
    rules = rules_for({path: "float32" if keeps else F16 for path, keeps in states.items()}, F16)
    report = diagnostics.precision_report(loss, F16, rules=rules)(w, w)
    found = {row.module: row.dtype_in == "float32" for row in report.rows if row.kind == "product"}
    assert found == states


# Options and arguments.


def test_a_loss_scale_spares_scopes_whose_gradients_underflow_without_it():
    loss, params, x = network([harmless, overflows])
    tiny = lambda params, x: 1e-9 * loss(params, x)
    without = diagnostics.find_float32(tiny, F16)(params, x)
    scaled = diagnostics.find_float32(tiny, F16, scale=2.0**24)(params, x)
    assert sorted(paths_of(without)) == ["layer_0", "layer_1"]
    assert paths_of(scaled) == ["layer_1"]
    assert scaled.is_within


def test_options_of_autocast_hold_and_rules_that_were_given_come_first():
    loss, params, x = network([harmless, overflows, overflows])

    def loss_and_aux(params, x):
        return loss(params, x), x

    given = [("layer_2", "float32")]
    options = {"rules": given, "apply_to": ["x"], "has_aux": True, "argnums": (0, 1)}
    found = diagnostics.find_float32(loss_and_aux, F16, **options)(params, x)
    assert found.rules == [*given, ("layer_1", "float32")]
    assert found.is_within
    assert "layer_2" not in [scope.path for scope in found.scopes]


def test_what_stands_in_no_scope_is_named_by_the_empty_path():
    def loss(params, x):
        with jax.named_scope("body"):
            x = harmless(params[0], x)
        return jnp.mean(overflows(params[1], x) ** 2)

    _, params, x = network([harmless] * 2)
    found = diagnostics.find_float32(loss, F16)(params, x)
    assert found.rules == [("", "float32")]
    assert found.is_within
    assert "only what is in no scope" in str(found)


def test_a_loop_in_what_must_be_float32_is_float32():
    def loss(params, x):
        def turn(x, w):
            with jax.named_scope("inner"):
                return harmless(w, x), None

        return jnp.mean(overflows(params[0], jax.lax.scan(turn, x, params)[0]) ** 2)

    _, params, x = network([harmless] * 2)
    found = diagnostics.find_float32(loss, F16)(params, x)
    assert found.rules == [("", "float32")]
    assert found.gradient_error < 1e-6


def test_inner_scopes_stay_in_half_where_the_one_around_them_is_float32():
    def loss(params, x):
        with jax.named_scope("block"):
            with jax.named_scope("inner"):
                x = harmless(params[0], x)
            return jnp.mean(overflows(params[1], x) ** 2)

    _, params, x = network([harmless] * 2)
    found = diagnostics.find_float32(loss, F16)(params, x)
    assert found.rules == [("block/inner", F16), ("block", "float32")]
    assert found.is_within


def test_parameters_in_parts_on_a_mesh():
    sharding = jax.NamedSharding(four_devices(), jax.P(None, "data"))
    loss, params, x = network([harmless, overflows])
    found = diagnostics.find_float32(loss, F16)(jax.device_put(params, sharding), x)
    assert paths_of(found) == ["layer_1"]


def test_a_result_is_short_and_its_data_are_json():
    loss, params, x = network([harmless, overflows])
    found = diagnostics.find_float32(loss, F16)(params, x)
    assert "1 scope must stay in float32" in str(found)
    assert "rules=[\n    ('layer_1', 'float32'),\n]" in str(found)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["rules"] == [["layer_1", "float32"]]
    assert data["is_within"] is True
    assert data["scopes"] == list(map(vars, found.scopes))
    culprit, other = found.scopes
    many = dataclasses.replace(found, scopes=[culprit, *[other] * 200])
    assert len(str(many).splitlines()) < 20


def test_a_rule_that_matches_nothing_is_told_once():
    def loss(w, x):
        with jax.named_scope("head"):
            return jnp.mean(x @ w)

    with pytest.warns(jmp.UnusedRuleWarning, match="'haed'") as caught:
        rules = [("haed", "float32")]
        diagnostics.find_float32(loss, F16, rules=rules)(jnp.ones((8, 8)), jnp.ones((4, 8)))
    assert len(caught) == 1


@pytest.mark.parametrize(("policy", "expected"), [(F16, 2**-7), (BF16, 2**-4), (F8, 2**-3)])
def test_the_tolerance_is_eight_times_the_spacing_of_half_or_that_of_float8(policy, expected):
    loss = jax.named_scope("layer")(lambda w, x: jnp.mean(x @ w))
    found = diagnostics.find_float32(loss, policy)(jnp.ones((8, 8)), jnp.ones((4, 8)))
    assert found.tolerance == expected
