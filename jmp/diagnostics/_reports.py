"""Parts of reports: rows that are counted and added up, and tables of text."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from jmp.autocasting.float8 import E4M3
from jmp.dtypes import HALF_DTYPES

# Dtypes as reports name them: the half types, and what operands of float8 products are held in.
HALVES = tuple(map(str, HALF_DTYPES))
FLOAT8 = str(E4M3)
UNITS = ("B", "kB", "MB", "GB", "TB")

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R", bound=Any)  # a dataclass


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a diagnostic: `print` shows it, `to_dict` gives the data.

    Attributes:
      computed: the properties that are data too.
    """

    computed: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings."""
        data = dataclasses.asdict(self) | {name: getattr(self, name) for name in self.computed}
        return {name: value for name, value in data.items() if not name.startswith("_")}


def totals(pairs: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Returns the sum of the numbers of each key, the keys in the order in which they come.

    >>> totals([("float16", 2), ("float32", 4), ("float16", 2)])
    {'float16': 4, 'float32': 4}
    """
    found: dict[K, int] = {}
    for key, number in pairs:
        found[key] = found.get(key, 0) + number
    return found


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Returns the items of each key, the keys in the order in which they come.

    >>> grouped([1, 2, 3], lambda number: number % 2)
    {1: [1, 3], 0: [2]}
    """
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def added_up(rows: Iterable[R], *numbers: str) -> list[R]:
    """Returns one dataclass for those that differ only in some numbers, which are added up.

    >>> rows = [Report(), Report()]
    >>> added_up(rows) == rows[:1]
    True
    """
    others = lambda row: dataclasses.replace(row, **dict.fromkeys(numbers, 0))

    def sums(some: list[R]) -> dict[str, int]:
        return {name: sum(getattr(row, name) for row in some) for name in numbers}

    groups = grouped(rows, others).values()
    return [dataclasses.replace(some[0], **sums(some)) for some in groups]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows under the names of their columns, as lines of text.

    >>> print(table(["name", "value"], [["loss", "0.25"]]))
      name   value
     ──────────────
      loss   0.25
    """
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["  " + "   ".join(map(str.ljust, row, widths)).rstrip() for row in (columns, *rows)]
    lines.insert(1, " " + "─" * (sum(widths) + 3 * len(widths) - 1))
    return "\n".join(lines)


def first_rows(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], shown: int, data: str
) -> list[str]:
    """Returns the lines of a table of the first rows; `data` names the attribute that has all
    rows."""
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
