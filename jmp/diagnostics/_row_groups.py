"""Rows that repeat, put together: what every block of a network does is read once."""

import dataclasses
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

from jmp.diagnostics._rows import Row, together

# A path of modules: at each depth the names that stand there, all of them with all of the others.
Names = tuple[frozenset[str], ...]
# Rows, or several merged, with their modules and their source lines.
Found = list[tuple[Row, Names, tuple[str, ...]]]


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that agree in everything but the numbers of their modules."""

    # What they share, with times and operations of all. Its module is written "h/*/attn" where all
    # modules h/0, h/1, ... of the report take part, "h/{3,7}/attn" where only some do.
    row: Row
    repeated: str  # the path up to the first module that repeats, "h/* x 12"; "" where none does
    rest: str  # the path below it


def grouped(rows: Sequence[Row]) -> list[Group]:
    """Returns rows of a report in groups, in the order of the program.

    Modules repeat if their names differ in the number at the end alone. Of such modules first rows
    of one source line go together, then also those of different lines: layers of the same kind.
    """
    siblings: dict[tuple[str, ...], set[str]] = {}
    for names in (row.module.split("/") for row in rows):
        for depth, name in enumerate(names):
            siblings.setdefault(tuple(map(_stem, names[: depth + 1])), set()).add(name)
    found: Found = [
        (row, tuple(frozenset([name]) for name in row.module.split("/")), (row.source,))
        for row in rows
    ]
    for with_source in (True, False):
        for depth in range(max((len(names) for _, names, _ in found), default=0)):
            found = _merged(found, depth, with_source)
    return [_group(row, names, sources, siblings) for row, names, sources in found]


def _merged(found: Found, depth: int, with_source: bool) -> Found:
    """Merges what differs at this depth alone, and where it has no module in common."""
    alike: dict[Any, list[int]] = {}
    for index, (row, names, sources) in enumerate(found):
        stems = frozenset(_stem(name) for at in names[depth : depth + 1] for name in at)
        shared = dataclasses.replace(row, module="", source="", times=1, flops=0)
        key = shared, names[:depth], stems, names[depth + 1 :], sources if with_source else ()
        alike.setdefault(key, []).append(index)
    merged = dict(enumerate(found))
    for indices in alike.values():
        members = [found[index] for index in indices]
        levels = [at for _, names, _ in members for at in names[depth : depth + 1]]
        union = frozenset().union(*levels)
        if union and len(union) == sum(map(len, levels)):
            _, names, _ = members[0]
            names = (*names[:depth], union, *names[depth + 1 :])
            sources = tuple(dict.fromkeys(source for member in members for source in member[2]))
            merged[indices[0]] = together([row for row, _, _ in members]), names, sources
            for index in indices[1:]:
                del merged[index]
    return list(merged.values())


def _group(
    row: Row, names: Names, sources: tuple[str, ...], siblings: dict[tuple[str, ...], set[str]]
) -> Group:
    stems = tuple(_stem(min(at)) for at in names)
    labels = [_label(at, siblings[stems[: depth + 1]]) for depth, at in enumerate(names)]
    row = dataclasses.replace(row, module="/".join(labels), source=", ".join(_joined(sources)))
    first = next((depth for depth, at in enumerate(names) if len(at) > 1), None)
    if first is None:
        return Group(row, "", row.module)
    repeated = f"{'/'.join(labels[: first + 1])} x {len(names[first])}"
    return Group(row, repeated, "/".join(labels[first + 1 :]))


def _stem(name: str) -> str:
    """Returns a module's name without its number: "Block_3" is "Block", "3" is "".

    Haiku's first module of a kind has none: "linear", "linear_1".
    """
    return re.sub(r"_?\d+$", "", name)


def _label(names: frozenset[str], siblings: set[str]) -> str:
    if len(names) == 1:
        return min(names)
    starts = {name.rstrip(string.digits) for name in names}
    start = starts.pop() if len(starts) == 1 else _stem(min(names))
    if names == siblings:
        return f"{start}*"
    ends = sorted((name.removeprefix(start) for name in names), key=lambda end: (len(end), end))
    is_range = ends[0].isdigit() and int(ends[-1]) - int(ends[0]) == len(ends) - 1 > 1
    return f"{start}{{{f'{ends[0]}-{ends[-1]}' if is_range else ','.join(ends)}}}"


def _joined(sources: Sequence[str]) -> Iterator[str]:
    """Yields each file once, with all its lines."""
    lines: dict[str, dict[str, None]] = {}
    for source in ", ".join(sources).split(", "):
        file, _, line = source.rpartition(":")
        lines.setdefault(file, {})[line] = None
    for file, numbers in lines.items():
        yield f"{file}:{','.join(numbers)}" if file else ""
