"""Measures training steps in every recipe, side by side, and writes JSON for `report.py`.

    python -m benchmarks.run --suite compiled    # bytes, kernels, memory on an H200; needs no GPU
    python -m benchmarks.run --suite wire    # what eight H200s send each other; needs no GPU
    python -m benchmarks.run --suite programs    # the other tables of pages, also of an H200
    python -m benchmarks.run --suite targets    # GPUs and TPUs; after `make targets`
    python -m benchmarks.run --suite families    # the same of models that no rule was tuned on
    python -m benchmarks.run --suite gpu --minutes 9 --resume    # paired times on a GPU
    python -m benchmarks.run --rehearse --suite gpu    # everything at a tiny size, on any machine

A run with `--only`, `--recipes` or `--machines` replaces those results in the file and keeps the
others, so that a long suite can be run in parts; results of another machine are not kept. With
`--minutes` a run begins no workload after so many, and `--resume` goes on where one ended. `make
bench` installs what compiled, wire and programs need, and the GPUs of targets. The
suite gpu needs JAX for CUDA and, for its PyTorch rows, torch: `make benchmarks/peers/installed`,
then `pip install -e '.[test,cuda13]' torch`.
"""

import argparse
import collections
import contextlib
import functools
import json
import math
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks import families, gpu_parts, programs, targets, wire, workloads
from benchmarks.pairing import paired
from benchmarks.processes import ROOT, Process
from benchmarks.recipes import RECIPES, find
from benchmarks.workloads import UPDATES, WORKLOADS, Update

BASELINE = "by-hand"
CONTROL = "by-hand again"  # the same recipe in a second process: what chance alone makes of a ratio
TORCH = {"torch-eager": "eager", "torch-compile": "compile"}
TOGETHER = 4  # recipes on a device beside the baseline and its control: GPT-2 takes 12 GB in each
# The most telling first: time on a GPU is short.
GPU_ROWS = (
    *WORKLOADS[:2],
    *gpu_parts.ATTENTIONS,
    *gpu_parts.FAMILY_PARTS,
    *UPDATES,
    *gpu_parts.OTHERS,
    *WORKLOADS[2:],
)
ROWS = (*GPU_ROWS, *wire.CASES, *programs.GROUPS, *targets.ROWS, *families.FAMILIES)
NAMES = [row.name for row in ROWS]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=SUITES, required=True)
    names = "workloads, of the suite wire cases, of programs tables, of others rows"
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help=names)
    recipes = [row.name for row in RECIPES] + list(TORCH)
    recipes += sorted({row.name for case in wire.CASES for row in case.variants} - {*recipes})
    names = "of the suite wire variants"
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=recipes, help=names)
    names = "of the suites targets and families"
    machines = targets.MACHINES
    parser.add_argument("--machines", nargs="+", choices=machines, default=machines, help=names)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin nothing after so many"
    )
    parser.add_argument("--resume", action="store_true", help="leave what the file has of --only")
    parser.add_argument("--rounds", type=int, default=12, help="at least 8")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, on any machine")
    parser.add_argument("--output-dir", type=pathlib.Path, default=ROOT / "results" / "benchmarks")
    arguments = parser.parse_args()
    if arguments.rounds < 8:
        parser.error(f"--rounds got {arguments.rounds}; expected at least 8 for an interval")
    rows = [row.name for row in rows_of(arguments.suite)]
    if not set(rows) & set(arguments.only):
        parser.error(f"--only got {arguments.only}; expected one of {', '.join(rows)}")
    if BASELINE not in arguments.recipes:
        parser.error(f"--recipes has to name {BASELINE}: every ratio is to it")
    return arguments


def rows_of(suite: str) -> tuple[Any, ...]:
    others = {"wire": wire.CASES, "programs": programs.GROUPS, "targets": targets.ROWS}
    others |= {"families": tuple(families.FAMILIES), "gpu": GPU_ROWS}
    return others.get(suite, (*WORKLOADS, *UPDATES))


def recipes_for(workload: Any, arguments: argparse.Namespace, compiled: bool) -> list[str]:
    """Returns the names of the recipes that have something to run for `workload`."""
    names = [row.name for row in RECIPES if row.address(workload) is not None]
    if compiled:
        names = [name for name in names if name != "tf32"]  # the same program as float32
    elif workload.name == "gpt2":
        names += TORCH
    return [name for name in names if name in arguments.recipes]


@contextlib.contextmanager
def workers(
    names: list[str], platform: str | None = None, python: str = sys.executable
) -> Iterator[dict[str, Process]]:
    """Starts a process a recipe, and ends them all."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        found = {}
        for name in names:
            log = pathlib.Path(folder) / f"{name}.log"
            if name in TORCH:
                process = Process(["-m", "benchmarks.torch_worker", TORCH[name]], False, log)
            else:
                row = find(BASELINE if name == CONTROL else name)
                arguments = ["-m", "benchmarks.worker", row.name]
                process = Process(arguments, row.needs_peers_first, log, platform, python)
            stack.callback(process.close)
            found[name] = process
        yield found


# The suites: each returns what is written down for one workload.


def compiled_suite(workload: Any, arguments: argparse.Namespace, tick: Any) -> dict[str, Any]:
    """Counts bytes, kernels and memory of the programs an H200 would run."""
    options = {"workload": workload.name, "rehearse": arguments.rehearse}
    names = recipes_for(workload, arguments, compiled=True)
    return {"recipes": counted({name: (name, options) for name in names}, tick)}


def wire_suite(case: wire.Case, arguments: argparse.Namespace, tick: Any) -> dict[str, Any]:
    """Counts what eight H200s send each other in a step, in every variant of a case."""
    options = {"module": "wire", "case": case.name, "small": arguments.rehearse}
    names = [row.name for row in case.variants if row.name in arguments.recipes]
    # The variants are of this project alone: any recipe's worker can compile them.
    jobs = {name: (BASELINE, {**options, "variant": name}) for name in names}
    return {"recipes": counted(jobs, tick, "counted")}


def programs_suite(
    group: programs.Group, arguments: argparse.Namespace, tick: Any
) -> dict[str, Any]:
    """Counts the programs of one table of the documentation."""
    options = {"module": "programs", "group": group.name}
    jobs = {row: (BASELINE, {**options, "row": row}) for row in group.rows}
    return {"recipes": counted(jobs, tick, "counted")}


def targets_suite(
    row: Any,
    arguments: argparse.Namespace,
    tick: Any,
    module: str = "targets",
    jobs_of: Callable[[Any], Any] = targets.Row.jobs,
    together: int = min(2, os.cpu_count() or 1),  # a compiler takes more than a core, and 2 GB
) -> dict[str, Any]:
    """Counts a row for every machine and compiler that there is an interpreter for."""
    chosen = [job for job in jobs_of(row) if job.machine in arguments.machines]
    jobs = [job for job in chosen if targets.python_of(job)]
    for job in set(chosen) - set(jobs):
        print(f"Not counted: {job.name}. `make targets` installs its compiler.")

    answers: dict[str, Any] = {}

    def count(part: tuple[str, list[targets.Job]]) -> None:
        python, jobs = part
        with workers([BASELINE], "cpu", python) as found:
            for job in jobs:
                options = {"row_name": row.name, "small": arguments.rehearse, **vars(job)}
                answers[job.name] = found[BASELINE].ask("counted", module=module, **options)
                tick()

    of_python: dict[str, list[targets.Job]] = collections.defaultdict(list)
    for job in jobs:
        of_python[targets.python_of(job)].append(job)
    parts = [(python, of[i::together]) for python, of in of_python.items() for i in range(together)]
    with futures.ThreadPoolExecutor(together) as pool:
        list(pool.map(count, parts))
    return {"recipes": {job.name: answers[job.name] for job in jobs}}


def counted(
    jobs: dict[str, tuple[str, dict[str, Any]]], tick: Any, do: str = "count"
) -> dict[str, Any]:
    """Returns the counts of `{name: (recipe, options)}`, as many at a time as there are cores."""

    def count(job: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        recipe, options = job
        with workers([recipe], "cpu") as found:  # JAX must not take the compiler for a GPU
            answer = found[recipe].ask(do, **options)
        tick()
        return answer

    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(jobs, pool.map(count, jobs.values()), strict=True))


def timed_suite(workload: Any, arguments: argparse.Namespace, tick: Any) -> dict[str, Any]:
    """Times the steps in shuffled rounds; ratios are within a round, to the same step by hand."""
    options = {"workload": workload.name, "rehearse": arguments.rehearse}
    first = [BASELINE, CONTROL]
    others = [n for n in recipes_for(workload, arguments, compiled=False) if n != BASELINE]
    results: dict[str, Any] = {}
    flops: dict[str, Any] = {}
    with workers(first) as always:
        results |= prepared(always, options, tick)
        if "error" in results[BASELINE]:
            return {"recipes": {name: results[BASELINE] for name in (*first, *others)}}
        step_seconds = results[BASELINE]["step_seconds"]
        for start in range(0, len(others), TOGETHER):
            with workers(others[start : start + TOGETHER]) as group:
                results |= prepared(group, options, tick)
                alive = {n: p for n, p in (always | group).items() if "error" not in results[n]}
                time_steps = {n: stepping(p) for n, p in alive.items()}
                found = paired(time_steps, step_seconds, BASELINE, arguments.rounds)
                # The baseline and its control are timed in every group; the last one's are kept.
                for name, process in alive.items():
                    results[name] |= found[name] | process.ask("peak")
                if "float32" in group and not isinstance(workload, Update):
                    flops = group["float32"].ask("flops", **options)
    return {"recipes": results, **flops}


def gpu_suite(row: Any, arguments: argparse.Namespace, tick: Any) -> dict[str, Any]:
    """Times training steps and updates, each recipe in a process; of a part, all ways in one."""
    if not isinstance(row, gpu_parts.Part):
        return timed_suite(row, arguments, tick)
    options = {"part_name": row.name, "small": arguments.rehearse, "rounds": arguments.rounds}
    with workers([BASELINE]) as found:
        answer = found[BASELINE].ask("counted", module="gpu_parts", **options)
    tick()
    # A process that failed is that of all ways.
    return {"recipes": {row.baseline: answer} if "error" in answer else answer}


def prepared(found: dict[str, Process], options: dict[str, Any], tick: Any) -> dict[str, Any]:
    """Compiles in every process and takes the first steps."""

    def prepare(name: str) -> dict[str, Any]:
        answer = found[name].ask("prepare", **options)
        tick()
        return answer

    # A few at a time: on a GPU XLA times kernels while it compiles, not to be disturbed much.
    with futures.ThreadPoolExecutor(TOGETHER) as pool:
        return dict(zip(found, pool.map(prepare, found), strict=True))


def stepping(process: Process) -> Callable[[int], float]:
    return lambda steps: process.seconds("time", steps=steps)


SUITES = {
    "compiled": compiled_suite,
    "wire": wire_suite,
    "programs": programs_suite,
    "targets": targets_suite,
    # Compile and trace times are told: one job at a time.
    "families": functools.partial(
        targets_suite, module="families", jobs_of=families.jobs, together=1
    ),
    "gpu": gpu_suite,
}


def begun(path: pathlib.Path, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Returns the results so far of this machine (counted ones: of these versions), or none."""
    on_gpu = arguments.suite == "gpu"
    with workers(["float32"], None if on_gpu else "cpu") as found:
        process = found["float32"]
        machine = process.ask("machine" if on_gpu else "versions")
        platform = machine.get("platform")
        if on_gpu and platform != "gpu" and not arguments.rehearse:
            raise SystemExit(
                f"--suite gpu found {machine.get('error', platform)}; expected a GPU. Without one "
                "take --suite compiled, or --rehearse to see that everything runs."
            )
        results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if results.get("machine") != machine:
            if results:
                console.print(f"{path} was of {results['machine']}: begun anew.")
            results = {"machine": machine, "workloads": {}}
        if on_gpu and "ceilings" not in results:
            results["ceilings"] = process.ask("ceilings", rehearse=arguments.rehearse)
    return results


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    suite = SUITES[arguments.suite]
    name = f"{arguments.suite}_rehearsal" if arguments.rehearse else arguments.suite
    path = arguments.output_dir / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = begun(path, arguments, console)
    end = time.monotonic() + 60 * arguments.minutes
    done = set(results["workloads"]) if arguments.resume else set()

    with Progress(console=console) as progress:
        for workload in rows_of(arguments.suite):
            if workload.name not in arguments.only or workload.name in done:
                continue
            if time.monotonic() > end:
                console.print(f"Not begun: {workload.name} and later ones; --resume goes on.")
                break
            task = progress.add_task(workload.name, total=None)
            measured = suite(workload, arguments, lambda task=task: progress.advance(task))
            kept = results["workloads"].setdefault(workload.name, {"recipes": {}})
            recipes = kept["recipes"] | measured.pop("recipes")
            title = workload.title
            if isinstance(workload, workloads.Workload | Update):
                title = workloads.find(workload.name, arguments.rehearse).title
            kept |= {"title": title, "recipes": recipes} | measured
            # After each: a run that is cut short loses one workload.
            path.write_text(json.dumps(results, indent=1) + "\n")
            for recipe, found_here in recipes.items():
                if "error" in found_here:
                    console.print(f"{workload.name}, {recipe}: {found_here['error']}")
    console.print(f"Wrote {path}. `python -m benchmarks.report` makes the documentation of it.")


if __name__ == "__main__":
    main()
