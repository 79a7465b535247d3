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
from benchmarks.wire import FSDP, gpt_shapes
from testbed.machines.gpus import compile_for_placed
from testbed.machines.wire import MIB, h200s, wire
from tests.products import convolved
from tests.sharding import gpt

SHAPES = [(256, 512), (512, 256)]  # 1 MiB in float32
pytestmark = pytest.mark.usefixtures("h200")  # skips without a compiler
HALF, FULL = 7 / 16, 7 / 8


def loss_of(params, x, dtype):
    hidden = x.astype(dtype)
    for w in params:
        hidden = jnp.tanh(hidden @ w)
    return jnp.mean(hidden.astype(jnp.float32) ** 2)


def at(mesh, shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


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

    params = [at(mesh, shape, spec) for shape, spec in zip(SHAPES, specs, strict=True)]
    x = at(mesh, (128, 256), rows)
    if is_explicit:
        with jax.set_mesh(mesh):
            return compile_for_placed(gradients, params, x)
    places = {"in_specs": (specs, rows), "out_specs": specs, "check_vma": way == "tracked"}
    mapped = jax.shard_map(gradients, mesh=mesh, **places)
    return compile_for_placed(mapped, params, x)


def received_by_kind(program):
    """Returns the MiB of arrays, not of the loss, by kind of collective and dtype."""
    found = collections.Counter()
    for sent in wire(program.text):
        if sent.elements > 1:
            found[sent.kind, sent.dtype] += sent.bytes / MIB
    return dict(found)


def assert_as_lean(exchanged, half):
    assert exchanged.temp_bytes <= 1.1 * half.temp_bytes
    assert exchanged.kernels <= 1.3 * half.kernels


def gradients_in(dtype, reduce_dtype, gathered_by, **dtypes):
    def gradients(params, x):
        def loss(params):
            gathered = jmp.gather_params(params, gathered_by, dtype, reduce_dtype, **dtypes)
            return loss_of(gathered, x, gathered[0].dtype)

        return jax.grad(loss)(params)

    return gradients


@pytest.mark.parametrize("way", ["tracked", "untracked", "explicit"])
def test_a_float32_sum_of_half_gradients_takes_the_bytes_of_a_half_sum(way):
    by = P() if way == "explicit" else "data"
    half, exchanged = (
        compiled(way, {"data": 8}, gradients_in("f16", sums, by), [P("data")] * 2, P("data"))
        for sums in (None, "f32")
    )
    assert received_by_kind(half) == {("all-gather", "f16"): HALF, ("reduce-scatter", "f16"): HALF}
    assert received_by_kind(exchanged) == {("all-gather", "f16"): HALF, ("all-to-all", "f16"): HALF}
    assert_as_lean(exchanged, half)


@pytest.mark.parametrize("way", ["tracked", "explicit"])
def test_float32_is_sent_if_asked(way):
    by = P() if way == "explicit" else "data"
    gradients = gradients_in("bf16", "f32", by, send_dtype="float32")
    program = compiled(way, {"data": 8}, gradients, [P("data")] * 2, P("data"))
    expected = {("all-gather", "bf16"): HALF, ("reduce-scatter", "f32"): FULL}
    assert received_by_kind(program) == expected


@pytest.mark.parametrize(("returned", "received"), [(None, 3 * HALF), ("f16", 2 * HALF)])
def test_data_parallel_sums_go_back_in_the_dtype_asked(returned, received):
    form = lambda reduced, **dtypes: compiled(
        "tracked", {"data": 8}, gradients_in("f16", reduced, "data", **dtypes), [P()] * 2, P("data")
    )
    half, exchanged = form(None), form("f32", return_dtype=returned)
    assert received_by_kind(half) == {("all-reduce", "f16"): 2 * HALF}
    assert sum(received_by_kind(exchanged).values()) == received
    assert_as_lean(exchanged, half)


@pytest.mark.full
@pytest.mark.parametrize("way", ["tracked", "explicit"])
def test_replicas_of_shards_get_what_is_added_up_once_over_all(way):
    axes = ("replica", "data")
    gradients = gradients_in("f16", "f32", P() if way == "explicit" else axes)
    program = compiled(way, {"replica": 2, "data": 4}, gradients, [P("data")] * 2, P(axes))
    found = received_by_kind(program)
    assert found["all-to-all", "f16"] == HALF
    assert found["all-gather", "f32"] == 1 / 8  # the half of a quarter
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

    program = compiled(way, {"data": 4, "model": 2}, jax.grad(loss), specs, P("data"))
    sent = [(s.kind, s.dtype, s.elements) for s in wire(program.text) if s.elements > 128 * 256]
    shard = 256 * 512 // 2
    assert sorted(sent) == [("all-gather", "f16", shard)] * 2 + [("all-to-all", "f16", shard)] * 2


def gpt_step(mesh, gathered):
    shapes = gpt_shapes(layers=4, width=256, vocabulary=2048)
    is_shape = lambda node: isinstance(node, tuple)
    params = jax.tree.map(lambda shape, spec: at(mesh, shape, spec), shapes, FSDP, is_leaf=is_shape)
    tokens = at(mesh, (64, 257), P("data"), jnp.int32)
    loss = lambda params, tokens: gpt.loss_of(params, tokens, lambda w: gathered(w, "data"))
    return loss, (params, tokens), FSDP


def convolutions(mesh, gathered):
    spec = P(None, None, None, "data")

    def loss(kernels, x):
        for kernel in gathered(kernels, spec):
            x = jax.nn.relu(convolved(x, kernel))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    kernels = [at(mesh, (3, 3, 480, 480), spec)] * 4
    return loss, (kernels, at(mesh, (256, 16, 16, 480), P("data"), jnp.float16)), [spec] * 4


@pytest.mark.full
@pytest.mark.parametrize("make", [gpt_step, convolutions])
def test_models_send_and_hold_no_more_than_with_half_sums(make):
    mesh = h200s({"data": 8})

    def program(reduce_dtype):
        gathered = lambda w, by: jmp.gather_params(w, by, "float16", reduce_dtype)
        loss, arguments, specs = make(mesh, gathered)
        places = {"in_specs": (specs, P("data")), "out_specs": specs}
        return compile_for_placed(jax.shard_map(jax.grad(loss), mesh=mesh, **places), *arguments)

    half, exchanged = program(None), program("float32")
    received = lambda program: sum(sent.bytes for sent in wire(program.text))
    assert received(exchanged) <= 1.02 * received(half)
    assert_as_lean(exchanged, half)
