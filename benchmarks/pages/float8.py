"""Float8 beside bfloat16: the ends of trainings, and gradients at their start."""

from typing import Any

from benchmarks._tables import table
from benchmarks.pages.registry import figure, numbers

numbers({"float8/share": "{[gpt][float8_share]:.0%}"})


@figure("float8/table")
def _(found: Any) -> str:
    options, half, low = found["gpt"]["options"], "bfloat16", "float8"
    what = (
        f"GPT of `examples/gpt.py`, {options['layers']} layers of width {options['width']}, "
        f"{options['batch_size']} x {options['length']} bytes of Python's library, "
        f"{options['steps']} steps: mean of the last 20 losses, seed "
    )
    rows = [
        [f"{what}{row['seed']}" if index == 0 else f"seed {row['seed']}"]
        + [f"{row[half]:.4f}", f"{row[low]:.4f}", f"{row['difference']:+.4f}"]
        for index, row in enumerate(found["gpt"]["rows"])
    ]
    return table(["", half, low, "difference"], rows)


@figure("float8/apart")
def _(found: Any) -> str:
    """The largest difference between the losses of two trainings of the GPT."""
    return f"{max(abs(row['difference']) for row in found['gpt']['rows']):.3f}"


@figure("float8/gradients")
def _(found: Any) -> str:
    rows = [
        [model, *(f"{errors[name]:.4f}" for name in ("bfloat16", "float8"))]
        for model, errors in found["gradients"].items()
    ]
    return table(["error of the gradient at the initial values", "bfloat16", "float8"], rows)
