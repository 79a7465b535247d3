"""Fused attention in compiled programs: which kernels an H200 runs, and what they move."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from tests.h200.harness import HARDWARE_FACTS, as_if_cudnn, compile_for_h200

KERNEL = "__cudnn$fmha"


def rotary(x):
    frequencies = 1e-4 ** jnp.linspace(0, 1, x.shape[-1] // 2)
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies[None])[None, :, None]
    first, second = jnp.split(x, 2, -1)
    rotated = (first * jnp.cos(angles) - second * jnp.sin(angles),
               second * jnp.cos(angles) + first * jnp.sin(angles))  # fmt: skip
    return jnp.concatenate(rotated, -1).astype(x.dtype)


class Llama(nn.Module):
    """Attention of a Llama: rotary positions, groups of heads, a mask that is causal and padded."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, padding):
        heads = lambda n, name: nn.DenseGeneral(
            (n, 64), use_bias=False, dtype=self.dtype, name=name
        )
        q, k, v = heads(8, "q")(x), heads(2, "k")(x), heads(2, "v")(x)
        k, v = (jnp.repeat(array, 4, axis=2) for array in (rotary(k), v))
        causal = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        mask = nn.combine_masks(causal, padding[:, None, None])
        y = nn.dot_product_attention(rotary(q), k, v, mask=mask)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, dtype=self.dtype)(y)


class Bert(nn.Module):
    """Attention of a BERT: a bias over the keys that is added to the scores."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, padding):
        heads = lambda name: nn.DenseGeneral((8, 64), dtype=self.dtype, name=name)(x)
        bias = jnp.where(padding, 0, jnp.finfo(jnp.float32).min)[:, None, None]
        y = nn.dot_product_attention(heads("q"), heads("k"), heads("v"), bias=bias)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=self.dtype)(y)


class ViT(nn.Module):
    """Attention over an odd number of patches, without a mask."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, padding):
        x = x[:, :-3]
        return nn.MultiHeadDotProductAttention(8, dtype=self.dtype)(x, x)


X = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32)
PADDING = jax.ShapeDtypeStruct((8, 512), jnp.bool_)


def step(module, **options):
    apply = module.apply
    if options:
        apply = jmp.autocast(apply, "mixed_float16", **options)

    def loss(params, x, padding):
        return (apply(params, x, padding).astype(jnp.float32) ** 2).mean()

    return jax.grad(loss, (0, 1))


# Bytes, temporary memory and kernels over the module in half by hand, with plain attention.
GATES = [(Llama, (0.34, 0.49, 0.68)), (Bert, (0.332, 0.275, 0.745)), (ViT, (0.347, 0.313, 0.617))]


@pytest.mark.parametrize(("module", "at_most"), GATES)
def test_scores_are_never_written(h200, module, at_most):
    params = jax.eval_shape(module().init, jax.random.key(0), X, PADDING)
    by_hand = compile_for_h200(step(module(jnp.float16)), params, X, PADDING)
    fused = compile_for_h200(step(module(), attention="fused"), params, X, PADDING)
    assert fused.text.count(f'custom_call_target="{KERNEL}') == 2
    measured = (
        fused.bytes_moved / by_hand.bytes_moved,
        fused.temp_bytes / by_hand.temp_bytes,
        fused.kernels / by_hand.kernels,
    )
    print(f"{module.__name__}: bytes, temp, kernels " + " ".join(f"{x:.3f}" for x in measured))
    for ratio, bound in zip(measured, at_most, strict=True):
        assert ratio <= bound, f"{measured} exceeds {at_most}"


def test_attention_stays_where_its_batch_and_its_heads_are(h200):
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=HARDWARE_FACTS.read_text(), topology="1x1x8"
    )
    mesh = topologies.make_mesh(topology, (4, 2), ("batch", "heads"))
    sharding = NamedSharding(mesh, P("batch", None, "heads"))
    heads = jax.ShapeDtypeStruct((8, 512, 8, 64), jnp.float32, sharding=sharding)
    attention = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    fused = jmp.autocast(attention, "mixed_float16", attention="fused")
    gradient = jax.grad(lambda *args: (fused(*args) ** 2).sum(), (0, 1, 2))
    with as_if_cudnn():
        traced = jax.jit(gradient, out_shardings=sharding).trace(heads, heads, heads)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    assert text.count(f'custom_call_target="{KERNEL}') == 2
    assert "f16[2,4,512,64]" in text  # of one device: two examples, four heads
    assert not any(f" {collective}" in text for collective in ("all-gather", "all-to-all"))
