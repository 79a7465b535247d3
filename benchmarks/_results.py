"""Results of hours: files that are written whole, and what each part of them belongs to."""

import importlib.metadata
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any


def write(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Writes a file whole or not at all: hours of other parts may stand in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_stem(f"{path.stem}.tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(temporary, path)


def facts(started: float, packages: Sequence[str]) -> dict[str, Any]:
    """Returns minutes since a time of `time.perf_counter`, the number of CPUs, and versions."""
    return {
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "cpus": os.cpu_count(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
    }
