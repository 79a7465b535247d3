"""What MkDocs reads otherwise than GitHub: sections as tabs, and the notebook.

GitHub shows Markdown without extensions. So pages have plain headings. Here each heading of level
three below `<!-- tabs -->` becomes a tab with the same anchor, up to the next heading of level two.
Each section of level two below `<!-- folded -->` is folded: its heading opens it.
"""

import json
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

NOTEBOOK = pathlib.Path(__file__).parent.parent / "examples" / "tour.ipynb"
TABS = re.compile(r"^<!-- tabs -->\n(.*?)(?=^## |\Z)", re.M | re.S)
# An element of HTML around Markdown, which GitHub reads as it stands.
ELEMENT = re.compile(r'^<((?:details|div)(?: class="\w+")?)>$', re.M)
FOLDED = "<!-- folded -->\n"
SECTION = re.compile(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", re.M | re.S)
TAB = re.compile(r"^### ([^\n]*)\n(.*?)(?=^### |\Z)", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the notebook as a page."""
    files.append(File.generated(config, "tour.md", content=markdown_of(NOTEBOOK)))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Writes sections as tabs, and the page where GitHub shows the notebook."""
    if (
        page.file.src_uri == "tour.md"
    ):  # it repeats what other pages explain: they come first
        page.meta["search"] = {"boost": 0.5}
    markdown = markdown.replace("(../examples/tour.ipynb)", "(tour.md)")
    markdown = TABS.sub(lambda section: TAB.sub(as_tab, section[1]), markdown)
    before, folded, below = markdown.partition(FOLDED)
    markdown = before + (SECTION.sub(as_folded, below) if folded else "")
    return ELEMENT.sub(r'<\1 markdown="1">', markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tells MkDocs of the anchors of tabs, which are made after it has looked for anchors."""
    assert page.present_anchor_ids is not None
    page.present_anchor_ids |= set(
        re.findall(r'<input[^>]* id="([\w-]+)" name="__tabbed', html)
    )
    return html


def as_tab(section: re.Match[str]) -> str:
    """Returns a section as a tab of pymdownx.tabbed."""
    body = re.sub(r"^(?=.)", "    ", section[2], flags=re.M)
    return f'=== "{section[1]}"\n{body}'


def as_folded(section: re.Match[str]) -> str:
    """Returns a section that shows its heading, and the rest when it is opened."""
    summary = f'<summary markdown="block">\n\n## {section[1]}\n\n</summary>'
    return f'<details class="folded" markdown="1">\n{summary}\n\n{section[2]}\n</details>\n\n'


def markdown_of(notebook: pathlib.Path) -> str:
    """Returns a notebook's cells, and what was printed below each."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(
            source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        )
        for output in cell.get("outputs", ()):
            if png := output.get("data", {}).get("image/png"):
                parts.append(f"![What the cell draws](data:image/png;base64,{png})")
            else:
                parts.append("```text\n" + "".join(output["text"]).rstrip() + "\n```")
    return "\n\n".join(parts).replace("](../docs/", "](") + "\n"
