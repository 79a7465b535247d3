"""Turns the files of `results/` into `docs/performance.md`, figures, and the figures on all pages.

    python -m benchmarks.report

Run it after whatever renewed a file: `make bench`, or an example with `--output-dir results`.
"""

import json
from typing import Any

from benchmarks import _counted, _measured, _wire_report, figures, pages
from benchmarks.processes import ROOT

RESULTS = ROOT / "results" / "benchmarks"
DOCS = ROOT / "docs"
INTRODUCTION = """# Performance: bytes, kernels, memory

The same training step, written with each library; *ours* is this one. Each recipe is a file of
[benchmarks/recipes](../benchmarks/recipes), which says where it comes from and which known defect
it works around. `make bench` installs the other libraries (their versions are in the Makefile),
counts and times everything that needs no GPU, and writes this page.

"""


def load(suite: str) -> dict[str, Any] | None:
    path = RESULTS / f"{suite}.json"
    return json.loads(path.read_text()) if path.exists() else None


def performance() -> str:
    """Returns `docs/performance.md`."""
    compiled, checks, wire, gpu, cpu = map(load, ("compiled", "checks", "wire", "gpu", "cpu"))
    text = INTRODUCTION
    if compiled:
        text += _counted.steps(compiled) + _counted.loss_scaling(compiled)
        text += _counted.updates(compiled)
    if checks:
        text += _counted.checks(checks)
    if wire:
        text += _wire_report.section(wire)
    text += _measured.gpu(gpu, compiled) if gpu else ""
    if cpu:
        text += _measured.cpu(cpu)
    return text.rstrip() + "\n"


def main() -> None:
    (DOCS / "performance.md").write_text(performance())
    figures.draw()
    pages.write()
    print(f"Wrote {DOCS / 'performance.md'}, the figures in {figures.FOLDER}, and those on pages.")


if __name__ == "__main__":
    main()
