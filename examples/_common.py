"""What the examples share: positive options, the line that names the device, valid JSON."""

import argparse
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console

# Okabe and Ito's colours, told apart by every kind of colour vision.
COLORS = ("#000000", "#D55E00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7")


def positive(kind: type) -> Callable[[str], Any]:
    """Returns a parser of numbers above zero for `argparse`."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"got {text}; expected a number above zero")
        return value

    parse.__name__ = kind.__name__
    return parse


def device_line() -> str:
    """Returns which device and which JAX the figures belong to."""
    device = jax.devices()[0]
    return f"Training on {device.device_kind} ({device.platform}), JAX {jax.__version__}"


def begin(arguments: argparse.Namespace) -> Console:
    """Makes the output folder, and says which device and which JAX the figures belong to."""
    console = Console()
    console.print(device_line())
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    return console


def write_report(path: pathlib.Path, options: argparse.Namespace, **results: Any) -> None:
    """Writes what was measured, with device, version and options; NaN and infinity are null."""
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "options": {k: v for k, v in vars(options).items() if k != "output_dir"},
        **jax.tree.map(_finite_or_none, results),
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
