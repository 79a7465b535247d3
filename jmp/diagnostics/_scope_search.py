"""Which scopes must stay in float32 or out of float8, given the errors of any choice of them.

Pure functions: what an error is, and how it is measured, is the caller's.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

Errors = tuple[float, float]  # of the loss, of the gradient
# Of (numbers of scopes in half, of those the ones in float8).
ErrorsOf = Callable[[Iterable[int], Iterable[int]], Errors]

# More scopes than these are asked about in groups: each one takes a run of the program.
LIMIT = 256


def search(
    alone: Mapping[int, Errors], errors: Callable[[frozenset[int]], Errors], tolerance: float
) -> frozenset[int]:
    """Returns a set of scopes to keep in float32 so that the errors are within the tolerance.

    No scope can be taken out of it without an error leaving the tolerance, but for those whose
    error is too large alone. Where everything is infinite, errors of sets that shrink from "all in
    half" say nothing: so the scopes are ranked by what each does alone.

    Args:
      alone: the errors of each scope where it alone is in half.
      errors: those of the program where all scopes are in half but these.

    >>> sizes = {0: 0.1, 1: 5.0, 2: 0.2, 3: 0.2}
    >>> alone = {scope: (size, 0.0) for scope, size in sizes.items()}
    >>> errors = lambda kept: (sum(sizes[scope] for scope in sizes if scope not in kept), 0.0)
    >>> sorted(search(alone, errors, 1.0)), sorted(search(alone, errors, 0.35))
    ([1], [1, 2])
    """
    worst_first = sorted(alone, key=lambda scope: max(alone[scope]), reverse=True)
    kept = frozenset(scope for scope in alone if max(alone[scope]) > tolerance)
    added = []
    for scope in worst_first[len(kept) :]:
        if max(errors(kept)) <= tolerance:
            break
        kept |= {scope}
        added.append(scope)
    for scope in reversed(added):
        if max(errors(kept - {scope})) <= tolerance:
            kept -= {scope}
    return kept


class Found(NamedTuple):
    """Which scopes must stay where, and the errors that each has alone, where it was asked about.

    Attributes:
      lowest: the errors with every scope as low as the policy says.
      in_float32: the numbers of scopes that must stay in float32.
      out_of_float8: of those whose products must be half instead of float8.
      alone: the errors of each in half, all else in float32.
      alone_in_float8: of each in float8, all else as half as it may be.
    """

    lowest: Errors
    in_float32: frozenset[int] = frozenset()
    out_of_float8: frozenset[int] = frozenset()
    alone: Mapping[int, Errors] = {}
    alone_in_float8: Mapping[int, Errors] = {}


def search_levels(
    errors: ErrorsOf, scopes: int, in_float8: frozenset[int], tolerance: float
) -> Found:
    """Returns what must stay in float32, and then what must stay out of float8.

    Half is asked about first, without any float8. Where half is within the tolerance and float8 is
    not, half is the least cure.

    >>> def errors(half, float8):
    ...     return sum([0.1, 9, 0.1][i] for i in half) + sum([0, 0, 0.7][i] for i in float8), 0
    >>> found = search_levels(errors, 3, frozenset([0, 2]), tolerance=0.5)
    >>> sorted(found.in_float32), sorted(found.out_of_float8)
    ([1], [2])

    Args:
      scopes: how many there are.
      in_float8: the numbers of those with float8 products.
    """
    every = frozenset(range(scopes))
    found = Found(errors(every, in_float8))
    if max(found.lowest) <= tolerance:
        return found
    if max(errors(every, ())) > tolerance:
        alone = {scope: errors({scope}, ()) for scope in every}
        kept = search(alone, lambda kept: errors(every - kept, ()), tolerance)
        found = found._replace(in_float32=kept, alone=alone)
    half = every - found.in_float32
    asked = in_float8 & half
    if max(errors(half, asked)) > tolerance:
        alone = {scope: errors(half, {scope}) for scope in asked}
        out = search(alone, lambda kept: errors(half, asked - kept), tolerance)
        found = found._replace(out_of_float8=out, alone_in_float8=alone)
    return found


def in_groups(paths: Iterable[str], limit: int = LIMIT) -> dict[str, str]:
    """Returns for each path its prefix of as many names as leave at most `limit` prefixes.

    >>> in_groups(["net/a/x", "net/a/y", "net/b"], limit=2)
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
    policies: Mapping[str, str], default: str, *, of_modules: bool = False
) -> list[tuple[str, str]]:
    """Returns rules by which autocast computes each of these scopes as said.

    A rule holds for all that is inside its scope, and may match from any name of a path on. So an
    inner scope of another policy, and another of the same name elsewhere, are named in rules of
    their own; longer paths come first, because the first rule that matches counts.

    Args:
      policies: for each path of scopes with operations of their own its policy.
      default: that of what no rule names.
      of_modules: whether they are those of an adapter, where a rule for "", the outermost module,
        holds for all modules inside it.

    >>> half = "mixed_float16"
    >>> rules_for({"net": "float32", "net/mlp": half, "head": "float32"}, half)
    [('net/mlp', 'mixed_float16'), ('head', 'float32'), ('net', 'float32')]
    """
    found: list[tuple[list[str], str]] = []
    for path in sorted(policies, key=lambda path: (path.count("/"), path)):
        names = path.split("/") if path else []
        longest_first = sorted(found, key=lambda rule: -len(rule[0]))
        held = next(
            (p for part, p in longest_first if _is_part(part, names) and (part or of_modules)),
            default,
        )
        if held != policies[path]:
            found.append((names, policies[path]))
    found.sort(key=lambda rule: -len(rule[0]))
    return [(_escaped("/".join(names)), policy) for names, policy in found]


def _is_part(part: list[str], names: list[str]) -> bool:
    starts = range(len(names) - len(part) + 1)
    return any(names[start : start + len(part)] == part for start in starts)


def _escaped(path: str) -> str:
    """Returns a glob that matches the path alone."""
    return re.sub(r"([*?[])", r"[\1]", path)


def path_in_rules(path: str) -> str:
    """Returns a path of name scopes without those that `jnp.einsum` opens, and what is inside.

    An einsum is no module: what stands in it belongs to the scope around it.

    >>> path_in_rules("attention/bqhd,bkhd->bhqk/transpose")
    'attention'
    """
    names = path.split("/")
    return "/".join(itertools.takewhile(lambda name: "->" not in name, names))
