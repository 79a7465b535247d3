"""`find_float32` finds planted culprits, and nothing if there is none."""

import contextlib
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from jmp import adapters, diagnostics
from jmp.diagnostics._find_float32 import rules_for, search
from tests.commands import in_full

F16, BF16, F8 = "mixed_float16", "mixed_bfloat16", "mixed_float8"
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


def plain(layer):
    return layer


def in_scope(path, layer, w, x):
    with jax.named_scope(path) if path else contextlib.nullcontext():
        return x + layer(w, x)


def network(layers, wrap=plain):
    """A loss of a stack of layers, each in a scope of its own, and its arguments.

    Args:
      layers: what each scope does to w @ x; the scope "" is none.
      wrap: calls a layer in some other way.
    """

    def loss(params, x):
        for w, (path, layer) in zip(params, layers.items(), strict=True):
            x = wrap(functools.partial(in_scope, path, layer))(w, x)
        return jnp.mean(x**2)

    generator = np.random.default_rng(0)
    shape = (len(layers), WIDTH, WIDTH)
    params = (generator.normal(size=shape) / WIDTH**0.5).astype(np.float32)
    x = generator.uniform(0.5, 1.0, size=(4, WIDTH)).astype(np.float32)
    return loss, params, x


ONE = {"layer_0": harmless, "layer_1": overflows}


EIGHT = {str(i): harmless for i in range(8)} | {"1": overflows, "4": cancels, "6": underflows}


@pytest.mark.parametrize(
    ("layers", "rules"),
    [
        (EIGHT, [("1", "float32"), ("4", "float32"), ("6", "float32")]),
        ({"body": harmless, "": overflows}, [("", "float32")]),
        (
            {"block/inner": harmless, "block": overflows},
            [("block/inner", F16), ("block", "float32")],
        ),
    ],
    ids=["three of eight", "in no scope", "around a scope"],
)
def test_planted_culprits_are_found(layers, rules):
    loss, params, x = network(layers)
    found = diagnostics.find_float32(loss, F16, tolerance=0.005)(params, x)
    assert sorted(found.rules) == sorted(rules)
    assert max(found.all_low) == np.inf
    assert found.is_within
    assert ("'' is what is in no scope" in str(found)) == ("" in layers)
    # `compare` says the same of these rules.
    again = diagnostics.compare(loss, F16, rules=found.rules)(params, x)
    errors = {row.kind: row.relative_error for row in again.by_module(0)}
    assert errors["gradient"] == pytest.approx(found.errors.gradient, rel=1e-3)
    assert errors["gradient"] <= 0.005


@pytest.mark.usefixtures("small_is_float8")
@pytest.mark.parametrize(
    ("policy", "tolerance", "words"),
    in_full([(F16, 0.005, "stay in float32"), (F8, 0.125, "stay out of float8")], first=1),
)
def test_where_there_is_no_culprit_no_rule_is_found(policy, tolerance, words):
    loss, params, x = network({f"layer_{i}": harmless for i in range(4)})
    found = diagnostics.find_float32(loss, policy, tolerance=tolerance)(params, x)
    assert (found.rules, found.kept, found.is_within) == ([], {}, True)
    assert found.all_low == found.errors
    assert 0 < found.errors.gradient < tolerance
    assert f"no scope has to {words}" in str(found) and "all scopes" in str(found)


def test_what_is_not_finite_in_float32_is_named():
    product = lambda params: jax.named_call(jnp.matmul, name="head")(params["a"], params["a"]).sum()
    params = {"a": jnp.ones((2, 2)), "b": jnp.zeros(2)}
    divided = lambda params: product(params) / params["b"].sum()
    with pytest.raises(ValueError, match="found the loss infinite or NaN in float32"):
        diagnostics.find_float32(divided, F16)(params)
    root = lambda params: product(params) + jnp.sqrt(params["b"]).sum()
    with pytest.raises(ValueError, match="found the gradient of b infinite or NaN in float32"):
        diagnostics.find_float32(root, F16)(params)


# Ways to call a culprit.


neighbour = jax.named_scope("neighbour")(harmless)


def in_a_loop(function):
    """In a turn, before another scope of the same turn."""

    def call(w, x):
        return jax.lax.scan(lambda x, _: (neighbour(w, function(w, x)), None), x, length=2)[0]

    return call


def in_a_branch(function):
    return lambda w, x: jax.lax.cond(x.sum() > 1e9, neighbour, function, w, x)


def four_devices():
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def in_shard_map(function):
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
    return jax.shard_map(function, mesh=four_devices(), **specs)


def under_vmap(function):
    return jax.vmap(function, in_axes=(None, 0))


@pytest.mark.parametrize(
    "wrap",
    in_full([in_a_loop, in_shard_map, in_a_branch, jax.checkpoint, jax.jit, under_vmap], first=3),
)
def test_a_culprit_is_found_inside(wrap):
    loss, params, x = network({"first": overflows, "second": harmless}, wrap)
    found = diagnostics.find_float32(loss, F16, tolerance=0.005)(params, x)
    assert found.rules == [("first", "float32")]
    assert found.is_within


def test_a_loop_in_what_must_be_float32_is_float32():
    def loss(params, x):
        def turn(x, w):
            with jax.named_scope("inner"):
                return harmless(w, x), None

        return jnp.mean(overflows(params[0], jax.lax.scan(turn, x, params)[0]) ** 2)

    _, params, x = network(ONE)
    found = diagnostics.find_float32(loss, F16)(params, x)
    assert found.rules == [("", "float32")]
    assert found.errors.gradient < 1e-6


# Float8.


def crushed(w, x):
    """One number takes all of float8's range; bfloat16 and float32 do not mind."""
    return jnp.tanh((x / 10).at[0, 0].set(1e5) @ (10 * w).at[0].set(0.0))


def crushed_backward(w, x):
    """The same in the backward pass: one result is zero, and its cotangent is multiplied."""
    factors = jnp.ones_like(x).at[0, 0].set(1e6)
    return jnp.tanh((x @ w.at[:, 0].set(0.0)) * factors)


@pytest.mark.usefixtures("small_is_float8")
@pytest.mark.parametrize("wrap", in_full([plain, in_a_loop], first=1))
def test_what_float8_cannot_is_found_beside_what_bfloat16_cannot(wrap):
    culprits = {"1": crushed, "2": crushed_backward, "4": cancels}
    loss, params, x = network({str(i): culprits.get(str(i), harmless) for i in range(5)}, wrap)
    given = [("4", "float32")]
    found = diagnostics.find_float32(loss, F8, rules=given)(params, x)
    assert found.rules == [*given, ("1", BF16), ("2", BF16)]
    assert found.tolerance == 0.125 and found.is_within
    assert max(found.all_low) > 0.25
    assert found.kept.keys() == {"1", "2"}
    assert "2 scopes must stay out of float8" in str(found)


# Models of frameworks.


class Top(eqx.Module):
    """Its own operations need float32, the module in it does not. It opens no scopes."""

    layers: list[eqx.nn.Linear]

    def __call__(self, x):
        return overflows(self.layers[0].weight, self.layers[0](x)[None])


def test_modules_that_open_no_scopes_are_named_as_their_adapters_rules_name_them():
    model = Top([eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0))])
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    x = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    found = diagnostics.find_float32(loss, F16)(model, x)
    # A rule for the outermost module would hold for those inside.
    assert found.rules == [("layers/0", F16), ("", "float32")]
    assert found.is_within
    assert "'' is what is in no scope" in str(found)
    lowered = adapters.equinox.autocast(loss, F16, rules=found.rules)
    assert str(jax.make_jaxpr(lowered)(model, x)).count("preferred_element_type=float16") == 1
    again = diagnostics.find_float32(loss, F16, rules=found.rules)(model, x)
    assert again.rules == found.rules and again.is_within


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
    policies = {path: "float32" if keeps else F16 for path, keeps in states.items()}
    rules = rules_for(policies, F16, of_modules=False)
    report = diagnostics.precision_report(loss, F16, rules=rules)(w, w)
    found = {row.module: row.dtype_in == "float32" for row in report.rows if row.kind == "product"}
    assert found == states


# Options and arguments.


def test_a_loss_scale_spares_scopes_whose_gradients_underflow_without_it():
    loss, params, x = network(ONE)
    tiny = lambda params, x: 1e-9 * loss(params, x)
    without = diagnostics.find_float32(tiny, F16)(params, x)
    scaled = diagnostics.find_float32(tiny, F16, scale=2.0**24)(params, x)
    assert sorted(without.rules) == [("layer_0", "float32"), ("layer_1", "float32")]
    assert scaled.rules == [("layer_1", "float32")]
    assert scaled.is_within


def test_options_of_autocast_hold_and_rules_that_were_given_come_first():
    loss, params, x = network(ONE | {"layer_2": overflows})
    loss_and_aux = lambda params, x: (loss(params, x), x)
    given = [("layer_2", "float32")]
    options = {"rules": given, "apply_to": ["x"], "has_aux": True, "argnums": (0, 1)}
    found = diagnostics.find_float32(loss_and_aux, F16, **options)(params, x)
    assert found.rules == [*given, ("layer_1", "float32")]
    assert found.is_within
    assert found.kept.keys() == {"layer_1"}


def test_parameters_in_parts_on_a_mesh():
    sharding = jax.NamedSharding(four_devices(), jax.P(None, "data"))
    loss, params, x = network(ONE)
    found = diagnostics.find_float32(loss, F16)(jax.device_put(params, sharding), x)
    assert found.rules == [("layer_1", "float32")]


def test_a_result_is_short_and_its_data_are_json():
    loss, params, x = network(ONE)
    found = diagnostics.find_float32(loss, F16)(params, x)
    assert "1 scope must stay in float32" in str(found)
    assert "rules=[\n    ('layer_1', 'float32'),\n]" in str(found)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["rules"] == [["layer_1", "float32"]]
    assert data["is_within"] is True
    assert data["kept"] == {"layer_1": list(found.kept["layer_1"])}


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
