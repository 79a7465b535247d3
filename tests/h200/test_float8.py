"""Float8 products in programs for an H200: all that autocast makes float8 run as float8.

XLA falls back to bfloat16 without a word, so the compiled program is looked at, not the jaxpr.
Counts of products are exact; bounds of bytes and memory are 2 % above what was measured, over the
same step under `mixed_bfloat16`.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from testbed.machines.float8_steps import (
    PAIR,
    TWO_MLPS,
    float32,
    layer,
    products,
    scanned,
    step,
    with_head,
)
from testbed.machines.gpus import compile_for_h200, compile_for_placed
from testbed.machines.training_steps import ratios
from testbed.machines.wire import h200s, wire
from testbed.models import gpt

pytestmark = pytest.mark.usefixtures("h200")


def compiled(loss, *arguments):
    """Returns the products in float8, and bytes and memory over those under bfloat16."""
    with jax.numpy_rank_promotion("allow"):
        float8, half = (
            compile_for_h200(step(loss, policy), *arguments, donate_argnums=0)
            for policy in ("mixed_float8", "mixed_bfloat16")
        )
    measured = ratios(float8, half)
    print(f"{products(float8)} products; bytes, temp, kernels", *(f"{x:.3f}" for x in measured))
    assert products(half)[0] == 0
    return products(float8), measured


@pytest.mark.full
def test_of_a_gpt_three_products_run_in_float8_for_each_that_is_eligible():
    with jax.numpy_rank_promotion("allow"):
        params, batch = jax.eval_shape(lambda: gpt(layers=1)[1:])
    found, (moved, temp, _) = compiled(lambda *args: gpt(layers=1)[0](*args), params, *batch)
    # Queries, keys, values and the output of attention; two of the MLP. Others: two products of
    # attention, and the head, with two gradients each.
    assert found == (3 * 6, 3 * 3)
    assert moved <= 1.02 and temp <= 0.96


LAYERS = float32(4, 1024, 4096), float32(4, 4096, 1024)


def rematted(params, x):
    body = jax.checkpoint(lambda x, w: (layer(x, w), None), prevent_cse=False)
    # Behind a product the loop carries half, which feeds the next turn.
    x = layer(x, jax.tree.map(lambda w: w[0], params))
    return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)


def test_what_a_scan_keeps_is_float8_in_its_program():
    found, (moved, temp, _) = compiled(scanned, LAYERS, float32(8192, 1024))
    assert found == (6, 0)
    assert moved <= 0.88 and temp <= 0.79


@pytest.mark.full
def test_functions_and_cotangents_between_products_are_written_in_float8():
    """Not in bfloat16, to be read again: an SGD step of two MLPs moves fewer bytes."""
    found, (moved, temp, _) = compiled(*TWO_MLPS)
    assert found == (4 * 3 - 1, 3)  # no gradient of the first input is taken
    assert moved <= 0.99 and temp <= 0.82


@pytest.mark.full
def test_what_a_remat_computes_again_is_float8():
    found, _ = compiled(rematted, LAYERS, float32(8192, 1024))
    # In the loop the first product runs twice; the gradient of the second does not need its result.
    # Before it stand two products: the second has two gradients, the first its matrix's.
    assert found == (7 + 5, 0)


@pytest.mark.full
def test_gradients_of_single_examples_are_float8():
    def loss(params, x):
        return jnp.mean((layer(jnp.tanh(x @ params[2]), params)) @ params[3])

    params = (float32(512, 1024), float32(1024, 512), float32(512, 512), float32(512, 512))
    grads = jax.vmap(jax.grad(jmp.autocast(loss, "mixed_float8")), (None, 0))
    program = compile_for_h200(grads, params, float32(4, 1024, 512))
    # The first one's operand is an input, of which no gradient is taken; the head has two.
    assert products(program) == (2 + 3 + 3, 2)


@pytest.mark.full
def test_products_that_share_a_factor_are_not_joined(small_is_float8):
    def loss(params, x):
        w, v = params
        # One factor under three shapes, and one matrix twice.
        a, b = x @ w, x.reshape(4, 64, 256) @ v
        return jnp.mean((jnp.tanh(a) @ w * (jnp.tanh(b).reshape(256, 256) @ w)) @ v)

    params = float32(256, 256), float32(256, 256)
    gradient = jax.grad(jmp.autocast(loss, "mixed_float8"))
    float8, others = products(compile_for_h200(gradient, params, float32(256, 256)))
    assert float8 == 2 * 2 + 2 * 3 and others <= 3


@pytest.mark.full
def test_on_eight_h200s_fsdp_multiplies_and_gathers_float8():
    """Under jit XLA gathers what the product reads; of scales it sends single numbers."""
    mesh = h200s({"data": 8})
    rows = NamedSharding(mesh, P("data"))

    sharded = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
    loss = lambda params, x: jnp.mean(jax.nn.gelu(layer(x, params)) @ params[0])
    params = sharded(1024, 4096), sharded(4096, 1024)
    run = step(loss, "mixed_float8")
    program = compile_for_placed(run, params, sharded(8 * 8192, 1024), out_shardings=(rows, rows))
    assert products(program) == (2 + 3, 2)
    sent = wire(program.text)
    gathered = {s.dtype for s in sent if s.kind == "all-gather"}
    assert "f8e4m3fn" in gathered and "f32" not in gathered
    # Largest numbers, and norms of rows and columns.
    reduced, total = (sum(s.bytes for s in sent if kind in s.kind) for kind in ("all-reduce", ""))
    assert reduced < total / 1000


def test_functions_are_tried_here_while_a_mesh_of_devices_elsewhere_is_set():
    layer = lambda x, w: jax.nn.gelu(1.0625 * (x @ w[0])) @ w[1]
    loss, arguments, x = with_head(layer, *PAIR)
    with jax.set_mesh(h200s({"data": 8})):
        gradients = jax.eval_shape(jax.grad(jmp.autocast(loss, "mixed_float8")), arguments, x)
    assert gradients[2].shape == arguments[2].shape
