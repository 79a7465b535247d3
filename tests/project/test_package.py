"""The package's data: one version, extras that pages name, links of a release, sources of a table.

That wheel and sdist install and run beside Haiku, and that the recipe for conda is rendered, is
tried by `make package`: `tests/project/package.py`.
"""

import re
import tomllib

import pytest

import jmp
from testbed import ROOT
from tests.project.package import copy_for_release

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
RECIPE = (ROOT / "conda" / "recipe.yaml").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_version_is_one_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {jmp.__version__}\n" in citation
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest[1] == jmp.__version__
    assert PROJECT["dynamic"] == ["version"]
    assert f'\n  version: "{jmp.__version__}"\n' in RECIPE


def test_the_recipe_for_conda_requires_what_the_wheel_requires():
    needed = [re.sub(r"^([\w.-]+)(?=[<>=!])", r"\1 ", text) for text in PROJECT["dependencies"]]
    run = re.search(r"^  run:\n    - python (\S+) *\n((?:    - .+\n)+)", RECIPE, re.M)
    assert re.findall(r"- (.+)", run[2]) == needed
    lowest = re.search(r'^  python_min: "(.+)"$', RECIPE, re.M)[1]
    assert PROJECT["requires-python"] == run[1].replace("${{python_min}}", lowest)
    (tool,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert f"- {tool.replace('>', ' >', 1)}\n" in RECIPE
    assert PROJECT["description"] in RECIPE


def test_pages_name_the_versions_that_the_package_supports():
    pythons = [row.split()[-1] for row in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", row)]
    jax_versions = re.search(r"^MATRIX := (.+)", (ROOT / "Makefile").read_text(), re.M)[1].split()
    table = re.findall(r"^\| (\d\.\d+) \|", (ROOT / "docs" / "releases.md").read_text(), re.M)
    assert table == jax_versions + pythons
    lowest, above = jax_versions[0], f"0.{int(jax_versions[-1].partition('.')[2]) + 1}"
    assert f"jax>={lowest},<{above}" in PROJECT["dependencies"]
    for page in ("README.md", "docs/start.md"):
        sentence = r"Python (\S+) to (\S+?),? (?:and )?JAX (\S+) to (\d\.\d+)"
        said = re.search(sentence, (ROOT / page).read_text())
        assert said.groups() == (pythons[0], pythons[-1], jax_versions[0], jax_versions[-1]), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_extras_that_there_are(page):
    named = re.findall(r"(?:\.|jmp)\[([a-z0-9, ]+)\]['\"`]", page.read_text())
    extras = {name.strip() for group in named for name in group.split(",")}
    assert extras <= set(EXTRAS), f"{page.name} names {extras - set(EXTRAS)}"


def test_the_copy_for_a_release_has_no_relative_link_and_names_its_address(tmp_path):
    copy_for_release(tmp_path, "https://host/blob/v1", "https://host/raw/v1")
    readme = (tmp_path / "README.md").read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert targets and all(re.match("https?:|#", target) for target in targets)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"] == {"Documentation": "https://host/blob/v1"}
    assert "urls" not in PROJECT  # there is no public address to name
    assert (tmp_path / "jmp" / "py.typed").exists()


# The table of docs/comparison.md


COMPARISON = (ROOT / "docs" / "comparison.md").read_text()
KNOWN = ("not found", "not its task")


def cells():
    """Yields library, feature and cell of every table with a feature in each column."""
    features = []
    for line in COMPARISON.splitlines():
        if not line.startswith("|"):
            features = []
        elif not features:
            features = [cell.strip() for cell in line.strip("|").split("|")]
        elif not line.startswith("|---"):
            library, *found = [cell.strip() for cell in line.strip("|").split("|")]
            for feature, cell in zip(features[1:], found, strict=True):
                yield pytest.param(library, cell, id=f"{library}: {feature}")


@pytest.mark.parametrize(("library", "cell"), list(cells()))
def test_a_cell_of_the_comparison_has_a_source_or_says_that_none_was_found(library, cell):
    sources = re.findall(r"\]\[([\w-]+)\]", cell)
    pages = re.findall(r"\]\(([\w.-]+)\)", cell)
    assert cell in KNOWN or sources or pages or "*tried*" in cell
    for source in sources:
        assert re.search(rf"^\[{source}\]: https://\S+$", COMPARISON, re.M), source
    for page in pages:
        assert library == "**jmp**" and (ROOT / "docs" / page).exists()
