"""The figures of `docs/figures`, each drawn from files of `results/`.

`python -m benchmarks.report` draws them. What each was drawn from stands inside the file, as a
digest, so that a test can tell a figure that is older than its data.
"""

import functools
import hashlib
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.pages import recipes, small_states, targets
from benchmarks.processes import ROOT

FOLDER = ROOT / "docs" / "figures"
RESULTS = ROOT / "results"


def example(name: str) -> Any:
    """Returns the module of an example, whose `plot` draws what its JSON holds."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module(name)


def of_example(name: str, found: Any) -> Any:
    return example(name).plot(found)


def of_memory(found: Any, programs: Any) -> Any:
    """Draws the small GPT on a CPU above GPT-2 for an H200."""
    gpt2 = programs["workloads"]["memory"]["recipes"]
    small = "GPT, 4 layers of width 256, 8 x 256 tokens: counted; XLA's peak for a CPU"
    large = "GPT-2 124M, 8 x 1024 tokens: counted; XLA's peak for an H200"
    return example("memory").plot({small: found["reports"], large: gpt2})


Drawing = tuple[Callable[..., Any], tuple[str, ...]]
DRAWINGS: dict[str, Drawing] = {
    name: (functools.partial(of_example, name), (f"{name}.json",))
    for name in (
        "autoencoder",
        "char_lm",
        "diffusion",
        "digits",
        "find_overflow",
        "grpo",
        "inspect_ranges",
        "log_metrics",
    )
}
DRAWINGS |= {
    "memory": (of_memory, ("memory.json", "benchmarks/programs.json")),
    "targets": (targets.plot, ("benchmarks/targets.json",)),
    "small_states": (small_states.plot, ("small_states.json",)),
}
DRAWINGS |= {
    recipes.drawing(key): (functools.partial(recipes.plot, key), ("benchmarks/compiled.json",))
    for key in recipes.DRAWN
}


def source(files: Iterable[str]) -> str:
    """Returns the names of files of `results/`, and a digest of what they hold."""
    digest = hashlib.sha256()
    for file in files:
        digest.update((RESULTS / file).read_bytes())
    return f"results: {', '.join(files)}; sha256 {digest.hexdigest()[:16]}"


def draw(folder: pathlib.Path = FOLDER, names: Iterable[str] = tuple(DRAWINGS)) -> None:
    """Draws the figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        plot, files = DRAWINGS[name]
        figure = plot(*(json.loads((RESULTS / file).read_text()) for file in files))
        example("_common").save_figure(figure, folder / f"{name}.svg", source(files))
