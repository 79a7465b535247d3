"""The harness counts what it says: first on programs written out, then on compiled ones."""

import importlib.metadata
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention

from testbed.machines import loops
from testbed.machines.gpus import Program, as_if_cudnn
from testbed.machines.hlo import array_bytes, count, parse_instruction
from tests.h200 import fixture
from tests.h200.fixture import spec

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
    counted = count(text)
    assert (counted["bytes_moved"], counted["kernels"], counted["copies"]) == (64, 1, 1)


# As XLA writes loops and fusions within fusions for TPUs, and since jaxlib 0.12 fusions that are
# asynchronous or have a library call. The name of a loop says how often it runs.
LOOPS = """
%row_of (t: f32[100,8], u: s32[]) -> f32[1,8] {
  %t = f32[100,8]{1,0} parameter(0)
  %u = s32[] parameter(1)
  ROOT %taken = f32[1,8]{1,0} dynamic-slice(%t, %u), dynamic_slice_sizes={1,8}
}

%cut (p: f32[100,8], i: s32[], q: f16[8,4]) -> (f16[1,4], s8[4096]) {
  %p = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,8]{1,0} fusion(%p, %i), kind=kLoop, calls=%row_of
  %q = f16[8,4]{1,0} parameter(2)
  ROOT %product = (f16[1,4]{1,0}, s8[4096]{0}) custom-call(%row, %q), custom_call_target="__cublas$gemm"
}

%write (r: f32[100,8], s: f32[1,8], j: s32[]) -> f32[100,8] {
  %r = f32[100,8]{1,0} parameter(0)
  %s = f32[1,8]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %updated = f32[100,8]{1,0} dynamic-update-slice(%r, %s, %j)
}

%inner (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  %two = s32[] constant(2)
  %turn = s32[] get-tuple-element(%a), index=0
  %next = s32[]{:T(128)} add(%turn, %two)
  %state = f32[8]{0} get-tuple-element(%a), index=1
  %doubled = f32[8]{0} add(%state, %state)
  ROOT %both = (s32[], f32[8]{0}) tuple(%next, %doubled)
}

%until_seven (b: (s32[], f32[8])) -> pred[] {
  %b = (s32[], f32[8]{0}) parameter(0)
  %bound = s32[]{:T(128)} constant(7)
  %counter = s32[] get-tuple-element(%b), index=0
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}

%until_done (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  %bound = s32[]{:T(128)} constant(7)
  %counter = s32[] get-tuple-element(%c), index=0
  %less = pred[] compare(%counter, %bound), direction=LT
  ROOT %both_hold = pred[] and(%less, %less)
}

%outer (d: (s32[], f32[8])) -> (s32[], f32[8]) {
  %d = (s32[], f32[8]{0}) parameter(0)
  %all = f32[100,8]{1,0} constant({...})
  %row = f32[1,8]{1,0} dynamic-slice(%all, %place), dynamic_slice_sizes={1,8}
  %again = f32[100,8]{1,0} dynamic-update-slice(%all, %row, %place)
  %half = f16[8,4]{1,0} constant({...})
  %place = s32[] get-tuple-element(%d), index=0
  %product = (f16[1,4]{1,0}, s8[4096]{0}) fusion(%all, %place, %half), kind=kCustom, calls=%cut
  %begun = ((f32[100,8]{1,0}, f32[1,8]{1,0}, s32[]), f32[100,8]{1,0}, u32[]) fusion-start(%all, %row, %place), kind=kLoop, calls=%write
  %ended = f32[100,8]{1,0} fusion-done(%begun)
  ROOT %four_times = (s32[], f32[8]{0}) while(%d), condition=%until_seven, body=%inner
}

ENTRY %main (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = (s32[], f32[8]{0}) parameter(0)
  %five_times = (s32[], f32[8]{0}) while(%x), condition=%until_done, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %some_times = (s32[], f32[8]{0}) while(%five_times), condition=%until_done, body=%inner
}
"""  # noqa: E501  as the compiler writes it


def test_loops_count_their_turns_and_one_whose_turns_are_unknown_counts_once():
    product = (8 * 4 + 4) + 8 * 4 * 2 + 4 * 2  # a row, its place, the matrix; but no workspace
    written = 2 * 8 * 4 + 4  # a row read and written at a place
    inner = 2 * 8 * 4 + 3 * 4  # and the counter
    compared, both = 2 * 4 + 1, 1 + 1
    sliced = 2 * written  # by itself as in a fusion
    assert count(LOOPS) == {
        "bytes_moved": 5 * (product + written + sliced + 4 * (inner + compared) + compared + both)
        + (inner + compared + both),
        "kernels": 5 * (4 + 4 * (2 + 1) + 2) + (2 + 2),
        "copies": 0,
        "conditionals": 0,
        "loops_of_unknown_turns": 1,
    }


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
    tree = {"a": np.ones(1000, np.float32), "b": jnp.ones(1000)}  # they stand for their shapes
    program = h200(lambda tree: tree["a"] + tree["b"], tree)
    no = dict.fromkeys(("copies", "conditionals", "loops_of_unknown_turns", "temp_bytes"), 0)
    assert program == Program(program.text, bytes_moved=12_000, kernels=1, **no)


def test_a_donated_update_copies_nothing(h200):
    tree = [spec(64, 64), spec(64)]
    program = h200(
        lambda parameters, gradients: jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients),
        tree, tree, donate_argnums=0,
    )  # fmt: skip
    assert "may-alias" in program.text
    assert (program.kernels, program.copies) == (2, 0)
    assert program.bytes_moved == 12 * (64 * 64 + 64)


def test_a_conditional_shows_and_its_costliest_branch_counts(h200):
    program = h200(
        lambda which, x: lax.cond(which, lambda x: x @ x, lambda x: x + 1, x),
        spec(dtype=jnp.bool_), spec(64, 64),
    )  # fmt: skip
    assert program.conditionals == 1
    assert program.bytes_moved == 2 * 64 * 64 * 4
    assert program.kernels == 1


@pytest.mark.parametrize("name", loops.LOOPS)
def test_a_loop_of_n_turns_counts_n_times_its_body(h200, name):
    loops.check([loops.counted("h200", name, turns) for turns in loops.TURNS])


def test_a_loop_until_a_condition_holds_counts_one_turn_and_says_so(h200):
    def double(x):
        return lax.while_loop(lambda x: x.sum() < 10, lambda x: jnp.sin(x) * 2, x)

    program = h200(double, spec(1000))
    assert program.loops_of_unknown_turns == 1
    assert program.bytes_moved < 100_000


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

    program = h200(logarithms, spec(64, 30000), spec(64, dtype=jnp.int32))
    assert program.bytes_moved < 1.1 * 64 * 30000 * 4  # read once, for maxima and sums


def test_a_lookup_reads_the_rows_it_takes(h200):
    look_up = lambda table, rows: table.at[rows].get(mode="promise_in_bounds")
    program = h200(look_up, spec(50_000, 64), spec(8, dtype=jnp.int32))
    assert program.bytes_moved == 2 * 8 * 64 * 4 + 8 * 4


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16])
def test_a_cast_there_and_back_is_removed_unless_a_barrier_stands_between(h200, half):
    # XLA may keep more precision than was asked for: a rounding that matters must not be a pair of
    # casts inside one program.
    removed = h200(lambda x: x.astype(half).astype(jnp.float32), spec(1000))
    kept = h200(lambda x: lax.optimization_barrier(x.astype(half)).astype(jnp.float32), spec(1000))
    assert " convert(" not in removed.text
    assert kept.text.count(" convert(") == 2
    assert kept.bytes_moved == (4 + 2 + 2 + 4) * 1000
