"""Runs the examples as a reader would, and measures how long each takes.

    JAX_PLATFORMS=cpu python -m benchmarks.gallery                # an hour on two CPU cores
    JAX_PLATFORMS=cpu python -m benchmarks.gallery --only lora    # the others stay as they were

Writes `results/gallery.json`. The examples whose figures stand in the gallery write into `results`,
too; the others, whose figures other pages quote, into a folder that is thrown away.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from benchmarks import _results
from benchmarks.processes import ROOT

FILE = ROOT / "results" / "gallery.json"


class Row(NamedTuple):
    """An example: its name, what people train, and with what."""

    name: str
    trains: str
    framework: str
    data: str
    options: tuple[str, ...] = ()
    is_run: bool = True
    writes_results: bool = False


DIGITS, PYTHON = "digits of scikit-learn", "Python's standard library"
ROWS = (
    Row("quickstart", "a classifier, before and after the five lines", "Flax linen", DIGITS),
    Row("digits", "a ResNet with BatchNorm", "Flax linen", DIGITS),
    Row("cifar10", "a ResNet-50", "Flax linen", "CIFAR-10", is_run=False),
    Row("autoencoder", "an autoencoder", "Flax linen", DIGITS),
    Row("diffusion", "a diffusion model", "Flax nnx", DIGITS, writes_results=True),
    Row("char_lm", "an LSTM of characters", "Flax linen", PYTHON, ("--seeds", "3")),
    Row("gpt", "a GPT", "Flax nnx", f"{PYTHON}, or a folder of text"),
    Row("lora", "adapters of a frozen GPT: LoRA", "Flax linen", PYTHON, writes_results=True),
    Row("seq2seq", "an encoder and a decoder with attention", "Flax linen", "dates that it draws",
        writes_results=True),
    Row("grpo", "a GPT by reinforcement learning: GRPO", "plain JAX", "sums that it draws"),
    Row("actor_critic", "an actor and a critic", "Equinox", "a pole that it simulates",
        writes_results=True),
    Row("data_parallel", "on eight devices: data parallel, FSDP", "plain JAX", DIGITS,
        writes_results=True),
    Row("find_overflow", "attention until it overflows, and the cure", "Flax linen", DIGITS),
    Row("inspect_ranges", "one step: what underflows", "Flax linen", DIGITS),
    Row("log_metrics", "a classifier with a log of its loss scale", "plain JAX", DIGITS),
    Row("memory", "nothing: counts the memory of a GPT", "Flax linen", "none"),
)  # fmt: skip


def measure(row: Row) -> dict[str, Any]:
    """Runs an example to its end; returns its minutes by the clock, and of the processors."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / f"{row.name}.py"), *row.options]
        if row.name != "quickstart":
            command += ["--output-dir", str(ROOT / "results") if row.writes_results else folder]
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, cwd=folder, env=dict(os.environ, PYTHONPATH=str(ROOT)))
        after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "options": row.options,
        "minutes": round(seconds / 60, 2),
        "processor_minutes": round(used / 60, 2),
    }


def main() -> None:
    names = [row.name for row in ROWS if row.is_run]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    for row in ROWS:
        if row.name in arguments.only:
            started = time.perf_counter()
            found = measure(row)
            results = json.loads(FILE.read_text()) if FILE.exists() else {"examples": {}}
            results["examples"][row.name] = found
            _results.write(FILE, {**results, **_results.facts(started, ("jax", "flax", "equinox"))})


if __name__ == "__main__":
    main()
