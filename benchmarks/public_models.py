"""Takes published models through autocast and the adapters, for `docs/performance.md`.

    python -m benchmarks.public_models    # what has no result yet
    python -m benchmarks.public_models --only bert gpt-2    # these, whether or not they have one

`make public-models` installs the models' packages, runs all of it and writes the page. Each model
runs in a process of its own on the CPU and has a file of its own under
`results/benchmarks/public_models`: a run that is cut short goes on where it stopped. Models that
fail are rows of the page.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

from benchmarks import published
from benchmarks.processes import ROOT

RESULTS = ROOT / "results" / "benchmarks" / "public_models"
LIMIT = 1800  # seconds a model


def path_of(name: str) -> pathlib.Path:
    return RESULTS / f"{name}.json"


def measure(source: str, name: str) -> dict[str, Any]:
    """Runs one model in a process; what becomes of it is in its file."""
    worker = "benchmarks.published._worker"
    command = [sys.executable, "-m", worker, source, name, str(path_of(name))]
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    path_of(name).unlink(missing_ok=True)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        raised = [line for line in done.stderr.splitlines() if "Error: " in line][-1:]
        error = f"the process ended with status {done.returncode}: {' '.join(raised)[:300]}"
    except subprocess.TimeoutExpired:
        error = f"it took more than {LIMIT} seconds"
    if not path_of(name).exists():
        title = published.find(source, name).title
        result = {"title": title, "source": source, "error": error}
        path_of(name).write_text(json.dumps(result, indent=1) + "\n")
    return json.loads(path_of(name).read_text())


def line(name: str, result: dict[str, Any]) -> str:
    """Returns what is printed when a model is done."""
    if "error" in result:
        return f"{name}: {result['error']}"
    parts = []
    for recipe, found in result["recipes"].items():
        if "error" in found:
            parts.append(f"{recipe}: {found['error']}")
        elif recipe != "float32":
            error = found["gradient_error"]
            ok = f"{error:.1e}" if math.isfinite(error) else "not finite"
            parts.append(f"{recipe}: {found['half']} of {found['products']} half, {ok}")
    return f"{name}: " + "; ".join(parts)


def main() -> None:
    """Measures the models that are asked for, or have no result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sources = published.sources()
    missing = [name for name in sources if not path_of(name).exists()]
    parser.add_argument("--only", nargs="+", choices=sources, default=missing, help="run these")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().only:
        print(line(name, measure(sources[name], name)), flush=True)
    print(f"Wrote {RESULTS}. `python -m benchmarks.report` makes the page of it.")


if __name__ == "__main__":
    main()
