"""How much longer `import jmp` takes than `import jax`: `python -m benchmarks.start_up`.

Each round starts a process that imports jax and then jmp, and takes the processor's time of both.
The ratio is taken within a process, because seconds of different machines cannot be compared.
The gate is 0.15 s beside a jax that takes 0.45 s. Writes `results/benchmarks/start_up.json`; the
exit status is 1 above the gate.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from importlib import metadata

ROOT = pathlib.Path(__file__).parents[1]
GATE = 1 / 3  # of the seconds of `import jax`
CODE = """
import time
start = time.process_time()
import jax
middle = time.process_time()
import jmp
print(middle - start, time.process_time() - middle)
"""


def seconds() -> tuple[float, float]:
    """Returns the seconds of `import jax`, and of `import jmp` after it, in a new process."""
    command = [sys.executable, "-c", CODE]
    # As an installed package has it: its bytecode is kept, whatever this process was told.
    given = {name: of for name, of in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    finished = subprocess.run(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, check=True)
    first, second = map(float, finished.stdout.split())
    return first, second


def measured(rounds: int) -> dict[str, object]:
    """Returns medians over rounds, the first of which only fills caches."""
    rows = [seconds() for _ in range(rounds + 1)][1:]
    return {
        "jax": metadata.version("jax"),
        "python": platform.python_version(),
        "rounds": rounds,
        "seconds_of_jax": round(statistics.median(jax for jax, _ in rows), 4),
        "seconds_of_jmp": round(statistics.median(jmp for _, jmp in rows), 4),
        "ratio": round(statistics.median(jmp / jax for jax, jmp in rows), 4),
        "gate": round(GATE, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output-dir", type=pathlib.Path, default=ROOT / "results" / "benchmarks")
    arguments = parser.parse_args()
    found = measured(arguments.rounds)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / "start_up.json").write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"import jax: {found['seconds_of_jax']} s; import jmp adds {found['seconds_of_jmp']} s, "
        f"{found['ratio']} of it; the gate is {found['gate']}."
    )
    return int(float(str(found["ratio"])) > GATE)


if __name__ == "__main__":
    sys.exit(main())
