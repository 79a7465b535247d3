"""Turns the JSON of `benchmarks.run` into `docs/performance.md` and its picture.

python -m benchmarks.report
"""

import json
from typing import Any

from benchmarks import _counted, _measured, _wire_report
from benchmarks.processes import ROOT

RESULTS = ROOT / "results" / "benchmarks"
DOCS = ROOT / "docs"
INTRODUCTION = """# Performance

The same training step in the recipes that people use, side by side; each is a file of
[benchmarks/recipes](../benchmarks/recipes), which says where it comes from and which known defect
it steps around. `make bench` installs the peers (their versions are in the Makefile), counts and
times everything that needs no GPU, and makes this page.

"""


def load(suite: str) -> dict[str, Any] | None:
    path = RESULTS / f"{suite}.json"
    return json.loads(path.read_text()) if path.exists() else None


def main() -> None:
    compiled, checks, wire, gpu, cpu = map(load, ("compiled", "checks", "wire", "gpu", "cpu"))
    text = INTRODUCTION
    if compiled:
        text += _counted.steps(compiled) + _counted.loss_scaling(compiled)
        text += _counted.updates(compiled)
        _counted.plot(compiled, DOCS / "compiled.png")
    if checks:
        text += _counted.checks(checks)
    if wire:
        text += _wire_report.section(wire)
    text += _measured.gpu(gpu, compiled) if gpu else _measured.NO_GPU
    if cpu:
        text += _measured.cpu(cpu)
    (DOCS / "performance.md").write_text(text.rstrip() + "\n")
    print(f"Wrote {DOCS / 'performance.md'}.")


if __name__ == "__main__":
    main()
