"""Rules: exceptions from a policy, by path or by module type.

A rule is a pair `(target, policy)`. Its target is one of
  - a glob, which is compared with the path from any of its names on: `"head"` and `"*/head"` find
    "head" and "net/head" (`*` also crosses slashes); with a slash in front, as in `"/head"`, only
    from the first name,
  - a compiled regular expression that must match the whole path; in rules of `jmp.autocast` the
    path from any of its names on,
  - a module class, or a tuple of them (subclasses count); not in rules of `jmp.autocast`.
A path is a module's or parameter's names joined by slashes: "encoder/Dense_0/kernel". Names that
begin with `~`, which Haiku puts in for the method that made a module, may be left out of a path, a
glob and an expression: "mlp/~/linear_0" and "mlp/linear_0" are the same. A rule that matches a
module holds for everything inside it. The first rule that matches counts. A rule that never matched
is reported by `warn_unused`, because it may be a typo.

>>> rules = PolicyRules([("head*", "float32")], default="mixed_float16")
>>> str(rules.policy_for("head/kernel")), str(rules.policy_for("body/kernel"))
('p=full,c=full,o=full', 'p=full,c=f16,o=full')
"""

import difflib
import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from jmp._messages import PrecisionWarning, described, listed, users_stacklevel, wrong
from jmp.policy import Policy, get_policy

Target = str | re.Pattern[str] | type | tuple[type, ...]
Rule = tuple[Target, str | Policy]

_MOST_PATHS = 1000  # that are kept for the warning
# The name of a method in a regular expression: at its start, behind a slash, a wildcard or a group.
_METHOD_NAME = re.compile(r"(?<![\w\[^\\])\\?~[^/\]()|]*/")


class UnusedRuleWarning(PrecisionWarning):
    """A rule matched no parameter and no module: most likely its target is misspelt.

    >>> import warnings
    >>> rules = PolicyRules([("haed*", "float32")], default="mixed_float16")
    >>> _ = rules.policy_for("head/kernel")
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     rules.warn_unused()
    >>> caught[0].category.__name__, "'haed*'" in str(caught[0].message)
    ('UnusedRuleWarning', True)
    """


class PolicyRules:
    """An ordered list of rules above a default policy; remembers which rules have matched.

    Args:
      rules: `(target, policy)` pairs, the strongest first. Policies may be text.
      default: the policy if no rule matches.
      fallback: an adapter's own rule that norms are float32. It is called as `fallback(path,
        module_types)` if no rule matches, and returns None to leave the default.

    Raises:
      TypeError: a rule is not a pair, or its target is of no known kind.
      ValueError: a policy does not parse.

    >>> rules = PolicyRules([("*/norm", "float32")], default="mixed_bfloat16")
    >>> rules.policy_for("encoder/norm").compute_dtype.__name__, rules.unused
    ('float32', [])
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        default: str | Policy,
        *,
        fallback: Callable[[str, Sequence[type]], Policy | None] | None = None,
    ) -> None:
        self.default = get_policy(default)
        if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
            raise TypeError(
                f"Got rules={described(rules)}; expected a list of pairs (target, policy): "
                "rules=[('head*', 'float32')]."
            )
        self._rules = [_checked(rule) for rule in rules]
        self._fallback = fallback
        self._unused = dict(enumerate(target for target, _ in self._rules))
        self._asked: dict[str, None] = {}  # paths, for the warning

    def policy_for(
        self,
        path: str,
        module_types: Sequence[type] = (),
        *,
        root: str = "",
        anywhere: bool = False,
    ) -> Policy:
        """Returns the policy of the first rule that matches, else the default.

        Args:
          path: names joined by slashes; "" is the root.
          module_types: the classes of the module at `path` and of the modules around it, innermost
            first, if they are known.
          root: the name of the root, if it has one: a target may begin with it.
          anywhere: whether a regular expression may match from any name of the path on, as a glob
            does, because the outer names are not the user's.
        """
        if len(self._asked) < _MOST_PATHS:
            self._asked[path] = None
        spellings = _spellings(path, root)
        for index, (target, policy) in enumerate(self._rules):
            if _target_matches(target, spellings, module_types, anywhere):
                self._unused.pop(index, None)
                return policy
        found = self._fallback(path, module_types) if self._fallback else None
        return self.default if found is None else found

    @property
    def unused(self) -> list[str]:
        """The targets of the user's rules that have not matched yet."""
        return list(map(_target_text, self._unused.values()))

    def warn_unused(self) -> None:
        """Warns with an `UnusedRuleWarning` that names each rule that has not matched yet."""
        if self.unused:
            warnings.warn(
                "These rules matched no parameter and no module: "
                f"{listed(self.unused, written=str)}. Check their "
                f"spelling{self._paths_asked()}; an earlier rule may have taken every match.",
                UnusedRuleWarning,
                stacklevel=users_stacklevel(),
            )

    def _paths_asked(self) -> str:
        """Returns some of the paths that were asked about, those near the unused rules first."""
        # Modules before the parameters in them, whichever was asked about first.
        asked = sorted(filter(None, self._asked), key=lambda path: path.count("/"))
        globs = [target.lstrip("*/") for target in self._unused.values() if isinstance(target, str)]
        near = [path for glob in globs[:8] for path in difflib.get_close_matches(glob, asked, 2)]
        shown = list(dict.fromkeys([*near, *asked]))
        return f" (paths here are {listed(shown, most=4)})" if shown else ""


def _checked(rule: object) -> tuple[Target, Policy]:
    if not (isinstance(rule, tuple) and len(rule) == 2):
        expected = "a pair (target, policy), in a list: rules=[('head*', 'float32')]"
        raise wrong(TypeError, "A rule", rule, expected)
    target, policy = rule
    classes = target if isinstance(target, tuple) else (target,)
    is_class = bool(classes) and all(isinstance(item, type) for item in classes)
    if not (isinstance(target, (str, re.Pattern)) or is_class):
        expected = "a glob such as 'head*', a compiled regular expression, or a module class"
        raise wrong(TypeError, "A rule's target", target, expected)
    return target, get_policy(policy)


def _spellings(path: str, root: str) -> list[str]:
    """Returns what a path may be called: with the root's name, without names of methods."""
    spellings = [path, f"{root}/{path}" if path else root] if root else [path]
    return [*spellings, *map(_without_method_names, spellings)] if "~" in path else spellings


def _without_method_names(path: str) -> str:
    """Returns a path, or a glob of one, without the names that Haiku gives to methods."""
    return "/".join(name for name in path.split("/") if not name.startswith("~"))


def _path_and_ancestors(path: str) -> list[str]:
    names = path.split("/")
    return ["/".join(names[:end]) for end in range(len(names), 0, -1)]


def _from_any_name(path: str) -> list[str]:
    names = path.split("/")
    return ["/".join(names[start:]) for start in range(len(names))]


def _target_matches(
    target: Target, spellings: list[str], module_types: Sequence[type], anywhere: bool
) -> bool:
    if isinstance(target, str):
        globs = {target, _without_method_names(target)}
        return any(glob_matches(glob, path) for glob in globs for path in spellings)
    if isinstance(target, re.Pattern):
        starts = [s for path in spellings for s in (_from_any_name(path) if anywhere else [path])]
        parts = [part for start in starts for part in _path_and_ancestors(start)]
        plain = re.compile(_METHOD_NAME.sub("", target.pattern), target.flags)
        return any(regex.fullmatch(part) for regex in (target, plain) for part in parts)
    return any(issubclass(module_type, target) for module_type in module_types)


def glob_matches(glob: str, path: str) -> bool:
    """Returns whether a glob matches a path or what is around it, as targets of rules do.

    >>> glob_matches("mu", "0/mu"), glob_matches("/mu", "0/mu"), glob_matches("head*", "net/head/w")
    (True, False, True)
    """
    if glob.startswith("/"):
        starts, glob = [path], glob[1:]
    else:
        starts, glob = _from_any_name(path), glob.removeprefix("*/")
    parts = (part for start in starts for part in _path_and_ancestors(start))
    return any(fnmatch.fnmatchcase(part, glob) for part in parts)


def _target_text(target: Target) -> str:
    if isinstance(target, str):
        return described(target)
    if isinstance(target, re.Pattern):
        return f"re.compile({described(target.pattern)})"
    classes = target if isinstance(target, tuple) else (target,)
    return " | ".join(item.__name__ for item in classes)
