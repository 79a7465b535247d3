"""The tutorial's six programs run, its diffs lead from each to the next, its output is theirs.

`python -m tests.project.test_tutorial` writes the programs' diffs into the page anew.
"""

import difflib
import re
import runpy

import pytest

from testbed import ROOT
from tests.project.running import words_and_numbers

pytestmark = pytest.mark.full

PAGE = ROOT / "docs" / "tutorial.md"
STEPS = [PAGE.parent / "tutorial" / f"step_{number}.py" for number in range(1, 7)]
RUNS = [*STEPS, STEPS[-1]]  # the last one goes on from its checkpoint


def difference(before, after):
    texts = (path.read_text().splitlines() for path in (before, after))
    return "\n".join(list(difflib.unified_diff(*texts, n=1, lineterm=""))[2:]) + "\n"


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)


def test_the_page_has_the_first_program_and_what_changes_in_each_step():
    assert blocks("python") == [STEPS[0].read_text()]
    expected = [difference(*pair) for pair in zip(STEPS, STEPS[1:], strict=False)]
    assert blocks("diff") == expected, "run: python -m tests.project.test_tutorial"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tutorial")


@pytest.mark.parametrize("index", range(len(RUNS)), ids=lambda i: f"{RUNS[i].stem}-{i}")
def test_a_step_runs_and_prints_what_the_page_says(index, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)  # the last program writes its checkpoint here
    runpy.run_path(str(RUNS[index]))
    printed = [words_and_numbers(line) for line in capsys.readouterr().out.splitlines()]
    lines = blocks("text")[index].splitlines()
    assert lines
    for line in lines:
        words, numbers = words_and_numbers(line)
        found = [others for text, others in printed if text == words]
        assert any(numbers == pytest.approx(others, rel=0.05) for others in found), (line, printed)


if __name__ == "__main__":
    text = PAGE.read_text()
    for old, pair in zip(blocks("diff"), zip(STEPS, STEPS[1:], strict=False), strict=True):
        text = text.replace(f"```diff\n{old}", f"```diff\n{difference(*pair)}")
    PAGE.write_text(text.replace(blocks("python")[0], STEPS[0].read_text()))
