"""What the examples share: options, folders and files, the line that names the device."""

import argparse
import contextlib
import json
import math
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

matplotlib.use("Agg")  # figures are written, and not shown

# Okabe and Ito's colours, told apart by every kind of colour vision.
COLORS = ("#000000", "#D55E00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7")
# Not `results`, whose files are tracked and quoted in the documentation: `--output-dir results`
# renews those, and `python -m benchmarks.report` then writes the pages and their figures anew.
OUTPUT = pathlib.Path("runs")
PRECISIONS = ["float32", "mixed_float16", "mixed_bfloat16"]
# For jit, where precisions are compared: XLA for a CPU leaves the roundings of bfloat16 products
# out, unless it is told not to, and bfloat16 would look better than it is on a GPU.
ALL_ROUNDINGS = {"xla_allow_excess_precision": False}


class OptionsHelp(argparse.RawDescriptionHelpFormatter):
    """Shows the description as it stands, and of each option its default, if it has one."""

    def add_argument(self, action: argparse.Action) -> None:
        help, default = action.help or "", action.default
        has_one = not (default is None or default is False or default is argparse.SUPPRESS)
        if has_one and "default" not in help:
            shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
            shown = str(shown).replace("%", "%%")
            action.help = f"{help}; default: {shown}" if help else f"default: {shown}"
        super().add_argument(action)


def positive(kind: type) -> Callable[[str], Any]:
    """Returns a parser of numbers above zero for `argparse`."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"got {text}; expected a number above zero")
        return value

    parse.__name__ = kind.__name__
    return parse


def parse_options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Parses the options of an example.

    Args:
      description: the docstring of the example.
      **defaults: by the name of an option a number above zero; a number and a word of help; or a
        list of words, of which the user may choose some. --output-dir needs no row.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=OptionsHelp)
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        if isinstance(default, list):
            parser.add_argument(option, nargs="+", choices=default, default=default)
        else:
            number, help = default if isinstance(default, tuple) else (default, None)
            kind = positive(type(number))
            parser.add_argument(option, type=kind, default=number, help=help)
    parser.add_argument("--output-dir", type=pathlib.Path, default=OUTPUT)
    return parser.parse_args()


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Returns scikit-learn's digits: float32[1797, 8, 8] in [0, 1] and int32[1797] labels."""
    digits = load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.astype(np.int32)


def stop(message: str) -> NoReturn:
    """Ends the program as argparse does for an option that makes no sense."""
    print(f"{pathlib.Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def prepare_folder(folder: pathlib.Path, option: str) -> None:
    """Makes `folder` and tries to write into it: better now than after hours of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"to see whether there is room")
    except OSError as error:
        stop(
            f"{option} {folder} cannot be written into ({error.strerror}); expected a folder, or "
            f"a name under which one can be made. Give another {option}; nothing was done yet."
        )


def begin(arguments: argparse.Namespace, *more_folders: str, does: str = "Training") -> Console:
    """Makes the folders to write into, and says what device and what JAX the figures belong to.

    Returns: what to print to; of several processes the first prints, the others are silent.
    """
    for name in ("output_dir", *more_folders):
        prepare_folder(getattr(arguments, name), "--" + name.replace("_", "-"))
    console = Console(quiet=jax.process_index() > 0)
    device = jax.devices()[0]
    console.print(f"{does} on {device.device_kind} ({device.platform}), JAX {jax.__version__}")
    return console


@contextlib.contextmanager
def written_whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the name of a file to write; once it is whole, it takes the place of `path`.

    Who is killed or fails while writing leaves what was there before, and beside it a file
    `name.tmp.suffix`, which the next one overwrites.
    """
    temporary = path.with_stem(f"{path.stem}.tmp")
    yield temporary
    with temporary.open("rb") as file:
        os.fsync(file.fileno())  # else a power cut could leave the new name on an empty file
    os.replace(temporary, path)


def save_figure(figure: Any, path: pathlib.Path, source: str | None = None) -> None:
    """Writes a figure as SVG; `source` says inside the file what it was drawn from."""
    # The same figure is the same file: no date, no random names.
    metadata = {"Date": None, "Source": source}
    with matplotlib.rc_context({"svg.hashsalt": "jmp"}), written_whole(path) as file:
        figure.savefig(file, metadata=metadata)


def draw_band(
    axes: Any, curves: np.ndarray, color: str, style: str = "-", each: int = 1, **look: Any
) -> None:
    """Draws the mean of curves [seeds, steps], and between the lowest and the highest.

    Args:
      each: the number of steps whose mean is one point.
    """
    points = curves.shape[1] // each
    curves = curves[:, : points * each].reshape(len(curves), points, each).mean(axis=2)
    steps = np.arange(points) * each + (each - 1) / 2
    limits = (curves.min(axis=0), curves.max(axis=0))
    axes.fill_between(steps, *limits, color=color, alpha=0.25, linewidth=0)
    axes.plot(steps, curves.mean(axis=0), style, color=color, **look)


def draw_skipped(axes: Any, skipped: Any) -> None:
    """Marks steps that were skipped by lines in a panel of their own, which hides no curve."""
    axes.vlines(skipped, 0, 1, COLORS[1], linewidth=1.0)
    axes.set(ylim=(0, 1), yticks=[])
    axes.set_ylabel("skipped\nsteps", rotation=0, ha="right", va="center", fontsize=8)


def plot_run(history: dict[str, Any]) -> tuple[Any, Any]:
    """Draws loss, loss scale and skipped steps below each other; returns figure and axes."""
    figure, panels = plt.subplots(
        3, figsize=(7, 5.4), height_ratios=(5, 4, 0.6), sharex=True, layout="constrained"
    )
    top, bottom, last = panels
    losses = np.array(history["loss"], float)  # null, of an infinity or a NaN, is NaN
    # With a dot each: a finite loss between two that are NaN has no line.
    look = {"color": COLORS[3], "linewidth": 0.9, "markersize": 3}
    top.plot(losses, ".-", label="loss, where finite", **look)
    top.set(yscale="log", ylabel="training loss, nats")
    bottom.plot(history["loss_scale"], color=COLORS[0], linewidth=1.4, drawstyle="steps-post")
    bottom.set_yscale("log", base=2)
    bottom.set(ylabel="loss scale after the step")
    draw_skipped(last, np.flatnonzero(~np.array(history["grads_finite"], bool)))
    last.set(xlabel="step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    return figure, panels


def legend_above(axes: Any, **options: Any) -> None:
    """Puts the legend above the axes, where it hides nothing."""
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    axes.legend(**place, frameon=False, fontsize=8, **options)


def write_report(path: pathlib.Path, options: argparse.Namespace, **results: Any) -> dict[str, Any]:
    """Writes what was measured, with device, version and options; NaN and infinity are null.

    Returns: what the file holds, as `json.loads` reads it.
    """
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "options": {k: v for k, v in vars(options).items() if k != "output_dir"},
        **_finite_or_none(results),
    }
    text = json.dumps(report, indent=1) + "\n"
    with written_whole(path) as file:
        file.write_text(text)
    read: dict[str, Any] = json.loads(text)
    return read


def print_table(console: Console, *rows: Sequence[Any]) -> None:
    """Prints rows, of which the first has the headings, and the first cell of each its name."""
    table = Table(rows[0][0], box=box.SIMPLE, padding=0)
    for heading in rows[0][1:]:
        table.add_column(heading, justify="right")
    for name, *cells in rows[1:]:
        table.add_row(name, *(f"{x:.4f}" if isinstance(x, float) else str(x) for x in cells))
    console.print(table)


def finish(
    console: Console, arguments: argparse.Namespace, name: str, plot: Any = None, **results: Any
) -> None:
    """Writes `name.json`, and `name.svg` if there is a `plot` of what the file holds."""
    path = arguments.output_dir / f"{name}.json"
    report = write_report(path, arguments, **results)
    if plot is not None:
        save_figure(plot(report), path.with_suffix(".svg"))
    console.print(f"Wrote {path}" + (f" and {name}.svg beside it." if plot else "."))


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, dict):  # not by jax.tree.map, which would sort the names
        return {name: _finite_or_none(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_none(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(values: Any) -> Any:
    """Returns numbers of curves as lists, with six digits: a file that can be read and compared."""
    return np.vectorize(lambda value: float(f"{value:.6g}"))(values).tolist()
