"""The contract of all adapters, over the rows of `adapter_cases`: one network in each framework."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp
from jmp import transforms
from tests.adapter_cases import ADAPTERS, IMAGES, PRODUCTS, mean_square
from tests.bits import bits
from tests.products import equations, product_dtypes

POLICIES = ["mixed_float16", "mixed_bfloat16", "O2", "O3"]

every_adapter = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)


@pytest.fixture(autouse=True)
def users_rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


def loss_of(adapter, policy, rules=None, **options):
    forward = adapter.forward(policy, rules, **options)

    def loss_fn(params, statistics):
        output, statistics = forward(params, statistics, IMAGES)
        return mean_square(output), (output, statistics)

    return loss_fn


def stored(adapter, policy, rules=None):
    params, statistics = adapter.init()
    return adapter.cast_params(params, policy, rules), statistics


def dtypes_of(tree):
    return {x.dtype.name for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


@every_adapter
@pytest.mark.parametrize("policy", POLICIES)
def test_every_product_is_half_forward_and_backward(adapter, policy):
    params, statistics = stored(adapter, policy)
    loss_fn = loss_of(adapter, policy)
    half = jmp.get_policy(policy).compute_dtype.name
    grad_fn = jax.grad(loss_fn, has_aux=True)
    assert list(product_dtypes(grad_fn, params, statistics)) == [half]
    gradients, (output, _) = jax.eval_shape(grad_fn, params, statistics)
    same = jax.tree.map(lambda g, p: g.dtype == p.dtype, gradients, params)
    assert all(jax.tree.leaves(same))
    expected = jmp.get_policy(policy).output_dtype if adapter.casts_output else None
    assert output.dtype == (expected or output.dtype)


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


@every_adapter
def test_the_gradient_is_close_to_float32s(adapter):
    params, statistics = adapter.init()
    flat = {}
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        grad_fn = jax.jit(jax.grad(loss_of(adapter, policy), has_aux=True))
        leaves = jax.tree.leaves(grad_fn(params, statistics)[0])
        flat[policy] = jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])
    exact = flat["float32"]
    for policy, bound in (("mixed_float16", 5e-3), ("mixed_bfloat16", 4e-2)):
        assert jnp.linalg.norm(flat[policy] - exact) <= bound * jnp.linalg.norm(exact)


@every_adapter
def test_rules_by_path_and_by_type(adapter):
    params, statistics = adapter.init()
    count = lambda rules: product_dtypes(
        lambda p: loss_of(adapter, "mixed_float16", rules)(p, statistics)[0], params
    )
    assert count(None) == {"float16": PRODUCTS}
    assert count([(adapter.head, "float32")]) == {"float16": PRODUCTS - 1, "float32": 1}
    convolutions = [(adapter.convolution, "float32")]
    assert count(convolutions) == {"float16": 1, "float32": PRODUCTS - 1}
    assert count([(adapter.convolution, "mixed_float16"), ("*", "float32")]) == {
        "float16": PRODUCTS - 1,
        "float32": 1,
    }


@every_adapter
def test_a_float32_policy_with_a_half_part(adapter):
    params, statistics = adapter.init()
    loss_fn = loss_of(adapter, "float32", [(adapter.convolution, "mixed_float16")])
    products = product_dtypes(lambda p: loss_fn(p, statistics)[0], params)
    assert products == {"float16": PRODUCTS - 1, "float32": 1}


@every_adapter
def test_two_half_dtypes_in_one_model_are_refused(adapter):
    with pytest.raises(ValueError, match="bfloat16 and float16; expected one half dtype"):
        forward = adapter.forward("mixed_float16", [(adapter.head, "mixed_bfloat16")])
        forward(*adapter.init(), IMAGES)


@every_adapter
def test_autocasts_options_are_taken(adapter):
    params, statistics = adapter.init()
    full = ["conv_general_dilated"]
    loss_fn = loss_of(adapter, "mixed_float16", full=full)
    products = product_dtypes(lambda p: loss_fn(p, statistics)[0], params)
    assert products == {"float16": 1, "float32": PRODUCTS - 1}
    with pytest.raises(ValueError, match="recompute='sometimes'"):
        loss_of(adapter, "mixed_float16", recompute="sometimes")(params, statistics)


@every_adapter
def test_a_rule_that_matched_nothing_is_named(adapter):
    params, statistics = adapter.init()
    rules = [("haed", "float32"), (adapter.head, "float32")]
    with pytest.warns(jmp.UnusedRuleWarning, match="'haed'"):
        jax.eval_shape(loss_of(adapter, "mixed_float16", rules), params, statistics)
    with pytest.warns(jmp.UnusedRuleWarning, match="'haed'"):
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


@every_adapter
@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
def test_a_skipped_step_moves_nothing_but_the_scale_and_all_steps_compile_once(adapter, policy):
    adam = optax.adam(optax.linear_schedule(1e-2, 0.0, 9))
    tx = transforms.mixed_precision(adam, policy, jmp.DynamicLossScale(8.0, period=2))
    state, step = adapter.trainer(policy, tx)
    scale_of = lambda state: transforms.loss_scale_state(adapter.opt_state(state)).loss_scale
    for i, factor in enumerate([jnp.nan, 1.0, 2.0, jnp.inf, 1.0]):
        before = bits(adapter.everything(state))
        scale = float(scale_of(state).loss_scale)
        state = step(state, IMAGES * factor)
        skipped = i in (0, 3)
        assert (bits(adapter.everything(state)) == before) == skipped
        assert not skipped or scale_of(state).loss_scale == scale / 2
    assert jmp.all_finite(adapter.everything(state))
    assert step._cache_size() == 1


@every_adapter
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
