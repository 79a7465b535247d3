"""What the examples share: positive options, the device's name, valid JSON, whose checkpoints."""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax

# Okabe and Ito's colours, told apart by every kind of colour vision.
COLORS = ("#000000", "#D55E00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7")
RECORD = "training.json"  # among checkpoints: what they were made with


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


def write_report(path: pathlib.Path, options: argparse.Namespace, **results: Any) -> None:
    """Writes what was measured, with device, version and options; NaN, unknown to JSON, is null."""
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "options": {k: v for k, v in vars(options).items() if k != "output_dir"},
        **jax.tree.map(lambda x: None if x != x else x, results),
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def check_checkpoints(folder: pathlib.Path, wanted: dict[str, Any], resume: bool) -> None:
    """Raises ValueError where resuming would mix two trainings, or starting would lose one.

    Args:
      folder: of the checkpoints; there may be none yet.
      wanted: what decides what is computed, as it is written to `folder / RECORD`.
      resume: whether the training there is to go on.
    """
    record = folder / RECORD
    found = json.loads(record.read_text()) if record.exists() else {}
    others = [name for name in wanted if found.get(name) != wanted[name]]
    if resume and others:
        expected = {name: found.get(name) for name in others} if found else "a training there"
        raise ValueError(
            f"--resume: for {folder} got { {name: wanted[name] for name in others} }; expected "
            f"{expected}. Give the options and the data it began with, or leave out --resume and "
            "give another --checkpoint-dir."
        )
    if found and not resume:
        raise ValueError(
            f"{folder} holds a training; expected none, or --resume to go on with it. To "
            "start anew delete it, or give another --checkpoint-dir."
        )
