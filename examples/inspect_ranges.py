"""Is anything underflowing? Where the numbers of a training step lie, with and without a scale.

    python examples/inspect_ranges.py            # half a minute on two CPU cores
    python examples/inspect_ranges.py --help

The model, the text and the loss are those of `char_lm.py`, at the first step. Three programs are
measured: the float32 one, which shows what float16 would lose; float16 without loss scaling, which
shows what it does lose; and float16 under the static scale that the first measurement suggests.

Writes `inspect_ranges.json` and `inspect_ranges.png` into the output folder.
"""

import argparse
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from _common import begin, positive, save_figure, write_report
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
    parser.add_argument("--output-dir", type=pathlib.Path, default=pathlib.Path("results"))
    parser.set_defaults(steps=1)  # how many batches are drawn
    return parser.parse_args()


def plot(reports: dict[str, diagnostics.RangeReport], path: pathlib.Path) -> None:
    figure, panels = plt.subplots(
        len(reports), figsize=(6.4, 7.5), sharex=True, sharey=True, layout="constrained"
    )
    for axes, (name, report) in zip(panels, reports.items(), strict=True):
        report.plot(axes, roles=["gradient", "activation gradient"], dtype="float16")
        axes.set_title(name, loc="left", fontsize=9, pad=16)
        axes.label_outer()
    save_figure(figure, path)


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
    plot(reports, arguments.output_dir / "inspect_ranges.png")
    data = {name: report.to_dict() for name, report in reports.items()}
    write_report(arguments.output_dir / "inspect_ranges.json", arguments, programs=data)
    console.print(
        f"Wrote {arguments.output_dir / 'inspect_ranges.json'} and the picture beside it."
    )


if __name__ == "__main__":
    main()
