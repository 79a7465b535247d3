"""Sentences of pages, docstrings, messages and comments: subject, verb, and the common word."""

import ast
import re

import pytest

from benchmarks import pages
from testbed import ROOT

PACKAGE = sorted((ROOT / "jmp").rglob("*.py"))
# One page is for contributors, the other has texts of errors.
OF_USERS = [page for page in pages.PAGES if page.name not in ("internals.md", "mistakes.md")]

HABITS = {
    # It may say that nothing else is there: behind "tried alone", nothing else is tried.
    "alone, for only": r"(?<!tried)(?<!runs)(?<!stand)(?<=[\w`'\")]) alone\b",
    "a training, for a run": r"\btrainings\b|\ba training[.,;:]",
    "those of and that of, for a noun": r"\b(those|that) of (\w+ ){0,4}(those|that) of\b",
    "of in front of the subject": r"(^|[.:;] )Of (an?|the|several|its) ",
    "a subject that is a clause": r"(^|[.:;] )What \w[^?]*([.:;]|$)",
}
# Users read pages from the first line on.
STRICTER = HABITS | {
    "a training, for a run": r"\btrainings\b|\b(a|an|each|every|one|real|whole|longer|another)"
    r"( \w+)? training\b(?! (batch|data|example|loop|loss|mode|program|run|script|set|step)s?\b)",
    "those of and that of, for a noun": r"\b(those|that) of\b",
    "of in front of the subject": r"(^|[.:;] )Of (an?|the|several|its|such|these|so) ",
    "a subject that is a clause": r"(^|[.:;] )(What|Whatever) \w[^?]*([.:;]|$)",
    "where, for if": r"(^|[.:;] )Where \w[^?]*([.:;]|$)",
}


def of_a_page(text):
    """Yields paragraphs, items and cells of a page as they are read, each on one line."""
    text, _, _ = text.partition("\n### Low: ")  # the op table, whose words are the package's
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->|^#.*$", "", text, flags=re.M)  # a heading is no sentence
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n|\n(?= *[-*|] )|\n(?= *\d+\. )", text):
        line = re.sub(r"^([-*] |\d+\. )", "", " ".join(paragraph.split()))
        yield from filter(None, map(str.strip, line.split("|")) if line[:1] == "|" else [line])


def of_a_module(source):
    """Yields each docstring's paragraph, message and comment of a module on one line."""
    tree = ast.parse(source)
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    for node in formatted:
        parts = [part.value if isinstance(part, ast.Constant) else "_" for part in node.values]
        yield "".join(parts)
    inside = {id(part) for node in formatted for part in node.values}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in inside:
                text = re.sub(r"^ *(>>>|\.\.\.).*$", "", text, flags=re.MULTILINE)
                yield from (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    comments = re.findall(r"^ *# .*(?:\n *# .*)*|  # .*", source, re.MULTILINE)
    yield from (re.sub(r"\s*# ", " ", comment).strip() for comment in comments)


def habits_in(text, reader, habits):
    """Returns the sentences that have one of the habits, with its name."""
    return [
        (habit, sentence[max(0, found.start() - 40) : found.end() + 40])
        for sentence in reader(text)
        for habit, pattern in habits.items()
        for found in re.finditer(pattern, sentence)
    ]


TEXTS = [(page, of_a_page, STRICTER) for page in OF_USERS]
TEXTS += [(module, of_a_module, HABITS) for module in PACKAGE]


@pytest.mark.parametrize(
    ("path", "reader", "habits"), TEXTS, ids=[str(path.relative_to(ROOT)) for path, *_ in TEXTS]
)
def test_sentences_have_a_subject_and_the_common_word(path, reader, habits):
    assert habits_in(path.read_text(), reader, habits) == []


SENTENCES = """What selects has a derivative that selects.

- It is true of parameters alone.
- Of the models it is
  those of Flax.

| a | b |
|---|---|
| a training. | Where it fails, it fails. |
"""
MODULE = '''"""One line.

What selects is found.

>>> print("What is an example is left out.")
"""
x = 1  # of parameters alone
# Those of the model, and that
# of those of a view.
raise ValueError(f"{x} got two. Of a module "
                 "it is the trainings.")
y = "tried alone"
'''


def test_habits_are_found_in_paragraphs_items_tables_docstrings_messages_and_comments():
    page = SENTENCES + "\n```python\nx = 1  # What stands in a program is left out.\n```\n"
    for text, reader, habits in (page, of_a_page, STRICTER), (MODULE, of_a_module, HABITS):
        found = [habit for habit, _ in habits_in(text, reader, habits)]
        assert sorted(found) == sorted(habits)
