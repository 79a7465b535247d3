"""The figures that stand on pages, each from a file in `results/`.

A page marks them, in a sentence, in a cell or around a whole table:

    <!-- from char_lm/lost -->94 %<!-- end -->

`python -m benchmarks.report` writes what stands between such marks anew, on every page, and a test
compares. The name before the stroke says in `SOURCES` which file of `results/` it is from and
which command makes that file; the name after it is a row of `FIGURES`, both in `registry.py`.
"""

import functools
import re

from benchmarks.pages import (  # noqa: F401 (they register)
    examples,
    families,
    float8,
    gallery,
    measured,
    planner,
    programs,
    published,
    recipes,
    small_states,
    targets,
    wire,
)
from benchmarks.pages.registry import FIGURES, read
from benchmarks.processes import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
MARK = re.compile(r"(^ +)?<!-- from (\S+) -->(.*?)<!-- end -->", re.S | re.M)


def rewritten(text: str) -> str:
    """Returns a page with its marked figures as the files say.

    Raises: ValueError for a name that is not known.
    """

    def again(found: re.Match[str]) -> str:
        indent = found[1] or ""  # of a table in a list
        text = value(found[2])
        if "\n" in text:
            text = "\n".join(indent + line if line else "" for line in text.split("\n")) + indent
        return f"{indent}<!-- from {found[2]} -->{text}<!-- end -->"

    return MARK.sub(again, text)


@functools.cache
def value(name: str) -> str:
    """Returns a figure as it is printed; a table between empty lines."""
    if name not in FIGURES:
        known = ", ".join(sorted(FIGURES))
        raise ValueError(f"A page asks for the figure {name!r}; expected one of {known}.")
    text = FIGURES[name](read(name.split("/")[0]))
    return f"\n\n{text.strip()}\n\n" if "\n" in text else text


def write() -> None:
    """Writes the figures of all pages anew."""
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
