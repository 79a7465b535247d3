"""What MkDocs calls while it builds the site.

The site holds docs/ alone. A link to a program or a folder of the repository, which GitHub follows,
becomes its text with the path beside it. A picture must be in docs/.
"""

import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

DOCS = pathlib.Path(__file__).parent
OUTSIDE = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]+)(#[^)\s]*)?\)")
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

    return PICTURE.sub(r"[\1](\2)", OUTSIDE.sub(written, markdown))
