"""Attention in one Pallas kernel: that it computes the same, and what is left as it is.

The kernels are JAX's own. Here a CPU interprets them, tile by tile; the program is the one that is
lowered for a TPU otherwise.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp.autocasting.attention import _pallas
from testbed.machines.gpus import as_if_cudnn
from testbed.machines.tpus import compile_for_tpu
from tests.autocasting.attentions import (
    LOWEST,
    attention,
    attention_of_jax,
    attentions,
    hidden,
    lowered,
    mesh_of_four,
    normal,
    sharded,
    squares,
    transformed,
    with_mask_of_keys,
)
from tests.commands import in_full
from tests.errors import relative_error

LENGTH = 256
Q, K, V = (normal(i, 2, LENGTH, heads, 16) for i, heads in enumerate((4, 2, 2)))
TWO_HEADS = Q[:, :, :2]
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
PADDING = jnp.arange(LENGTH)[None] < jnp.array([LENGTH, 90])[:, None]
LEFT_PADDING = PADDING[:, ::-1]  # the first rows see no key before theirs
EMPTY = PADDING.at[1].set(False)  # an example without a key
PREFIX = CAUSAL | (np.arange(LENGTH) < 100)[None]  # of a language model that sees all of its prompt
causal = functools.partial(attention_of_jax, is_causal=True)
window = functools.partial(causal, local_window_size=(100, 0))


def masked(mask, scale=0.25, fill=-1e9):
    """Returns an attention with a mask of the program's own."""
    shape = (1, -1, *mask.shape[-2:])
    return attention(lambda x: jnp.where(mask.reshape(shape), x, fill), scale=scale)


def padded(mask, scale=0.25):
    """Returns an attention with such a mask and one of keys, which it is given."""
    kept = lambda pad: pad[:, None, None] & mask[None, None]
    return attention(lambda x, pad: jnp.where(kept(pad), x, LOWEST), scale=scale)


# Name: a function, its floating arguments, and others. `test_fused_attention.py` has the forms of
# attentions; these are what the kernels of TPUs tell apart.
FOUND = {
    "no mask": (attention_of_jax, (TWO_HEADS, K, V), ()),
    "causal": (causal, (Q, K, V), ()),
    "window": (window, (TWO_HEADS, K, V), ()),
    "other scale": (functools.partial(causal, scale=0.3), (TWO_HEADS, K, V), ()),
    "other scale, causal and padded": (
        padded(CAUSAL, scale=0.3), (TWO_HEADS, K, V), (LEFT_PADDING,)),
    "wide heads": (causal, [normal(i, 1, LENGTH, n, 128) for i, n in enumerate((2, 1, 1))], ()),
    "padded": (attention(hidden), (TWO_HEADS, K, V), (PADDING,)),
    "an example without a key": (attention(hidden), (TWO_HEADS, K, V), (EMPTY,)),
    "padded, groups of heads": (with_mask_of_keys, (Q, K, V), (PADDING,)),
    "causal, rows without a key": (padded(CAUSAL), (TWO_HEADS, K, V), (LEFT_PADDING,)),
    "window, rows without a key": (
        padded(CAUSAL & ~np.tril(CAUSAL, -9)), (TWO_HEADS, K, V), (PADDING,)),
    "-inf": (masked(CAUSAL, fill=-jnp.inf), (TWO_HEADS, K, V), ()),
    "fewer queries": (attention_of_jax, (TWO_HEADS[:, :128], K, V), ()),
    "values of another width": (masked(CAUSAL), (TWO_HEADS, K, V[..., :8]), ()),
}  # fmt: skip


@pytest.fixture
def as_on_tpu(monkeypatch):
    """A CPU runs what a TPU would, and interprets the kernels; a tile is 128 by 128."""
    compiled = pallas.pallas_call

    def interpreted(*args, **options):
        return compiled(*args, **options | {"interpret": True})

    monkeypatch.setattr(pallas, "pallas_call", interpreted)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, tpu, default: tpu(*args))
    monkeypatch.setattr(_pallas, "LARGEST_TILE", 128)


on_tpu = functools.partial(jmp.autocast, policy="mixed_bfloat16", attention="fused", platform="tpu")


@pytest.mark.parametrize(("function", "args", "others"), in_full(FOUND, but=["causal"]))
def test_a_fused_attention_and_its_gradient_are_those_of_the_plain_one(
    function, args, others, as_on_tpu
):
    def gradient(run, args):
        return jax.jit(jax.value_and_grad(lambda args: (run(*args, *others) ** 2).mean()))(args)

    plain = jmp.autocast(function, "mixed_bfloat16", platform="tpu")
    with jax.enable_x64(True):
        value, exact = gradient(function, jax.tree.map(lambda x: np.asarray(x, np.float64), args))
        value, exact = jax.tree.map(np.asarray, (value, exact))
    _, of_plain = gradient(plain, args)
    fused_value, of_fused = gradient(on_tpu(function), args)
    assert abs(fused_value - value) < 2.0**-8 * value
    assert relative_error(of_fused, exact) < 1.1 * relative_error(of_plain, exact)
    assert relative_error(of_fused, of_plain) > 0  # it is not the plain one


# What is left as it is.

OWN_MASK = normal(4, 2, 1, LENGTH, LENGTH) < 1
LEFT = {
    "a length that is no multiple": (
        lambda q, k, v: attention_of_jax(q[:, :100], k, v), (), "100 queries and 256 keys"),
    "one query": (lambda q, k, v: attention_of_jax(q[:, :1], k, v), (), "1 queries"),
    "a learned bias": (
        lambda q, k, v, bias: attention_of_jax(q, k, v, bias),
        (normal(9, 1, 2, LENGTH, LENGTH),), "as large as the scores"),
    "a mask of its own for each example": (
        lambda q, k, v, mask: attention_of_jax(q, k, v, mask=mask),
        (OWN_MASK,), "nor one of keys or queries"),
    "a mask that depends on an argument, for each head": (
        lambda q, k, v, mask: attention_of_jax(q, k, v, mask=mask),
        (OWN_MASK[:1, :, :1].repeat(2, 1),), "nor one of keys or queries"),
    "another scale and a window": (
        functools.partial(window, scale=0.3), (), "only causal and padding masks"),
    "a prefix": (masked(PREFIX), (), "neither causal, nor a window"),
    "a mask of each head": (
        masked(np.stack([CAUSAL, PREFIX])), (), "neither causal, nor a window"),
    "a row without a key": (
        masked(np.tril(CAUSAL, -1)), (), "neither causal, nor a window"),
    "another scale and values of another width": (
        lambda q, k, v: masked(CAUSAL, 0.3)(q, k, v[..., :8]), (), "V model dimension unequal"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "others", "why"), LEFT.values(), ids=LEFT)
def test_what_the_kernels_do_not_compute_stays_as_it_is_and_the_report_says_why(
    function, others, why
):
    options = {"attention": "fused", "platform": "tpu"}
    report = jmp.diagnostics.precision_report(function, "mixed_bfloat16", **options)
    text = " ".join(str(report(TWO_HEADS, K, V, *others)).split())
    assert why in text
    assert "Pallas kernel where" not in text


def test_float16_is_left_as_it_is():
    with pytest.warns(jmp.Float16OnTpuWarning):
        fused, (reason,) = attentions(causal, TWO_HEADS, K, V, platform="tpu")
    assert not fused
    assert "no float16" in reason


@pytest.mark.parametrize(
    ("platform", "says"),
    [
        ("tpu", "one fused Pallas kernel where the program is lowered for a TPU"),
        ("gpu", "one fused cuDNN kernel where the program is lowered for CUDA"),
    ],
)
def test_the_report_speaks_of_the_platform_that_was_planned_for(platform, says):
    options = {"attention": "fused", "platform": platform}
    report = jmp.diagnostics.precision_report(causal, "mixed_bfloat16", **options)
    with as_if_cudnn():
        assert says in " ".join(str(report(Q, K, V)).split())


def test_elsewhere_the_program_computes_what_it_does_without_the_option():
    plain = jmp.autocast(causal, "mixed_bfloat16", platform="tpu")
    np.testing.assert_array_equal(jax.jit(on_tpu(causal))(Q, K, V), jax.jit(plain)(Q, K, V))


@pytest.mark.parametrize("combined", [np.logical_and, np.logical_or], ids=["and", "or"])
def test_masks_that_are_joined_are_told_apart(combined):
    def changed(x, pad):
        if combined is np.logical_and:
            return jnp.where(pad[:, None, None] & CAUSAL[None, None], x, -1e9)
        return jnp.where(~pad[:, None, None] | ~CAUSAL[None, None], -1e9, x)

    for platform in ("tpu", "gpu"):
        options = {"policy": "mixed_bfloat16", "platform": platform}
        ((form,), _) = attentions(attention(changed), TWO_HEADS, K, V, PADDING, **options)
        assert form.masking.is_causal
        (mask,) = form.masking.terms
        assert sum(map(len, mask.source.axes)) == 2  # it differs by example and by key


# Under the transformations of JAX.

fused_attention = on_tpu(causal)
PLACED = [
    jax.device_put(array, NamedSharding(mesh_of_four(), P("batch", None, "heads")))
    for array in (TWO_HEADS, K, V)
]
TRANSFORMED = transformed(on_tpu, causal, (TWO_HEADS, K, V), (PADDING, EMPTY), 3, False) | {
    "grad, scores multiplied": (
        jax.grad(squares(on_tpu(functools.partial(causal, scale=0.3)))), (TWO_HEADS, K, V), 3),
    # XLA cannot divide these, and there JAX refuses its own kernels: they stay plain.
    "on a mesh": (jax.grad(squares(fused_attention)), PLACED, 0),
    "checked shard_map outside": (
        jax.grad(squares(sharded(fused_attention, True))), (TWO_HEADS, K, V), 0),
    "checked shard_map inside": (
        jax.grad(squares(on_tpu(sharded(causal, True)))), (TWO_HEADS, K, V), 0),
}  # fmt: skip


@pytest.mark.parametrize(("function", "args", "kernels"), in_full(TRANSFORMED, one_of=2))
def test_kernels_are_there_under_every_transformation(function, args, kernels):
    found = lowered(function, *args, platform="tpu").count("@tpu_custom_call")
    if jax.__version_info__ < (0, 11):
        assert found == kernels
    else:  # in its text equal kernels stand once
        assert bool(found) == bool(kernels)


def test_kernels_are_lowered_under_a_default_precision_too():
    with jax.default_matmul_precision("highest"):
        text = lowered(jax.grad(squares(fused_attention)), TWO_HEADS, K, V, platform="tpu")
    assert "@tpu_custom_call" in text


def test_scores_are_never_written():
    """Counted for a v5e, between half arrays as they are in a model."""
    pytest.importorskip("libtpu")
    heads = [jax.ShapeDtypeStruct((8, 12, 1024, 64), jnp.bfloat16)] * 3

    def moved(run):
        def loss(*heads):
            q, k, v = (array.astype(jnp.float32).swapaxes(1, 2) for array in heads)
            return (run(q, k, v) ** 2).sum()

        return compile_for_tpu("v5e", jax.grad(loss, (0, 1, 2)), *heads).bytes_moved

    plain = moved(jmp.autocast(causal, "mixed_bfloat16", platform="tpu"))
    ratio = moved(fused_attention) / plain
    print(f"bytes: {ratio:.3f}")
    assert ratio <= 0.17
