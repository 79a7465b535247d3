"""The contract of all adapters, over the rows of `adapter_cases`: one network in each framework."""

import collections
import re
import threading
from collections import OrderedDict
from typing import NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmp
from jmp import adapters, diagnostics, transforms
from testbed.adapter_cases import ADAPTERS, HAIKU_NET, IMAGES, PRODUCTS, mean_square
from tests.bits import bits
from tests.commands import in_full
from tests.products import equations, product_dtypes

pytestmark = pytest.mark.usefixtures("users_rank_promotion")

POLICIES = in_full(["mixed_float16", "O2", "mixed_bfloat16", "O3"], first=2)


def each_of(adapters):
    return pytest.mark.parametrize("adapter", adapters, ids=lambda adapter: adapter.name)


def in_core_of(*names):
    """A test of every adapter, of which `make test` runs those with these names."""
    return each_of(in_full(ADAPTERS, but=names))


every_adapter = each_of(ADAPTERS)


def loss_of(adapter, policy, rules=None, **options):
    forward = adapter.forward(policy, rules, **options)

    def loss_fn(params, statistics):
        output, statistics = forward(params, statistics, IMAGES)
        return mean_square(output), (output, statistics)

    return loss_fn


def products_of(adapter, policy, rules=None, **options):
    """Returns how many forward products there are of each dtype."""
    loss_fn = loss_of(adapter, policy, rules, **options)
    params, statistics = adapter.init()
    return product_dtypes(lambda params: loss_fn(params, statistics)[0], params)


def stored(adapter, policy):
    params, statistics = adapter.init()
    return adapter.cast_params(params, policy), statistics


def dtypes_of(tree):
    return {x.dtype.name for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


@in_core_of("nnx view", "equinox")
@pytest.mark.filterwarnings("ignore:.*was asked for reduce_dtype=float32:UserWarning")  # convs
def test_autocast_is_told_the_dtype_of_reductions(adapter):
    params, statistics = stored(adapter, "mixed_float16")
    gradient = jax.grad(loss_of(adapter, "mixed_float16,r=f32"), has_aux=True)
    program = str(jax.make_jaxpr(gradient)(params, statistics))
    assert re.search(r":f32\[[\d,]*\] = dot_general", program)  # of a weight's gradient


@every_adapter
@pytest.mark.parametrize(
    "policy", in_full(["mixed_float16", "O2", "mixed_bfloat16", "O3"], first=2)
)
def test_every_product_is_half_forward_and_backward(adapter, policy):
    params, statistics = stored(adapter, policy)
    loss_fn = loss_of(adapter, policy)
    half = jmp.get_policy(policy).compute_dtype.__name__
    grad_fn = jax.grad(loss_fn, has_aux=True)
    assert list(product_dtypes(grad_fn, params, statistics)) == [half]
    gradients, (output, _) = jax.eval_shape(grad_fn, params, statistics)
    same = jax.tree.map(lambda g, p: g.dtype == p.dtype, gradients, params)
    assert all(jax.tree.leaves(same))
    expected = jmp.get_policy(policy).output_dtype if adapter.casts_output else None
    assert output.dtype == (expected or output.dtype)


@every_adapter
def test_float8_is_refused_in_every_dtype_of_a_policy_and_of_a_rule(adapter):
    policies = ["p=f8_e5m2,c=f16,o=f16", "p=f16,c=f8_e5m2,o=f16", "p=f16,c=f16,o=f8_e5m2"]
    params, statistics = adapter.init()
    as_rules = [("mixed_float16", [("head", policy)]) for policy in policies]
    for whole, rules in (*((policy, None) for policy in policies), *as_rules):
        with pytest.raises(ValueError, match="is float8_e5m2: float8 is not supported there yet"):
            jax.eval_shape(loss_of(adapter, whole, rules), params, statistics)
        with pytest.raises(ValueError, match="cast_params got the policy .* is float8_e5m2"):
            adapter.cast_params(params, whole, rules)


@every_adapter
@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
@pytest.mark.parametrize("cast_all", [False, True])
def test_a_batch_norm_computes_in_float32_and_what_follows_is_half(adapter, policy, cast_all):
    params, statistics = stored(adapter, policy)
    if cast_all:
        params, statistics = jmp.cast_to_half((params, statistics))
    loss_fn = loss_of(adapter, policy)
    _, (_, updated) = jax.eval_shape(loss_fn, params, statistics)
    assert dtypes_of(updated) == {"float32"}
    jaxpr = jax.make_jaxpr(loss_fn)(params, statistics).jaxpr
    roots = [e for e in equations(jaxpr) if e.primitive.name in ("rsqrt", "sqrt")]
    assert roots and all(e.outvars[0].aval.dtype == jnp.float32 for e in roots)
    relus = [
        equation.outvars[0].aval.dtype.name
        for equation in equations(jaxpr)
        if equation.primitive.name == "max" and getattr(equation.invars[1], "val", None) == 0
    ]
    assert relus and set(relus) == {"float16"}


HALF_CONVOLUTIONS = [("convolution", "mixed_float16"), ("*", "float32")]
IN_FLOAT32 = {  # the policy, rules, options of autocast; how many products are float32
    "nothing": ("mixed_float16", None, {}, 0),
    "a path": ("mixed_float16", [("head", "float32")], {}, 1),
    "a class": ("mixed_float16", [("convolution", "float32")], {}, PRODUCTS - 1),
    "the first rule": ("mixed_float16", HALF_CONVOLUTIONS, {}, 1),
    "the policy": ("float32", HALF_CONVOLUTIONS[:1], {}, 1),
    "an option": ("mixed_float16", None, {"full": {"conv_general_dilated"}}, PRODUCTS - 1),
}


@every_adapter
@pytest.mark.parametrize("what", IN_FLOAT32)
def test_rules_and_options_say_which_products_are_float32(adapter, what):
    policy, rules, options, full = IN_FLOAT32[what]
    if rules:  # an iterator, which can be read once
        rules = ((getattr(adapter, name, name), policy) for name, policy in rules)
    expected = {"float16": PRODUCTS - full, "float32": full}
    found = products_of(adapter, policy, rules, **options)
    assert collections.Counter(found) == collections.Counter(expected)


@every_adapter
def test_cast_params_reads_rules_that_may_be_an_iterator(adapter):
    params, _ = adapter.init()
    cast = lambda rules: bits(adapter.cast_params(params, "O2", rules))
    rules = [("head", "float32")]
    assert cast(iter(rules)) == cast(rules) != cast(())


@every_adapter
def test_a_rule_that_matched_nothing_is_named(adapter):
    params, statistics = adapter.init()
    rules = [("haed", "float32"), ("head", "float32")]
    with pytest.warns(jmp.UnusedRuleWarning, match="'haed'.*paths here are '"):
        jax.eval_shape(loss_of(adapter, "mixed_float16", rules), params, statistics)
    with pytest.warns(jmp.UnusedRuleWarning, match="'haed'.*paths here are '"):
        adapter.cast_params(params, "O2", rules)


@every_adapter
def test_cast_params_keeps_norms_and_can_be_undone(adapter):
    params, _ = adapter.init()
    cast = adapter.cast_params(params, "O2")
    halves = {leaf.size for leaf in jax.tree.leaves(cast) if leaf.dtype == jnp.float16}
    full = [leaf.size for leaf in jax.tree.leaves(cast) if leaf.dtype == jnp.float32]
    assert len(halves) >= 4 and full == [8, 8]  # scale and bias of the BatchNorm
    assert dtypes_of(adapter.cast_params(params, "O2", rules=())) == {"float16"}
    assert dtypes_of(adapter.cast_params(params, "O3")) == {"float16"}
    restored = jmp.cast_to_full(cast)
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    assert dtypes_of(restored) == {"float32"}


ADAM = optax.adam(optax.linear_schedule(1e-2, 0.0, 9))
SCALE = jmp.DynamicLossScale(8.0, period=2)
F16, SCALING = "mixed_float16", transforms.with_loss_scale(optax.identity(), SCALE)
BEHIND_SCALING = optax.chain(SCALING, optax.add_decayed_weights(0.1), ADAM)


@every_adapter
@pytest.mark.parametrize(
    ("policy", "tx"),
    in_full(
        {
            "O2": ("O2", transforms.mixed_precision(ADAM, "O2", SCALE)),
            "mixed_float16": (F16, transforms.mixed_precision(ADAM, F16, SCALE)),
            "with Adam and weight decay behind loss scaling": (F16, BEHIND_SCALING),
        },
        first=1,
    ),
)
def test_a_skipped_step_moves_nothing_but_the_scale_and_all_steps_compile_once(adapter, policy, tx):
    state, step = adapter.trainer(policy, tx)
    scale_of = lambda state: diagnostics.metrics(adapter.opt_state(state))["loss_scale"]
    for i, factor in enumerate([jnp.nan, 1.0, 2.0, jnp.inf, 1.0]):
        before = bits(adapter.everything(state))
        scale = float(scale_of(state))
        state = step(state, IMAGES * factor)
        skipped = i in (0, 3)
        assert (bits(adapter.everything(state)) == before) == skipped
        assert not skipped or scale_of(state) == scale / 2
    assert jmp.all_finite(adapter.everything(state))
    assert step._cache_size() == 1


def test_an_optimizer_behind_loss_scaling_may_start_from_python_numbers():
    update = lambda updates, total, params: (updates, total + updates["w"].sum())
    tx = optax.chain(SCALING, optax.GradientTransformation(lambda params: 1.0, update))
    model = {"w": jnp.ones(2)}
    for factor, expected in ((1.0, 3.0), (jnp.inf, 1.0)):
        loss_fn = lambda model, factor: factor * model["w"].sum()
        step = adapters.equinox.train_step(loss_fn, model, tx.init(model), tx, factor)
        assert step.opt_state[1] == expected


# In the rows of linen and Haiku a plain function calls the wrapped network, and no step can see
# through it. A train state of linen sees what it is given.
MARKED = [adapter for adapter in ADAPTERS if adapter.name not in ("linen", "haiku")]


UNSCALED = {
    "bfloat16's": transforms.mixed_precision(ADAM, "mixed_bfloat16"),
    "float32's": transforms.mixed_precision(ADAM, "float32"),
    "none asked for": transforms.with_loss_scale(ADAM, jmp.NoOpLossScale()),
    "plain": ADAM,
    "a chain": optax.chain(optax.clip(1.0), ADAM),
}
SCALES_NOTHING = "float16, but its optimizer scales no loss"


@each_of(MARKED)
@pytest.mark.parametrize("tx", in_full(UNSCALED, but=("bfloat16's", "a chain")))
def test_a_step_warns_of_an_optimizer_that_scales_nothing_for_a_float16_model(adapter, tx):
    state, step = adapter.trainer("mixed_float16", tx)
    with pytest.warns(jmp.UnscaledLossWarning, match=SCALES_NOTHING):
        step(state, IMAGES)


def test_a_train_state_warns_of_an_optimizer_that_scales_nothing_for_a_float16_model():
    def create(tx, policy="mixed_float16"):
        apply_fn = jax.jit(adapters.linen.autocast(lambda variables: variables["w"], policy))
        params = {"w": jnp.ones(1)}
        return adapters.linen.TrainState.create(apply_fn=apply_fn, params=params, tx=tx)

    with pytest.warns(jmp.UnscaledLossWarning, match=SCALES_NOTHING):
        create(ADAM)
    assert create(ADAM, "mixed_bfloat16").step == 0  # a warning is an error in tests
    checked = transforms.with_loss_scale(ADAM, jmp.StaticLossScale(1.0))  # no scale, and a check
    assert create(checked).loss_scale.loss_scale == 1.0


@in_core_of("nnx view", "haiku")
def test_training_follows_float32(adapter):
    ends = {}
    for policy in ("float32", "mixed_float16"):
        tx = transforms.mixed_precision(optax.sgd(0.1), policy, jmp.StaticLossScale(1024.0))
        state, step = adapter.trainer(policy, tx)
        for _ in range(8):
            state = step(state, IMAGES)
        leaves = jax.tree.leaves(adapter.everything(state))
        leaves = [x.ravel() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        ends[policy] = jnp.concatenate(leaves)
    error = jnp.linalg.norm(ends["mixed_float16"] - ends["float32"])
    assert error <= 5e-3 * jnp.linalg.norm(ends["float32"])


WEIGHT = jnp.ones((3, 3))


class Decorated(eqx.Module):
    """Methods that are no plain functions; each has a product of its own."""

    weight: jax.Array

    @staticmethod
    def double(x):
        return 2 * x

    @jax.jit
    def jitted(self, x):
        return x @ self.weight

    def __call__(self, x):
        return self.jitted(self.double(x))


class DecoratedNnx(nnx.Module):
    def __init__(self, weight):
        self.weight = nnx.Param(weight)

    double = staticmethod(Decorated.double)

    @nnx.jit
    def jitted(self, x):
        return x @ self.weight

    def __call__(self, x):
        return self.jitted(self.double(x))


@pytest.mark.parametrize(
    ("framework", "decorated"), [(adapters.equinox, Decorated), (adapters.nnx, DecoratedNnx)]
)
def test_static_and_decorated_methods_run_in_the_scope_of_a_rule(framework, decorated):
    rules = [(decorated, "float32")]
    loss = framework.autocast(lambda model, x: model.jitted(model(x)), "O1", rules=rules)
    assert product_dtypes(lambda w: loss(decorated(w), WEIGHT), WEIGHT) == {"float32": 2}
    assert jnp.array_equal(loss(decorated(WEIGHT), WEIGHT), 18 * WEIGHT)


class Weightless(eqx.Module):
    """A module without fields."""

    def __call__(self, x):
        return x @ WEIGHT


class Pair(NamedTuple):
    first: eqx.nn.Linear
    second: eqx.nn.Linear


class Containers(eqx.Module):
    pair: Pair
    ordered: OrderedDict

    def __call__(self, x):
        return self.ordered["z"](self.pair.second(self.pair.first(x)))


def test_equinox_modules_in_containers_of_any_class_and_without_fields_are_found():
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    model = Containers(Pair(linear, linear), OrderedDict(z=Weightless()))
    rules = [("pair/first", "float32"), ("ordered/z", "float32")]
    classes = []

    def call(model, x):
        classes.extend(map(type, model.pair))
        return model(x)

    lowered = adapters.equinox.autocast(call, "O1", rules=rules)
    assert product_dtypes(lowered, model, WEIGHT[0]) == {"float16": 1, "float32": 2}
    assert issubclass(classes[0], eqx.nn.Linear)
    assert classes[1] is eqx.nn.Linear  # what no rule names keeps its class
    cast = adapters.equinox.cast_params(model, "O2")
    assert jax.tree.structure(cast) == jax.tree.structure(model)
    assert dtypes_of(cast) == {"float16"}


class Calibrated(eqx.Module):
    """Sets its second field by what it computes with the first."""

    weight: jax.Array
    largest: jax.Array

    def __init__(self, weight):
        self.weight = weight
        call = adapters.equinox.autocast(lambda module, x: x @ module.weight, "mixed_float16")
        self.largest = jnp.max(call(self, weight))


def test_an_equinox_module_may_compute_before_all_its_fields_are_set():
    assert Calibrated(WEIGHT / 3).largest == pytest.approx(1 / 3, abs=1e-3)


def test_haiku_takes_its_state_by_name():
    network = adapters.haiku.autocast(HAIKU_NET, "mixed_float16")
    params, state = jax.jit(HAIKU_NET.init)(jax.random.key(0), IMAGES)
    named = jax.eval_shape(lambda: network.apply(params, state=jmp.cast_to_half(state), x=IMAGES))
    assert dtypes_of(named[1]) == {"float32"}


@pytest.mark.filterwarnings("ignore::jmp.UnusedRuleWarning")
def test_two_threads_may_trace_one_haiku_network():
    is_inside, has_traced = threading.Event(), threading.Event()

    class Slow(hk.Module):
        def __call__(self, x):
            is_inside.set()
            assert has_traced.wait(5)
            return x

    network = hk.transform(lambda x, slow: Slow()(x) if slow else hk.Linear(3)(x))
    network = hk.without_apply_rng(network)
    params = network.init(jax.random.key(0), WEIGHT, False)
    apply = adapters.haiku.autocast(network, "mixed_float16", rules=[(Slow, "float32")]).apply
    thread = threading.Thread(target=lambda: apply({}, WEIGHT, True))
    thread.start()
    assert is_inside.wait(5)
    products = product_dtypes(lambda p: apply(p, WEIGHT, False), params)
    has_traced.set()
    thread.join()
    assert products == {"float16": 1}


def test_haikus_modules_are_named_as_in_the_parameters_and_as_in_the_report():
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 2])(x)))
    variables = jax.eval_shape(network.init, jax.random.key(0), WEIGHT)
    stored, plain = "mlp/~/linear_0", "mlp/linear_0"
    assert stored in variables
    targets = [(plain, stored), ("linear_0", f"/{plain}"), (re.compile(plain), plain)]
    for target, in_report in targets:
        asked = diagnostics.precision_report(network.apply, "O1", rules=[(in_report, "float32")])
        report = asked(variables, WEIGHT)
        products = {row.module: row.dtype_in for row in report.rows if row.kind == "product"}
        assert [path for path, dtype in products.items() if dtype == "float32"] == [plain]
        half = adapters.haiku.autocast(network, "O1", rules=[(target, "float32")])
        assert product_dtypes(half.apply, variables, WEIGHT) == {"float16": 1, "float32": 1}


def test_a_policy_of_haikus_own_beside_that_of_with_policy_is_reported():
    network = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x)))
    params = jax.eval_shape(network.init, jax.random.key(0), WEIGHT)
    half = adapters.haiku.autocast(network, "mixed_float16")
    hk.mixed_precision.set_policy(hk.Linear, jmp.get_policy("half"))
    try:
        with pytest.warns(
            UserWarning, match=r"'Linear' has a policy .*set_policy too.*clear_policy"
        ):
            jax.eval_shape(half.apply, params, WEIGHT)
    finally:
        hk.mixed_precision.clear_policy(hk.Linear)


def test_the_offset_of_haikus_batch_norm_is_held_within_no_range_as_a_mask_is():
    forward = lambda x: hk.Linear(2)(hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(x), True))
    network = hk.without_apply_rng(hk.transform_with_state(forward))
    variables = jax.eval_shape(network.init, jax.random.key(0), WEIGHT)
    report = diagnostics.precision_report(network.apply, "mixed_float16")(*variables, WEIGHT)
    assert not report.decisions


def test_an_equinox_state_outlives_a_step_whose_loss_fails():
    def loss_fn(model, state, x):
        state.set(model.index, x)
        raise RuntimeError("no loss")

    class Remembering(eqx.Module):
        weight: jax.Array
        index: eqx.nn.StateIndex

        def __init__(self):
            self.weight = WEIGHT
            self.index = eqx.nn.StateIndex(WEIGHT)

    model, state = eqx.nn.make_with_state(Remembering)()
    tx = optax.sgd(0.1)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    with pytest.raises(RuntimeError, match="no loss"):
        adapters.equinox.train_step(loss_fn, model, opt_state, tx, WEIGHT, state=state)
    assert jnp.array_equal(state.get(model.index), WEIGHT)


# Rules and reports of Equinox.


class TiedHead(eqx.Module):
    """A decoder whose head is no module: the table, again, in a scope of its own."""

    table: jax.Array
    blocks: list[eqx.nn.Linear]

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 3)
        self.table = jax.random.normal(keys[0], (16, 8))
        self.blocks = [eqx.nn.Linear(8, 8, key=key) for key in keys[1:]]

    def __call__(self, tokens):
        x = self.table[tokens]
        for block in self.blocks:
            x = jnp.tanh(jax.vmap(block)(x))
        with jax.named_scope("logits"):
            return x @ self.table.T


def next_token_loss(model, tokens):
    return -jnp.mean(jax.nn.log_softmax(model(tokens))[:, 0])


TOKENS = jnp.arange(16)


@pytest.mark.parametrize(
    ("rules", "in_float32"),
    [
        ([("logits", "float32")], [False, False, True]),
        ([("eqx.nn.Linear", "float32"), ("blocks/0", "O2")], [False, True, False]),
        ([(re.compile("blocks/1|logits"), "float32")], [False, True, True]),
        ([("blocks/1", "O2"), ("", "float32")], [True, False, True]),
    ],
)
def test_rules_of_equinox_name_modules_and_then_scopes_in_training_as_in_reports(rules, in_float32):
    model, options = TiedHead(), {"rules": rules}
    trained = adapters.equinox.autocast(next_token_loss, "O2", **options)
    reports = [
        diagnostics.precision_report(next_token_loss, "O2", **options)(model, TOKENS),
        diagnostics.precision_report(trained, "O2")(model, TOKENS),
    ]
    for report in reports:
        rows = [row for row in report.rows if row.kind == "product"]
        assert [row.dtype_in == "float32" for row in rows] == in_float32
    # The float32 products are what was asked for; their price is named.
    assert all("HIGHEST precision" in hazard for hazard in reports[0].hazards)


def test_a_rule_of_equinox_that_names_neither_is_reported_at_the_users_line():
    trained = adapters.equinox.autocast(next_token_loss, "O2", rules=[("logit", "float32")])
    with pytest.warns(jmp.UnusedRuleWarning, match="'logit'.*paths here are 'logits'") as caught:
        jax.eval_shape(eqx.filter_grad(trained), TiedHead(), TOKENS)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_memory_of_an_equinox_model_with_functions_among_its_leaves_is_counted():
    model = eqx.nn.MLP(8, 1, 16, 1, key=jax.random.key(0))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    tx = transforms.mixed_precision(optax.adam(1e-3), "O2")
    count = diagnostics.memory_report(loss, optimizer=tx, compiled=False)
    parts = count(adapters.equinox.cast_params(model, "O2"), jnp.ones((4, 8))).parts
    numbers = 8 * 16 + 16 + 16 + 1
    assert parts["parameters"] == 2 * numbers and parts["optimizer"] > 12 * numbers  # with masters


def test_an_update_of_equinox_that_widens_half_parameters_is_named_in_the_next_step():
    tx = transforms.mixed_precision(optax.sgd(0.1), "O2")
    params = {"w": jnp.ones(2, jnp.float16)}
    updates, state = tx.update(params, tx.init(params), params)
    ours = adapters.equinox.apply_updates
    kept, also_kept, widened = (
        apply(params, updates) for apply in (optax.apply_updates, ours, eqx.apply_updates)
    )
    assert kept["w"].dtype == jnp.float16 and bits(kept) == bits(also_kept)
    frozen = {"w": None}  # as equinox.apply_updates takes it
    assert bits(ours(params, frozen)) == bits(eqx.apply_updates(params, frozen)) == bits(params)
    with pytest.raises(ValueError, match="a half dtype.*optax.apply_updates does, apply_updates o"):
        tx.update(params, state, widened)
