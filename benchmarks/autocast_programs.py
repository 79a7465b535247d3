"""Compiles a training step of each model for an H200 and prints how lean autocast's is.

Counted, not timed, and without a GPU: bytes moved, temporary memory and kernels of the compiled
program, as ratios to the same model written with `dtype=float16` by hand. The table stands in
`docs/autocast.md`. Run it from the project's root in the test environment:

    JAX_PLATFORMS=cpu PYTHONPATH=. .venv-test/bin/python benchmarks/autocast_programs.py
"""

import sys

from tabulate import tabulate

from tests.h200.training_steps import WAYS, compile_step, ratios
from tests.models import MODELS

SIZES = {
    "resnet": "ResNet, batch 256, 32 x 32",
    "unet": "U-Net with GroupNorm, batch 64, 64 x 64",
    "gpt": "GPT, 4 layers, width 512, 8 x 512 tokens",
    "scanned_gpt": "the same, scanned with remat",
    "lstm": "LSTM, 2 x 512, 64 x 128 tokens",
    "plain_transformer": "RMSNorm, rotary, SwiGLU in plain JAX, 4 layers",
}


def main(names):
    rows = []
    for model in MODELS:
        if model.name not in names:
            continue
        programs = {way: compile_step(model, way, {}) for way in WAYS}
        by_hand = programs["by hand"]
        rows.append(
            [
                SIZES[model.name],
                *ratios(programs["autocast"], by_hand),
                *ratios(programs["float32"], by_hand)[:2],
                f"{by_hand.bytes_moved / 1e9:.2f} GB, {by_hand.temp_bytes / 1e6:.0f} MB, "
                f"{by_hand.kernels}",
            ]
        )
    headers = ["one training step", "bytes moved", "temp memory", "kernels"]
    headers += ["float32: bytes", "float32: temp", "by hand"]
    print(tabulate(rows, headers, tablefmt="github", floatfmt=".3f"))


if __name__ == "__main__":
    main(sys.argv[1:] or list(SIZES))
