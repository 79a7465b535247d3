"""The harness counts what it says: first on programs written out, then on compiled ones."""

# ruff: noqa: F811  a fixture is imported and then named as a parameter

import importlib.metadata
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention

from testbed.machines.gpus import Program, as_if_cudnn
from testbed.machines.hlo import array_bytes, count, parse_instruction
from tests.h200 import fixture
from tests.h200.fixture import h200  # noqa: F401  the tests below take it by name


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# The reader, which needs no compiler.


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("f32[]", [4]),
        ("bf16[640,1024]{1,0}", [2 * 640 * 1024]),
        ("f16[8,128]{1,0:T(8,128)(2,1)S(1)}", [2 * 8 * 128]),
        ("pred[7]{0}", [7]),
        ("f8e4m3fn[3,5]{1,0}", [15]),
        ("s4[5]{0:E(4)}", [3]),
        ("s4[5]{0}", [5]),
        ("c64[2]", [16]),
        ("f32[0,4]{1,0}", [0]),
        ("token[]", [0]),
        ("(f16[2]{0}, (s8[4194304]{0}, /*index=2*/u32[]))", [4, 4194304, 4]),
        ("()", []),
    ],
)
def test_a_shape_is_read_to_the_byte(shape, sizes):
    assert array_bytes(shape) == sizes


def test_an_unknown_dtype_is_refused_by_name():
    with pytest.raises(ValueError, match="'mystery'"):
        array_bytes("mystery[4]")


def test_a_line_with_nested_tuples_and_layouts_is_read():
    line = (
        "  ROOT %call.1 = (f16[8]{0:T(8)}, (s8[4]{0}, /*index=2*/u32[])) custom-call(%a.1, %b-2), "
        'custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/dot(x)"}'
    )
    instruction = parse_instruction(line)
    assert instruction.name == "call.1"
    assert instruction.shape == "(f16[8]{0:T(8)}, (s8[4]{0}, /*index=2*/u32[]))"
    assert instruction.opcode == "custom-call"
    assert instruction.operands == ("a.1", "b-2")


def test_an_asynchronous_pair_is_one_kernel_that_reads_and_writes_once():
    text = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %start = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%a)
  ROOT %done = f32[8]{0} copy-done(%start)
}
"""
    assert count(text) == {"bytes_moved": 64, "kernels": 1, "copies": 1, "conditionals": 0}


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="without an ENTRY computation"):
        count("HloModule empty")


# The fixture.


def test_an_environment_without_the_compiler_gets_a_reason(monkeypatch):
    monkeypatch.setattr(fixture, "COMPILER_WHEEL", "no-such-wheel-as-this")
    monkeypatch.setattr(fixture, "PINNED_JAXLIB", importlib.metadata.version("jaxlib"))
    assert "pip install no-such-wheel-as-this==" in fixture.reason_to_skip()


def test_another_compiler_version_gets_a_reason(monkeypatch):
    monkeypatch.setattr(fixture, "PINNED_JAXLIB", "0.0.1")
    assert "the H200 figures are those of 0.0.1" in fixture.reason_to_skip()


# As if there were cuDNN.


def attend(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def attend_or(query, key, value):
    """As a function that looks at the machine while it is traced."""
    try:
        return attend(query, key, value)
    except RuntimeError:
        return query


def test_attention_traced_as_if_there_were_cudnn_does_not_change_it_elsewhere():
    if cudnn_attention.cuda_versions is not None:
        pytest.skip("JAX knows this machine's version of cuDNN")
    with_cudnn, without = jax.jit(attend), jax.jit(attend_or)
    heads = (spec(2, 8, 1, 8, dtype=jnp.float16),) * 3
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cuDNN is not detected"):
            with_cudnn.trace(*heads)
        assert "attention" not in str(without.trace(*heads).jaxpr)
        with as_if_cudnn():
            for function in (with_cudnn, without):
                assert "dot_product_attention_fwd" in str(function.trace(*heads).jaxpr)


# Compiled programs.


def test_attention_of_cudnn_reads_and_writes_its_heads_and_a_number_a_row(h200):
    batch, length, heads, width = 8, 1024, 12, 64
    one = batch * length * heads * width * 2  # bytes of queries, of keys, of values, of outputs
    statistics = batch * heads * length * 4  # of the softmax, in float32

    def gradient(query, key, value):
        loss = lambda *inputs: attend(*inputs).astype(jnp.float32).sum()
        return jax.grad(loss, (0, 1, 2))(query, key, value)

    program = h200(gradient, *(spec(batch, length, heads, width, dtype=jnp.float16),) * 3)
    forward = (3 + 1) * one + statistics
    backward = (5 + 3) * one + statistics  # query, key, value, output and its gradient are read
    ones = one  # the gradient of a sum
    assert program.bytes_moved == forward + backward + ones
    assert (program.kernels, program.copies) == (3, 0)
    assert program.text.count("__cudnn$fmhaSoftmax") == 2


def test_a_float16_product_is_a_cublas_call_on_float16_operands(h200):
    m, k, n = 256, 512, 128
    program = h200(jnp.matmul, spec(m, k, dtype=jnp.float16), spec(k, n, dtype=jnp.float16))
    call = re.search(r"custom-call\((.*?)\).*__cublas", program.text)
    for operand in call[1].split(", "):
        assert re.search(rf"{re.escape(operand)} = f16\[", program.text)
    assert program.kernels == 1
    assert program.bytes_moved == 2 * (m * k + k * n + m * n)  # the workspace is not moved
    assert program.temp_bytes > 0  # but it is held


def test_a_sum_of_two_arrays_moves_twelve_bytes_an_element_in_one_kernel(h200):
    program = h200(jnp.add, spec(1000), spec(1000))
    assert program == Program(
        program.text, bytes_moved=12_000, kernels=1, copies=0, conditionals=0, temp_bytes=0
    )


def test_arrays_stand_for_their_shapes_and_pytrees_are_taken(h200):
    program = h200(
        lambda tree: tree["a"] + tree["b"], {"a": np.ones(8, np.float32), "b": jnp.ones(8)}
    )
    assert program.bytes_moved == 3 * 8 * 4


def test_a_donated_update_copies_nothing(h200):
    tree = [spec(64, 64), spec(64)]
    program = h200(
        lambda parameters, gradients: jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients),
        tree, tree, donate_argnums=0,
    )  # fmt: skip
    assert "may-alias" in program.text
    assert (program.kernels, program.copies) == (2, 0)
    assert program.bytes_moved == 12 * (64 * 64 + 64)


def test_an_argument_returned_as_it_came_is_a_copy_unless_donated(h200):
    assert h200(lambda x: x, spec(8)).copies == 1
    assert h200(lambda x: x, spec(8), donate_argnums=0).copies == 0


def test_a_conditional_shows_and_its_costliest_branch_counts(h200):
    program = h200(
        lambda which, x: lax.cond(which, lambda x: x @ x, lambda x: x + 1, x),
        spec(dtype=jnp.bool_), spec(64, 64),
    )  # fmt: skip
    assert program.conditionals == 1
    assert program.bytes_moved == 2 * 64 * 64 * 4
    assert program.kernels == 2


def test_a_loop_body_counts_once_whatever_the_number_of_turns(h200):
    def run(turns):
        return h200(lambda x: lax.fori_loop(0, turns, lambda _, x: jnp.sin(x) * 2, x), spec(1000))

    assert run(10).bytes_moved == run(1000).bytes_moved
    assert run(10).kernels == run(1000).kernels


def test_slices_behind_a_cast_are_read_alone_and_once():
    text = """
%cut (p: f32[100]) -> (f16[10], f32[10], pred[10]) {
  %p = f32[100]{0} parameter(0)
  %half = f16[100]{0} convert(%p)
  %first = f16[10]{0} slice(%half), slice={[0:10]}
  %size = f32[100]{0} abs(%p)
  %again = f32[10]{0} slice(%size), slice={[0:10]}
  %other = f32[10]{0} slice(%size), slice={[10:20]}
  %less = pred[10]{0} compare(%again, %other), direction=LT
  ROOT %all = (f16[10]{0}, f32[10]{0}, pred[10]{0}) tuple(%first, %again, %less)
}

ENTRY %main (x: f32[100]) -> (f16[10], f32[10], pred[10]) {
  %x = f32[100]{0} parameter(0)
  ROOT %fusion = (f16[10]{0}, f32[10]{0}, pred[10]{0}) fusion(%x), kind=kLoop, calls=%cut
}
"""
    read, written = 20 * 4, 10 * 2 + 10 * 4 + 10
    assert count(text)["bytes_moved"] == read + written


def test_a_gather_behind_arithmetic_reads_what_it_takes(h200):
    def logarithms(logits, labels):
        maxima, sums = logits.max(-1), jnp.exp(logits).sum(-1)
        rows = logits - (maxima + jnp.log(sums))[:, None]
        return jnp.take_along_axis(rows, labels[:, None], 1, mode="clip")

    logits = jax.ShapeDtypeStruct((64, 30000), jnp.float32)
    program = h200(logarithms, logits, jax.ShapeDtypeStruct((64,), jnp.int32))
    assert program.bytes_moved < 1.1 * 64 * 30000 * 4  # read once, for maxima and sums


def test_a_scan_over_a_stack_reads_one_slice_a_turn(h200):
    def scan(x, stack):
        return lax.scan(lambda x, w: (x * w, None), x, stack)[0]

    small = h200(scan, spec(1024), spec(16, 1024))
    large = h200(scan, spec(1024), spec(64, 1024))
    assert small.bytes_moved == large.bytes_moved
    assert small.bytes_moved < 16 * 1024 * 4


def test_a_scan_that_stacks_writes_one_slice_a_turn(h200):
    def scan(x, turns):
        return lax.scan(lambda x, _: (jnp.sin(x), x), x, length=turns)[1]

    small, large = (h200(lambda x, turns=turns: scan(x, turns), spec(1024)) for turns in (16, 64))
    # The stack itself is filled with zeros once before the loop.
    assert large.bytes_moved - small.bytes_moved == (64 - 16) * 1024 * 4


def test_a_lookup_reads_the_rows_it_takes(h200):
    def look_up(table, rows):
        return table.at[rows].get(mode="promise_in_bounds")

    program = h200(look_up, spec(50_000, 64), spec(8, dtype=jnp.int32))
    assert program.bytes_moved == 2 * 8 * 64 * 4 + 8 * 4


def test_the_figures_of_an_adam_step_repeat(h200):
    optimizer = optax.adam(1e-3)
    shapes = [(640, 1024)] * 40 + [(1024,)] * 20
    parameters = [spec(*shape) for shape in shapes]
    gradients = [spec(*shape, dtype=jnp.float16) for shape in shapes]
    state = jax.eval_shape(optimizer.init, parameters)
    size = sum(int(np.prod(shape)) for shape in shapes)

    def update(parameters, state, gradients):
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes Python and integer scalars
            updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    def finite(gradients):
        return jnp.stack([jnp.isfinite(g).all() for g in gradients]).all()

    def update_and_select(parameters, state, gradients):
        new = update(parameters, state, gradients)
        keep = finite(gradients)
        return jax.tree.map(lambda new, old: jnp.where(keep, new, old), new, (parameters, state))

    def update_under_cond(parameters, state, gradients):
        return lax.cond(
            finite(gradients), update, lambda p, s, g: (p, s), parameters, state, gradients
        )

    plain, select, cond = (
        h200(step, parameters, state, gradients, donate_argnums=(0, 1))
        for step in (update, update_and_select, update_under_cond)
    )
    # Parameter and both moments read and written in float32, the gradient read in float16.
    assert plain.bytes_moved / size == pytest.approx(26, abs=0.01)
    # The check reads the gradient once more.
    assert select.bytes_moved / size == pytest.approx(28, abs=0.01)
    assert (plain.copies, select.copies) == (0, 0)
    assert plain.temp_bytes + select.temp_bytes < size / 100
    # A conditional cannot update in place: parameters and moments are copied, and held twice.
    assert (cond.conditionals, select.conditionals) == (1, 0)
    assert cond.bytes_moved / size == pytest.approx(52, abs=0.01)
    assert cond.temp_bytes / size == pytest.approx(12, abs=0.1)
    for name, program in (("plain", plain), ("select", select), ("cond", cond)):
        print(
            f"{name}: {program.bytes_moved / size:.3f} bytes a parameter, "
            f"{program.kernels} kernels, {program.copies} copies, "
            f"{program.temp_bytes / size:.3f} temporary bytes a parameter"
        )


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16])
def test_a_cast_there_and_back_is_removed_unless_a_barrier_stands_between(h200, half):
    # XLA may keep more precision than was asked for: a rounding that matters must not be a pair of
    # casts inside one program.
    removed = h200(lambda x: x.astype(half).astype(jnp.float32), spec(1000))
    kept = h200(lambda x: lax.optimization_barrier(x.astype(half)).astype(jnp.float32), spec(1000))
    assert " convert(" not in removed.text
    assert kept.text.count(" convert(") == 2
    assert kept.bytes_moved == (4 + 2 + 2 + 4) * 1000
