"""The nnx adapter: half products, shared Variables, an untouched argument, atomic steps."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import errors, nnx

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import nnx as adapter
from tests.bits import bits
from tests.commands import in_full
from tests.products import operand_dtypes_of, product_dtypes

IMAGES = jnp.ones((2, 4, 4, 3))
TOKENS = jnp.arange(12).reshape(2, 6) % 7


class ScaleNorm(nnx.Module):
    """A norm of the user's own."""

    def __init__(self):
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.gain * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


class Convolutions(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.second = nnx.ConvTranspose(8, 8, (3, 3), rngs=rngs)
        self.group_norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.batch_norm(self.first(x)))
        return self.head(self.second(self.group_norm(x)).mean((1, 2)))


class Sequences(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)])
        self.scale_norm = ScaleNorm()
        cells = (nnx.OptimizedLSTMCell, nnx.LSTMCell, nnx.GRUCell, nnx.SimpleCell)
        self.recurrent = nnx.List([nnx.RNN(cell(8, 8, rngs=rngs)) for cell in cells])
        self.layers = nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.gelu, nnx.Dropout(0.0))
        self.general = nnx.LinearGeneral(16, 8, rngs=rngs)
        self.tied = self.general

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(tokens))
        for layer in self.recurrent:
            x = layer(x)
        x = self.general(self.layers(self.norms[1](x)))
        return self.embed.attend(self.scale_norm(x))


MODELS = {"convolutions": (Convolutions, IMAGES), "sequences": (Sequences, TOKENS)}


def split_loss(model, inputs):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params):
        output = nnx.merge(graph, params, rest, copy=True)(inputs)
        return jnp.sum(output.astype(jnp.float32) ** 2)

    return loss_fn, params


@pytest.mark.parametrize(
    "policy", in_full(["mixed_float16", "O2", "mixed_bfloat16", "O3"], first=1)
)
@pytest.mark.parametrize(("make", "inputs"), MODELS.values(), ids=MODELS.keys())
def test_every_product_is_half_forward_and_backward(make, inputs, policy):
    model = adapter.cast_params(make(nnx.Rngs(0)), policy)
    view = adapter.autocast(model, policy)
    loss_fn, params = split_loss(view, inputs)
    half = jmp.get_policy(policy).compute_dtype.__name__
    assert operand_dtypes_of(jax.make_jaxpr(jax.grad(loss_fn))(params).jaxpr) == {half}
    output = nnx.eval_shape(lambda m: m(inputs), view)
    assert output.dtype == jmp.get_policy(policy).output_dtype


@pytest.mark.parametrize(("make", "inputs"), MODELS.values(), ids=MODELS.keys())
def test_variables_are_shared_and_the_argument_stays_as_it_was(make, inputs):
    model = make(nnx.Rngs(0))
    graph = nnx.graphdef(model)
    view = adapter.autocast(model, "mixed_float16")
    assert isinstance(view, make)
    assert nnx.graphdef(model) == graph
    loss_fn, params = split_loss(model, inputs)
    assert list(product_dtypes(loss_fn, params)) == ["float32"]
    of_model, shared = (
        {path: id(node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)}
        for module in (model, view)
    )
    assert shared == of_model


def test_views_of_one_policy_have_equal_graphs_in_which_one_module_stays_one():
    model = Sequences(nnx.Rngs(0))
    one, two = (adapter.autocast(model, "mixed_float16") for _ in range(2))
    assert nnx.graphdef(one) == nnx.graphdef(two)
    assert one.tied is one.general


def test_cast_params_keeps_norms_and_statistics_and_copies():
    model = Convolutions(nnx.Rngs(0))
    cast = adapter.cast_params(model, "O2", [(nnx.Linear, "float32"), ("first/bias", "float32")])
    assert model.first.kernel[...].dtype == jnp.float32
    flat = nnx.to_flat_state(nnx.state(cast))
    half = {"/".join(path) for path, variable in flat if variable[...].dtype == jnp.float16}
    assert half == {"first/kernel", "second/kernel", "second/bias"}


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


def mean_square(model, inputs):
    return jnp.mean((model(inputs) - 1.0) ** 2)


def test_an_auxiliary_output_comes_along_and_bfloat16_needs_no_scale():
    view = adapter.autocast(Convolutions(nnx.Rngs(0)), "mixed_bfloat16")
    tx = transforms.mixed_precision(optax.adam(1e-2), "mixed_bfloat16")
    optimizer = nnx.Optimizer(view, tx, wrt=nnx.Param)
    assert adapter.loss_scale(optimizer) == jmp.NoOpLossScale()
    loss_fn = lambda m, x: (mean_square(m, x), {"inputs": x})
    step = nnx.jit(lambda m, o, x: adapter.train_step(loss_fn, m, o, x, has_aux=True))
    losses = []
    for _ in range(3):
        loss, aux = step(view, optimizer, IMAGES)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert bits(aux["inputs"]) == bits(IMAGES)


class Regularised(nnx.Module):
    """A network whose calls change its state: statistics, a count of random numbers, a flag."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 2, dtype=jnp.float32, rngs=rngs)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return self.decode(self.encode(x))

    def encode(self, x):
        return self.dropout(nnx.relu(self.batch_norm(self.first(x))))

    def decode(self, x):
        return self.head(x)


ROWS = jax.random.normal(jax.random.key(5), (16, 8))


@pytest.mark.parametrize("way", ["lifted", "view", "lifted in jit"])
def test_what_a_call_changes_is_changed(way):
    model, reference = Regularised(nnx.Rngs(0)), Regularised(nnx.Rngs(0))
    expected = reference(ROWS)
    call = lambda model, x: model(x)
    if way == "view":
        view = adapter.autocast(model, "mixed_float16")
        output, calls = view(ROWS), view.calls
    else:
        lowered = adapter.autocast(call, "mixed_float16")
        output = (nnx.jit(lowered) if "jit" in way else lowered)(model, ROWS)
        calls = model.calls
    assert calls == 1
    assert jnp.allclose(output, expected, atol=1e-2)
    for path, variable in nnx.to_flat_state(nnx.state(reference)):
        got = dict(nnx.to_flat_state(nnx.state(model)))[path]
        if isinstance(variable, nnx.BatchStat | nnx.RngCount):
            assert jnp.allclose(got[...], variable[...], atol=1e-2), path
            assert got[...].dtype == variable[...].dtype


def test_a_lifted_loss_is_differentiated_and_decorates():
    @adapter.autocast(policy="mixed_bfloat16", rules=[("head", "float32")])
    def loss_fn(model, x):
        return jnp.mean(model(x) ** 2)

    model = Regularised(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda params: loss_fn(nnx.merge(graph, params, rest, copy=True), ROWS)
    # The gradient of the first layer's input is nobody's.
    assert product_dtypes(jax.grad(loss), params) == {"bfloat16": 2, "float32": 3}
    value, gradients = nnx.value_and_grad(loss_fn)(model, ROWS)
    assert value.dtype == jnp.float32 and gradients["head"]["kernel"][...].dtype == jnp.float32


def test_modules_inside_a_view_are_lowered_when_called_from_outside():
    view = adapter.autocast(Regularised(nnx.Rngs(0)), "mixed_float16")
    assert product_dtypes(lambda x: view.head(x), ROWS) == {"float16": 1}
    # Other methods run as written, but for the modules they call.
    assert product_dtypes(lambda x: view.decode(x), ROWS) == {"float16": 1}
    encode = adapter.autocast(Regularised.encode, "mixed_float16")
    assert product_dtypes(lambda x: encode(Regularised(nnx.Rngs(0)), x), ROWS) == {"float16": 1}


def products_of(model, call=lambda model, x: model(x)):
    graph, state = nnx.split(model)
    return product_dtypes(lambda state: call(nnx.merge(graph, state, copy=True), ROWS), state)


def test_a_second_policy_replaces_the_first_and_one_inside_stays():
    model = Regularised(nnx.Rngs(0))
    first = adapter.autocast(model, "mixed_float16", rules=[("head", "float32")])
    second = adapter.autocast(first, "mixed_bfloat16")
    assert products_of(second) == {"bfloat16": 2}
    assert products_of(first) == {"float16": 1, "float32": 1}
    model.head = adapter.autocast(model.head, "float32")
    outer = adapter.autocast(model, "mixed_float16")
    assert products_of(outer) == {"float16": 1, "float32": 1}
    lifted = adapter.autocast(lambda model, x: model(x), "mixed_bfloat16")
    assert products_of(second, lifted) == {"bfloat16": 2}
    assert products_of(first, lifted) == {"float16": 1, "float32": 1}


def test_a_view_has_modes_of_its_own():
    model = Regularised(nnx.Rngs(0))
    view = adapter.autocast(model, "mixed_float16")
    view.eval()
    assert view.dropout.deterministic and not model.dropout.deterministic
    before = bits(nnx.as_pure(nnx.state(model, nnx.BatchStat)))
    view(ROWS)
    assert bits(nnx.as_pure(nnx.state(model, nnx.BatchStat))) == before


class Sowing(nnx.Module):
    """A module whose Variables hold what is no single array."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)
        self.absent = nnx.Param(None)

    def __call__(self, x):
        x = self.layer(x)
        self.sow(nnx.Intermediate, "activations", x[0, 0])
        return x


@pytest.mark.parametrize("way", ["lifted", "view"])
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_a_variable_that_grows_keeps_growing(way):
    model = Sowing(nnx.Rngs(0))
    if way == "view":
        call = model = adapter.autocast(model, "mixed_bfloat16")
    else:
        call = functools.partial(adapter.autocast(lambda m, x: m(x), "mixed_bfloat16"), model)
    outputs = [call(ROWS * factor)[0, 0] for factor in (1.0, 2.0, 3.0)]
    assert bits(model.activations.get_value()) == bits(tuple(outputs))


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
    assert bits(lowered(Sowing(nnx.Rngs(0)), ROWS)) != bits(ROWS)


def test_rules_leave_no_trace_in_the_graph():
    model = Regularised(nnx.Rngs(0))
    model(ROWS)
    graph = nnx.graphdef(model)
    rules = [(nnx.Linear, "float32"), ("dropout", "float32")]
    encode = adapter.autocast(Regularised.encode, "mixed_float16", rules=rules)
    encode(model, ROWS)
    assert nnx.graphdef(model) == graph


# A call or a step that fails leaves everything as it was.


class Net(nnx.Module):
    """All that changes in training, and a norm inside a list."""

    def __init__(self, rngs):
        self.body = nnx.Linear(8, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.BatchNorm(4, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.blocks[0](self.body(x)))))


def net_loss(model, x):
    return jnp.mean(model(x) ** 2)


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
    assert "BatchStat blocks/0/mean" in text and "RngCount dropout/rngs/count" in text
    assert "Param" not in text and "nnx.jit" in text and "model.eval()" in text
    assert call(model, ROWS).shape == (16, 3)  # and it runs


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


def test_attributes_that_a_closed_over_model_would_get_are_refused():
    class Counting(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(()))
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            return self.scale * x

    model = Counting()
    before = contents(model)
    with pytest.raises(errors.TraceContextError, match="changes attributes of Counting"):
        jax.make_jaxpr(lambda x: lifted(model, x))(ROWS)
    assert contents(model) == before and model.calls == 0


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


class Judge(nnx.Module):
    """A network of a GAN: its norm has statistics."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return nnx.tanh(self.norm(self.layer(x)))


def judged(judge, maker, x):
    return jnp.mean((judge(maker(x)) - 1) ** 2)


def made(maker, judge, x):
    return jnp.mean(judge(maker(x)) ** 2)


def optimized(seed, tx):
    view = adapter.autocast(Judge(nnx.Rngs(seed)), "mixed_float16")
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
            assert (other.norm.mean[...] != 0).any() and (model.norm.mean[...] != 0).any()
            assert (model.layer.kernel[...] != before[0]["layer"]["kernel"]).any()
    assert bits(ends[0]) == bits(ends[1])


def test_of_two_models_the_one_that_overflows_is_skipped_alone():
    (judge, judge_optimizer), (maker, maker_optimizer) = optimized(0, MIXED), optimized(1, MIXED)
    # The gradients of the judge are 2**126 times too large, the maker's are not.
    state = nnx.as_pure(judge_optimizer.opt_state)
    scale = jmp.DynamicLossScale(2.0**126)
    nnx.update(judge_optimizer.opt_state, nnx.state(transforms.set_loss_scale(state, scale)))

    @nnx.jit
    def step(judge, judge_optimizer, maker, maker_optimizer, x):
        adapter.train_step(judged, judge, judge_optimizer, maker, x)
        adapter.train_step(made, maker, maker_optimizer, judge, x)

    before = values(judge)
    step(judge, judge_optimizer, maker, maker_optimizer, ROWS)
    assert int(judge_optimizer.step[...]) == 0 and int(maker_optimizer.step[...]) == 1
    assert adapter.loss_scale(judge_optimizer).loss_scale == 2.0**125
    assert adapter.loss_scale(maker_optimizer).loss_scale == 2.0**10
    # The judge's statistics come from the one step that was taken, the maker's.
    after = values(judge)[0]
    assert bits(after["layer"]) == bits(before[0]["layer"])
    assert (after["norm"]["mean"] != 0).any()


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
    scale = jmp.StaticLossScale(8.0)
    only = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("norm")))
    of_both = adapter.scaled_value_and_grad(judged, scale, argnums=(0, 1))
    loss, (first, second) = of_both(model, other, ROWS)
    _, of_norm = adapter.scaled_value_and_grad(judged, scale, only)(model, other, ROWS)
    assert loss.dtype == jnp.float32 and set(second) == {"layer", "norm"}
    assert set(of_norm) == {"norm"}
    exact = nnx.grad(judged)(model, other, ROWS)
    for name in ("scale", "bias"):
        assert jnp.allclose(first["norm"][name][...], 8 * exact["norm"][name][...], rtol=1e-2)
        assert jnp.allclose(of_norm["norm"][name][...], first["norm"][name][...], rtol=1e-2)


# Diagnostics of a model in training.


@pytest.mark.parametrize("head", ["float16", "float32"])
@pytest.mark.parametrize("way", ["plain", "view", "wrapped loss"])
def test_reports_take_a_model_in_training_and_show_its_modules_and_what_rules_do(way, head):
    rules = [("head", head)] if head == "float32" else []
    model, loss_fn, options = Net(nnx.Rngs(0)), net_loss, {}
    if way == "view":
        model = adapter.autocast(model, "mixed_float16", rules=rules)
    elif way == "wrapped loss":
        loss_fn = adapter.autocast(net_loss, "mixed_float16", rules=rules)
    else:
        options = {"rules": rules}
    before = contents(model)
    report = diagnostics.precision_report(loss_fn, "mixed_float16", **options)(model, ROWS)
    products = [(row.module, row.dtype_in) for row in report.rows if row.kind == "product"]
    assert products == [("body", "float16"), ("head", head)]
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
    assert {"blocks/0", "dropout"} < set(memory.residual_bytes_by_module)
    assert contents(model) == before


def test_tied_parameters_count_once_in_reports():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.two = self.one

        def __call__(self, x):
            return self.two(self.one(x))

    report = diagnostics.memory_report(lambda m, x: jnp.mean(m(x)), compiled=False)
    assert report(Tied(nnx.Rngs(0)), jnp.ones((2, 4))).parameters == 16


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


def test_a_skipped_step_moves_no_average_of_the_parameters():
    model = adapter.autocast(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "mixed_float16")
    average = nnx.clone(model)
    tx = transforms.mixed_precision(optax.sgd(0.5), "mixed_float16")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, average, optimizer, x):
        with adapter.atomic_step(model, optimizer, average):
            grad_fn = adapter.scaled_value_and_grad(net_loss, adapter.loss_scale(optimizer))
            optimizer.update(model, grad_fn(model, x)[1])
            mean = jax.tree.map(lambda a, b: (a + b) / 2, nnx.state(average), nnx.state(model))
            nnx.update(average, mean)

    kernel = jnp.array(average.kernel[...])
    step(model, average, optimizer, jnp.ones((4, 2)))
    moved = jnp.array(average.kernel[...])
    assert not jnp.array_equal(moved, kernel)
    step(model, average, optimizer, jnp.full((4, 2), jnp.inf))
    assert jnp.array_equal(average.kernel[...], moved) and int(optimizer.step[...]) == 1


def test_keys_with_slashes_name_variables_of_their_own():
    class Two(nnx.Module):
        def __init__(self):
            inner = nnx.Dict({"b": nnx.Param(jnp.ones(3))})
            self.weights = nnx.Dict({"a/b": nnx.Param(jnp.ones(2)), "a": inner})

    report = jmp.diagnostics.range_report(Two())
    assert {row.path: row.size for row in report.rows} == {"weights/a/b": 3, "weights/'a/b'": 2}
