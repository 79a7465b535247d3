"""Each claim of `docs/claims.md` stands on its page, and its evidence exists."""

import ast
import json
import re

import pytest

from testbed import ROOT
from testbed.mistakes import MISTAKES
from tests.transforms.every_optimizer import TRANSFORMATIONS
from tests.transforms.orders import REFUSED

ROW = re.compile(r"^\| (\S+\.md) \| (.+) \| (`.+`) \|$", re.M)
# Below the table the page says what was examined for silent failures: claims are about that too.
TABLE, _, EXAMINED = (ROOT / "docs" / "claims.md").read_text().partition("\n## ")
CLAIMS = ROW.findall(TABLE)


def plain(text):
    """Returns text without marks, emphasis and addresses of links, in one line."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)|\[|\*\*|^> ", "", text, flags=re.M)
    return " ".join(text.split())


def why_missing(evidence):
    """Returns why a test, a key or a file does not exist, or None."""
    file, _, test = evidence.partition("::")
    file, _, keys = (test and (file, "", "")) or file.partition(":")
    if not (ROOT / file).is_file():
        return f"{file} does not exist"
    if test:
        names = {node.name for node in ast.parse((ROOT / file).read_text()).body
                 if isinstance(node, ast.FunctionDef)}  # fmt: skip
        return None if test in names else f"{file} has no test {test}"
    found = json.loads((ROOT / file).read_text()) if keys else None
    for key in filter(None, keys.split(".")):
        if not isinstance(found, dict) or key not in found:
            return f"{file} has no key {key!r} of {keys!r}"
        found = found[key]
    return None


def test_there_are_thirty_claims_each_of_its_own():
    assert len(CLAIMS) >= 30
    assert len({(page, sentence) for page, sentence, _ in CLAIMS}) == len(CLAIMS)
    assert len(CLAIMS) == len(re.findall(r"^\|", TABLE, re.M)) - 2  # each row is read


@pytest.mark.parametrize(("page", "sentence", "evidence"), CLAIMS, ids=range(len(CLAIMS)))
def test_a_claim_stands_on_its_page_and_its_evidence_exists(page, sentence, evidence):
    path = ROOT / page if page == "README.md" else ROOT / "docs" / page
    text = EXAMINED if page == "claims.md" else path.read_text()
    assert plain(sentence) in plain(text), f"{page} does not say: {plain(sentence)}"
    for each in re.findall(r"`([^`]+)`", evidence):
        assert why_missing(each) is None


def test_the_examination_counts_what_the_tests_have():
    """Its other figures are marked and come from files."""
    page = " ".join((ROOT / "docs" / "claims.md").read_text().split())
    for sentence in (
        f"{len(TRANSFORMATIONS)} optimizers and transformations of optax",
        f"{len(MISTAKES)} mistakes of users",
        f"{sum(map(len, REFUSED))} orders of transformations",
    ):
        assert sentence in page
