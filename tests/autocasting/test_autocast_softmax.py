"""Attention: on GPUs the derivative of its softmax is taken from the half result, which is kept.

On TPUs its scores are masked, scaled and shifted in half, where half loses nothing by it.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from jmp.autocasting.targets._softmax import softmax
from tests.errors import largest_error, relative_error
from tests.saved import printed_residuals

ODD, EVEN = 61, 64


def attention(queries, keys, values, mask, scale=0.25, lowest=-1e9):
    scores = jnp.einsum("bqd,bkd->bqk", queries, keys) * scale
    weights = jax.nn.softmax(jnp.where(mask, scores, lowest))
    return jnp.einsum("bqk,bkd->bqd", weights, values)


def arguments(length, masked_row=False):
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = [jax.random.normal(key, (8, length, 16)) for key in keys]
    mask = jnp.tril(jnp.ones((length, length), bool))[None]
    return *tokens, mask.at[:, 3].set(False) if masked_row else mask


def loss(*args, **options):
    return jnp.sin(attention(*args, **options)).sum()


def gradients(function, args):
    return list(jax.jit(jax.grad(function, argnums=(0, 1, 2)))(*args))


def in_float64(args):
    with jax.enable_x64(True):
        exact = [np.asarray(a, np.float64) for a in args[:3]]
        return [np.asarray(g) for g in gradients(loss, (*map(jnp.asarray, exact), args[3]))]


@pytest.mark.parametrize(
    ("dtype", "platform", "at_most"),
    [("float16", "gpu", 2e-3), ("bfloat16", "gpu", 1.5e-2), ("bfloat16", "tpu", 1.5e-2)],
)
def test_gradients_are_as_exact_as_from_a_softmax_computed_again(dtype, platform, at_most):
    args = arguments(ODD)
    exact = in_float64(args)
    kept, again = (
        largest_error(gradients(jmp.autocast(loss, f"mixed_{dtype}", **options), args), exact)
        for options in ({"platform": platform}, {"recompute": "none"})
    )
    assert kept <= min(at_most, 1.2 * again)


@pytest.mark.parametrize(("half", "at_most"), [("bfloat16", 0.01), ("float16", 0.0012)])
def test_one_large_weight_does_not_spoil_the_gradient_of_its_row(half, at_most):
    """Rounded rows do not add up to one; what a row's cotangents have in common would stay."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(256, 64)) + 8 * (np.arange(64) == 0)
    cotangent = rng.normal(size=(256, 64)) + 3
    shifted = scores - scores.max(-1, keepdims=True)
    powers = np.exp(shifted)
    weights = powers / powers.sum(-1, keepdims=True)
    exact = weights * (cotangent - (weights * cotangent).sum(-1, keepdims=True))

    function = functools.partial(softmax, 1, jnp.dtype(half))
    _, pull_back = jax.vjp(jax.jit(function), jnp.float32(shifted))
    (found,) = pull_back(jnp.float32(cotangent))
    assert relative_error(found, exact) <= at_most
    np.testing.assert_allclose(found.sum(-1), 0, atol=1e-5)


VECTOR = 128


def on(platform, function=loss, **options):
    return jmp.autocast(function, "mixed_bfloat16", platform=platform, **options)


def halves_of_softmax(function, length=VECTOR):
    """Returns what a program computes of its scores in bfloat16, in order."""
    text = str(jax.make_jaxpr(function)(*arguments(length)))
    return re.findall(rf":bf16\[8,{length},{length}\] = (div|mul|select_n|sub|exp)\b", text)


@pytest.mark.parametrize(
    ("platform", "length", "found"),
    [
        ("gpu", VECTOR, []),
        ("tpu", VECTOR, ["mul", "select_n", "sub"]),
        ("tpu", 64, ["mul", "select_n"]),
    ],
)
def test_on_tpus_scores_are_masked_and_shifted_in_half(platform, length, found):
    assert halves_of_softmax(on(platform), length) == found


@pytest.mark.parametrize("size", [1.0, 3.0, 10.0], ids="scores_of_{}".format)
def test_gradients_on_tpus_are_as_exact_as_on_gpus(size):
    queries, *others = arguments(VECTOR)
    args = size * queries, *others
    exact = in_float64(args)
    errors = []
    for platform in ("gpu", "tpu"):
        lowered = jax.jit(jax.grad(on(platform), argnums=(0, 1, 2))).lower(*args)
        # Else XLA leaves out the rounding of scores, on a CPU and only with the plan for GPUs.
        found = lowered.compile({"xla_allow_excess_precision": False})(*args)
        errors.append(largest_error(list(found), exact))
    on_gpu, on_tpu = errors
    assert on_tpu <= 1.1 * on_gpu


@pytest.mark.parametrize(("platform", "length"), [("gpu", VECTOR), ("gpu", ODD), ("tpu", VECTOR)])
@pytest.mark.parametrize("lowest", [-1e9, float(jnp.finfo(jnp.float32).min)])
def test_a_row_masked_throughout_has_equal_weights_on_all_platforms(platform, length, lowest):
    args = arguments(length, masked_row=True)
    found = on(platform, functools.partial(attention, lowest=lowest))(*args)
    np.testing.assert_allclose(found[:, 3], args[2].mean(1), atol=0.01)
    slopes = gradients(on(platform, functools.partial(loss, lowest=lowest)), args)
    assert all(jnp.isfinite(array).all() for array in (found, *slopes))


def of_a_loss(queries, keys, values, mask):
    scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", queries, keys) / 4, -1e9)
    return jax.nn.logsumexp(scores, -1).sum()


SHIFTED_IN_FLOAT32 = {
    "scores that half does not hold exactly": (functools.partial(loss, scale=0.3), {}),
    "a region of the user's": (jmp.full_precision(loss), {}),
    "an operation that the user keeps": (loss, {"full": ["sub"]}),
    "scores of a loss": (of_a_loss, {}),
}


@pytest.mark.parametrize(
    ("function", "options"), SHIFTED_IN_FLOAT32.values(), ids=SHIFTED_IN_FLOAT32
)
def test_these_scores_are_shifted_in_float32_on_tpus(function, options):
    assert halves_of_softmax(on("tpu", function, **options)) == []


def close_on_all_platforms(function, args, at_most):
    exact = function(*args)
    for platform in ("gpu", "tpu"):
        assert relative_error(on(platform, function)(*args), exact) <= at_most, platform


def test_layers_with_scales_and_masks_of_their_own_have_their_own_on_tpus():
    """Islands that are alike share a trace, which must not hold a constant of one of them."""
    scales, lowest = (jnp.asarray(0.125), jnp.asarray(1.0)), (-1e9, -3.0)
    lowest = [np.full((VECTOR,), number, np.float32) for number in lowest]

    def layers(x, keys, values, mask):
        for scale, number in zip(scales, lowest, strict=True):
            scores = jnp.where(mask, scale * jnp.einsum("bqd,bkd->bqk", x, keys), number)
            x = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), values)
        return x

    close_on_all_platforms(layers, arguments(VECTOR), 0.02)


def test_what_else_reads_masked_scores_sees_the_mask_as_it_is_written_on_tpus():
    def no_key_no_value(queries, keys, values, mask):
        scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", queries, keys) / 4, -1e9)
        has_none = scores.max(-1, keepdims=True) <= -1e9
        weights = jnp.where(has_none, 0.0, jax.nn.softmax(scores))
        return jnp.einsum("bqk,bkd->bqd", weights, values)

    assert not on("tpu", no_key_no_value)(*arguments(VECTOR, masked_row=True))[:, 3].any()


def test_more_than_the_maximum_is_subtracted_in_float32_on_tpus():
    """A sink reads the shift too: of one that half does not hold both must see the same."""

    def with_sink(queries, keys, values, mask, sink=12.11):
        scores = jnp.einsum("bqd,bkd->bqk", queries, keys) / 4
        shift = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
        powers = jnp.exp(scores - shift)
        sums = powers.sum(-1, keepdims=True) + jnp.exp(sink - shift)
        return jnp.einsum("bqk,bkd->bqd", powers / sums, values)

    close_on_all_platforms(with_sink, arguments(VECTOR), 0.01)


def test_probabilities_that_are_read_in_float32_too_are_not_rounded():
    def with_entropy(queries, keys, values):
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", queries, keys))
        entropy = -(weights * jnp.log(weights)).sum(-1)  # of 1e-9 in float16: 0 * -inf
        return jnp.sin(jnp.einsum("bqk,bkd->bqd", weights, values)).mean() + 0.1 * entropy.mean()

    args = arguments(ODD)[:3]
    found = gradients(jmp.autocast(with_entropy, "mixed_float16"), args)
    assert largest_error(found, gradients(with_entropy, args)) < 3e-3


@pytest.mark.parametrize("length", [ODD, EVEN])
def test_one_half_array_is_kept_of_a_softmax(length):
    kept = printed_residuals(jmp.autocast(loss, "mixed_float16"), *arguments(length))
    square = re.findall(rf"^(\w+\[8,{length},{length}\]) (?!from the argument)", kept, re.M)
    # By the softmax and by the product; XLA sees that the two are one, and repeats the mask anew.
    square.remove(f"bool[8,{length},{length}]")
    assert square == [f"f16[8,{length},{length}]"] * 2
