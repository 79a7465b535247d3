"""What MkDocs calls while it builds the site.

The site holds docs/ alone. A link to a program or a folder of the repository, which GitHub follows,
becomes its text with the path beside it. A picture must be in docs/.

A link whose text is the file's name, such as [ranges.md](ranges.md), shows the page's title. Wide
tables are marked for docs/stylesheets/, which lays them out for a phone.
"""

import pathlib
import re
from html import escape, unescape

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

DOCS = pathlib.Path(__file__).parent
OUTSIDE = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]+)(#[^)\s]*)?\)")
FILE_NAME = re.compile(r"\[(\w+\.md)\](?=\(\1[#)])")
# On a line of its own: it becomes a link to itself, since a phone shows it small.
PICTURE = re.compile(r"^(!\[[^\]]*\]\(([^)\s]+)\))$", re.M)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Writes links as the site can follow them."""
    if page.file.src_uri == "mistakes.md":  # it repeats most names: others come before it
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
OBJECT_NAME = re.compile(r'(?<=class="doc doc-object-name )([^>]*>)([\w.]+)(?=</span>)')


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks what a phone's width needs: tables of words and of numbers, where names may break."""
    html = html.replace(
        'class="headerlink"', 'class="headerlink" aria-label="Link to this section"'
    )
    html = OBJECT_NAME.sub(lambda it: it[1] + it[2].replace(".", ".<wbr>"), html)
    return TABLE.sub(lambda table: for_a_phone(table[0]), html)


def for_a_phone(table: str) -> str:
    """Returns a table with what docs/stylesheets/ needs to lay it out on a narrow page.

    A table of three or more columns of words, seven letters a cell or more, becomes `data-stacked`:
    each row is a block, and each cell has its column's title in `data-label`. Others scroll
    sideways beside their first column; their numbers become `data-number`.
    """
    rows = [[text_of(cell[3]) for cell in CELL.finditer(row)] for row in ROW.findall(table)]
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
