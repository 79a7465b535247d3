"""Rows of reports: added up, and as text, by rich where it is installed, else in plain columns."""

import io
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def totals(pairs: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Returns the sum of the numbers of each key, the keys in the order in which they come.

    >>> totals([("float16", 2), ("float32", 4), ("float16", 2)])
    {'float16': 4, 'float32': 4}
    """
    found: dict[K, int] = {}
    for key, number in pairs:
        found[key] = found.get(key, 0) + number
    return found


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows under the names of their columns, as lines of text.

    >>> "loss" in table(["name", "value"], [["loss", "0.25"]])
    True
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (columns, *rows)
        )
    shown = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=160, markup=False, emoji=False).print(shown)  # "[why]" is text
    return text.getvalue().partition("\n")[2].rstrip()  # the first line is the blank upper edge
