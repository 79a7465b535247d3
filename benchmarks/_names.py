"""Rows that are found by their names."""

from collections.abc import Iterable
from typing import Any


def named(kind: str, name: str, rows: Iterable[Any]) -> Any:
    """Returns the row of a name.

    Raises:
      ValueError: there is none; the message has the names of this kind.
    """
    found = {row.name: row for row in rows}
    if name not in found:
        raise ValueError(f"find got the {kind} {name!r}; expected one of {', '.join(found)}.")
    return found[name]
