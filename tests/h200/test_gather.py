"""What `jmp.gather_params` sends between eight H200s, counted in the compiled program.

Of 1 MiB of float32 parameters a device receives 7/8 a gather in float32, and as much a reduction.
"""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from testbed.machines.gpus import compile_for_placed
from testbed.machines.wire import MIB, h200s, wire

SHAPES = [(256, 512), (512, 256)]  # 1 MiB in float32
pytestmark = pytest.mark.usefixtures("h200")  # skips without a compiler
HALF, FULL = 7 / 16, 7 / 8


def loss_of(params, x, dtype):
    hidden = x.astype(dtype)
    for w in params:
        hidden = jnp.tanh(hidden @ w)
    return jnp.mean(hidden.astype(jnp.float32) ** 2)


def compiled(way, axes, gradients, specs, rows):
    """Compiles the gradients of parameters, along explicit axes or in a shard_map.

    Args:
      way: "explicit"; or "tracked" or "untracked", as JAX follows along which axes values differ.
      axes: the axes of the mesh and their lengths.
      gradients: a function of parameters and rows.
      specs: where the parameters lie.
      rows: where the rows lie.
    """
    is_explicit = way == "explicit"
    mesh = h200s(axes, *[AxisType.Explicit] * is_explicit)

    def placed(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = [placed(shape, spec) for shape, spec in zip(SHAPES, specs, strict=True)]
    if is_explicit:
        with jax.set_mesh(mesh):
            return compile_for_placed(gradients, params, placed((128, 256), rows))
    places = {"in_specs": (specs, rows), "out_specs": specs, "check_vma": way == "tracked"}
    mapped = jax.shard_map(gradients, mesh=mesh, **places)
    return compile_for_placed(mapped, params, placed((128, 256), rows))


def received_by_kind(program):
    """Returns the MiB of arrays, not of the loss, by kind of collective and dtype."""
    found = collections.Counter()
    for sent in wire(program.text):
        if sent.elements > 1:
            found[sent.kind, sent.dtype] += sent.bytes / MIB
    return dict(found)


def gradients_in(dtype, reduce_dtype, gathered_by):
    def gradients(params, x):
        def loss(params):
            gathered = jmp.gather_params(params, gathered_by, dtype, reduce_dtype)
            return loss_of(gathered, x, gathered[0].dtype)

        return jax.grad(loss)(params)

    return gradients


@pytest.mark.parametrize(
    ("way", "dtype", "reduce_dtype", "sums", "reduced"),
    [
        ("tracked", "f16", "f32", "f32", FULL),
        ("tracked", "f16", None, "f16", HALF),
        ("tracked", "bf16", None, "bf16", HALF),
        ("untracked", "f16", "f32", "f32", FULL),
        ("explicit", "f16", "f32", "f32", FULL),
        ("explicit", "bf16", None, "bf16", HALF),
    ],
)
def test_fsdp_sends_what_the_same_program_by_hand_does(way, dtype, reduce_dtype, sums, reduced):
    gradients = gradients_in(dtype, reduce_dtype, P() if way == "explicit" else "data")
    program = compiled(way, {"data": 8}, gradients, [P("data")] * 2, P("data"))
    expected = {("all-gather", dtype): HALF, ("reduce-scatter", sums): reduced}
    assert received_by_kind(program) == pytest.approx(expected)


@pytest.mark.full
@pytest.mark.parametrize("way", ["tracked", "explicit"])
def test_replicas_add_up_what_is_left_after_the_scatter(way):
    axes = ("replica", "data")
    gradients = gradients_in("f16", "f32", P() if way == "explicit" else axes)
    program = compiled(way, {"replica": 2, "data": 4}, gradients, [P("data")] * 2, P(axes))
    found = received_by_kind(program)
    assert found["reduce-scatter", "f32"] == pytest.approx(3 / 4)
    assert found["all-reduce", "f32"] == pytest.approx(1 / 4)
    assert found["all-gather", "f16"] <= HALF and len(found) == 3


@pytest.mark.full
@pytest.mark.parametrize("way", ["tracked", "explicit"])
def test_no_gathered_weight_is_larger_than_its_shard_of_tensor_parallelism(way):
    """Four of FSDP by two of tensor parallelism, first by columns and then by rows."""
    specs = [P("data", "model"), P(("model", "data"))]

    def loss(params, x):
        first, second = jmp.gather_params(params, "data", "f16", "f32")
        x = x.astype(jnp.float16)
        if way == "explicit":
            hidden = jnp.einsum("bi,ih->bh", x, first, out_sharding=P("data", "model"))
            out = jnp.einsum("bh,ho->bo", jnp.tanh(hidden), second, out_sharding=P("data"))
        else:
            out = jax.lax.psum(jnp.tanh(x @ first) @ second, "model")
        return jnp.mean(out.astype(jnp.float32) ** 2)

    axes = {"data": 4, "model": 2}
    program = compiled(way, axes, jax.grad(loss), specs, P("data"))
    sent = [(s.kind, s.dtype, s.elements) for s in wire(program.text) if s.elements > 128 * 256]
    shard = 256 * 512 // 2
    half, full = ("all-gather", "f16", shard), ("reduce-scatter", "f32", shard)
    assert sorted(sent) == [half, half, full, full]
