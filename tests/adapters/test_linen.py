"""The linen adapter: which products are half, what stays float32, what a skip does not change."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp
from jmp import transforms
from jmp.adapters import linen
from tests.products import operand_dtypes_of, product_dtypes

IMAGES = jnp.ones((2, 4, 4, 3))
TOKENS = jnp.arange(12).reshape(2, 6) % 7


class Raw(nn.Module):
    """A module of the user's own, with a product of its own."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 8))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3))(x)))
        x = nn.GroupNorm(2)(nn.ConvTranspose(8, (3, 3))(x))
        x = nn.InstanceNorm()(nn.Conv(8, (3, 3), feature_group_count=2)(x))
        return nn.Dense(3)(x.mean((1, 2)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(nn.DenseGeneral(16)(nn.RMSNorm()(x + y))))


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Block()(x).astype(x.dtype), None


class Transformer(nn.Module):
    """Blocks as they are, computed again in a scan, and side by side; and a tied head."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, 8)
        x = embed(tokens) + self.param("position", nn.initializers.normal(), (1, 6, 8))
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(ScannedBlock), length=2, **split)()(Block()(x), None)
        x = nn.vmap(nn.Dense, in_axes=None, axis_size=3, **split)(8)(x).sum(0)
        return embed.attend(nn.WeightNorm(Raw())(x))


MODELS = {"convolutions": (Convolutions(), IMAGES), "transformer": (Transformer(), TOKENS)}


@functools.cache
def variables_of(name):
    """The shapes of a model's variables."""
    model, inputs = MODELS[name]
    return jax.eval_shape(model.init, jax.random.key(0), inputs)


@pytest.mark.parametrize("policy", ["mixed_float16", "O3"])
@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_half_forward_and_backward_and_the_plain_model_stays(name, policy):
    (model, inputs), variables = MODELS[name], variables_of(name)
    plain = lambda v: model.apply(v, inputs, mutable=["batch_stats"])
    before = product_dtypes(plain, variables)
    apply_fn = linen.autocast(model.apply, policy)

    def loss_fn(variables):
        output, _ = apply_fn(variables, inputs, mutable=["batch_stats"])
        return jnp.sum(output.astype(jnp.float32) ** 2), output

    stored = jax.eval_shape(lambda v: linen.cast_params(v, policy), variables)
    gradient = jax.grad(loss_fn, has_aux=True)
    program, (_, output) = jax.make_jaxpr(gradient, return_shape=True)(stored)
    assert operand_dtypes_of(program.jaxpr) == {"float16"}
    assert output.dtype == jmp.get_policy(policy).output_dtype
    with pytest.raises(Exception):  # noqa: B017 - whatever Flax says of such a shape
        jax.eval_shape(apply_fn, variables, jnp.ones((1, 1, 1, 1, 1)))
    assert product_dtypes(plain, variables) == before
    assert list(before) == ["float32"]


def count_products(model, variables, x, rules=None, **options):
    apply_fn = linen.autocast(model.apply, "mixed_float16", rules=rules, **options)
    return product_dtypes(apply_fn, variables, x)


@pytest.mark.parametrize(
    ("target", "products"),
    [
        ("Block_0/DenseGeneral_0", 2),  # in the scan too
        (re.compile(".*Raw_.*"), 1),
        (nn.MultiHeadDotProductAttention, 12),  # modules inside it count too
        (nn.Dense, 3),  # under nn.vmap, and in both blocks
    ],
)
def test_rules_by_path_and_by_type(target, products):
    (model, inputs), variables = MODELS["transformer"], variables_of("transformer")
    count = functools.partial(count_products, model, variables, inputs)
    total = count(None)["float16"]
    assert count([(target, "float32")]) == {"float32": products, "float16": total - products}


@pytest.fixture
def layers_that_say_float32():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm(dtype=jnp.float32)(nn.Dense(8, dtype=jnp.float32)(x))
            return nn.Dense(2, dtype=jnp.float32, name="head")(x)

    x = jnp.ones((2, 8))
    return Model(), jax.jit(Model().init)(jax.random.key(0), x), x


def test_a_layer_that_says_float32_is_lowered_unless_one_keeps_it(layers_that_say_float32):
    model, variables, x = layers_that_say_float32
    count = functools.partial(count_products, model, variables, x)
    assert count() == {"float16": 2}
    assert count([("*/head", "float32")]) == {"float16": 1, "float32": 1}
    assert count([("Model/head", "float32")]) == count([("head", "float32")])
    assert count(keep_dtypes=True) == {"float32": 2}
    assert count([("head", "mixed_float16")], keep_dtypes=True) == {"float16": 1, "float32": 1}


def test_a_jitted_part_is_traced_anew_for_other_rules():
    class Jitted(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="first")(nn.Dense(8, name="second")(x))

    model, x = Jitted(), jnp.ones((2, 8))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    count = functools.partial(count_products, model, variables, x)
    assert count(None) == {"float16": 2}
    assert count([("first", "float32")]) == {"float16": 1, "float32": 1}
    assert count([(nn.Dense, "float32")]) == {"float32": 2}
    assert product_dtypes(model.apply, variables, x) == {"float32": 2}


def test_a_wrapped_model_inside_another_keeps_its_own_policy(layers_that_say_float32):
    model, variables, x = layers_that_say_float32
    for inner, expected in (("float32", "float32"), ("mixed_bfloat16", "bfloat16")):
        inside = linen.autocast(model.apply, inner)

        class Around(nn.Module):
            @nn.compact
            def __call__(self, x):
                return inside(variables, nn.Dense(8)(x))  # noqa: B023

        own = Around().init(jax.random.key(0), x)
        rules = [(nn.LayerNorm, "float32"), ("*", "mixed_float16")]
        apply_fn = linen.autocast(Around().apply, "mixed_float16", rules=rules[1:])
        assert product_dtypes(apply_fn, own, x) == {"float16": 1, expected: 2}


def test_variables_may_be_named(layers_that_say_float32):
    model, variables, x = layers_that_say_float32

    def call(x, *, params=None, **variables):
        return model.apply(variables.get("variables") or {"params": params}, x)

    wrapped = linen.autocast(call, "mixed_float16", rules=[("head/kernel", "float32")])
    half = linen.cast_params(variables, "O2")
    gradient = jax.grad(lambda params: wrapped(x, params=params).sum())(half["params"])
    assert gradient["head"]["kernel"].dtype == jnp.float16
    assert product_dtypes(lambda v: wrapped(x, variables=v), half) == {"float16": 2}


class Norms(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm()(nn.WeightNorm(nn.Dense(3))(x))


def test_cast_params_keeps_norms_and_statistics_and_what_a_rule_names():
    cast = functools.partial(linen.cast_params, policy="O2")
    names = lambda tree: jax.tree.map(lambda leaf: leaf.dtype.name, tree)
    variables = variables_of("convolutions")
    dtypes = names(jax.eval_shape(cast, variables))
    for name, module in dtypes["params"].items():
        expected = "float32" if "Norm" in name else "float16"
        assert set(module.values()) == {expected}, name
    assert set(jax.tree.leaves(dtypes["batch_stats"])) == {"float32"}
    assert names(jax.eval_shape(cast, variables["params"])) == dtypes["params"]

    one = functools.partial(cast, rules=[("Conv_0/bias", "float32")])
    conv = names(jax.eval_shape(one, variables["params"]))["Conv_0"]
    assert conv == {"bias": "float32", "kernel": "float16"}

    # A layer under WeightNorm: the scale belongs to the norm, the kernel does not.
    variables = jax.eval_shape(Norms().init, jax.random.key(0), jnp.ones((2, 4)))
    dtypes = names(jax.eval_shape(cast, variables))["params"]
    assert dtypes["WeightNorm_0"]["Dense_0/kernel/scale"] == "float32"
    assert dtypes["Dense_0"]["kernel"] == "float16"


@pytest.mark.parametrize(
    ("policy", "rules", "dtype"),
    [("O3", None, "float16"), ("O2", [], "float16"), ("O2", None, "float32")],
)
def test_norms_and_statistics_are_half_in_a_pure_half_policy_and_without_rules(
    policy, rules, dtype
):
    (model, inputs), variables = MODELS["convolutions"], variables_of("convolutions")
    cast = functools.partial(linen.cast_params, policy=policy, rules=rules)
    stored = jax.eval_shape(cast, variables)
    apply_fn = linen.autocast(model.apply, policy, rules=rules)
    _, updated = jax.eval_shape(
        functools.partial(apply_fn, mutable=["batch_stats"]), stored, inputs
    )
    norms = stored["batch_stats"], updated["batch_stats"], stored["params"]["BatchNorm_0"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(norms)} == {dtype}


def test_half_statistics_are_moved_on_in_float32():
    model, inputs = MODELS["convolutions"]
    variables = model.init(jax.random.key(0), inputs)
    statistics = jax.tree.map(lambda leaf: leaf * 0.3, variables["batch_stats"])
    half = linen.cast_params({**variables, "batch_stats": statistics}, "O3")
    apply_fn = linen.autocast(model.apply, "mixed_float16")
    _, updated = apply_fn(half, inputs, mutable=["batch_stats"])
    _, wanted = apply_fn(jmp.cast_to_full(half), inputs, mutable=["batch_stats"])
    jax.tree.map(np.testing.assert_array_equal, updated, wanted)


def test_it_is_called_as_apply_is():
    class Model(nn.Module):
        def setup(self):
            self.dense, self.dropout = nn.Dense(4), nn.Dropout(0.5)

        def __call__(self, x, *, train):
            return self.dropout(self.dense(x), deterministic=not train)

        def encode(self, x):
            return self.dense(x)

    model, x = Model(), jnp.ones((2, 3))
    variables = model.init(jax.random.key(0), x, train=False)
    apply_fn = linen.autocast(model.apply, "mixed_bfloat16")
    assert apply_fn(variables, x, method="encode").dtype == jnp.float32
    assert apply_fn(variables, x, method=Model.encode).shape == (2, 4)
    assert apply_fn(variables, x, train=True, rngs={"dropout": jax.random.key(1)}).shape == (2, 4)


SCALED = transforms.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(4.0))
UNCHECKED = transforms.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")


@pytest.mark.parametrize(
    ("tx", "scale"),
    [
        (SCALED, 4.0),
        (optax.chain(SCALED, optax.trace(0.9)), 4.0),
        (optax.sgd(0.1), None),
        (UNCHECKED, None),
    ],
)
def test_a_state_finds_its_scale_and_whether_a_step_was_taken_true_without_a_check(tx, scale):
    state = linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    found = state.loss_scale
    assert found == jmp.NoOpLossScale() if scale is None else found.loss_scale == scale
    for gradient, taken in ((1.0, True), (jnp.inf, scale is None)):
        state = state.apply_gradients(grads={"w": jnp.full(2, gradient)})
        assert state.grads_finite.shape == () and state.grads_finite.dtype == bool
        assert bool(state.grads_finite) == taken


class Sizes(nn.Module):
    """A module that computes only from its fields: others call it without a scope."""

    width: int

    def doubled(self):
        return 2 * self.width


class AsksAnUnboundModule(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(Sizes(4, parent=None).doubled())(x)


def test_an_unbound_module_is_called_as_it_is():
    model, x = AsksAnUnboundModule(), jnp.ones((2, 8))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    found = linen.autocast(model.apply, "mixed_bfloat16")(variables, x)
    np.testing.assert_allclose(found, model.apply(variables, x), rtol=0.02, atol=0.02)


def test_only_parameters_and_statistics_are_cast_and_seen_in_float32():
    variables = {
        "params": {"Dense_0": {"kernel": jnp.ones((2, 2))}},
        "batch_stats": {"BatchNorm_0": {"mean": jnp.ones(2, jnp.bfloat16)}},
        "cache": {"keys": jnp.ones(2)},
    }
    dtypes = lambda tree: [str(leaf.dtype) for leaf in jax.tree.leaves(tree)]
    cast = linen.cast_params(variables, "O2")
    assert dtypes(cast) == ["float32", "float32", "float16"]  # statistics, cache, parameters
    seen = []
    given = cast | {"cache": {"keys": jnp.ones(2, jnp.float16)}}
    linen.autocast(lambda variables: seen.extend(dtypes(variables)), "O2")(given)
    assert seen == ["float32", "float16", "float32"]
