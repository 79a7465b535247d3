"""Kills trainings of the examples at random moments, and resumes them until they end.

Every training has to end where one ends that was never stopped: the same losses, validations and
scales of every step, and the same last checkpoint, bit by bit. Some kills come at any moment of the
process, the others are aimed at the moments at which files are written:

    record      training.json is written
    checkpoint  Orbax writes a checkpoint under its temporary name
    renamed     a checkpoint got its name, and the one before it goes
    report      the picture and the numbers are written, all steps behind
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.processes import ROOT
from testbed.example_data import write_images, write_text

# Seconds after the moment aimed at within which the kill comes: about as long as it takes to write.
AIMS = {"record": 0.01, "checkpoint": 0.15, "renamed": 0.02, "report": 0.3}
KILLS_A_TRAINING = 3
LIMIT = 300  # seconds for a process


@dataclasses.dataclass(frozen=True)
class Example:
    """An example at a tiny size.

    Attributes:
      options: but for its folders.
      last: the number of its last checkpoint.
      trainings: folders of checkpoints, within the checkpoint folder.
    """

    name: str
    options: tuple[str, ...]
    last: int
    trainings: tuple[str, ...]


EXAMPLES = {
    "gpt": Example(
        "gpt",
        (
            *("--layers=1", "--width=16", "--heads=2", "--length=12", "--batch-size=4"),
            *("--accumulate=2", "--sample-length=20", "--pattern=*.txt", "--devices=1"),
            *("--steps=30", "--validate-every=10", "--checkpoint-every=4"),
        ),
        last=30,
        trainings=("training",),
    ),
    "cifar10": Example(
        "cifar10",
        (
            *("--model=resnet18", "--width=4", "--batch-size=8", "--epochs=5"),
            *("--precision", "float32", "float16"),
        ),
        last=5,
        trainings=("float32-batch8/training", "float16-batch8/training"),
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of aims and delays")
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Returns every kill, every training, and whether all trainings ended as they must."""
    chance = random.Random(arguments.seed)
    kills: list[dict[str, Any]] = []
    trainings: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        benches = [Bench(EXAMPLES[name], folder / name) for name in arguments.examples]
        for bench in benches:
            console.print(f"{bench.example.name}: {bench.seconds:.1f} s if it is not stopped")
        while len(kills) < arguments.kills:
            bench = benches[len(trainings) % len(benches)]
            number = len(trainings)
            left = min(KILLS_A_TRAINING, arguments.kills - len(kills))
            output = folder / f"training{number}"
            fell: list[dict[str, Any]] = []
            try:
                for kill in bench.killed(output, left, chance):
                    fell.append({"training": number} | kill)
                found = faults(bench.example, output, bench.expected)
            except (RuntimeError, OSError) as error:  # it could not be resumed, or lacks a file
                found = [str(error)]
            trainings.append({"example": bench.example.name, "kills": len(fell), "faults": found})
            kills += fell
            console.print(f"{len(kills)} kills; {bench.example.name}: {found or 'bit-equal'}")
            if found:
                break  # every other training might fail in the same way, and never be killed
    left = collections.Counter(name for kill in kills for name in kill["left"])
    return {
        "passed": not any(training["faults"] for training in trainings),
        "seed": arguments.seed,
        "kills": len(kills),
        "trainings": len(trainings),
        "bit_equal": sum(not training["faults"] for training in trainings),
        "by_aim": dict(sorted(collections.Counter(kill["aim"] for kill in kills).items())),
        "left_behind": dict(sorted(left.items())),
        "each_training": trainings,
        "each_kill": kills,
    }


class Bench:
    """One example, its data, and the training of it that was never stopped."""

    def __init__(self, example: Example, folder: pathlib.Path) -> None:
        folder.mkdir()
        self.example, self._folder = example, folder
        self._data = write_data(example.name, folder / "data")
        self.expected = folder / "uninterrupted"
        first = folder / "first"
        finish(self._start(first, resume=False), first)  # compiles; the next ones read it
        started = time.perf_counter()
        finish(self._start(self.expected, resume=False), self.expected)
        self.seconds = time.perf_counter() - started

    def killed(
        self, output: pathlib.Path, kills: int, chance: random.Random
    ) -> Iterator[dict[str, Any]]:
        """Trains into `output`, kills it that often on the way, and yields what each kill left."""
        ended = False
        while kills and not ended:
            process = self._start(output, record_of(self.example, output).exists())
            aim = chance.choice(["any", *AIMS])
            kill = fall(process, aim, chance, self.seconds, self.example, output)
            ended = kill is None  # before the moment came
            if kill is not None:
                kills -= 1
                yield kill
        if not ended:
            finish(self._start(output, record_of(self.example, output).exists()), output)

    def _start(self, output: pathlib.Path, resume: bool) -> subprocess.Popen[bytes]:
        script = ROOT / "examples" / f"{self.example.name}.py"
        folders = (f"--data-dir={self._data}", f"--output-dir={output}")
        environment = dict(
            os.environ,
            PYTHONPATH=str(ROOT),
            JAX_PLATFORMS="cpu",
            JAX_COMPILATION_CACHE_DIR=str(self._folder / "compiled"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )
        return subprocess.Popen(
            [sys.executable, script, *self.example.options, *folders, *["--resume"] * resume],
            stdout=subprocess.DEVNULL,
            stderr=errors_of(output).open("wb"),
            env=environment,
        )


def finish(process: subprocess.Popen[bytes], output: pathlib.Path) -> None:
    """Waits for a training to end; raises RuntimeError if it fails."""
    if process.wait(LIMIT) != 0:
        raise failure(process, output)


def failure(process: subprocess.Popen[bytes], output: pathlib.Path) -> RuntimeError:
    errors = errors_of(output)
    said = errors.read_text().strip().splitlines()[-1:] if errors.exists() else []
    return RuntimeError(f"a training ended with status {process.returncode}: {' '.join(said)}")


def errors_of(output: pathlib.Path) -> pathlib.Path:
    return output.with_suffix(".errors.txt")


def fall(
    process: subprocess.Popen[bytes],
    aim: str,
    chance: random.Random,
    seconds: float,
    example: Example,
    output: pathlib.Path,
) -> dict[str, Any] | None:
    """Kills the process at the moment aimed at, or within `seconds`; None if it ended before."""
    started = time.perf_counter()
    if aim == "any":
        delay, times = chance.uniform(0, seconds), 0
    else:
        delay, times = chance.uniform(0, AIMS[aim]), chance.randint(1, 3)
    if aim in ("record", "report"):
        times = 1  # they come once
    before, seen = moments(example, output).get(aim), 0
    while seen < times and process.poll() is None:
        now = moments(example, output)[aim]
        seen += bool(now - before)
        before = now
        time.sleep(0.0005)
    end = time.perf_counter() + delay
    while time.perf_counter() < end and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        if process.returncode != 0:
            raise failure(process, output)
        return None
    return {
        "aim": aim,
        "milliseconds": round(1000 * delay, 1),
        "lived_seconds": round(time.perf_counter() - started, 2),
        "checkpoints": sorted(moments(example, output)["renamed"]),
        "left": left_behind(example, output),
    }


def checkpoint_folder(example: Example, output: pathlib.Path) -> pathlib.Path:
    return output / "checkpoints" / example.name


def record_of(example: Example, output: pathlib.Path) -> pathlib.Path:
    return checkpoint_folder(example, output) / "training.json"


def moments(example: Example, output: pathlib.Path) -> dict[str, set[str]]:
    """Returns the names of the files there by which each aim is known."""
    checkpoints = checkpoint_folder(example, output)
    inner = [
        f"{training}/{name}"
        for training in example.trainings
        for name in names_in(checkpoints / training)
    ]
    return {
        "record": {name for name in names_in(checkpoints) if name.endswith(".json")},
        "checkpoint": {name for name in inner if "tmp" in name},
        "renamed": {name for name in inner if name.rpartition("/")[2].isdigit()},
        "report": {name for name in names_in(output) if name.startswith(example.name)},
    }


def names_in(folder: pathlib.Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # not yet, or just gone
        return []


def left_behind(example: Example, output: pathlib.Path) -> list[str]:
    """Returns what a training that ends by itself never leaves, in words."""
    checkpoints, found = checkpoint_folder(example, output), moments(example, output)
    kept = collections.Counter(name.rpartition("/")[0] for name in found["renamed"])
    left = {
        "no record": not (checkpoints / "training.json").exists(),
        "half a record": (checkpoints / "training.tmp.json").exists(),
        "a record without a checkpoint": bool(found["record"]) and not found["renamed"],
        "half a checkpoint": bool(found["checkpoint"]),
        "the checkpoint before": any(count > 1 for count in kept.values()),
        "half a report": any(".tmp." in name for name in found["report"]),
        "a report of two files, one missing": len(found["report"]) == 1,
    }
    return [name for name, is_so in left.items() if is_so]


def write_data(name: str, folder: pathlib.Path) -> pathlib.Path:
    writers = {"gpt": write_text, "cifar10": write_images}
    return writers[name](folder)


def faults(example: Example, got: pathlib.Path, expected: pathlib.Path) -> list[str]:
    """Returns in what one training differs from another that was not stopped."""
    return [
        fault
        for compare in (different_history, different_arrays, different_models)
        for fault in compare(example, got, expected)
    ]


def different_history(example: Example, got: pathlib.Path, expected: pathlib.Path) -> list[str]:
    """Returns which series differ that were measured step by step, the clock's apart."""
    histories = [histories_in(folder / f"{example.name}.json") for folder in (got, expected)]
    return [
        f"{training}: {series}"
        for training, history in enumerate(histories[1])
        for series in history
        if series not in ("seconds", "compiled_in")
        and histories[0][training][series] != history[series]
    ]


def histories_in(report: pathlib.Path) -> list[dict[str, Any]]:
    found = json.loads(report.read_text())
    return [run["epochs"] for run in found["runs"]] if "runs" in found else [found["history"]]


def different_arrays(example: Example, got: pathlib.Path, expected: pathlib.Path) -> list[str]:
    """Returns which arrays of the last checkpoints differ in any bit."""
    faults = []
    for training in example.trainings:
        arrays, others = (
            arrays_in(checkpoint_folder(example, folder) / training, example.last)
            for folder in (expected, got)
        )
        same = lambda a, b: a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        faults += [
            f"{training}{path}"
            for path in sorted(arrays.keys() | others.keys())
            if not (path in arrays and path in others and same(arrays[path], others[path]))
        ]
    return faults


def arrays_in(folder: pathlib.Path, number: int) -> dict[str, np.ndarray]:
    """Returns every array of a checkpoint, by its path."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder) as manager:
        items = ocp.args.Composite(state=ocp.args.StandardRestore())
        leaves = jax.tree_util.tree_leaves_with_path(manager.restore(number, args=items)["state"])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def different_models(example: Example, got: pathlib.Path, expected: pathlib.Path) -> list[str]:
    """Returns which exported models differ in any byte."""
    return [
        str(model.relative_to(expected))
        for model in expected.rglob("model.msgpack")
        if (got / model.relative_to(expected)).read_bytes() != model.read_bytes()
    ]
