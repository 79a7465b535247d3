"""How lean a step under autocast is on GPUs of other generations than the H200's, in bfloat16.

As `tests/h200/test_autocast.py`; what XLA fuses depends on the device. Bounds are 2 % above what
was measured.
"""

import re

import jax
import jax.numpy as jnp
import pytest

import jmp
from benchmarks.targets import vit
from testbed.decoding import CACHES, LOOPS, Decoder
from testbed.machines.gpus import compile_for_gpu
from testbed.machines.hlo import parse_program
from testbed.machines.training_steps import ratios
from testbed.models import MODELS, Model
from tests.commands import in_full
from tests.gates import assert_at_most, assert_leaner_than_by_hand

pytestmark = pytest.mark.usefixtures("h200", "users_rank_promotion")

# Bounds of the bytes moved, temporary memory and kernels, as ratios to the model by hand.
GATES = [("b200", "gpt", (0.82, 0.71, 1.01)), ("a100", "plain_transformer", (0.76, 0.76, 0.98))]


@pytest.mark.parametrize(("machine", "name", "at_most"), in_full(GATES))
def test_leaner_than_by_hand_in_bfloat16(machine, name, at_most):
    (model,) = (model for model in MODELS if model.name == name)
    assert_leaner_than_by_hand(model, {"layers": 1}, at_most, machine, "bfloat16")


@pytest.mark.full
@pytest.mark.parametrize(
    ("machine", "at_most"), [("b200", (0.92, 0.84, 0.95)), ("l40s", (0.92, 0.90, 0.93))]
)
def test_a_vit_is_leaner_than_by_hand(machine, at_most):
    """Its 197 tokens are padded once, so that no kernel writes scores of that length."""
    sizes = {"batch": 64, "layers": 1, "width": 512, "heads": 8}
    model = Model("vit", vit, {})
    by_hand, autocast = assert_leaner_than_by_hand(model, sizes, at_most, machine, "bfloat16")
    assert "bf16[64,8,197,197]" in by_hand.text
    assert "197,197]" not in autocast.text


# Generation in bfloat16: bytes moved and temporary memory, at most, over those by hand.
GENERATION = [
    ("h200", "scan", "filled", (1.02, 1.02)),
    ("h200", "while", "filled", (1.02, 1.02)),
    ("b200", "while", "filled", (1.02, 1.02)),
    *(("h200", "scan", cache, (1.05, 1.05)) for cache in CACHES[1:]),
]


@pytest.mark.parametrize(("machine", "loop", "cache", "at_most"), in_full(GENERATION, first=1))
def test_generation_is_as_lean_as_by_hand(machine, loop, cache, at_most):
    by_hand, exact = (Decoder(dtype, loop, cache) for dtype in (jnp.bfloat16, jnp.float32))
    autocast = jmp.autocast(exact, "mixed_bfloat16")
    arguments = exact.arguments()
    programs = [compile_for_gpu(machine, f, *arguments) for f in (autocast, by_hand)]
    measured = ratios(*programs)[:2]
    assert_at_most(f"{machine} {loop} {cache}: bytes, temp", measured, at_most)


@pytest.mark.full
@pytest.mark.parametrize("loop", LOOPS)
def test_half_parameters_are_cast_nowhere(loop):
    """And float32 ones are cast once, before the loop: no turn reads a float32 matrix."""
    exact = Decoder(loop=loop)
    params, token = exact.arguments()
    halves = jax.eval_shape(lambda params: jmp.cast_floating(params, jnp.bfloat16), params)
    generate = jmp.autocast(exact, "mixed_bfloat16")
    cast = []
    for given in (params, halves):
        computations, entry = parse_program(compile_for_gpu("h200", generate, given, token).text)
        (turns,) = (i for i in computations[entry] if i.opcode == "while")
        assert not re.search(r"f32\[(2,)?(1024|4096),\d{4}\]", turns.shape)
        inputs = {i.name for i in computations[entry] if i.opcode == "parameter"}
        launched = [i for i in computations[entry] if i.opcode in ("convert", "fusion")]
        casts = [i for i in launched if i.shape.startswith("bf16")]
        cast.append(sum(inputs.issuperset(i.operands) for i in casts))
    assert cast == [5, 0]
