"""Which scopes must stay in float32, given the errors of any choice of them; and rules that say so.

Pure functions: what an error is, and how it is measured, is the caller's.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

# More scopes than these are asked about in groups: each one takes a run of the program.
LIMIT = 256


def search(
    alone: Sequence[float], error: Callable[[frozenset[int]], float], tolerance: float
) -> frozenset[int]:
    """Returns a set of scopes to keep in float32 so that the error is within the tolerance.

    No scope can be taken out of it without the error leaving the tolerance, but for those whose
    error is too large alone. Where everything is infinite, errors of sets that shrink from "all in
    half" say nothing: so the scopes are ranked by what each does alone.

    Args:
      alone: the error of each scope where it alone is in half.
      error: that of the program where all scopes are in half but these.

    >>> sizes = [0.1, 5.0, 0.2, 0.2]
    >>> error = lambda kept: sum(x for i, x in enumerate(sizes) if i not in kept)
    >>> sorted(search(sizes, error, 1.0)), sorted(search(sizes, error, 0.35))
    ([1], [1, 2])
    """
    order = sorted(range(len(alone)), key=lambda i: (-alone[i], i))
    needed = sum(each > tolerance for each in alone)
    low, high = needed, len(order)  # the least prefix that is enough lies between
    middle = low
    while low < high:
        if error(frozenset(order[:middle])) <= tolerance:
            high = middle
        else:
            low = middle + 1
        middle = (low + high) // 2
    kept = frozenset(order[:high])
    for scope in reversed(order[needed:high]):
        if error(kept - {scope}) <= tolerance:
            kept -= {scope}
    return kept


def grouped(paths: Iterable[str], limit: int = LIMIT) -> dict[str, str]:
    """Returns for each path its prefix of as many names as leave at most `limit` prefixes.

    >>> grouped(["net/a/x", "net/a/y", "net/b"], limit=2)
    {'net/a/x': 'net/a', 'net/a/y': 'net/a', 'net/b': 'net/b'}
    """
    paths = list(dict.fromkeys(paths))
    deepest = max((len(path.split("/")) for path in paths), default=1)
    for depth in range(deepest, 0, -1):
        found = {path: "/".join(path.split("/")[:depth]) for path in paths}
        if len(set(found.values())) <= limit or depth == 1:
            return found
    return {}


def rules_for(
    in_float32: Mapping[str, bool], half: str, anywhere: bool = True
) -> list[tuple[str, str]]:
    """Returns rules by which autocast keeps these scopes in float32 and those in half.

    A rule holds for all that is inside its scope, and may match from any name of a path on. So an
    inner scope in half, and another of the same name elsewhere, are named in rules of their own;
    longer paths come first, because the first rule that matches wins.

    Args:
      in_float32: for each path of scopes with operations of their own whether it is float32.
      half: the policy of the others.
      anywhere: rules match from any name of a path on, as autocast's; else from the first alone, as
        those of adapters.

    >>> rules_for({"net": True, "net/mlp": False, "head": True}, "mixed_float16")
    [('net/mlp', 'mixed_float16'), ('head', 'float32'), ('net', 'float32')]
    """
    found: list[tuple[list[str], bool]] = []
    for path in sorted(in_float32, key=lambda path: (path.count("/"), path)):
        names = path.split("/")
        longest_first = sorted(found, key=lambda rule: -len(rule[0]))
        held = next(
            (keeps for part, keeps in longest_first if _matches(part, names, anywhere)), False
        )
        if held != in_float32[path]:
            found.append((names, in_float32[path]))
    found.sort(key=lambda rule: -len(rule[0]))
    return [(_escaped("/".join(names)), "float32" if keeps else half) for names, keeps in found]


def _matches(part: list[str], names: list[str], anywhere: bool) -> bool:
    starts = range(len(names) - len(part) + 1) if anywhere else [0]
    return any(names[start : start + len(part)] == part for start in starts)


def _escaped(path: str) -> str:
    """Returns a glob that matches the path alone."""
    return re.sub(r"([*?[])", r"[\1]", path)
