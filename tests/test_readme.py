"""The README and the recipes run as they are printed."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks():
    """Yields every Python block of every page, with the heading it stands under."""
    for page in PAGES:
        heading = ""
        for part in re.split(
            r"(^#+ [^\n]*$|^```python\n.*?^```$)", page.read_text(), flags=re.M | re.S
        ):
            if part.startswith("#"):
                heading = part.lstrip("# ")
            elif part.startswith("```python"):
                code = part.removeprefix("```python\n").removesuffix("```")
                yield pytest.param(code, id=f"{page.stem}: {heading}")


@pytest.mark.parametrize("code", list(code_blocks()))
def test_a_printed_program_runs(code):
    exec(compile(code, "<page>", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_links_only_to_what_exists(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
