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
    # At the beginning of a line or an item it would be a block of HTML, which ends the paragraph.
    assert not re.search(r"^[ *>-]*<!-- from \S+ -->[^\n]", text, re.M)


def test_the_figures_that_the_readme_gives_first_are_marked():
    marked = {found[1] for found in pages.MARK.findall((ROOT / "README.md").read_text())}
    assert marked >= {"digits/float32", "digits/mixed-float16", "digits/mixed-float16-difference"}
    assert marked >= {"char_lm/float32", "char_lm/unscaled", "char_lm/scaled"}
    assert marked >= {"recipes/gpt2-autocast-bytes", "recipes/gpt2-float32-bytes"}


def test_a_figure_that_is_not_the_files_is_written_anew():
    page = "lost <!-- from char_lm/lost -->12 %<!-- end --> of them"
    share = json.loads((ROOT / "results/char_lm.json").read_text())["underflow"]
    lost = f"{100 * share['zero in float16 without loss scaling']:.0f} %"
    assert pages.rewritten(page) == page.replace("12 %", lost) != page
    with pytest.raises(ValueError, match=r"figure 'char_lm/loss'; expected one of .*char_lm/lost"):
        pages.rewritten("<!-- from char_lm/loss --><!-- end -->")


def test_a_table_is_indented_as_its_mark():
    page = "- a list\n\n  <!-- from rules/cost --><!-- end -->\n\n- goes on\n"
    lines = pages.rewritten(page).split("\n")
    rows = [line for line in lines if "|" in line]
    assert len(rows) > 10 and all(line.startswith("  |") for line in rows)
    assert lines[lines.index(rows[-1]) + 2] == "  <!-- end -->"
    assert pages.rewritten(pages.rewritten(page)) == pages.rewritten(page)


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


# Tables whose figures other tests compare with their files, or that are whole pages or parts of
# pages that a program writes and a test compares.
ELSEWHERE = {
    "performance.md": "benchmarks.report",
    "public_models.md": "benchmarks.public_models",
    "op_table.md": "docs.op_table",
    "mistakes.md": "docs.mistakes",
    "checkpoints.md": "benchmarks.migrations",
    "examination.md": "test_soak.py",
}
MEASURED = re.compile(r"[+-]?\d[\d,]*(\.\d+)?( (%|[kMG]?B|ms|s))?( ± \d+(\.\d+)?( %)?)?")


def unmarked_tables(text):
    """Returns the rows of a page that hold two figures or more, in no mark."""
    text = re.sub(r"<!-- (from|written by) .*?<!-- end -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    rows = re.findall(r"^ *\|(.*)\|$", text, flags=re.M)
    cells = ([cell.strip() for cell in row.split("|")] for row in rows)
    return [row for row in cells if sum(bool(MEASURED.fullmatch(cell)) for cell in row) > 1]


@pytest.mark.parametrize(
    "page",
    [p for p in pages.PAGES if p.name not in ELSEWHERE],
    ids=lambda page: page.name,
)
def test_a_table_of_figures_comes_from_a_file(page):
    found = unmarked_tables(page.read_text())
    if page.name == "float8.md":  # its accuracy: test_soak.py compares it
        found = [row for row in found if "seed" not in row[0]]
    assert not found, "put marks around the table: see benchmarks/pages.py"


def test_a_table_without_a_file_is_found():
    assert unmarked_tables("| a | 1.00 | 12 % |\n| b | `x` | 3 |\n") == [["a", "1.00", "12 %"]]
    assert not unmarked_tables("<!-- from x/y -->\n| a | 1.00 | 12 % |\n<!-- end -->")
