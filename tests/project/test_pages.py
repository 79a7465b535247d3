"""Every figure on a page comes from a file in `results/`, and every drawing from its data."""

import importlib
import json
import re

import matplotlib.pyplot as plt
import pytest
from matplotlib.text import Text

from benchmarks import figures, pages, programs
from benchmarks.pages import registry
from benchmarks.processes import ROOT


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_marked_figures_are_what_the_files_say(page):
    text = page.read_text()
    assert text.count("<!-- from ") == len(pages.MARK.findall(text))  # each has its end
    assert text == pages.rewritten(text)
    # At the beginning of a line or an item it would be a block of HTML, which ends the paragraph.
    assert not re.search(r"^[ *>-]*<!-- from \S+ -->[^\n]", text, re.M)


def test_a_figure_that_is_not_the_files_is_written_anew():
    page = "lost <!-- from autoencoder/lost -->12 %<!-- end --> of them"
    runs = json.loads((ROOT / "results/autoencoder.json").read_text())["runs"]
    shares = runs["float16 without loss scaling"]["zero_gradients"]
    lost = f"{100 * sum(shares) / len(shares):.0f} %"
    assert pages.rewritten(page) == page.replace("12 %", lost) != page
    with pytest.raises(ValueError, match=r"figure 'char_lm/loss'; expected .*char_lm/float32"):
        pages.rewritten("<!-- from char_lm/loss --><!-- end -->")


def test_every_file_of_figures_is_there_and_named_with_its_command():
    assert all((ROOT / row.file).exists() and row.command for row in registry.SOURCES.values())
    for name in registry.FIGURES:
        assert pages.value(name).strip()
    counted = pages.read("programs")["workloads"]
    for group in programs.GROUPS:
        assert counted[group.name]["recipes"].keys() == group.rows.keys()
        assert not any("error" in row for row in counted[group.name]["recipes"].values())


@pytest.mark.parametrize("name", figures.DRAWINGS)
def test_a_drawing_is_of_the_data_that_are_committed(name):
    _, files = figures.DRAWINGS[name]
    assert figures.source(files) in (figures.FOLDER / f"{name}.svg").read_text()


@pytest.mark.parametrize("name", sorted(figures.DRAWINGS.keys() - figures.WIDE))
def test_a_drawing_reads_on_a_phone(name):
    figure = figures.drawn(name)
    figure.canvas.draw()  # which writes the numbers beside the axes
    sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text()]
    plt.close(figure)
    pixels_a_point = 358 / (72 * figure.get_figwidth())  # a page on a phone of 390 pixels
    assert len(sizes) >= 3 and min(sizes) * pixels_a_point >= 10.99


def test_every_drawing_stands_on_a_page():
    shown = {
        (page.parent / target).resolve()
        for page in pages.PAGES
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", page.read_text())
    }
    assert shown >= {figures.FOLDER / f"{name}.svg" for name in figures.DRAWINGS}


# Tables whose figures other tests compare with their files, or that are whole pages or parts of
# pages that a program writes and a test compares.
ELSEWHERE = {"mistakes.md": "docs.mistakes", "claims.md": "test_claims.py"}
MARKED = [page for page in pages.PAGES if page.name not in ELSEWHERE]
every_marked_page = pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
MEASURED = re.compile(r"[+-]?\d[\d,]*(\.\d+)?( (%|[kMG]?B|ms|s))?( ± \d+(\.\d+)?( %)?)?")


def unmarked_tables(text):
    """Returns the rows of a page that hold two figures or more, in no mark."""
    text = re.sub(r"<!-- (from|written by) .*?<!-- end -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    rows = re.findall(r"^ *\|(.*)\|$", text, flags=re.M)
    cells = ([cell.strip() for cell in row.split("|")] for row in rows)
    return [row for row in cells if sum(bool(MEASURED.fullmatch(cell)) for cell in row) > 1]


@every_marked_page
def test_a_table_of_figures_comes_from_a_file(page):
    found = unmarked_tables(page.read_text())
    assert not found, "put marks around the table: see benchmarks/pages.py"


# What looks like a measurement in a sentence: a share, a factor, a size, a time, a fraction.
QUANTITY = re.compile(
    r"(?<![\w.^-])\d[\d,]*(\.\d+)?( %| times\b| [kMGT]i?B\b| ms\b| kernels\b)"
    r"|(?<![\w.^])\d+\.\d+(?!\.?\w)"
)
# Quantities in sentences that nobody measures: they are chosen, defined, or calculated there.
NOT_MEASURED = {
    "README.md": "95 %",  # of a confidence interval
    "docs/autocast.md": "1 %",  # from which share on a hazard is reported
    "docs/checks.md": "0.0005, 0.004, 0.0078, 0.063, 0.125",  # unit roundoffs; a default
    "docs/explanation.md": "95 %",  # of a confidence interval
    "docs/float8.md": "32 MiB, 0.125",  # parameters of the program; a default
    "docs/internals.md": "0.99, 0.01",  # a state that is defined so
    # A unit; what a formula leaves out; Adam's factor and what it leaves of a gradient; spacings.
    "docs/memory.md": "1 MB, 0.1, 0.999, 1.0, 0.05, 0.1 %, 0.2, 0.4, 0.4 %, 0.8 %",
    # Of an interval; parameters of the programs.
    "docs/performance.md": "95 %, 16.8, 32 MiB",
    "docs/tutorial.md": "0.0001",  # an update that float16 loses
}
VERSION = re.compile(
    r"(Python|JAX|jaxlib|Flax|Optax|jmp|mpx|Haiku|qwix|TransformerEngine|Apache)[ -]"
    r"[\d.]+( (to|and) [\d.]+)?"
)


def quantities(text):
    """Returns what looks measured in the sentences of a page, in no mark."""
    text = re.sub(r"<!-- (from|written by) .*?<!-- end -->", "", text, flags=re.S)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    text = re.sub(r"^ *\|.*$|^    +options=.*$", "", text, flags=re.M)  # tables: see above
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>|https?://\S+", "", text)
    return [found[0] for found in QUANTITY.finditer(VERSION.sub("", text))]


@every_marked_page
def test_a_measurement_in_a_sentence_comes_from_a_file(page):
    given = NOT_MEASURED.get(str(page.relative_to(ROOT)))
    found = set(quantities(page.read_text()))
    assert found == set(given.split(", ") if given else ()), "mark it (see benchmarks/pages)"


def test_the_planner_has_few_words_of_its_own():
    """A reader learns them all: the words of the field come first."""
    page = (ROOT / "docs" / "internals.md").read_text()
    table, _, _ = page.partition("## Words")[2].partition("## The rules")
    _, *words = re.findall(r"^\| ([a-z]+) \|", table, re.MULTILINE)
    assert 10 < len(words) <= 25


@pytest.mark.parametrize("module", ["", ".transforms", ".diagnostics", ".autocasting"])
def test_every_exported_name_is_in_use_on_a_page(module):
    users = [page for page in (ROOT / "docs").glob("*.md") if page.stem != "mistakes"]
    text = "\n".join(page.read_text() for page in [*users, ROOT / "README.md"])
    exported = importlib.import_module(f"jmp{module}").__all__
    assert [name for name in exported if not re.search(rf"\b{name}\b", text)] == []
