"""Runs the long checks, and writes what they found into `results/soak.json`.

    python -m benchmarks.soak    # all of them, as `make soak` does
    python -m benchmarks.soak kills --kills 60 --seed 1

A check replaces its own results in the file and keeps those of the others. It ends with status 1
if a check found a fault.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks._results import facts, write
from benchmarks.processes import ROOT
from benchmarks.soak import CHECKS

VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "results" / "soak.json")
    checks = parser.add_subparsers(dest="check", metavar="check")
    for name, module in CHECKS.items():
        summary = module.__doc__.splitlines()[0]
        module.add_options(checks.add_parser(name, help=summary, description=module.__doc__))
    return parser.parse_args(given)


def results_so_far(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise SystemExit(
            f"{path} is no JSON ({error}); delete it, or give another --output."
        ) from error


def main(given: Sequence[str] | None = None) -> None:
    arguments, console = parse_arguments(given), Console()
    results_so_far(arguments.output)
    failed = []
    for name in [arguments.check] if arguments.check else list(CHECKS):
        # Without a name the options are those that the check has by itself.
        options = arguments if arguments.check else parse_arguments([name])
        started = time.perf_counter()
        found = CHECKS[name].run(options, console)
        found |= facts(started, VERSIONS)
        write(arguments.output, results_so_far(arguments.output) | {name: found})
        failed += [name] * (not found["passed"])
    console.print(f"Wrote {arguments.output}.")
    if failed:
        raise SystemExit(f"{', '.join(failed)}: a fault was found; see {arguments.output}.")


if __name__ == "__main__":
    main()
