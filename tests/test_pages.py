"""Every figure on a page comes from a file in `results/`, and every drawing from its data."""

import json
import re

import pytest

from benchmarks import figures, pages, programs
from benchmarks.processes import ROOT


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_marked_figures_are_what_the_files_say(page):
    text = page.read_text()
    assert text.count("<!-- from ") == len(pages.MARK.findall(text))  # each has its end
    assert text == pages.rewritten(text)


def test_a_figure_that_is_not_the_files_is_written_anew():
    page = "lost <!-- from char_lm/lost -->12 %<!-- end --> of them"
    share = json.loads((ROOT / "results/char_lm.json").read_text())["underflow"]
    lost = f"{100 * share['zero in float16 without loss scaling']:.0f} %"
    assert pages.rewritten(page) == page.replace("12 %", lost) != page
    with pytest.raises(ValueError, match=r"figure 'char_lm/loss'; expected one of .*char_lm/lost"):
        pages.rewritten("<!-- from char_lm/loss --><!-- end -->")


def test_every_file_of_figures_is_there_and_named_with_its_command():
    assert pages.FILES.keys() == pages.COMMANDS.keys()
    for name in pages.FIGURES:
        assert pages.value(name).strip()
    counted = pages.read("programs")["workloads"]
    for group in programs.GROUPS:
        assert counted[group.name]["recipes"].keys() == group.rows.keys()
        assert not any("error" in row for row in counted[group.name]["recipes"].values())


@pytest.mark.parametrize("name", figures.DRAWINGS)
def test_a_drawing_is_of_the_data_that_are_committed(name):
    _, files = figures.DRAWINGS[name]
    assert figures.source(files) in (figures.FOLDER / f"{name}.svg").read_text()


def test_every_drawing_stands_on_a_page():
    shown = {
        (page.parent / target).resolve()
        for page in pages.PAGES
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", page.read_text())
    }
    assert shown >= {figures.FOLDER / f"{name}.svg" for name in figures.DRAWINGS}


def test_a_figure_is_drawn_twice_alike_and_says_its_source(tmp_path):
    figures.draw(tmp_path / "one", ["log_metrics"])
    figures.draw(tmp_path / "two", ["log_metrics"])
    one, two = (path / "log_metrics.svg" for path in (tmp_path / "one", tmp_path / "two"))
    assert one.read_bytes() == two.read_bytes()
    assert figures.source(["log_metrics.json"]) in one.read_text()
