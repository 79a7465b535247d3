"""How lean a step under autocast is on GPUs of other generations than the H200's, in bfloat16.

As `tests/h200/test_autocast.py`; what XLA fuses depends on the device. Bounds are 2 % above what
was measured.
"""

import jax.numpy as jnp
import pytest

import jmp
from benchmarks.targets import vit
from testbed.decoding import CACHES, Decoder
from testbed.machines.gpus import compile_for_gpu
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
