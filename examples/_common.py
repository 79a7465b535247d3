"""What the examples share: options, folders and files, the line that names the device."""

import argparse
import contextlib
import json
import math
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

# Okabe and Ito's colours, told apart by every kind of colour vision.
COLORS = ("#000000", "#D55E00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7")
# Not `results`, whose files are tracked and quoted in the documentation: `--output-dir results`
# renews those, and `python -m benchmarks.report` then writes the pages and their figures anew.
OUTPUT = pathlib.Path("runs")
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
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
    """Parses the output folder, and an option for each default: a number above zero, or words.

    Of words a user may choose some.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=OptionsHelp)
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        if isinstance(default, tuple):
            parser.add_argument(option, nargs="+", choices=default, default=default)
        else:
            parser.add_argument(option, type=positive(type(default)), default=default)
    parser.add_argument("--output-dir", type=pathlib.Path, default=OUTPUT)
    return parser.parse_args()


def device_line() -> str:
    """Returns which device and which JAX the figures belong to."""
    device = jax.devices()[0]
    return f"Training on {device.device_kind} ({device.platform}), JAX {jax.__version__}"


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


def begin(arguments: argparse.Namespace, *more_folders: str) -> Console:
    """Makes the folders to write into, and says what device and what JAX the figures belong to.

    Returns: what to print to; of several processes the first prints, the others are silent.
    """
    for name in ("output_dir", *more_folders):
        prepare_folder(getattr(arguments, name), "--" + name.replace("_", "-"))
    console = Console(quiet=jax.process_index() > 0)
    console.print(device_line())
    return console


def every(seconds: float) -> Callable[[], bool]:
    """Returns what is true when it is first called, and then once in so many seconds.

    A line of progress that is printed each time also shows in a log file, where no bar is drawn.
    """
    next_time = -math.inf

    def is_due() -> bool:
        nonlocal next_time
        now = time.monotonic()
        if now < next_time:
            return False
        next_time = now + seconds
        return True

    return is_due


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
    """Writes a figure; of an SVG `source` says inside the file what it was drawn from."""
    import matplotlib

    # The same figure is the same file: no date, no random names.
    options = {"metadata": {"Date": None, "Source": source}} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "jmp"}), written_whole(path) as file:
        figure.savefig(file, dpi=160, **options)


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
    table = Table(rows[0][0])
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
