"""How lean a step under autocast is on GPUs of other generations than the H200's, in bfloat16.

As `tests/h200/test_autocast.py`; what XLA fuses depends on the device. Bounds are 2 % above what
was measured.
"""

import pytest

from testbed.machines.training_steps import compile_step, ratios
from testbed.models import MODELS

SIZES = {"gpt": {"layers": 1}, "scanned_gpt": {"layers": 2}, "plain_transformer": {"layers": 1}}
# Bytes moved, temporary memory and kernels, at most, over those of the model by hand.
GATES = [
    ("b200", "gpt", (0.82, 0.71, 1.01)),
    ("b200", "scanned_gpt", (0.84, 0.88, 1.00)),
    ("b200", "plain_transformer", (0.67, 0.69, 0.95)),
    ("a100", "gpt", (0.86, 0.85, 0.96)),
    ("a100", "scanned_gpt", (0.90, 0.95, 0.99)),
    ("a100", "plain_transformer", (0.76, 0.76, 0.98)),
]


@pytest.mark.usefixtures("h200", "users_rank_promotion")
@pytest.mark.parametrize(("machine", "name", "at_most"), GATES)
def test_leaner_than_by_hand_in_bfloat16(machine, name, at_most):
    (model,) = (model for model in MODELS if model.name == name)
    by_hand, autocast = (
        compile_step(model, way, SIZES[name], machine, "bfloat16")
        for way in ("by hand", "autocast")
    )
    measured = ratios(autocast, by_hand)
    print(f"{machine} {name}: bytes, temp, kernels " + " ".join(f"{x:.3f}" for x in measured))
    for ratio, bound in zip(measured, at_most, strict=True):
        assert ratio <= bound, f"{measured} exceeds {at_most}"
