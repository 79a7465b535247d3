"""What MkDocs calls while it builds the site.

The site holds docs/ alone. A link to a program or a folder of the repository, which GitHub follows,
becomes its text with the path beside it. A picture must be in docs/.

A link whose text is the file's name, such as [checks.md](checks.md), shows the page's title. Wide
tables are marked for docs/stylesheets/, which lays them out for a phone. The index of the search
gets the parts of names and the words of `extra.search_words`, and the search also works where the
site is opened from a disk.
"""

import json
import pathlib
import re
from collections.abc import Iterable
from html import escape, unescape

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority, get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
OUTSIDE = re.compile(
    r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]+)(#[^)\s]*)?\)"
)
FILE_NAME = re.compile(r"\[(\w+\.md)\](?=\(\1[#)])")
# Most names are here too: other pages come before them.
REPEATING = {"mistakes.md", "changelog.md", "claims.md"}
# On a line of its own: it becomes a link to itself, since a phone shows it small.
PICTURE = re.compile(r"^(!\[[^\]]*\]\(([^)\s]+)\))$", re.M)


def on_config(config: MkDocsConfig) -> None:
    """Writes the version beside the name of the library, above each page."""
    found = re.search(
        r'^__version__ = "(.+)"', (ROOT / "jmp" / "__init__.py").read_text(), re.M
    )
    assert found
    config.site_name += f" {found[1]}"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Makes CHANGELOG.md a page; where it names a page of docs/, there is a link."""
    text = re.sub(
        r"(?<![\w/])docs/(\w+\.md)", r"[\1](\1)", (ROOT / "CHANGELOG.md").read_text()
    )
    files.append(File.generated(config, "changelog.md", content=text))


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Writes links as the site can follow them."""
    if page.file.src_uri in REPEATING:
        page.meta["search"] = {"boost": 0.3}
    folder = (DOCS / page.file.src_uri).parent

    def written(link: re.Match[str]) -> str:
        path = folder.joinpath(link["target"]).resolve()
        if not path.exists() or path.is_relative_to(DOCS):
            return link[0]  # MkDocs itself reports what does not exist
        name = path.relative_to(DOCS.parent).as_posix()
        return link["text"] if name in link["text"] else f"{link['text']} (`{name}`)"

    def titled(name: re.Match[str]) -> str:
        heading = (folder / name[1]).read_text().partition("\n")[0]
        return f"[{heading.removeprefix('# ')}]"

    markdown = FILE_NAME.sub(titled, markdown)
    return PICTURE.sub(r"[\1](\2)", OUTSIDE.sub(written, markdown))


TABLE = re.compile(r"<table>.*?</table>", re.S)
ROW = re.compile(r"<tr>.*?</tr>", re.S)
CELL = re.compile(r"<t([hd])([^>]*)>(.*?)</t\1>", re.S)
# Numbers with their errors and units, or a sum with its result: a line break would tear them.
ONE = r"[-+]?[\d.,]*\d(e[-+]\d+)?( ± [\d.]+)?( (%|[kMG]?B|b?f\d+))?"
NUMBER = re.compile(rf"{ONE}(,? {ONE})*|[-+*/x\d. ]+=[-+*/x\d. ]+")
PRINTED = re.compile(r'<div( class="language-text highlight">)(.*?</pre>)', re.S)
OBJECT_NAME = re.compile(r'(?<=class="doc doc-object-name )([^>]*>)([\w.]+)(?=</span>)')


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks what a phone's width needs: tables of words and of numbers, where names may break."""
    html = PRINTED.sub(printed, html)
    html = html.replace(
        'class="headerlink"', 'class="headerlink" aria-label="Link to this section"'
    )
    html = OBJECT_NAME.sub(lambda it: it[1] + it[2].replace(".", ".<wbr>"), html)
    return TABLE.sub(lambda table: for_a_phone(table[0]), html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Says in words what the theme's picture is."""
    return output.replace('alt="logo"', 'alt="The logo of jmp"')


def printed(block: re.Match[str]) -> str:
    """Marks what a program printed, if it is wider than a page: see docs/stylesheets/site.css."""
    columns = max(map(len, text_of(block[2]).split("\n")))
    if columns <= 88:
        return block[0]
    return (
        f'<div data-columns="{"104" if columns <= 104 else "more"}"{block[1]}{block[2]}'
    )


def for_a_phone(table: str) -> str:
    """Returns a table with what docs/stylesheets/ needs to lay it out on a narrow page.

    A table of three or more columns of words, seven letters a cell or more, becomes `data-stacked`:
    each row is a block, and each cell has its column's title in `data-label`. Others scroll
    sideways beside their first column; their numbers become `data-number`.
    """
    rows = [
        [text_of(cell[3]) for cell in CELL.finditer(row)] for row in ROW.findall(table)
    ]
    titles = rows.pop(0)
    cells = [cell for row in rows for cell in row[1:] if cell]
    letters = sum(character.isalpha() for cell in cells for character in cell)
    is_stacked = len(titles) > 2 and letters >= 7 * len(cells)

    def marked(row: re.Match[str]) -> str:
        columns = iter(titles)

        def cell(it: re.Match[str]) -> str:
            title, mark = next(columns), ""
            if it[1] == "d" and is_stacked and title:
                mark = f' data-label="{escape(title)}"'
            elif it[1] == "d" and NUMBER.fullmatch(text_of(it[3])):
                mark = " data-number"
            return f"<t{it[1]}{it[2]}{mark}>{it[3]}</t{it[1]}>"

        return CELL.sub(cell, row[0])

    table = ROW.sub(marked, table)
    return table.replace("<table>", "<table data-stacked>") if is_stacked else table


def text_of(cell: str) -> str:
    """Returns a cell's text, without tags."""
    return unescape(re.sub(r"<[^>]+>", "", cell)).strip()


LOG = get_plugin_logger("search")
NAME = re.compile(
    r"\b\w*(?:[a-z\d][A-Z]|[A-Za-z\d]_[A-Za-z\d])\w*"
)  # GradScaler, loss_scale
PART = re.compile(
    r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=_)(?=[A-Za-z\d])"
)
# jmp.x or jmp.m.x, and no method of a class.
OF_A_MODULE = re.compile(r"[\w/]+\.html#((?:[a-z_]+\.)+)(\w+)")


@event_priority(-50)  # after the plugin that writes the index
def on_post_build(config: MkDocsConfig) -> None:
    """Adds words to the index of the search, and what a browser needs to search from a disk."""
    folder = pathlib.Path(config.site_dir, "search")
    index = json.loads((folder / "search_index.json").read_text())
    sections = {section["location"]: section for section in index["docs"]}
    keywords = first_names(sections)
    for location, words in config.extra["search_words"].items():
        address = location.replace(".md", ".html")
        if address not in sections:
            LOG.warning(f"search_words in mkdocs.yml: there is no section {location}")
        keywords[address] = f"{keywords.get(address, '')} {words}"
    for location, section in sections.items():
        section["keywords"] = keywords.get(location, "")
        section["names"], section["more_names"] = map(
            ends, (section["title"], section["text"])
        )
    text = json.dumps(index, separators=(",", ":"))
    (folder / "search_index.json").write_text(text)
    (folder / "search_index.js").write_text(f"var __index = {text}")
    (worker,) = pathlib.Path(config.site_dir, "assets/javascripts/workers").glob(
        "search.*.min.js"
    )
    (folder / "worker.js").write_text(
        f"var __worker = {json.dumps(worker.read_text())}"
    )


def first_names(locations: Iterable[str]) -> dict[str, str]:
    """Returns the places of names that are part of others, which the search would put before them.

    Of two places with one name it is the one in fewer modules: jmp.x, not jmp.adapters.nnx.x.
    """
    places = sorted(
        filter(None, map(OF_A_MODULE.fullmatch, locations)), key=lambda it: len(it[1])
    )
    names = [place[2] for place in places]
    return {
        place[0]: place[2]
        for number, place in enumerate(places)
        if place[2] not in names[:number]
        if sum(place[2].lower() in name.lower() for name in names) > 1
    }


def ends(text: str) -> str:
    """Returns what else names can be found by: "LossScale Scale" for DynamicLossScale.

    The search finds words by their beginnings, so that is every part, and parts that are joined.
    """
    found = {
        name[it.end() :] for name in NAME.findall(text) for it in PART.finditer(name)
    }
    return " ".join(sorted(found))
