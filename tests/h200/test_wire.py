"""What devices send each other is counted as said, and autocast sends what a step by hand sends.

First the counting on programs written out and on compiled ones whose wire is known, then the cases
of `benchmarks/wire.py` at a small size.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import wire as cases
from testbed.machines.gpus import compile_for_placed
from testbed.machines.wire import MIB, Sent, h200s, received, wire
from tests.commands import in_full
from tests.h200.fixture import spec

# Counting, which needs no compiler.

ALL_EIGHT = "replica_groups={{0,1,2,3,4,5,6,7}}"


def program(*lines, others=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"{others}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # Seven eighths of a gathered array of 64 numbers come from others.
        ("%y = f32[64]{0} all-gather(%x)", Sent("all-gather", "f32", 224, 64)),
        # A device receives seven parts of eight numbers; what is scattered are 64.
        ("%y = f16[8]{0} reduce-scatter(%x)", Sent("reduce-scatter", "f16", 112, 64)),
        ("%y = f16[64]{0} all-reduce(%x)", Sent("all-reduce", "f16", 224, 64)),
        ("%y = bf16[64]{0} all-to-all(%x)", Sent("all-to-all", "bf16", 112, 64)),
        ("%y = f32[64]{0} collective-permute(%x)", Sent("collective-permute", "f32", 256, 64)),
    ],
)
def test_a_device_receives_what_a_ring_sends_it(line, expected):
    assert wire(program(f"{line}, {ALL_EIGHT}")) == [expected]


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ("(f32[8]{0}, f32[64]{0})", "all-gather", [224]),
        ("((f32[8]{0}, f16[8]{0}), (f32[64]{0}, f16[64]{0}))", "all-gather", [224, 112]),
        ("(f32[64]{0}, f32[8]{0})", "reduce-scatter", [224]),
        ("((f32[8]{0}), f32[8]{0})", "all-to-all", [28]),
        ("f32[64]{0}", "all-reduce", [448]),
        ("(f32[64]{0}, f16[64]{0})", "all-reduce", [448, 224]),
        ("(f32[64]{0}, f32[64]{0}, u32[], u32[])", "collective-permute", [256]),
    ],
)
def test_an_asynchronous_pair_counts_what_comes_out_once(shape, kind, expected):
    start = f"%start = {shape} {kind}-start(%x), {ALL_EIGHT}"
    done = f"%done = f32[64]{{0}} {kind}-done(%start)"
    sent = wire(program(start, done))
    assert [s.bytes for s in sent] == expected
    assert {s.kind for s in sent} == {kind}


def test_an_asynchronous_computation_counts_once():
    start = "%start = ((f32[8]{0}), f32[64]{0}, u32[]) async-start(%x), calls=%inner"
    done = "%done = f32[64]{0} async-done(%start)"
    assert [s.bytes for s in wire(program(start, done, others=LOOPS))] == [224]


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", 2),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", 4),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", 4),
        ("replica_groups={}", 8),
    ],
)
def test_only_the_devices_of_a_group_send_to_each_other(groups, devices):
    (sent,) = wire(program(f"%y = f32[64]{{0}} all-gather(%x), {groups}, dimensions={{0}}"))
    assert sent.bytes == 4 * 64 * (devices - 1) / devices


LOOPS = """
%inner (a: f32[8]) -> f32[8] {
  %gathered = f32[64]{0} all-gather(%a), replica_groups=[1,8]<=[8]
}

%outer (b: f32[8]) -> f32[8] {
  %turns = f32[8]{0} while(%b), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %reduced = f16[64]{0} all-reduce(%b), replica_groups=[1,8]<=[8], to_apply=%test
}

%test (c: f32[8]) -> pred[] {
  %yes = pred[] constant(true)
}
"""  # noqa: E501  as the compiler writes it


def test_what_stands_in_a_loop_counts_once_a_turn():
    known = '%y = f32[8]{0} while(%x), condition=%test, body=%outer, backend_config={"known_trip_count":{"n":"3"}}'  # noqa: E501
    unknown = "%y = f32[8]{0} while(%x), condition=%test, body=%outer"
    for line, turns in ((known, 3), (unknown, 1)):
        in_both, in_outer = wire(program(line, others=LOOPS))
        assert (in_both.kind, in_both.bytes) == ("all-gather", turns * 5 * 224)
        assert (in_outer.kind, in_outer.bytes) == ("all-reduce", turns * 224)


@pytest.mark.parametrize(
    "line",
    [
        "%y = f32[8]{0} conditional(%p, %x, %x), branch_computations={%inner, %inner}",
        "%y = f32[8]{0} conditional(%p, %x, %x), true_computation=%inner, false_computation=%inner",
    ],
)
def test_of_branches_all_count(line):
    assert [s.bytes for s in wire(program(line, others=LOOPS))] == [224, 224]


def test_what_is_received_is_chosen_by_kind_and_dtype():
    sent = [Sent("all-gather", "f16", MIB, 1), Sent("all-gather", "f32", 2 * MIB, 1)]
    sent.append(Sent("all-reduce", "f32", 4 * MIB, 1))
    assert (received(sent), received(sent, "all-gather"), received(sent, dtype="f32")) == (7, 3, 6)
    assert received(sent, "all-gather", "f32") == 2
    assert received(sent, "all-to-all") == 0


# Compiled programs whose wire is known.


@pytest.mark.parametrize("turns", [1, 6])
def test_an_all_gather_in_a_scan_counts_once_a_turn(h200, turns):
    mesh = h200s({"data": 8})
    stack = spec(turns, 64, 64, sharding=NamedSharding(mesh, P(None, "data")))
    x = spec(64, 64, sharding=NamedSharding(mesh, P("data")))

    def scanned(stack, x):
        def turn(x, weight):
            return jnp.tanh(x @ lax.all_gather(weight, "data", tiled=True)), None

        return lax.scan(turn, x, stack)[0]

    places = {"in_specs": (P(None, "data"), P("data")), "out_specs": P("data")}
    sent = wire(compile_for_placed(jax.shard_map(scanned, mesh=mesh, **places), stack, x).text)
    assert {(s.kind, s.dtype) for s in sent} == {("all-gather", "f32")}
    assert received(sent) * MIB == turns * 4 * 64 * 64 * 7 / 8


def test_two_axes_of_a_mesh_are_counted_apart(h200):
    mesh = h200s({"data": 4, "model": 2})
    place = P("data", "model")
    x = spec(64, 64, dtype=jnp.float16, sharding=NamedSharding(mesh, place))

    def moved(x):
        rows = lax.all_gather(x, "data", tiled=True)  # (64, 32)
        ring = [(i, (i + 1) % 4) for i in range(4)]
        return lax.ppermute(lax.psum(x, "model"), "data", ring), rows

    outs = (P("data"), P("data", "model"))
    mapped = jax.shard_map(moved, mesh=mesh, in_specs=place, out_specs=outs)
    by_kind = {s.kind: s.bytes for s in wire(compile_for_placed(mapped, x).text)}
    assert by_kind == {
        "all-gather": 2 * 64 * 32 * 3 / 4,
        "all-reduce": 2 * (2 * 16 * 32) / 2,
        "collective-permute": 2 * 16 * 32,
    }


# The cases of the benchmark.


@functools.cache
def sent_by(case, variant):
    return wire(cases.compile_step(cases.find(case), variant, small=True).text)


LAYERS = 4 * 128 * 256  # numbers
BLOCKS, TABLE = 2 * 12 * 128 * 128, 1280 * 128  # of the language model
FSDP = {"all-gather": LAYERS, "reduce-scatter": LAYERS}
DATA_PARALLEL = {"all-reduce": 2 * LAYERS}
# What is gathered, and what is reduced (twice in an all-reduce), in numbers.
PREDICTED = [
    ("fsdp", FSDP),
    ("fsdp-constraint", FSDP),
    ("fsdp-shard-map", FSDP),
    ("fsdp-around-shard-map", FSDP),
    ("fsdp-explicit", FSDP),
    ("dp", DATA_PARALLEL),
    ("dp-shard-map", DATA_PARALLEL),
    ("dp-psum", DATA_PARALLEL),
    # Blocks are gathered forward and again backward; of the table are two gradients.
    ("gpt-fsdp", {"all-gather": 2 * BLOCKS + 2 * TABLE, "reduce-scatter": BLOCKS + 2 * TABLE}),
    ("gpt-dp", {"all-reduce": 2 * (BLOCKS + 2 * TABLE)}),
]


def expected(numbers, widths):
    """MiB that a device receives, given the bytes of a number by kind of collective."""
    return {kind: widths[kind] * moved * 7 / 8 / MIB for kind, moved in numbers.items()}


IN_HALF = {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 2}
IN_FLOAT32 = {"all-gather": 4, "reduce-scatter": 4, "all-reduce": 4}


@pytest.mark.parametrize(
    ("case", "variant"),
    in_full(itertools.product(("fsdp", "gpt-fsdp"), ("float32", "by-hand")), but=["fsdp"]),
)
def test_float32_and_by_hand_send_what_a_ring_needs(h200, case, variant):
    sent = sent_by(case, variant)
    is_half = variant == "by-hand"
    needed = expected(dict(PREDICTED)[case], IN_HALF if is_half else IN_FLOAT32)
    for kind, moved in needed.items():
        assert received(sent, kind, "f16" if is_half else "f32") == pytest.approx(moved, rel=0.01)
    # The loss and the gradients of norms are the rest.
    assert received(sent) == pytest.approx(sum(needed.values()), rel=0.01)


def test_without_a_barrier_a_constraint_moves_three_of_four_weights_before_their_cast(h200):
    sent = sent_by("fsdp-constraint", "by-hand")
    assert received(sent, "all-gather", "f32") == pytest.approx(0.75 * 4 * LAYERS * 7 / 8 / MIB)
    assert received(sent, "all-gather", "f16") == pytest.approx(0.25 * 2 * LAYERS * 7 / 8 / MIB)


# What a step by hand needs, autocast sends. In shard_map AD's own sum of the gradient of what is
# the same on all devices is float32.
IN_ANOTHER_WAY = ("dp-shard-map", "dp-psum")


@pytest.mark.parametrize(
    ("case", "numbers"),
    in_full((row for row in PREDICTED if row[0] not in IN_ANOTHER_WAY), but=["fsdp", "dp"]),
)
def test_autocast_sends_what_a_ring_needs_in_half(h200, case, numbers):
    ours = received(sent_by(case, "autocast"))
    assert ours <= 1.03 * sum(expected(numbers, IN_HALF).values())


@pytest.mark.parametrize("case", in_full(["gpt-fsdp-tp", "convolutions-fsdp"]))
def test_autocast_sends_what_a_step_by_hand_sends(h200, case):
    ours, base = (received(sent_by(case, variant)) for variant in ("autocast", "by-hand"))
    assert ours <= 1.03 * base


SCATTERED = re.compile(r" = (\w+)\[[\d,]*\b(?:1280|160),\d+\]\S* scatter\(")


@pytest.mark.parametrize("case", in_full(["gpt-dp", "gpt-fsdp"]))
def test_rows_of_a_tied_table_add_up_in_float32_and_cost_no_more_than_by_hand(h200, case):
    # By hand rows are added up in half: 2048 ones and no more.
    ours, base = (
        cases.compile_step(cases.find(case), way, small=True).text
        for way in ("autocast", "by-hand")
    )
    assert [SCATTERED.findall(text) for text in (ours, base)] == [["f32"], ["f16"]]
    assert received(wire(ours)) <= received(wire(base)) * 1.001


@pytest.mark.parametrize(
    ("case", "numbers"),
    in_full((row for row in PREDICTED if row[0] != "dp-psum"), but=["fsdp", "dp"]),
)
def test_with_float32_reduction_autocast_sends_half_and_adds_up_in_float32(h200, case, numbers):
    sent = sent_by(case, "autocast-f32")
    needed = expected(numbers, IN_FLOAT32 | {"all-gather": 2})
    for kind, moved in needed.items():
        dtype = "f16" if kind == "all-gather" else "f32"
        assert received(sent, kind, dtype) <= 1.03 * moved
    assert received(sent) <= 1.03 * sum(needed.values())


@pytest.mark.full
@pytest.mark.parametrize("variant", ["autocast", "autocast-f32"])
def test_with_tensor_parallelism_no_weight_is_gathered_whole(h200, variant):
    sent = [s for s in sent_by("gpt-fsdp-tp", variant) if s.kind == "all-gather"]
    gathered = {s.elements for s in sent if s.dtype in ("f16", "f32")}
    # Half of a weight has the size of no other weight, and of no activation.
    qkv, out, up = (128 * columns for columns in (3 * 128, 128, 4 * 128))
    assert {qkv // 2, out // 2, up // 2} <= gathered
    assert not {qkv, out, up, TABLE} & gathered


IN_FLOAT8 = ["fsdp-constraint", "fsdp-shard-map", "fsdp-explicit"]


@pytest.mark.full
@pytest.mark.parametrize("case", IN_FLOAT8)
def test_what_float8_products_read_is_gathered_in_half_of_halfs_bytes(h200, small_is_float8, case):
    sent = sent_by(case, "autocast-f8")
    # The last of the four layers feeds no product. Gradients add up as in half.
    gathered, reduced = (expected(FSDP, IN_HALF)[kind] for kind in FSDP)
    assert received(sent, "all-gather", "f8e4m3fn") == pytest.approx(gathered * 3 / 4 / 2)
    assert received(sent, "all-gather", "bf16") == pytest.approx(gathered / 4)
    assert received(sent, "reduce-scatter", "bf16") == pytest.approx(reduced)
    # The rest are single numbers: scales, and the loss.
    assert received(sent) <= 1.001 * (gathered * 5 / 8 + reduced)


def test_every_case_has_a_name_of_its_own_and_an_unknown_one_is_answered_with_them():
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    for case in cases.CASES:
        variants = [variant.name for variant in case.variants]
        assert len(set(variants)) == len(variants)
    with pytest.raises(ValueError, match="got the case 'zero'; expected one of fsdp, "):
        cases.find("zero")
