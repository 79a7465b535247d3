"""Which scopes must stay in float32 or out of float8, given the errors of any choice of them.

Pure functions: what an error is, and how it is measured, is the caller's.

What `find_float32` returns: the rules, the errors behind them, and the text of both.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jmp.diagnostics._comparison import Comparison
from jmp.diagnostics._tables import table
from jmp.policy import get_policy
from jmp.rules import Rule

Errors = tuple[float, float]  # of the loss, of the gradient
# Of (numbers of scopes in half, of those the ones in float8, is one asked about alone).
ErrorsOf = Callable[[Iterable[int], Iterable[int], bool], Errors]

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

    >>> def errors(half, float8, is_alone):
    ...     return sum([0.1, 9, 0.1][i] for i in half) + sum([0, 0, 0.7][i] for i in float8), 0
    >>> found = search_levels(errors, 3, frozenset([0, 2]), tolerance=0.5)
    >>> sorted(found.in_float32), sorted(found.out_of_float8)
    ([1], [2])

    Args:
      scopes: how many there are.
      in_float8: the numbers of those with float8 products.
    """
    every = frozenset(range(scopes))
    found = Found(errors(every, in_float8, False))
    if max(found.lowest) <= tolerance:
        return found
    if max(errors(every, (), False) if in_float8 else found.lowest) > tolerance:
        alone = {i: errors([i], (), True) for i in sorted(every)}
        worst = [max(alone[i]) for i in sorted(every)]
        kept = search(worst, lambda kept: max(errors(every - kept, (), False)), tolerance)
        found = found._replace(in_float32=kept, alone=alone)
    half = every - found.in_float32
    asked = sorted(in_float8 & half)
    if not asked or max(errors(half, asked, False)) <= tolerance:
        return found
    alone = {i: errors(half, [i], False) for i in asked}

    def error(kept: frozenset[int]) -> float:
        others = [i for position, i in enumerate(asked) if position not in kept]
        return max(errors(half, others, False))

    out = search([max(alone[i]) for i in asked], error, tolerance)
    return found._replace(out_of_float8=frozenset(asked[i] for i in out), alone_in_float8=alone)


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
            (p for part, p in longest_first if _matches(part, names) and (part or of_modules)),
            default,
        )
        if held != policies[path]:
            found.append((names, policies[path]))
    found.sort(key=lambda rule: -len(rule[0]))
    return [(_escaped("/".join(names)), policy) for names, policy in found]


def _matches(part: list[str], names: list[str]) -> bool:
    starts = range(len(names) - len(part) + 1)
    return any(names[start : start + len(part)] == part for start in starts)


def _escaped(path: str) -> str:
    """Returns a glob that matches the path alone."""
    return re.sub(r"([*?[])", r"[\1]", path)


SHOWN = 8
NOWHERE = "what is in no scope"


@dataclasses.dataclass(frozen=True)
class ScopeAlone:
    """The error of the program in which one scope rounds to half and everything else is float32.

    With `in_float8`: of the program in which the products of one scope are float8, and everything
    else has the dtypes that the rules give.

    Attributes:
      path: names of scopes, or of modules, joined by slashes; "" for what is in none. What is
        inside a scope of its own does not count.
      loss_error, gradient_error: relative, see `find_float32`; infinite where not finite.
      in_float32: whether the rules that were found keep it in float32.
      in_float8: whether it was asked about in float8.
      out_of_float8: whether the rules take its products out of float8.

    >>> scope = ScopeAlone("head", loss_error=0.2, gradient_error=0.1, in_float32=True)
    >>> scope.path, scope.in_float8
    ('head', False)
    """

    path: str
    loss_error: float
    gradient_error: float
    in_float32: bool
    in_float8: bool = False
    out_of_float8: bool = False


@dataclasses.dataclass(frozen=True)
class Float32Scopes:
    """What `find_float32` found; `print` shows it, `to_dict` gives the data.

    Attributes:
      policy: the policy, as text.
      tolerance: of the relative errors.
      rules: for `rules=` of `jmp.autocast`; those that were given come first. Empty where no scope
        has to stay in float32 or out of float8.
      all_half: the errors of loss and gradient with all scopes in half, and in float8 where the
        policy asks for it, as emulated.
      scopes: each scope by itself, the worst first; empty where no rule is needed. Under a policy
        with float8 products a scope may stand there twice.
      comparison: `compare` of the program with these rules against float32.

    >>> from jmp.diagnostics import compare
    >>> comparison = compare(lambda w: jnp.sum(w @ w), "mixed_bfloat16")(jnp.eye(2))
    >>> scopes = Float32Scopes("mixed_bfloat16", 0.01, [], (0.0, 0.0), [], comparison)
    >>> scopes.rules, scopes.is_within  # exact in bfloat16
    ([], True)
    """

    policy: str
    tolerance: float
    rules: list[Rule]
    all_half: Errors
    scopes: list[ScopeAlone]
    comparison: Comparison

    @property
    def loss_error(self) -> float:
        """The relative error of the loss with the rules, measured in autocast's own program."""
        return self._error("result")

    @property
    def gradient_error(self) -> float:
        """The relative error of the gradient with the rules, all leaves as one vector."""
        return self._error("gradient")

    @property
    def is_within(self) -> bool:
        """Whether both errors are within the tolerance."""
        return max(self.loss_error, self.gradient_error) <= self.tolerance

    def _error(self, kind: str) -> float:
        (row,) = (row for row in self.comparison.by_module(0) if row.kind == kind)
        return math.inf if math.isnan(row.relative_error) else row.relative_error

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings.

        Errors may be infinite.
        """
        data = {**vars(self), "rules": [(str(target), str(p)) for target, p in self.rules]}
        data["scopes"] = list(map(dataclasses.asdict, self.scopes))
        data["comparison"] = self.comparison.to_dict()
        names = ("loss_error", "gradient_error", "is_within")
        return {**data, **{name: getattr(self, name) for name in names}}

    def __str__(self) -> str:
        asked = f"{self.policy}, tolerance {self.tolerance:.3g}"
        kept = [scope for scope in self.scopes if scope.in_float32 or scope.out_of_float8]
        if kept:
            must = [_of(self.scopes, "in_float32", "in float32", False)]
            must.append(_of(self.scopes, "out_of_float8", "out of float8", True))
            lines = [f"{asked}: {', '.join(filter(None, must))}", "rules=["]
            lines += [f"    {rule!r}," for rule in self.rules] + ["]"]
            if any(not scope.path for scope in kept):
                lines.append(
                    f"'' is {NOWHERE}: the loss, and what the outermost module computes itself"
                )
        else:
            float8 = " or out of float8" * (get_policy(self.policy).product_dtype is not None)
            lines = [f"{asked}: no scope has to stay in float32{float8}"]
        rows = [("all scopes, without rules", *self.all_half, "emulated")] if kept else []
        what = "with these rules" if self.rules else "all scopes"
        rows.append((what, self.loss_error, self.gradient_error, "measured"))
        for scope in self.scopes[: max(SHOWN, len(kept) + 2)]:
            name = f"{scope.path or NOWHERE} alone{' in float8' * scope.in_float8}"
            rows.append((name, scope.loss_error, scope.gradient_error, "emulated"))
        cells = [(name, f"{loss:.2g}", f"{grad:.2g}", how) for name, loss, grad, how in rows]
        lines.append(table(("in half", "loss error", "gradient error", ""), cells))
        if not self.is_within:
            lines.append(
                "Above the tolerance: autocast's own program differs from what was emulated. Ask "
                "with a smaller tolerance, which finds more scopes."
            )
        return "\n".join(lines)


def _of(scopes: Sequence[ScopeAlone], name: str, where: str, in_float8: bool) -> str:
    states = [getattr(scope, name) for scope in scopes if scope.in_float8 is in_float8]
    return f"{sum(states)} of {len(states)} scopes must stay {where}" if any(states) else ""
