"""The figures of `docs/figures`, each drawn from files of `results/`.

`python -m benchmarks.report` draws them. What each was drawn from stands inside the file, as a
digest, so that a test can tell a figure that is older than its data.
"""

import functools
import hashlib
import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from matplotlib.text import Text

from benchmarks.pages import programs, recipes, targets
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


def of_memory(found: Any, counted: Any) -> Any:
    """Draws the small GPT on a CPU above GPT-2 for an H200."""
    gpt2 = counted["workloads"]["memory"]["recipes"]
    small = "GPT, 4 layers of width 256, 8 x 256 tokens: counted; XLA's peak for a CPU"
    large = "GPT-2 124M, 8 x 1024 tokens: counted; XLA's peak for an H200"
    return example("memory").plot({small: found["reports"], large: gpt2})


# A page on a phone of 390 pixels has 358 for a drawing, and its letters should have 11 of them.
PAGE, LETTERS = 358, 11


def with_one_legend(figure: Any) -> None:
    """Puts the legends of all axes above the figure, one entry a line."""
    found = {}
    for axes in figure.axes:
        if legend := axes.get_legend():
            for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
                found.setdefault(text.get_text(), handle)
            legend.remove()
    place = {"loc": "outside upper left", "frameon": False, "fontsize": 8}
    figure.legend(list(found.values()), list(found), **place)


def for_a_phone(figure: Any) -> Any:
    """Returns a figure narrow enough for its letters to be large; breaks long lines."""
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    least = min(text.get_fontsize() for text in texts)
    width, height = figure.get_size_inches()
    narrow = least * PAGE / (72 * LETTERS)
    if width <= narrow:
        return figure
    figure.set_size_inches(narrow, height * (narrow / width) ** 0.2)
    upright = [axes.yaxis.label for axes in figure.axes]
    for text in texts:
        room = 72 * (1.7 if text in upright else 0.8 * narrow)
        letters = int(room / (0.6 * text.get_fontsize()))
        lines = text.get_text().split("\n")
        text.set_text("\n".join(textwrap.fill(line, letters) for line in lines))
    return figure


IN_A_ROW = {"find_overflow"}  # as its legend stands in the example's own drawing
WIDE = {"inspect_ranges", "memory"}  # their panels need the width
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
    "gpt2_times": (programs.plot_times, ("benchmarks/gpu.json",)),
    "compiled": (recipes.plot, ("benchmarks/compiled.json",)),
    "targets": (targets.plot, ("benchmarks/targets.json",)),
}


def source(files: Iterable[str]) -> str:
    """Returns the names of files of `results/`, and a digest of what they hold."""
    digest = hashlib.sha256()
    for file in files:
        digest.update((RESULTS / file).read_bytes())
    return f"results: {', '.join(files)}; sha256 {digest.hexdigest()[:16]}"


def drawn(name: str) -> Any:
    """Returns a figure as it stands on a page."""
    plot, files = DRAWINGS[name]
    figure = plot(*(json.loads((RESULTS / file).read_text()) for file in files))
    if name in IN_A_ROW:
        with_one_legend(figure)
    return figure if name in WIDE else for_a_phone(figure)


def draw() -> None:
    """Draws all figures into their folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (_, files) in DRAWINGS.items():
        example("_common").save_figure(drawn(name), FOLDER / f"{name}.svg", source(files))
