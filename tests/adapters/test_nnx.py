"""The nnx adapter: half products, shared Variables, an untouched argument, atomic steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import nnx as adapter
from tests.bits import bits
from tests.products import product_dtypes

ROWS = jax.random.normal(jax.random.key(5), (16, 8))


class Net(nnx.Module):
    """All that changes in training: statistics, of a norm in a list, and random numbers.

    The head stands in two places.
    """

    def __init__(self, rngs):
        self.body = nnx.Linear(8, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.BatchNorm(8, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 8, dtype=jnp.float32, rngs=rngs)
        self.tail = self.head

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return self.dropout(nnx.relu(self.blocks[0](self.body(x))))

    def decode(self, x):
        return self.tail(x)


def net_loss(model, x):
    return jnp.mean(model(x) ** 2)


class Counting(Net):
    """The same, with an attribute and Variables that each call changes."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = 0
        self.absent = nnx.Param(None)

    def __call__(self, x):
        self.calls += 1
        self.sow(nnx.Intermediate, "activations", x[0, 0])
        return super().__call__(x)


def test_variables_are_shared_and_the_argument_stays_as_it_was():
    model = Net(nnx.Rngs(0))
    graph = nnx.graphdef(model)
    one, two = (adapter.autocast(model, "mixed_float16") for _ in range(2))
    assert nnx.graphdef(one) == nnx.graphdef(two)
    assert isinstance(one, Net) and one.tail is one.head
    assert nnx.graphdef(model) == graph
    assert products_of(model) == {"float32": 2}
    of_model, shared = (
        {path: id(node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)}
        for module in (model, one)
    )
    assert shared == of_model


def test_cast_params_keeps_norms_and_statistics_and_copies():
    model = Net(nnx.Rngs(0))
    cast = adapter.cast_params(model, "O2", [("head", "float32"), ("body/bias", "float32")])
    assert model.body.kernel[...].dtype == jnp.float32
    flat = nnx.to_flat_state(nnx.state(cast))
    half = {path for path, variable in flat if variable[...].dtype == jnp.float16}
    assert half == {("body", "kernel")}


class Containers(nnx.Module):
    def __init__(self, rngs):
        self.parts = nnx.data({"a": nnx.Linear(8, 8, rngs=rngs), "b": nnx.Linear(8, 8, rngs=rngs)})
        self.pair = nnx.data((nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)))

    def __call__(self, x):
        for part in (*self.parts.values(), *self.pair):
            x = part(x)
        return x


def test_modules_in_containers_are_found_by_key_and_by_index():
    rules = [("parts/a", "float32"), ("pair/1", "float32")]
    view = adapter.autocast(Containers(nnx.Rngs(0)), "mixed_float16", rules=rules)
    assert product_dtypes(lambda x: view(x), ROWS) == {"float16": 2, "float32": 2}
    # A call from outside finds them too.
    assert product_dtypes(lambda x: view.parts["a"](view.pair[1](x)), ROWS) == {"float32": 2}


GROWS = pytest.mark.filterwarnings("ignore:Using 'Module.sow")


@GROWS
@pytest.mark.parametrize("way", ["lifted", "view", "lifted in jit"])
def test_what_a_call_changes_is_changed(way):
    model, reference = Counting(nnx.Rngs(0)), Counting(nnx.Rngs(0))
    lowered = adapter.autocast(lambda model, x: model(x), "mixed_float16")
    if way == "view":
        model = adapter.autocast(model, "mixed_float16")
        call = lambda model, x: model(x)
    else:
        call = nnx.jit(lowered) if "jit" in way else lowered
    for calls in (1, 2):
        assert jnp.allclose(call(model, ROWS), reference(ROWS), atol=1e-2)
        assert model.calls == calls
    assert bits(model.activations.get_value()) == bits(reference.activations.get_value())
    for path, variable in nnx.to_flat_state(nnx.state(reference)):
        got = dict(nnx.to_flat_state(nnx.state(model)))[path]
        if isinstance(variable, nnx.BatchStat | nnx.RngCount):
            assert jnp.allclose(got[...], variable[...], atol=1e-2), path
            assert got[...].dtype == variable[...].dtype


class Scaled(nnx.Module):
    """Arrays as attributes, without Variables: constants, and a count that each call changes."""

    def __init__(self, rngs):
        self.body = nnx.WeightNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
        self.scale, self.offset = jnp.full((1, 8), 2.0), np.ones((1, 8), np.float32)
        self.calls = jnp.array(0)

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.body(x * self.scale + self.offset)


@pytest.mark.parametrize("way", ["view", "loss"])
def test_arrays_may_be_attributes_of_modules(way):
    model = Scaled(nnx.Rngs(0))
    loss_fn = adapter.autocast(net_loss, "mixed_float16") if way == "loss" else net_loss
    if way == "view":
        model = adapter.autocast(model, "mixed_float16")
    tx = transforms.mixed_precision(optax.sgd(0.1), "mixed_float16", jmp.StaticLossScale(8))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(lambda *args: adapter.train_step(loss_fn, *args))
    loss = step(model, optimizer, ROWS)
    assert jnp.allclose(loss, net_loss(Scaled(nnx.Rngs(0)), ROWS), rtol=1e-3)
    assert int(model.calls) == 1
    diagnostics.assert_products_in(loss_fn, jnp.float16)(model, ROWS)


class Sowing(nnx.Module):
    def __init__(self):
        self.body = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "hidden", self.body(x))
        return x


@pytest.mark.parametrize("way", ["view", "function"])
def test_what_a_call_sows_is_captured(way):
    fun = view = adapter.autocast(Sowing(), "mixed_float16")
    args = (ROWS,)
    if way == "function":
        fun, args = adapter.autocast(Sowing.__call__, "mixed_float16"), (Sowing(), ROWS)
    _, captured = nnx.capture(fun, nnx.Intermediate)(*args)
    (hidden,) = jax.tree.leaves(captured)
    assert jnp.allclose(hidden, view.body(ROWS), rtol=1e-2, atol=1e-2)


def test_a_lifted_loss_is_differentiated_and_decorates():
    @adapter.autocast(policy="mixed_bfloat16", rules=[("head", "float32")])
    def loss_fn(model, x):
        return jnp.mean(model(x) ** 2)

    model = Net(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda params: loss_fn(nnx.merge(graph, params, rest, copy=True), ROWS)
    # The gradient of the first layer's input is nobody's.
    assert product_dtypes(jax.grad(loss), params) == {"bfloat16": 2, "float32": 3}
    value, gradients = nnx.value_and_grad(loss_fn)(model, ROWS)
    assert value.dtype == jnp.float32 and gradients["head"]["kernel"][...].dtype == jnp.float32


def test_modules_inside_a_view_are_lowered_when_called_from_outside():
    view = adapter.autocast(Net(nnx.Rngs(0)), "mixed_float16")
    assert product_dtypes(lambda x: view.head(x), ROWS) == {"float16": 1}
    # Other methods run as written, but for the modules they call.
    assert product_dtypes(lambda x: view.decode(x), ROWS) == {"float16": 1}
    encode = adapter.autocast(Net.encode, "mixed_float16")
    assert product_dtypes(lambda x: encode(Net(nnx.Rngs(0)), x), ROWS) == {"float16": 1}


def products_of(model, call=lambda model, x: model(x)):
    graph, state = nnx.split(model)
    return product_dtypes(lambda state: call(nnx.merge(graph, state, copy=True), ROWS), state)


def test_a_second_policy_replaces_the_first_and_one_inside_stays():
    model = Net(nnx.Rngs(0))
    first = adapter.autocast(model, "mixed_float16", rules=[("head", "float32")])
    second = adapter.autocast(first, "mixed_bfloat16")
    assert products_of(second) == {"bfloat16": 2}
    assert products_of(first) == {"float16": 1, "float32": 1}
    model.head = model.tail = adapter.autocast(model.head, "float32")
    outer = adapter.autocast(model, "mixed_float16")
    assert products_of(outer) == {"float16": 1, "float32": 1}
    lifted = adapter.autocast(lambda model, x: model(x), "mixed_bfloat16")
    assert products_of(second, lifted) == {"bfloat16": 2}
    assert products_of(first, lifted) == {"float16": 1, "float32": 1}


def test_a_view_has_modes_of_its_own():
    model = Net(nnx.Rngs(0))
    view = adapter.autocast(model, "mixed_float16")
    view.eval()
    assert view.dropout.deterministic and not model.dropout.deterministic
    before = bits(nnx.as_pure(nnx.state(model, nnx.BatchStat)))
    view(ROWS)
    assert bits(nnx.as_pure(nnx.state(model, nnx.BatchStat))) == before


def test_a_jitted_part_keeps_no_scope_of_other_rules():
    part = nnx.jit(lambda layer, x: layer(x))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return part(self.layer, x)

    view = adapter.autocast(Model(nnx.Rngs(0)), "mixed_bfloat16")
    view(ROWS)
    assert bits(part(view.layer, ROWS)) == bits(view.layer(ROWS))


def test_options_name_the_functions_arguments():
    lowered = adapter.autocast(lambda model, x: x * 1.0, "mixed_bfloat16", apply_to=("x",))
    assert bits(lowered(Net(nnx.Rngs(0)), ROWS)) != bits(ROWS)


def test_rules_leave_no_trace_in_the_graph():
    model = Net(nnx.Rngs(0))
    model(ROWS)
    graph = nnx.graphdef(model)
    rules = [(nnx.Linear, "float32"), ("dropout", "float32")]
    encode = adapter.autocast(Net.encode, "mixed_float16", rules=rules)
    encode(model, ROWS)
    assert nnx.graphdef(model) == graph


# A call or a step that fails leaves everything as it was.


def contents(*nodes):
    """The names of all attributes, the Variables themselves, and their arrays."""
    found = [node for _, node in nnx.iter_graph(nodes)]
    names = [sorted(vars(node)) for node in found if isinstance(node, nnx.Pytree)]
    variables = [node for node in found if isinstance(node, nnx.Variable)]
    return names, [(id(v), id(v.get_raw_value())) for v in variables]


def lifted(model, x):
    return adapter.autocast(lambda model, x: model(x), "mixed_float16")(model, x)


@pytest.mark.parametrize(("way", "trace"), [("view", jax.jit), ("autocast", jax.make_jaxpr)])
def test_a_closed_over_model_in_training_is_refused_and_stays_whole(way, trace):
    model = Net(nnx.Rngs(0))
    call = lifted
    if way == "view":
        model, call = adapter.autocast(model, "mixed_float16"), lambda model, x: model(x)
    before = contents(model)
    with pytest.raises(errors.TraceContextError) as caught:
        trace(lambda x: call(model, x))(ROWS)
    assert contents(model) == before
    text = str(caught.value)
    assert "A call changes a Net" in text and "nnx.jit" in text and "model.eval()" in text
    assert call(model, ROWS).shape == (16, 8)  # and it runs


@GROWS
def test_attributes_that_a_closed_over_model_would_get_are_refused():
    model = Counting(nnx.Rngs(0))
    before = contents(model)
    with pytest.raises(errors.TraceContextError, match="changes a Counting"):
        jax.make_jaxpr(lambda x: lifted(model, x))(ROWS)
    assert contents(model) == before and model.calls == 0


def test_a_closed_over_model_that_does_not_change_is_no_obstacle_to_one_that_does():
    teacher, student = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    teacher.eval()

    @nnx.jit
    def both(student, x):
        run = adapter.autocast(lambda models, x: models[0](x) - models[1](x), "mixed_float16")
        return run((teacher, student), x)

    mean = student.blocks[0].mean[...]
    both(student, ROWS)
    assert not jnp.array_equal(student.blocks[0].mean[...], mean)


def test_an_error_while_a_model_is_written_leaves_it_whole(monkeypatch):
    model = Net(nnx.Rngs(0))
    before = contents(model)

    def fail(self, state):
        raise KeyboardInterrupt

    monkeypatch.setattr(nnx.Param, "update_from_state", fail)
    with pytest.raises(KeyboardInterrupt):
        lifted(model, ROWS)
    assert contents(model) == before


def test_a_step_whose_optimizer_fails_changes_nothing():
    def fail(updates, state, params=None):
        model.scale.set_metadata(noted=True)
        raise RuntimeError("no step")

    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), fail)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = contents(model, optimizer), model.scale.get_metadata()
    with pytest.raises(RuntimeError, match="no step"):
        adapter.train_step(net_loss, model, optimizer, ROWS)
    assert (contents(model, optimizer), model.scale.get_metadata()) == before


# Steps of one's own.


def judged(judge, maker, x):
    return jnp.mean((judge(maker(x)) - 1) ** 2)


def optimized(seed, tx):
    view = adapter.autocast(Net(nnx.Rngs(seed)), "mixed_float16")
    return view, nnx.Optimizer(view, tx, wrt=nnx.Param)


MIXED = transforms.mixed_precision(optax.adam(1e-2), "mixed_float16", jmp.DynamicLossScale(2.0**10))


def values(*nodes):
    return nnx.as_pure(nnx.state(nodes, nnx.Not(nnx.RngState)))


@pytest.mark.parametrize("x", [ROWS, ROWS.at[0, 0].set(jnp.inf)], ids=["taken", "skipped"])
def test_a_step_of_ones_own_is_train_step_bit_by_bit(x):
    @nnx.jit
    def own_step(model, optimizer, other, x):
        with adapter.atomic_step(model, optimizer, other):
            grad_fn = adapter.scaled_value_and_grad(judged, adapter.loss_scale(optimizer))
            loss, grads = grad_fn(model, other, x)
            norm = optax.tree.norm(adapter.loss_scale(optimizer).unscale(nnx.as_pure(grads)))
            optimizer.update(model, grads)
        return loss, norm

    @nnx.jit
    def step(model, optimizer, other, x):
        return adapter.train_step(judged, model, optimizer, other, x)

    ends = []
    for take in (own_step, step):
        (model, optimizer), (other, _) = optimized(0, MIXED), optimized(1, MIXED)
        before = values(model, other)
        result = take(model, optimizer, other, x)
        ends.append((values(model, optimizer, other), jax.tree.leaves(result)[0]))
        is_skipped = bool(jnp.isinf(x).any())
        assert bool(jnp.isfinite(jax.tree.leaves(result)[-1])) != is_skipped
        assert int(optimizer.step[...]) == (not is_skipped)
        if is_skipped:
            assert bits(values(model, other)) == bits(before)
        else:  # the statistics of both have moved, and the parameters of the first
            assert all((net.blocks[0].mean[...] != 0).any() for net in (model, other))
            assert (model.head.kernel[...] != before[0]["head"]["kernel"]).any()
    assert bits(ends[0]) == bits(ends[1])


def test_a_skipped_step_moves_no_average_of_the_parameters():
    @nnx.jit
    def step(model, optimizer, average, x):
        with adapter.atomic_step(model, optimizer, average):
            grad_fn = adapter.scaled_value_and_grad(net_loss, adapter.loss_scale(optimizer))
            optimizer.update(model, grad_fn(model, x)[1])
            nnx.update(average, jax.tree.map(lambda p: p / 2, nnx.state(model, nnx.Param)))

    model = adapter.autocast(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "mixed_float16")
    optimizer, average = nnx.Optimizer(model, MIXED, wrt=nnx.Param), nnx.clone(model)
    before = values(average)
    step(model, optimizer, average, ROWS.at[0, 0].set(jnp.inf))
    assert bits(values(average)) == bits(before)
    step(model, optimizer, average, ROWS)
    assert (average.kernel[...] == model.kernel[...] / 2).all()


@pytest.mark.parametrize(
    ("is_updated", "refused"),
    [
        (True, pytest.raises(RuntimeError, match="in between")),
        (False, pytest.raises(ValueError, match=r"expected optimizer.update\(model, gradients\)")),
    ],
    ids=["error", "no update"],
)
def test_a_step_of_ones_own_that_fails_or_updates_nothing_changes_nothing(is_updated, refused):
    (model, optimizer), (other, _) = optimized(0, MIXED), optimized(1, MIXED)
    before = contents(model, optimizer, other)
    with refused, adapter.atomic_step(model, optimizer, other):
        grad_fn = adapter.scaled_value_and_grad(judged, adapter.loss_scale(optimizer))
        _, grads = grad_fn(model, other, ROWS)
        if is_updated:
            optimizer.update(model, grads)
            raise RuntimeError("in between")
    assert contents(model, optimizer, other) == before


def test_gradients_are_of_what_argnums_names():
    (model, _), (other, _) = optimized(0, MIXED), optimized(1, MIXED)
    model.eval()
    other.eval()
    scale = jmp.StaticLossScale(8.0)
    only = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("blocks")))
    of_both = adapter.scaled_value_and_grad(judged, scale, argnums=(0, 1))
    loss, (first, second) = of_both(model, other, ROWS)
    _, of_norm = adapter.scaled_value_and_grad(judged, scale, only)(model, other, ROWS)
    assert loss.dtype == jnp.float32 and set(second) == {"body", "blocks", "head"}
    assert set(of_norm) == {"blocks"}
    exact = nnx.grad(judged)(model, other, ROWS)
    norms = [gradients["blocks"][0] for gradients in (exact, first, of_norm)]
    for name in ("scale", "bias"):
        expected, *found = (norm[name][...] for norm in norms)
        assert all(jnp.allclose(got, 8 * expected, rtol=2e-2, atol=1e-5) for got in found)


# Diagnostics of a model in training.


@pytest.mark.parametrize("way", ["plain", "view", "wrapped loss"])
def test_reports_take_a_model_in_training_and_show_its_modules_and_what_rules_do(way):
    model, loss_fn, options = Net(nnx.Rngs(0)), net_loss, {"rules": [("head", "float32")]}
    if way == "view":
        model, options = adapter.autocast(model, "mixed_float16", **options), {}
    elif way == "wrapped loss":
        loss_fn, options = adapter.autocast(net_loss, "mixed_float16", **options), {}
    before = contents(model)
    report = diagnostics.precision_report(loss_fn, "mixed_float16", **options)(model, ROWS)
    products = [(row.module, row.dtype_in) for row in report.rows if row.kind == "product"]
    assert products == [("body", "float16"), ("head", "float32")]
    assert "blocks/0" in {row.module for row in report.rows}
    assert contents(model) == before


PARAMETERS = {f"{layer}/{name}" for layer in ("body", "head") for name in ("kernel", "bias")}
PARAMETERS |= {"blocks/0/scale", "blocks/0/bias"}


def test_parameters_alone_are_differentiated_in_a_model_in_training():
    model = Net(nnx.Rngs(0))
    before = contents(model)
    given = model, ROWS
    comparison = diagnostics.compare(net_loss, "mixed_float16")(*given)
    assert {row.path for row in comparison.rows if row.kind == "gradient"} == PARAMETERS
    ranges = diagnostics.gradient_report(net_loss, "mixed_float16")(*given)
    assert {row.path for row in ranges.rows if row.role == "gradient"} == PARAMETERS
    assert "head" in {row.path for row in ranges.rows if row.role == "activation"}
    optimizer = optax.adam(1e-3)
    memory = diagnostics.memory_report(net_loss, optimizer=optimizer, compiled=False)(*given)
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert memory.parameters == count
    assert memory.optimizer_bytes == {"float32": 8 * count, "int32": 4}
    assert {"blocks/0", "dropout"} < {row.module for row in memory.residuals}
    assert contents(model) == before


def test_shared_variables_count_once_and_keys_with_slashes_name_their_own():
    class Two(nnx.Module):
        def __init__(self):
            inner = nnx.Dict({"b": nnx.Param(jnp.ones(3))})
            self.weights = nnx.Dict({"a/b": nnx.Param(jnp.ones(2)), "a": inner})
            self.weights_again = self.weights

    report = diagnostics.range_report(Two())
    assert {row.path: row.size for row in report.rows} == {"weights/a/b": 3, "weights/'a/b'": 2}


def test_modules_in_loops_and_abstract_models_are_named_by_their_whole_path():
    class Recurrent(nnx.Module, pytree=False):
        def __init__(self, rngs):
            self.layers = [nnx.RNN(nnx.SimpleCell(8, 8, rngs=rngs))]
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            return self.dropout(self.layers[0](x[None]), rngs=rngs)

    model = nnx.eval_shape(lambda: Recurrent(nnx.Rngs(0)))
    loss = lambda model, x, rngs: jnp.mean(model(x, rngs) ** 2)
    report = diagnostics.precision_report(loss, "mixed_float16")(model, ROWS, nnx.Rngs(1))
    modules = {row.module for row in report.rows if row.kind == "product"}
    assert modules == {"layers/0/cell/dense_i", "layers/0/cell/dense_h"}


def test_assertions_take_a_view_a_method_and_a_step_in_training():
    view = adapter.autocast(Net(nnx.Rngs(0)), "mixed_float16")
    tx = transforms.mixed_precision(optax.sgd(0.1), "mixed_float16")
    optimizer = nnx.Optimizer(view, tx, wrt=nnx.Param)
    step = nnx.jit(lambda *given: adapter.train_step(net_loss, *given))
    before = contents(view, optimizer)
    diagnostics.assert_products_in(view, jnp.float16)(ROWS)
    diagnostics.assert_products_in(view.__call__, jnp.float16)(ROWS)
    diagnostics.assert_products_in(step, jnp.float16)(view, optimizer, ROWS)
    with pytest.raises(AssertionError, match=r"\(head\)"):
        diagnostics.assert_products_in(Net(nnx.Rngs(0)), jnp.float16)(ROWS)
    assert contents(view, optimizer) == before


# Steps with what optax takes beside gradients, and in float32 by mistake.

BATCH = jnp.linspace(-1, 1, 32).reshape(16, 2)


def squared(model, x):
    return (model(x) ** 2).mean() + 1.0


def on_a_plateau(policy):
    slower = optax.contrib.reduce_on_plateau(patience=0, factor=0.5)
    return transforms.mixed_precision(optax.chain(optax.sgd(0.0), slower), policy)


@pytest.mark.parametrize("kind", [nnx.Optimizer, nnx.ModelAndOptimizer])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_loss_reaches_an_optimizer_that_asks_for_it(policy, kind):
    view = adapter.autocast(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), policy)
    optimizer = kind(view, on_a_plateau(policy), wrt=nnx.Param)
    step = nnx.jit(lambda model, optimizer, x: adapter.train_step(squared, model, optimizer, x))
    losses = [step(view, optimizer, BATCH) for _ in range(2)]
    state = nnx.as_pure(optimizer.opt_state).inner_state[1]
    assert state.best_value == losses[0] and state.scale == 0.5
    given = {"value": jnp.float32(-1.0)}
    adapter.train_step(squared, view, optimizer, BATCH, extra_args=given)
    assert nnx.as_pure(optimizer.opt_state).inner_state[1].best_value == -1.0
    with_aux = lambda model, x: (squared(model, x), {"inputs": x})
    loss, aux = adapter.train_step(with_aux, view, optimizer, BATCH, has_aux=True)
    assert loss.shape == () and bits(aux["inputs"]) == bits(BATCH)


@pytest.mark.filterwarnings("ignore::jmp.UnscaledLossWarning")
def test_a_transformation_that_takes_gradients_alone_is_given_no_more():
    view = adapter.autocast(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    plain = optax.GradientTransformation(lambda _: (), lambda grads, state, params: (grads, state))
    optimizer = nnx.Optimizer(view, plain, wrt=nnx.Param)
    assert adapter.train_step(squared, view, optimizer, BATCH).dtype == jnp.float32


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_an_optimizer_says_whether_its_last_step_was_taken(policy):
    model = adapter.autocast(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), policy)
    tx = transforms.mixed_precision(optax.sgd(0.1), policy)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert adapter.grads_finite(optimizer)
    adapter.train_step(squared, model, optimizer, jnp.full((4, 2), jnp.inf))
    assert adapter.grads_finite(optimizer) == (policy == "mixed_bfloat16")  # nothing is checked
    with pytest.raises(TypeError, match="expected an nnx.Optimizer"):
        adapter.grads_finite(model)


@pytest.mark.parametrize("masters", [None, "none"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_model_in_the_place_of_its_view_is_warned_of(policy, masters):
    model = linear()
    tx = transforms.mixed_precision(optax.sgd(0.1), policy, masters=masters)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.warns(jmp.NoHalfProductWarning, match=r"trains in float32. Pass the view"):
        adapter.train_step(squared, model, optimizer, BATCH)


def linear():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


class ByHand(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.eye(2))

    def __call__(self, x):
        return (x.astype(jnp.float16) @ self.kernel[...].astype(jnp.float16)).astype(jnp.float32)


def view_inside():
    return nnx.Sequential(adapter.autocast(linear(), "mixed_float16"))


def without_products(model, x):
    return (model.kernel[...] ** 2).sum() + 0 * model.bias[...].sum()


HALF_OR_NO_PRODUCTS = {
    "by hand": (ByHand, squared, "mixed_float16"),
    "view inside": (view_inside, squared, "mixed_float16"),
    "autocast": (linear, adapter.autocast(squared, "mixed_float16"), "mixed_float16"),
    "no products": (linear, without_products, "mixed_float16"),
    "float32": (linear, squared, "float32"),
}


@pytest.mark.parametrize("how", HALF_OR_NO_PRODUCTS)
def test_what_has_a_half_product_or_none_at_all_is_not_warned_of(how):
    make, loss, policy = HALF_OR_NO_PRODUCTS[how]
    model = make()
    tx = transforms.mixed_precision(optax.sgd(0.1), policy)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    adapter.train_step(loss, model, optimizer, BATCH)  # a warning is an error in tests
    assert int(optimizer.step[...]) == 1
