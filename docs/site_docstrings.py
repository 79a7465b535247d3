"""Docstrings as the site's reference shows them.

Docstrings are written to be read in a terminal. Markdown, and the reader of Google's style, need
a few changes: examples fenced, `Returns: text` in one paragraph, blank lines around a list, several
attributes on one line as one entry, and names of the library and pages of docs/ as links.
"""

import pathlib
import re
from collections.abc import Callable

import griffe

REFERENCE = pathlib.Path(__file__).parent / "reference"
ONE_LINE = re.compile(r"(Returns|Raises|Warns|Yields): (.+)")
NAME = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?![`\]])")
PAGE = re.compile(r"\bdocs/(\w+\.md)")
# Code, which stays, or what Markdown would take for a link, for bold or for italics: args[0],
# 2**16, "head*".
MARKUP = re.compile(r'`[^`]*`|"[^"`\n]*\*[^"`\n]*"|(?<=[\w\]])\[|(?<=\w)\*\*(?=[\w-])')
# Several attributes in one entry: a space would end the name, and without a type, here (), griffe
# shows that of the entry before.
SEVERAL = re.compile(r"^  \w+(?:, \w+)+(?=:)", re.M)
LAYOUT: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    # A list begins and ends with a blank line.
    (re.compile(r"^(\S.*)\n(?=  - )", re.M), r"\1\n\n"),
    (re.compile(r"^(  - .*\n(?:    .*\n)*)(?=\S)", re.M), r"\1\n"),
    # "Attributes, beyond those of `A`:" is a title, which is shown as it is written.
    (
        re.compile(r"^(Args|Attributes), .+:$", re.M),
        lambda title: f"{title[1]}: {title[0].replace('`', '')}",
    ),
    # A section begins with a blank line.
    (re.compile(r"(?<=[^\n])\n(?=(?:Args|Raises|Returns|Warns):$)", re.M), "\n\n"),
    (re.compile(r"::$", re.M), ":"),  # before lines that are indented as code
]


def public_names() -> list[str]:
    """Returns every name that the pages of docs/reference/ describe."""
    pages = sorted(REFERENCE.glob("*.md"))
    return [
        n for page in pages for n in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    ]


def _links() -> dict[str, str]:
    """Returns full names by each shorter form that only one of them has.

    The last part alone does not stand for a function of an adapter: `loss_scale` is an argument.
    """
    forms: dict[str, set[str]] = {}
    for name in public_names():
        parts = name.split(".")
        for start in range(len(parts) - name.startswith("jmp.adapters.")):
            forms.setdefault(".".join(parts[start:]), set()).add(name)
    return {form: names.pop() for form, names in forms.items() if len(names) == 1}


def for_the_site(text: str, links: dict[str, str]) -> str:
    """Returns a docstring in Markdown that mkdocstrings reads.

    Args:
      text: the docstring, without indentation.
      links: full names by the names that become links to them.
    """
    return "\n\n".join(_paragraph(part, links) for part in re.split(r"\n\s*\n", text))


def _paragraph(text: str, links: dict[str, str]) -> str:
    if text.lstrip().startswith(">>>"):
        return f"```pycon\n{text}\n```"

    def link(name: re.Match[str]) -> str:
        return f"[{name[0]}][{links[name[1]]}]" if name[1] in links else name[0]

    def escaped(it: re.Match[str]) -> str:
        return it[0] if it[0].startswith("`") else re.sub(r"([*[])", r"\\\1", it[0])

    def page(name: re.Match[str]) -> str:
        heading = (REFERENCE.parent / name[1]).read_text().partition("\n")[0]
        return f"[{heading.removeprefix('# ')}](../{name[1]})"

    for pattern, replacement in LAYOUT:
        text = pattern.sub(replacement, text)
    if text.startswith("Attributes"):
        text = SEVERAL.sub(
            lambda it: it[0].replace(", ", ",\N{NO-BREAK SPACE}") + " ()", text
        )
    text = MARKUP.sub(escaped, text)
    lines: list[str] = []
    in_one_line = False
    for line in PAGE.sub(page, NAME.sub(link, text)).split("\n"):
        if one_line := ONE_LINE.fullmatch(line):
            lines += ["", f"**{one_line[1]}:** {one_line[2]}"]
        elif in_one_line and line.startswith(" "):
            lines.append(line.strip())
        else:
            lines.append(line)
        in_one_line = one_line is not None or (in_one_line and line.startswith(" "))
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """Rewrites each docstring once it is read."""

    def __init__(self) -> None:
        self.names = set(public_names())
        self.links = _links()

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is None:
            return
        module = obj.module.path + "."
        here = {n.removeprefix(module): n for n in self.names if n.startswith(module)}
        own = {
            obj.name,
            *(parameter.name for parameter in getattr(obj, "parameters", ())),
        }
        links = {
            name: full for name, full in (self.links | here).items() if name not in own
        }
        obj.docstring.value = for_the_site(obj.docstring.value, links)
