"""How lean a training step under autocast is, against the same model written in half by hand.

The table of the documentation has the models at full size (`benchmarks/autocast_programs.py`); here
they have fewer layers, so that they compile in seconds. Bounds are 2 % above what was measured.
"""

import jax
import pytest

from tests.h200.training_steps import compile_step, ratios
from tests.models import MODELS

# Sizes; bytes moved, temporary memory and kernels, at most, over those of the model by hand.
GATES = [
    ("resnet", {"widths": (64, 128)}, (1.01, 1.02, 1.02)),
    ("unet", {"widths": (32, 64)}, (1.02, 1.02, 1.06)),
    ("gpt", {"layers": 1}, (0.78, 0.80, 1.04)),
    ("scanned_gpt", {"layers": 2}, (0.83, 0.97, 1.06)),
    ("lstm", {"width": 256}, (0.57, 0.55, 0.97)),
    ("plain_transformer", {"layers": 1}, (0.70, 0.77, 1.02)),
    ("equinox_attention", {"batch": 8, "length": 512, "width": 512}, (0.88, 0.78, 1.07)),
    # Rows that are no multiple of eight long, as the tokens of a ViT.
    ("equinox_attention", {"batch": 8, "length": 509, "width": 512}, (0.95, 0.78, 1.10)),
]


@pytest.mark.parametrize(("name", "sizes", "at_most"), GATES)
def test_leaner_than_by_hand(h200, name, sizes, at_most):
    (model,) = (model for model in MODELS if model.name == name)
    with jax.numpy_rank_promotion("allow"):
        by_hand = compile_step(model, "by hand", sizes)
        autocast = compile_step(model, "autocast", sizes)
    measured = ratios(autocast, by_hand)
    print(f"{name}: bytes, temp, kernels " + " ".join(f"{x:.3f}" for x in measured))
    for ratio, bound in zip(measured, at_most, strict=True):
        assert ratio <= bound, f"{measured} exceeds {at_most}"
