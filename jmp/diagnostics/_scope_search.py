"""Which scopes must stay in float32 or out of float8, given the errors of any choice of them.

Pure functions: what an error is, and how it is measured, is the caller's.
"""

import functools
import glob
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Errors = tuple[float, float]  # of the loss, of the gradient
Scopes = frozenset[str]  # their paths


class KeptOut(NamedTuple):
    """What was found of one lower precision: of half, or of float8.

    Attributes:
      kept: the scopes that must stay out of it.
      alone: the errors of those scopes that were tried alone in it; of each that is kept, too.
    """

    kept: Scopes = frozenset()
    alone: Mapping[str, Errors] = {}


def search(scopes: Sequence[str], errors: Callable[[Scopes], Errors], tolerance: float) -> KeptOut:
    """Returns which scopes to keep out of a precision so that the errors are within the tolerance.

    Groups of scopes are tried alone in it. A group within the tolerance is done; any other is split
    in two, down to single scopes. So few culprits among many scopes take few trials, and it does
    not matter that with all of them everything is infinite. If the others together are still too
    much, the worst of them go, until they are not; what was taken out for nothing is put back.

    Args:
      scopes: those that are asked about.
      errors: those of the program where only these of them have the lower precision.

    >>> sizes = {"a": 0.1, "b": 5.0, "c": 0.2, "d": 0.2}
    >>> errors = lambda low: (sum(sizes[scope] for scope in low), 0.0)
    >>> sorted(search("abcd", errors, 1.0).kept), sorted(search("abcd", errors, 0.35).kept)
    (['b'], ['b', 'c'])
    """
    errors = functools.cache(errors)
    single: set[str] = set()

    def trial(group: Sequence[str]) -> float:
        single.update(group if len(group) == 1 else ())
        return max(errors(frozenset(group)))

    def culprits(group: Sequence[str]) -> set[str]:
        if trial(group) <= tolerance:
            return set()
        if len(group) == 1:
            return set(group)
        return set().union(*map(culprits, _halves(group)))

    def worst(group: Sequence[str]) -> str:
        while len(group) > 1:
            group = max(_halves(group), key=trial)
        return group[0]

    def others() -> list[str]:
        return [scope for scope in scopes if scope not in kept]

    if not scopes or trial(scopes) <= tolerance:
        return KeptOut()
    kept = culprits(scopes)
    taken_out = []
    while others() and trial(others()) > tolerance:
        taken_out.append(worst(others()))
        kept.add(taken_out[-1])
    for scope in reversed(taken_out):
        kept.remove(scope)
        if trial(others()) > tolerance:
            kept.add(scope)
    alone = {scope: errors(frozenset([scope])) for scope in scopes if scope in single | kept}
    return KeptOut(frozenset(kept), alone)


def _halves(group: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    middle = len(group) // 2
    return group[:middle], group[middle:]


class Found(NamedTuple):
    """Which scopes must stay in float32, and which of the others out of float8.

    Attributes:
      lowest: the errors with every scope as low as the policy says.
      half: what was asked with all else in float32, and nothing in float8.
      float8: what was asked with all else in half, as far as it may be.
    """

    lowest: Errors
    half: KeptOut = KeptOut()
    float8: KeptOut = KeptOut()


def search_levels(
    scopes: Sequence[str],
    in_float8: Scopes,
    errors: Callable[[Scopes, Scopes], Errors],
    tolerance: float,
) -> Found:
    """Returns what must stay in float32, and then what must stay out of float8.

    Half is asked about first, without any float8. Where half is within the tolerance and float8 is
    not, half is the least cure.

    Args:
      in_float8: the scopes with float8 products.
      errors: those with some scopes in half, and of these some in float8.

    >>> half, float8 = {"a": 0.1, "b": 9, "c": 0.1}, {"a": 0, "c": 0.7}
    >>> def errors(in_half, in_float8):
    ...     return sum(half[scope] for scope in in_half) + sum(float8[s] for s in in_float8), 0
    >>> found = search_levels("abc", frozenset("ac"), errors, tolerance=0.5)
    >>> sorted(found.half.kept), sorted(found.float8.kept)
    (['b'], ['c'])
    """
    errors = functools.cache(errors)
    lowest = errors(frozenset(scopes), in_float8)
    if max(lowest) <= tolerance:
        return Found(lowest)
    half = search(scopes, lambda low: errors(low, frozenset()), tolerance)
    in_half = frozenset(scopes) - half.kept
    asked = [scope for scope in scopes if scope in in_float8 & in_half]
    float8 = search(asked, lambda low: errors(in_half, low), tolerance)
    return Found(lowest, half, float8)


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
    return [(glob.escape("/".join(names)), policy) for names, policy in found]


def _is_part(part: list[str], names: list[str]) -> bool:
    starts = range(len(names) - len(part) + 1)
    return any(names[start : start + len(part)] == part for start in starts)
