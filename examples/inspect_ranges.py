"""Is anything underflowing? Where the numbers of a training step lie, with and without a scale.

    python examples/inspect_ranges.py            # half a minute on two CPU cores
    python examples/inspect_ranges.py --help

The model, the text and the loss are those of `char_lm.py`, at the first step. Three programs are
measured: the float32 one, which shows what float16 would lose; float16 without loss scaling, which
shows what it does lose; and float16 under the static scale that the first measurement suggests.

Writes `inspect_ranges.json` and `inspect_ranges.svg` into the output folder.
"""

import argparse
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from _common import OUTPUT, begin, positive, save_figure, write_report
from char_lm import CharLM, batches, load_text, loss_fn

from jmp import diagnostics

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=positive(int), default=32)
    parser.add_argument("--length", type=positive(int), default=64, help="characters a sequence")
    parser.add_argument("--width", type=positive(int), default=128)
    parser.add_argument("--loss-weight", type=positive(float), default=1e-3)
    parser.add_argument("--output-dir", type=pathlib.Path, default=OUTPUT)
    parser.set_defaults(steps=1)  # how many batches are drawn
    return parser.parse_args()


def read(program: dict[str, Any]) -> diagnostics.RangeReport:
    """Returns the report that `to_dict` wrote down; all rows count from the same exponent."""
    lowest, known = -1100, {field.name for field in dataclasses.fields(diagnostics.Range)}
    rows = []
    for row in program["rows"]:
        counts = np.zeros(2200, np.int64)
        first = row["lowest"] - lowest
        counts[first : first + len(row["counts"])] = row["counts"]
        given = {name: value for name, value in row.items() if name in known}
        rows.append(diagnostics.Range(**given | {"counts": counts, "lowest": lowest}))
    return diagnostics.RangeReport(tuple(rows), program["dtype"])


def plot(report: dict[str, Any]) -> Any:
    """Draws the three programs that `inspect_ranges.json` holds."""
    programs = report["programs"]
    figure, panels = plt.subplots(
        len(programs), figsize=(7, 8.5), sharex=True, sharey=True, layout="constrained"
    )
    for axes, (name, rows) in zip(panels, programs.items(), strict=True):
        read(rows).plot(axes, roles=["gradient", "activation gradient"], dtype="float16")
        axes.set_title(name, loc="left", fontsize=9, fontweight="bold", pad=28)
        axes.label_outer()
    return figure


def main() -> None:
    arguments = parse_arguments()
    console = begin(arguments)
    text, vocabulary = load_text()
    batch = jnp.asarray(batches(text, arguments)[0])
    model = CharLM(vocabulary, arguments.width)
    params = model.init(jax.random.key(0), batch[:, :-1])["params"]

    def measure(policy: str | None = None, **options: Any) -> diagnostics.RangeReport:
        measured = diagnostics.gradient_report(loss_fn, policy, **options)
        return measured(params, model.apply, batch, arguments.loss_weight)

    reports = {"float32": measure()}
    scale = reports["float32"].best_scale("float16")
    reports["float16 without loss scaling"] = measure("mixed_float16")
    reports[f"float16 with a loss scale of 2^{np.log2(scale):.0f}"] = measure(
        "mixed_float16", scale=scale
    )
    for name, report in reports.items():
        console.print(f"\n[bold]{name}[/bold]")
        print(report)
    data = {name: report.to_dict() for name, report in reports.items()}
    path = arguments.output_dir / "inspect_ranges.json"
    save_figure(plot(write_report(path, arguments, programs=data)), path.with_suffix(".svg"))
    console.print(f"Wrote {path} and inspect_ranges.svg beside it.")


if __name__ == "__main__":
    main()
