"""One recipe in a process of its own, which obeys lines of JSON and answers in lines of JSON.

A process a recipe: DeepMind's `jmp` and ours share a name, a device's peak of memory can only be
read for a whole process, and no recipe profits from what another one has compiled.

    python -m benchmarks.worker adapter
    {"do": "count", "workload": "gpt2", "rehearse": false}
"""

import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
import traceback
from typing import Any

import jax

from benchmarks import recipes, workloads
from benchmarks.processes import failure


class Worker:
    """Every public method is a command; it returns what is answered."""

    def __init__(self, recipe: str) -> None:
        self._recipe = recipes.find(recipe)
        jax.config.update("jax_default_matmul_precision", self._recipe.matmul_precision)

    def count(self, workload: str, rehearse: bool) -> dict[str, Any]:
        """Counts the step compiled for an H200, without a device."""
        from testbed.machines.gpus import compile_for_h200

        training, *arguments = self._training(workload, rehearse)
        program = compile_for_h200(training.step, *arguments, donate_argnums=0)
        return program.figures("bytes_moved", "kernels", "copies", "temp_bytes")

    def counted(self, module: str, **options: Any) -> dict[str, Any]:
        """Returns what a module of this folder says of one row of its list."""
        with jax.numpy_rank_promotion("allow"):  # programs broadcast as users' models do
            return importlib.import_module(f"benchmarks.{module}").counted(**options)

    def target(self, row: str, rehearse: bool, **job: Any) -> dict[str, Any]:
        """Counts a program for one of several GPUs and TPUs, without a device."""
        return self.counted("targets", row_name=row, small=rehearse, **job)

    def prepare(self, workload: str, rehearse: bool) -> dict[str, Any]:
        """Traces and compiles the step for this machine's device and takes the first steps."""
        training, *arguments = self._training(workload, rehearse)
        compiled = jax.jit(training.step, donate_argnums=0).lower(*arguments).compile()
        self._step = compiled
        self._state = jax.jit(training.init)(jax.random.key(0))
        self._batch = jax.jit(workloads.find(workload, rehearse).batch)(jax.random.key(1))
        self.time(2)
        memory = compiled.memory_analysis()
        return {
            "step_seconds": self.time(3)["seconds"] / 3,
            "compiler_bytes": memory.temp_size_in_bytes
            + memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes,
        }

    def time(self, steps: int) -> dict[str, Any]:
        """Takes some steps and returns their seconds, waiting for the device once at the end."""
        jax.block_until_ready(self._state)
        started = time.perf_counter()
        for _ in range(steps):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return {"seconds": time.perf_counter() - started}

    def flops(self, workload: str, rehearse: bool) -> dict[str, Any]:
        """Counts the operations of the step's products: those of the model, not of a recipe."""
        from jmp.diagnostics import precision_report

        training, *arguments = self._training(workload, rehearse)
        report = precision_report(training.step, "mixed_float16")(*arguments)
        return {"flops": sum(row["flops"] for row in report.to_dict()["rows"])}

    def peak(self) -> dict[str, Any]:
        """Returns the most device memory that this process held, or None where nobody counts."""
        stats = jax.devices()[0].memory_stats() or {}
        return {"peak_bytes": stats.get("peak_bytes_in_use")}

    def machine(self) -> dict[str, Any]:
        """Returns what the figures belong to."""
        device = jax.devices()[0]
        return {
            "device": device.device_kind,
            "platform": device.platform,
            "platform_version": " ".join(device.client.platform_version.split()),
            "driver": _driver(),
            **self.versions(),
        }

    def versions(self) -> dict[str, Any]:
        """Returns what counts in compiled programs belong to."""
        packages = ("jax", "jaxlib", "flax", "optax", "numpy")
        python = {"python": sys.version.split()[0]}
        return python | {package: importlib.metadata.version(package) for package in packages}

    def ceilings(self, rehearse: bool) -> dict[str, Any]:
        """Measures what the device can do at best: bytes a second, operations a second."""
        side, elements = (256, 2**20) if rehearse else (8192, 2**28)
        array = jax.random.normal(jax.random.key(0), elements)
        seconds = _best_seconds(jax.jit(lambda x: x + 1), array)
        found = {"bytes_per_second": 2 * array.nbytes / seconds}
        for name, dtype, precision in (
            ("float16", "float16", None),
            ("tf32", "float32", "tensorfloat32"),
            ("float32", "float32", "highest"),
        ):
            matrix = jax.random.normal(jax.random.key(0), (side, side), dtype)
            with jax.default_matmul_precision(precision):
                seconds = _best_seconds(jax.jit(lambda x: x @ x), matrix)
            found[f"{name}_flops_per_second"] = 2 * side**3 / seconds
        return found

    def _training(self, workload: str, rehearse: bool) -> tuple[recipes.Training, Any, Any]:
        """Returns the recipe's functions, and the shapes of a state and of a batch."""
        found = workloads.find(workload, rehearse)
        training = self._recipe.make(found)
        key = jax.random.key(0)
        return training, jax.eval_shape(training.init, key), jax.eval_shape(found.batch, key)


def _driver() -> str | None:
    """Returns the version of the NVIDIA driver; None without one."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0]


def _best_seconds(function: Any, argument: Any) -> float:
    """Returns the seconds of a call, of several that are waited for together."""
    calls = 10
    jax.block_until_ready(function(argument))
    best = math.inf
    for _ in range(10):
        started = time.perf_counter()
        jax.block_until_ready([function(argument) for _ in range(calls)])
        best = min(best, (time.perf_counter() - started) / calls)
    return best


def obey(worker: Any) -> None:
    """Reads commands until the input ends. What libraries print goes to the standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = getattr(worker, command.pop("do"))(**command)
            except Exception as error:  # a recipe that fails is a line of the report
                traceback.print_exc()
                answer = failure(error)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    obey(Worker(sys.argv[1]))
