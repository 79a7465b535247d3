"""What the long checks found, and the restores into another kind of training."""

from typing import Any

import numpy as np

from benchmarks._tables import table
from benchmarks.migrations import MIGRATIONS, WAYS
from benchmarks.pages.registry import figure, numbers, percent

numbers({
    "soak/kills": "{[kills][kills]}",
    "soak/trainings": "{[kills][trainings]}",
    "soak/bit-equal": "{[kills][bit_equal]}",
    "soak/kills-half": "{[kills][left_behind][half a checkpoint]}",
    "soak/steps": "{[faults][steps]:,}",
    "soak/faults": "{[faults][faults]:,}",
    "soak/skipped": "{[faults][skipped]:,}",
    "soak/float8-share-gpt": "{[float8][gpt][float8_share]:.0%}",
    "soak/float8-share-digits": "{[float8][digits][float8_share]:.0%}",
    "soak/float8-programs": "{[float8_programs][programs]:,}",
    "soak/float8-near": "{[float8_programs][verdicts][near]:,}",
})  # fmt: skip


@figure("soak/kills-aimed")
def _(found: Any) -> str:
    """How many kills fell at moments at which files are written."""
    return str(found["kills"]["kills"] - found["kills"]["by_aim"].get("any", 0))


@figure("soak/different")
def _(found: Any) -> str:
    return str(sum(len(row["different"]) for row in found["faults"]["rows"]))


# Float8 beside bfloat16.


@figure("soak/float8-table")
def _(found: Any) -> str:
    gpt, digits = found["float8"]["gpt"], found["float8"]["digits"]
    options, half, low = gpt["options"], "bfloat16", "float8"
    what = (
        f"GPT of `examples/gpt.py`, {options['layers']} layers of width {options['width']}, "
        f"{options['batch_size']} x {options['length']} bytes of Python's library, "
        f"{options['steps']} steps: mean of the last 20 losses, seed "
    )
    rows = [
        [f"{what}{row['seed']}" if index == 0 else f"seed {row['seed']}"]
        + [f"{row[half]:.4f}", f"{row[low]:.4f}", f"{row['difference']:+.4f}"]
        for index, row in enumerate(gpt["rows"])
    ]
    accuracies = (percent(np.mean(digits["test_accuracy"][name]), 2) for name in (half, low))
    difference = f"{100 * digits['difference']:+.2f} % ± {100 * digits['standard_error']:.2f} %"
    layers = "-".join(map(str, digits["options"]["widths"]))
    what = f"digits, dense layers {layers}, batch {digits['options']['batch_size']}, "
    what += f"{digits['options']['epochs']} epochs: test accuracy, {len(digits['seeds'])} seeds"
    rows.append([what, *accuracies, difference])
    return table(["", half, low, "difference"], rows)


@figure("soak/float8-apart")
def _(found: Any) -> str:
    """The largest difference between the losses of two trainings of the GPT."""
    return f"{max(abs(row['difference']) for row in found['float8']['gpt']['rows']):.3f}"


@figure("soak/float8-gradients")
def _(found: Any) -> str:
    rows = [
        [model, *(f"{errors[name]:.4f}" for name in ("bfloat16", "float8"))]
        for model, errors in found["float8"]["gradients"].items()
    ]
    return table(["error of the gradient at the initial values", "bfloat16", "float8"], rows)


@figure("soak/float8-not-finite")
def _(found: Any) -> str:
    return str(found["float8_programs"]["verdicts"].get("not finite", 0))


# Migrations.


def _bit_equal(found: list[dict[str, Any]]) -> str:
    failed = sorted({name for one in found for name, value in one.items() if value is False})
    if not failed:
        return "yes"
    difference = max(one["largest_difference"] for one in found)
    return f"except {', '.join(failed)}: {difference:g} ulp" if difference else f"not {failed}"


@figure("migrations/table")
def _(found: Any) -> str:
    """A row for each title of lines that are run."""
    titles = dict.fromkeys(row.title for row in MIGRATIONS)
    rows = []
    for title in titles:
        same = [row for row in MIGRATIONS if row.title == title]
        pairs = f" ({len(same)} pairs)" if len(same) > 1 else ""
        cells = [_bit_equal([found[row.name][way] for row in same]) for way in WAYS]
        rows.append([f"{title}{pairs}", *cells, same[0].remark])
    return table(["from, to", "bit-equal by flax.serialization", "by Orbax", "what changes"], rows)


@figure("migrations/all")
def _(found: Any) -> str:
    return str(len(found))


@figure("migrations/bit-equal")
def _(found: Any) -> str:
    """How many go on without a different bit, by either serialization."""
    return str(sum(all(way["the next steps"] for way in ways.values()) for ways in found.values()))
