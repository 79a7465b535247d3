"""Fused attention in compiled programs: which kernels an H200 runs, and what they move."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from testbed.machines.attentions import PADDING, Bert, Llama, ViT, X, step
from testbed.machines.gpus import as_if_cudnn, compile_for_h200, facts_of_gpu
from testbed.machines.training_steps import ratios
from tests.commands import in_full
from tests.gates import assert_at_most

KERNEL = "__cudnn$fmha"


# Bytes, temporary memory and kernels over the module in half by hand, with plain attention.
GATES = [(Llama, (0.34, 0.49, 0.68)), (Bert, (0.332, 0.275, 0.745)), (ViT, (0.347, 0.313, 0.617))]


@pytest.mark.parametrize(("module", "at_most"), in_full(GATES, first=1))
def test_scores_are_never_written(h200, module, at_most):
    params = jax.eval_shape(module().init, jax.random.key(0), X, PADDING)
    by_hand = compile_for_h200(step(module(jnp.float16)), params, X, PADDING)
    fused = compile_for_h200(step(module(), attention="fused"), params, X, PADDING)
    assert fused.text.count(f'custom_call_target="{KERNEL}') == 2
    assert_at_most(f"{module.__name__}: bytes, temp, kernels", ratios(fused, by_hand), at_most)


@pytest.mark.full
def test_attention_stays_where_its_batch_and_its_heads_are(h200):
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=facts_of_gpu("h200"), topology="1x1x8"
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
