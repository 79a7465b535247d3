"""Attention in one kernel: what is found, that it computes the same, and what is left as it is.

Without a GPU nothing of cuDNN runs here. What JAX is asked for is computed by JAX's own attention
instead, in float32; `tests/h200` compiles the real kernels. On a GPU with cuDNN they run:

    JAX_PLATFORMS=cuda,cpu JAX_DEFAULT_MATMUL_PRECISION=highest python -m pytest \
        tests/autocasting/test_fused_attention.py -k of_the_plain_one
"""

import functools

import equinox as eqx
import flax.linen as nn
import flax.nnx as nnx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from testbed import position_cases
from testbed.machines.gpus import as_if_cudnn
from tests.autocasting.attentions import (
    LOWEST,
    attention,
    attention_of_jax,
    attentions,
    hidden,
    lowered,
    normal,
    scores,
    squares,
    transformed,
    weigh,
    with_mask_of_keys,
)
from tests.commands import in_full
from tests.errors import relative_error

LENGTH = 14
Q, K, V = (normal(i, 2, LENGTH, heads, 8) for i, heads in enumerate((4, 2, 2)))
TWO_HEADS = Q[:, :, :2]
X = normal(3, 2, LENGTH, 32)
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
PADDING = jnp.arange(LENGTH)[None] < jnp.array([LENGTH, 9])[:, None]
EMPTY = PADDING.at[1].set(False)  # an example without a key
jax_attention = functools.partial(attention_of_jax, is_causal=True)


def flax_attention(params, x, padding):
    causal = nn.make_causal_mask(x[..., 0])
    masks = nn.combine_masks(causal, padding[:, None, None])
    return nn.MultiHeadDotProductAttention(4).apply(params, x, x, mask=masks)


def haiku_attention(x):
    initializer = hk.initializers.VarianceScaling()
    return hk.MultiHeadAttention(4, 8, w_init=initializer)(x, x, x, mask=CAUSAL[None, None])


FLAX = jax.jit(nn.MultiHeadDotProductAttention(4).init)(jax.random.key(0), X, X)
HAIKU = hk.without_apply_rng(hk.transform(haiku_attention))
EQUINOX = eqx.partition(eqx.nn.MultiheadAttention(4, 32, key=jax.random.key(1)), eqx.is_array)
NNX = nnx.split(nnx.MultiHeadAttention(4, 32, 32, decode=False, rngs=nnx.Rngs(0)))


def nnx_attention(state, x):
    return nnx.merge(NNX[0], state)(x, mask=nn.make_causal_mask(x[..., 0]))


def equinox_attention(params, x):
    module = eqx.combine(params, EQUINOX[1])
    return jax.vmap(lambda row: module(row, row, row, mask=jnp.asarray(CAUSAL)))(x)


def repeated_heads(q, k, v):
    k, v = (jnp.repeat(array, 2, axis=2) for array in (k, v))
    return attention(lambda x: jnp.where(CAUSAL[None, None], x, -1e9))(q, k, v)


def one_head_of_keys(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("btnd,bsd->bnts", q, k[:, :, 0]) / 4)
    return jnp.einsum("bnts,bsd->btnd", weights, v[:, :, 0])


def heads_first(q, k, v):
    """With a softmax by hand."""
    q, k, v = (array.swapaxes(1, 2) for array in (q, k, v))
    x = jnp.where(CAUSAL[None, None], q @ k.swapaxes(-1, -2) / 3, -jnp.inf)
    powers = jnp.exp(x - x.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


def heads_by_vmap(q, k, v):
    one = lambda q, k, v: jax.nn.softmax(q @ k.T) @ v
    return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(q, k, v)


def adds_mask(x, padding):
    return x + ((1 - padding.astype(jnp.float32)) * LOWEST)[:, None, None]


def adds_slopes(x):
    """ALiBi (Press et al. 2021): a bias that the program computes."""
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None]
    slopes = jnp.array([0.5, 0.25])[:, None, None]
    return jnp.where(CAUSAL[None, None], x - (slopes * distance[None])[None], -1e9)


def far_from_zero(x):
    """ALiBi with only the place of the key, and numbers that make no difference."""
    x = x + (3000 + 0.5 * jnp.arange(LENGTH))[None, None, None]
    return jnp.where(CAUSAL[None, None], x, -1e9) - 3.0


# Name: a function, its floating arguments, and others.
FOUND = {
    "Flax": (flax_attention, (FLAX, X), (PADDING,)),
    "nnx": (nnx_attention, (NNX[1], X), ()),
    "Haiku": (HAIKU.apply, (HAIKU.init(jax.random.key(0), X), X), ()),
    "Equinox": (equinox_attention, (EQUINOX[0], X), ()),
    "jax.nn, groups of heads": (jax_attention, (Q, K, V), ()),
    "jax.nn, window": (functools.partial(jax_attention, local_window_size=(3, 0)), (Q, K, V), ()),
    "jax.nn, learned bias": (
        lambda q, k, v, bias: attention_of_jax(q, k, v, bias),
        (Q, K, V, normal(9, 1, 4, LENGTH, LENGTH)), ()),
    "jax.nn, mask": (with_mask_of_keys, (Q, K, V), (PADDING,)),
    "heads repeated": (repeated_heads, (Q, K, V), ()),
    "one head of keys": (one_head_of_keys, (Q, K, V), ()),
    "heads first": (heads_first, (TWO_HEADS, K, V), ()),
    "heads by vmap": (heads_by_vmap, (TWO_HEADS, K, V), ()),
    "an added mask": (attention(adds_mask), (TWO_HEADS, K, V), (PADDING,)),
    "a bias that is computed": (attention(adds_slopes), (TWO_HEADS, K, V), ()),
    "numbers far from zero": (attention(far_from_zero), (TWO_HEADS, K, V), ()),
    "one query": (attention_of_jax, (Q[:, :1], K, V), ()),
    "heads of 80": (attention_of_jax, [normal(i, 1, 6, 2, 80) for i in range(3)], ()),
    "heads of 128": (attention_of_jax, [normal(i, 1, 6, 2, 128) for i in range(3)], ()),
    "an odd length": (jax_attention, (Q[:, :7], K[:, :7], V[:, :7]), ()),
    "an odd number of keys, padded": (
        with_mask_of_keys, (Q, K[:, :7], V[:, :7]), (PADDING[:, :7].at[:, 5:].set(False),)),
}  # fmt: skip


def stand_in(query, key, value, *terms, implementation=None, **options):
    """JAX's attention, in float32 if cuDNN's was asked for."""
    if implementation != "cudnn":
        return attention_of_jax(query, key, value, *terms, implementation=implementation, **options)
    wide = [None if x is None else x.astype(jnp.float32) for x in (query, key, value, *terms)]
    return attention_of_jax(*wide, implementation="xla", **options).astype(query.dtype)


@pytest.fixture
def as_on_cuda(monkeypatch):
    if jax.default_backend() == "gpu":
        return
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))


IN_BFLOAT16 = ["Flax", "jax.nn, groups of heads", "jax.nn, learned bias"]
CASES = [pytest.param(*case, "mixed_float16", id=name) for name, case in FOUND.items()]
CASES += [pytest.param(*FOUND[name], "mixed_bfloat16", id=name) for name in IN_BFLOAT16]


@pytest.mark.parametrize(("function", "args", "others", "policy"), in_full(CASES, one_of=5))
def test_a_fused_attention_and_its_gradient_are_those_of_the_plain_one(
    function, args, others, policy, as_on_cuda
):
    fused = jmp.autocast(function, policy, attention="fused")

    def gradient(run):
        return jax.value_and_grad(lambda args: (run(*args, *others) ** 2).mean())(args)

    @jax.jit
    def all_three():
        return gradient(function), gradient(jmp.autocast(function, policy)), gradient(fused)

    with as_if_cudnn():
        (value, exact), (_, plain), (fused_value, of_fused) = all_three()
    rounding = float(jnp.finfo(jmp.get_policy(policy).compute_dtype).eps)
    assert abs(fused_value - value) < rounding * value
    assert relative_error(of_fused, exact) < 1.3 * relative_error(plain, exact)
    assert relative_error(of_fused, plain) > 0  # it is not the plain one


# Masks by value.


@pytest.mark.parametrize(
    ("mask", "is_causal", "window"),
    [
        (CAUSAL, True, None),
        (CAUSAL & ~np.tril(CAUSAL, -4), True, 3),
        (np.ones_like(CAUSAL), False, None),
    ],
    ids=["causal", "window", "none"],
)
@pytest.mark.parametrize("lowest", [-1e9, LOWEST, -np.inf])
def test_masks_that_the_program_holds_are_known_by_value(mask, is_causal, window, lowest):
    bias = np.where(mask, 0, lowest).astype(np.float32)
    chosen = attention(lambda x: jnp.where(mask[None, None], x, lowest))
    added = attention(lambda x: x + bias[None, None])
    for function in (chosen, added):
        ((form,), _) = attentions(function, TWO_HEADS, K, V)
        assert form.masking[:2] == (is_causal, window)
        assert not form.masking.terms
        assert form.masking.sees_a_key


def test_a_mask_of_keys_is_read_as_it_is_and_not_once_a_head():
    (form,), _ = attentions(with_mask_of_keys, Q, K, V, PADDING)
    (mask,) = form.masking.terms
    assert sum(map(len, mask.source.axes)) == 2  # it differs by example and by key


@pytest.mark.parametrize("is_added", [False, True], ids=["chosen", "added"])
def test_a_row_without_a_key_is_the_average_of_the_values_and_moves_no_query(is_added, as_on_cuda):
    function = attention(adds_mask) if is_added else with_mask_of_keys
    fused = jmp.autocast(function, "mixed_float16", attention="fused")

    @jax.jit
    def result_and_gradient():
        result, pull_back = jax.vjp(lambda *args: fused(*args, EMPTY), TWO_HEADS, K, V)
        return result, pull_back(jnp.ones_like(result))

    with as_if_cudnn():
        result, (of_queries, of_keys, of_values) = result_and_gradient()
    means = jnp.broadcast_to(V[1].mean(0), result[1].shape)
    np.testing.assert_allclose(result[1], means, rtol=2e-3, atol=2e-4)
    assert not of_queries[1].any() and not of_keys[1].any()
    np.testing.assert_allclose(of_values[1], np.ones_like(of_values[1]), rtol=2e-3)
    assert of_queries[0].any()


# What is left as it is.


def returned_weights(q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    return weigh(weights, v), weights


def squared_weights(q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    return weights @ weights


def divided_by_other_sums(q, k, v):
    powers = jnp.exp(scores(q, k))
    return weigh(powers / powers.sum(-1)[:, :, None, :], v)


def keys_of_a_grid(q, k, v):  # of images, say
    k, v = (x.reshape(x.shape[0], 2, -1, *x.shape[2:]) for x in (k, v))
    found = jnp.einsum("bqhd,bxyhd->bhqxy", q, k)
    weights = jax.nn.softmax(found.reshape(*found.shape[:3], -1)).reshape(found.shape)
    return jnp.einsum("bhqxy,bxyhd->bqhd", weights, v)


def repeated_scores(q, k, v, bias):
    return weigh(jax.nn.softmax(scores(q[:1], k[:1]) + bias), v)


def two_fills(x, mask):
    return jnp.where(CAUSAL[None, None], hidden(x, mask), LOWEST)


LEFT = {
    "dropout": (
        lambda q, k, v, kept: attention(after=lambda weights: weights * kept)(q, k, v),
        (jax.random.bernoulli(jax.random.key(0), 0.9, (1, 1, 1, LENGTH)),),
        "mul stands between its softmax and the values"),
    "soft-capped scores": (attention(jnp.tanh), (), "tanh changes its scores"),
    "keys in reverse": (attention(lambda x: x[..., ::-1]), (), "rev changes its scores"),
    "scores without a gradient": (
        attention(jax.lax.stop_gradient), (), "stop_gradient changes its scores"),
    "weights that do not add up to one": (
        divided_by_other_sums, (), "div stands between its softmax and the values"),
    "a mask that is scaled": (
        attention(lambda x, mask: hidden(x, mask, -1e4) * 1e-3),
        (PADDING,), "not a constant of -1e4 or below"),
    "a bias over a mask": (
        attention(lambda x, mask: hidden(x, mask, -1e4) + 1e4), (PADDING,), "may undo it"),
    "weights returned": (returned_weights, (), "read elsewhere"),
    "weights that weigh themselves": (squared_weights, (), "computed together with its scores"),
    "another axis": (
        lambda q, k, v: weigh(jax.nn.softmax(scores(q, k), axis=2), v),
        (), "sums over more than the keys"),
    "-inf where rows may be empty": (
        attention(lambda x, mask: hidden(x, mask, -jnp.inf)), (PADDING,), "of -inf"),
    "different numbers where rows may be empty": (
        attention(two_fills), (PADDING,), "different numbers"),
    "scores that are repeated": (
        repeated_scores, (normal(8, 2, 1, 1, LENGTH),), "its scores or its weights are repeated"),
    "a small penalty": (
        attention(lambda x, mask: hidden(x, mask, -3.0)),
        (PADDING,), "not a constant of -1e4 or below"),
    "a learned bias of each example": (
        attention(jnp.add), (normal(8, 2, 1, LENGTH, LENGTH),), "not the same for each example"),
    "a learned temperature": (
        attention(jnp.multiply), (jnp.float32(2),), "not a positive constant"),
    "keys along two axes": (keys_of_a_grid, (), "not over one axis of keys longer than one"),
    "heads of 12": (
        lambda q, k, v: attention_of_jax(q[..., :4], k[..., :4], v[..., :4]),
        (), "multiple of 8"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "others", "why"), LEFT.values(), ids=LEFT.keys())
def test_what_the_kernel_does_not_compute_stays_as_it_is_and_the_report_says_why(
    function, others, why
):
    fused, (reason,) = attentions(function, TWO_HEADS, K, V, *others)
    assert not fused
    assert why in reason
    with as_if_cudnn():
        report = jmp.diagnostics.precision_report(function, "mixed_float16", attention="fused")
        assert reason in str(report(TWO_HEADS, K, V, *others)).replace("\n", " ")


def test_an_attention_whose_operands_want_float32_gradients_is_left_as_it_is_and_says_so():
    fused, (reason,) = attentions(attention(), TWO_HEADS, K, V, policy="mixed_float16,r=f32")
    assert not fused
    assert "gradients are to be float32" in reason


@pytest.mark.usefixtures("users_rank_promotion")
def test_a_bias_that_an_island_computes_but_does_not_store_is_left_as_it_is():
    (case,) = (case for case in position_cases.CASES if case.name == "alibi")
    drawn = np.random.default_rng(0)
    args = case.params(drawn), *case.inputs(drawn)
    # Stored in half is the bias as it is added, repeated for each query; the kernel wants a row.
    options = {"recompute": "none", "rules": [("positions", "p=f32,c=f32,o=f16")]}
    fused, (reason,) = attentions(functools.partial(case.loss, jnp.float32), *args, **options)
    assert not fused
    assert "is inside of an island" in reason


def test_the_longer_axis_of_queries_is_their_position_where_no_mask_tells():
    def grouped(q, k, v):  # (batch, groups, heads of a group, positions, width)
        weights = jax.nn.softmax(jnp.einsum("bngtd,bnsd->bngts", q, k))
        return jnp.einsum("bngts,bnsd->bngtd", weights, v)

    q, k = normal(0, 2, 2, 3, LENGTH, 8), normal(1, 2, 2, LENGTH, 8)
    (form,), _ = attentions(grouped, q, k, k)
    assert form.query.shape == (2, LENGTH, 6, 8)


def test_a_mask_may_be_a_number_that_the_program_holds(as_on_cuda):
    def masked(q, k, v, mask=False):
        chosen = jax.lax.select_n(mask, jnp.full((2, 2, LENGTH, LENGTH), -1e9), scores(q, k))
        return weigh(jax.nn.softmax(chosen), v)

    with as_if_cudnn():
        fused = jmp.autocast(masked, "mixed_float16", attention="fused")
        assert jax.eval_shape(fused, TWO_HEADS, K, V).shape == TWO_HEADS.shape
    assert len(attentions(masked, TWO_HEADS, K, V)[0]) == 1


def test_weights_that_are_multiplied_by_ones_are_fused_and_noted_once():
    # As models have it whose heads can be switched off.
    with_all_heads = attention(after=lambda x: jnp.einsum("bhqk,h->bhqk", x, jnp.ones(2)))
    fused, reasons = attentions(with_all_heads, TWO_HEADS, K, V)
    assert (len(fused), reasons) == (1, [])


def test_weights_that_are_rounded_by_hand_stay_so():
    rounded = attention(after=lambda weights: jax.lax.reduce_precision(weights, 5, 3))
    assert not attentions(rounded, TWO_HEADS, K, V)[0]


def test_products_around_a_softmax_that_are_no_attention_are_not_mentioned():
    classifier = lambda x, w, v: jax.nn.softmax(x @ w).sum() + (x @ w @ v).sum()
    assert attentions(classifier, X[0], normal(1, 32, 32), normal(2, 32, 8)) == ([], [])


def test_without_cudnn_the_program_is_the_plain_one():
    plain = jmp.autocast(jax_attention, "mixed_float16")
    fused = jmp.autocast(jax_attention, "mixed_float16", attention="fused")
    programs = [str(jax.make_jaxpr(jax.grad(squares(run)))(Q, K, V)) for run in (plain, fused)]
    assert programs[0] == programs[1]
    report = jmp.diagnostics.precision_report(jax_attention, "mixed_float16", attention="fused")
    assert "cuDNN is not detected" in str(report(Q, K, V))


# Under the transformations of JAX.

fuses = functools.partial(jmp.autocast, policy="mixed_float16", attention="fused")
fused_attention = fuses(jax_attention)
loss = squares(fused_attention)
STACKED = [jnp.stack([x, x]) for x in (Q, K, V)]


loss_of_odd = lambda q, k, v: squares(fuses(attention_of_jax))(q[:, :7], k[:, :7], v[:, :7])
TRANSFORMED = transformed(fuses, jax_attention, (Q, K, V), (PADDING, EMPTY), 2, True) | {
    "vmap of an odd length": (jax.vmap(jax.grad(loss_of_odd)), STACKED, 2)
}


@pytest.mark.parametrize(("function", "args", "kernels"), in_full(TRANSFORMED, one_of=2))
def test_kernels_are_there_under_every_transformation(function, args, kernels):
    assert lowered(function, *args, platform="cuda").count("__cudnn$fmha") == kernels


def test_each_example_has_its_own_gradient_of_a_bias_that_all_share():
    bias = normal(9, 1, 4, LENGTH, LENGTH)
    of_bias = jax.grad(squares(fuses(lambda *args: attention_of_jax(*args))), argnums=3)
    text = lowered(jax.vmap(of_bias, (0, 0, 0, None)), *STACKED, bias, platform="cuda")
    kernels = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    # cuDNN adds up the gradient over what it gets.
    assert len(kernels) == 2
    assert all("tensor<2x14x4x8xf16>" in line for line in kernels)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x: jax.jvp(lambda x: fused_attention(x, K, V), (x,), (x,)), "forward-mode"),
        (lambda x: jax.jvp(jax.grad(loss), (x, K, V), (x, K, V)), "a second derivative"),
    ],
    ids=["jvp", "jvp of grad"],
)
def test_derivatives_that_the_kernel_has_not_are_refused_by_the_option_s_name(function, what):
    with pytest.raises(NotImplementedError, match=rf"attention='fused'.*{what}"):
        lowered(function, Q, platform="cuda")


def test_what_is_kept_is_counted_for_the_platform_that_runs():
    count = lambda run: jmp.diagnostics.memory_report(squares(run))(Q, K, V).activation_bytes
    with as_if_cudnn():
        assert count(fused_attention) == count(jmp.autocast(jax_attention, "mixed_float16"))
