"""The README and the recipes run as they are printed."""

import re

import pytest

from tests.printed_programs import PAGES, code_blocks

PROGRAMS = [
    pytest.param(code, id=f"{page.stem}: {heading}") for page, heading, code in code_blocks()
]


@pytest.mark.parametrize("code", PROGRAMS)
def test_a_printed_program_runs(code):
    exec(compile(code, "<page>", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_links_only_to_what_exists(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
