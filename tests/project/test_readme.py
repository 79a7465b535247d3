"""The README and the recipes run as they are printed."""

import ast
import importlib.metadata
import re
import sys
import tomllib

import pytest

from testbed import ROOT
from tests.commands import in_full
from tests.project.printed_programs import PAGES, code_blocks
from tests.project.running import words_and_numbers

PROGRAMS = {
    code: f"{page.stem}: {heading}"  # what stands on two pages runs once
    for page, heading, code in code_blocks()
    if page.stem != "tutorial"  # whose steps tests/project/test_tutorial.py runs
}


# A program of these pages prints the text below it, but for the last digits.
PRINTED = dict(
    program
    for name in ("internals", "troubleshooting")
    for program in re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```",
        (ROOT / "docs" / f"{name}.md").read_text(),
        flags=re.M | re.S,
    )
)


# `make test` runs only the programs of these pages.
FIRST_PAGES = ("README", "index", "start")
OF_FIRST_PAGES = [code for code, title in PROGRAMS.items() if title.split(":")[0] in FIRST_PAGES]


@pytest.mark.parametrize("code", in_full([*PROGRAMS], but=OF_FIRST_PAGES), ids=PROGRAMS.values())
def test_a_printed_program_runs_in_another_folder(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "train.py", "exec"), {"__name__": "page"})
    if code in PRINTED:
        printed, expected = map(words_and_numbers, (capsys.readouterr().out, PRINTED[code]))
        assert printed[0] == expected[0]
        assert printed[1] == pytest.approx(expected[1], rel=0.05)


def lines_by_framework(page, kind, chosen):
    """Returns the lines of code of each framework that match `chosen`, without their remarks."""
    text = (ROOT / "docs" / page).read_text()
    sections = re.findall(rf"^### (.*?)\n.*?^```{kind}\n(.*?)^```", text, re.M | re.S)
    return {
        name: {re.sub(r"  # .*", "", line).strip() for line in re.findall(chosen, code, re.M)}
        for name, code in sections
    }


def test_the_lines_of_the_first_page_are_the_new_ones_of_the_programs_on_the_next():
    added = lines_by_framework("index.md", "diff", r"^\+(.*)$")
    lines = lines_by_framework("start.md", "python", r"^(.*)$")
    new = lines_by_framework("start.md", "python", r"^(.*\S)  # NEW.*$")
    new_below = lines_by_framework("start.md", "python", r"^ *# NEW.*\n(.*)$")
    assert len(added) == 5
    for name, diff in added.items():
        assert new[name] | new_below[name] <= diff <= lines[name], name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_links_only_to_what_exists(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The packages that a page tells its reader to install must run its programs, and these.
PROGRAMS_OF = {
    "README.md": [
        f"examples/{name}.py" for name in ("quickstart", "autoencoder", "char_lm", "_common")
    ],
    "docs/start.md": ["examples/quickstart.py"],
    "docs/tutorial.md": [f"docs/tutorial/step_{number}.py" for number in range(1, 7)],
}


def named(requirements):
    """Returns the packages of a list of requirements, and those of our own extras among them."""
    packages = set()
    for requirement in requirements:
        name, listed = re.match(r"([\w.-]+)(?:\[(.*?)\])?", requirement).groups()
        packages.add(name)
        if name == "jmp":
            for extra in filter(None, (listed or "").split(",")):
                packages |= named(PROJECT["optional-dependencies"][extra])
    return packages


def roots_imported(programs):
    """Returns the packages outside the standard library that programs import."""
    nodes = [node for code in programs for node in ast.walk(ast.parse(code))]
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in imported} - sys.stdlib_module_names


def installed_by(page):
    """Returns the packages that a page tells its reader to install."""
    lines = re.findall(r"pip install '\.(\[.*?\])'", (ROOT / page).read_text())
    return named([f"jmp{extras}" for extras in lines] + PROJECT["dependencies"])


def not_installed(programs, packages):
    """Returns what programs import and none of the packages installs."""
    local = {path.stem for path in (ROOT / "examples").glob("*.py")} | {"examples"}
    distributions = importlib.metadata.packages_distributions()
    imported = roots_imported(programs) - local
    return {root for root in imported if not packages & set(distributions.get(root, [root]))}


@pytest.mark.parametrize("page", PROGRAMS_OF)
def test_the_install_of_a_page_has_what_its_programs_import(page):
    programs = [code for path, _, code in code_blocks() if path == ROOT / page]
    programs += [(ROOT / path).read_text() for path in PROGRAMS_OF[page]]
    assert not not_installed(programs, installed_by(page))


def test_programs_of_all_pages_need_what_the_first_page_installs():
    programs = [code for _, _, code in code_blocks()]
    assert not not_installed(programs, installed_by("docs/start.md"))


def test_the_extra_examples_installs_what_the_examples_import():
    programs = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    packages = named(["jmp[examples]", *PROJECT["dependencies"], "jaxlib"])
    assert not not_installed(programs, packages)
