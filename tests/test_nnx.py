"""The nnx adapter: half products, shared Variables, an untouched argument, atomic steps."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmp
from jmp import transforms
from jmp.adapters import nnx as adapter
from tests.bits import bits
from tests.products import product_dtypes

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


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "O2", "O3"])
@pytest.mark.parametrize(("make", "inputs"), MODELS.values(), ids=MODELS.keys())
def test_every_product_is_half_forward_and_backward(make, inputs, policy):
    model = adapter.cast_params(make(nnx.Rngs(0)), policy)
    view = adapter.with_policy(model, policy)
    loss_fn, params = split_loss(view, inputs)
    half = jmp.get_policy(policy).compute_dtype.name
    assert list(product_dtypes(jax.grad(loss_fn), params)) == [half]
    output = nnx.eval_shape(lambda m: m(inputs), view)
    assert output.dtype == jmp.get_policy(policy).output_dtype


@pytest.mark.parametrize(("make", "inputs"), MODELS.values(), ids=MODELS.keys())
def test_variables_are_shared_and_the_argument_stays_as_it_was(make, inputs):
    model = make(nnx.Rngs(0))
    graph = nnx.graphdef(model)
    view = adapter.with_policy(model, "mixed_float16")
    assert isinstance(view, make)
    assert nnx.graphdef(model) == graph
    loss_fn, params = split_loss(model, inputs)
    assert list(product_dtypes(loss_fn, params)) == ["float32"]
    variables_of = lambda module: {
        path: node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)
    }
    shared = variables_of(view)
    for path, variable in variables_of(model).items():
        assert shared.pop(path) is variable
    assert not shared


def test_views_of_one_policy_have_equal_graphs_and_jit_once():
    model = Convolutions(nnx.Rngs(0))
    views = [adapter.with_policy(model, "mixed_float16") for _ in range(2)]
    assert nnx.graphdef(views[0]) == nnx.graphdef(views[1])


def test_a_module_used_twice_stays_one_module():
    view = adapter.with_policy(Sequences(nnx.Rngs(0)), "mixed_float16")
    assert view.tied is view.general


@pytest.mark.parametrize("cast_all", [False, True])
def test_running_statistics_are_float32(cast_all):
    model = Convolutions(nnx.Rngs(0))
    if cast_all:
        nnx.update(model, jmp.cast_to_half(nnx.state(model)))
    view = adapter.with_policy(model, "mixed_float16")
    view(IMAGES)
    assert model.batch_norm.mean[...].dtype == jnp.float32
    assert jnp.any(model.batch_norm.mean[...] != 0)


def test_cast_params_keeps_norms_and_statistics_and_copies():
    model = Convolutions(nnx.Rngs(0))
    cast = adapter.cast_params(model, "O2", [(nnx.Linear, "float32"), ("first/bias", "float32")])
    assert model.first.kernel[...].dtype == jnp.float32
    dtypes = {
        "/".join(map(str, path)): variable[...].dtype.name
        for path, variable in nnx.to_flat_state(nnx.state(cast))
    }
    half = {name for name, dtype in dtypes.items() if dtype == "float16"}
    assert half == {"first/kernel", "second/kernel", "second/bias"}


def test_rules_by_path_and_type():
    model = Convolutions(nnx.Rngs(0))
    count = lambda rules: product_dtypes(
        *split_loss(adapter.with_policy(model, "mixed_float16", rules), IMAGES)
    )
    assert count([("head", "float32")]) == {"float16": 2, "float32": 1}
    assert count([(nnx.Conv, "float32")]) == {"float16": 2, "float32": 1}
    assert count([(re.compile("first|second"), "float32")]) == {"float16": 1, "float32": 2}


def test_a_rule_that_matched_nothing_is_named():
    model = Convolutions(nnx.Rngs(0))
    for function in (adapter.with_policy, adapter.cast_params):
        with pytest.warns(jmp.UnusedRuleWarning, match="'haed'"):
            function(model, "O2", [("haed", "float32")])


def test_a_layer_that_says_float32_is_mentioned():
    model = nnx.Linear(2, 2, dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match="says dtype=float32 and stays in float32"):
        adapter.with_policy(model, "mixed_float16")


def mean_square(model, inputs):
    return jnp.mean((model(inputs) - 1.0) ** 2)


def test_a_skipped_step_moves_no_batch_statistics_nor_anything_else():
    view = adapter.with_policy(Convolutions(nnx.Rngs(0)), "mixed_float16")
    tx = transforms.with_loss_scale(optax.adam(1e-2), jmp.DynamicLossScale(8.0, period=2))
    optimizer = nnx.Optimizer(view, tx, wrt=nnx.Param)
    step = nnx.jit(lambda m, o, x: adapter.train_step(mean_square, m, o, x))

    def everything():
        inner = nnx.as_pure(optimizer.opt_state).inner_state
        return bits((nnx.as_pure(nnx.state(view)), inner, optimizer.step[...]))

    for i, factor in enumerate([jnp.nan, 1.0, 2.0, jnp.inf, 1.0]):
        before, scale = everything(), float(adapter.loss_scale(optimizer).loss_scale)
        loss = step(view, optimizer, IMAGES * factor)
        bad = i in (0, 3)
        assert (everything() == before) == bad
        assert jnp.isfinite(loss) == (not bad) and loss.dtype == jnp.float32
        if bad:
            assert adapter.loss_scale(optimizer).loss_scale == scale / 2
    assert optimizer.step[...] == 3


def test_an_auxiliary_output_comes_along_and_the_loss_falls():
    view = adapter.with_policy(Sequences(nnx.Rngs(0)), "mixed_bfloat16")
    tx = transforms.mixed_precision(optax.adam(1e-2), "mixed_bfloat16")
    optimizer = nnx.Optimizer(view, tx, wrt=nnx.Param)
    assert adapter.loss_scale(optimizer) == jmp.NoOpLossScale()
    loss_fn = lambda m, x: (mean_square(m, x), {"inputs": x})
    step = nnx.jit(lambda m, o, x: adapter.train_step(loss_fn, m, o, x, has_aux=True))
    losses = []
    for _ in range(8):
        loss, aux = step(view, optimizer, TOKENS)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert bits(aux["inputs"]) == bits(TOKENS)


def test_masters_keep_half_parameters_going():
    model = adapter.cast_params(Convolutions(nnx.Rngs(0)), "O2")
    view = adapter.with_policy(model, "O2")
    tx = transforms.mixed_precision(optax.sgd(1e-2), "O2", jmp.StaticLossScale(8.0))
    optimizer = nnx.Optimizer(view, tx, wrt=nnx.Param)
    step = nnx.jit(lambda m, o, x: adapter.train_step(mean_square, m, o, x))
    for _ in range(3):
        step(view, optimizer, IMAGES)
    state = nnx.as_pure(optimizer.opt_state)
    params = nnx.as_pure(nnx.state(view, nnx.Param))
    rounded = jax.tree.map(
        lambda m, p: m.astype(p.dtype), transforms.masters(state, params), params
    )
    assert bits(rounded) == bits(params)
    assert model.first.kernel[...].dtype == jnp.float16


def test_a_loss_that_is_no_number_is_refused_before_anything_changed():
    view = adapter.with_policy(Convolutions(nnx.Rngs(0)), "mixed_float16")
    optimizer = nnx.Optimizer(view, optax.sgd(0.1), wrt=nnx.Param)
    before = bits(nnx.as_pure(nnx.state(view, nnx.Param)))
    with pytest.raises(TypeError, match="expected a real floating scalar"):
        adapter.train_step(lambda m, x: m(x), view, optimizer, IMAGES)
    assert bits(nnx.as_pure(nnx.state(view, nnx.Param))) == before
