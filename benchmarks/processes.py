"""Talks to the workers: one process a recipe, PyTorch's among them."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
# `pip install --no-deps --target` puts the peers here: DeepMind's `jmp` must not replace ours.
PEERS = ROOT / "benchmarks" / "peers"


def failure(error: Exception) -> dict[str, str]:
    """Returns the answer of something that raised an error: its first line."""
    return {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}


class Process:
    """A worker that is asked one thing at a time.

    Args:
      arguments: of the Python interpreter, such as `["-m", "benchmarks.worker", "adapter"]`.
      peers_first: whether the peers' folder comes before this project on the import path, or after.
      log: where its standard error goes.
      platform: the only one JAX may start; None leaves it the choice.
      python: the interpreter.
    """

    def __init__(
        self,
        arguments: list[str],
        peers_first: bool,
        log: pathlib.Path,
        platform: str | None = None,
        python: str = sys.executable,
    ) -> None:
        paths = [PEERS, ROOT] if peers_first else [ROOT, PEERS]
        # Several processes share a device: none may take all of its memory.
        environment = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(map(str, paths)),
            PYTHONSAFEPATH="1",  # `-m` would put this project before everything
            XLA_PYTHON_CLIENT_PREALLOCATE="false",
            **({"JAX_PLATFORMS": platform} if platform else {}),
        )
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        """Returns the answer to a command; `{"error": sentence}` if it or the process failed."""
        with contextlib.suppress(BrokenPipeError):  # its log says why
            print(json.dumps({"do": do, **options}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        end = self._log.read_text().strip().splitlines()[-1:]
        return {"error": f"the process ended with status {self._process.wait()}: {end}"[:300]}

    def seconds(self, do: str, **options: Any) -> float:
        """Returns the seconds that a command measured; raises RuntimeError if it failed."""
        answer = self.ask(do, **options)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["seconds"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
