"""Rows of reports: added up, and as text, by rich where it is installed, else in plain columns."""

import io
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

UNITS = ("B", "kB", "MB", "GB", "TB")

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


def first_rows(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], shown: int, data: str
) -> list[str]:
    """Returns the lines of a table of the first rows; `data` names what has the others too."""
    more = [f"and {len(rows) - shown} more, which `{data}` has too"] if len(rows) > shown else []
    return [title, table(columns, rows[:shown]), *more]


def size(number: int | None) -> str:
    """Returns bytes in a unit that suits them; "" for none.

    >>> size(12_345_678), size(999_600)
    ('12.3 MB', '1 MB')
    """
    if not number:
        return ""
    digits = len(str(round(float(f"{number:.3g}"))))  # rounded first: 999.6 kB is 1 MB
    power = min((digits - 1) // 3, len(UNITS) - 1)
    return f"{number / 1000**power:.3g} {UNITS[power]}"
