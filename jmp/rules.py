"""Rules: exceptions from a policy, by path or by module type.

A rule is a pair `(target, policy)`. Its target is one of
  - a glob on the path, such as "head*" or "*/Dense_0" (`*` also crosses slashes),
  - a compiled regular expression that must match the whole path,
  - a module class, or a tuple of them (subclasses count).
A path is a module's or parameter's names joined by slashes: "encoder/Dense_0/kernel". A rule that
matches a module holds for everything inside it. The first rule that matches counts. A rule that
never matched is reported by `warn_unused`, because it may be a typo.

>>> rules = PolicyRules([("head*", "float32")], default="mixed_float16")
>>> str(rules.policy_for("head/kernel")), str(rules.policy_for("body/kernel"))
('p=full,c=full,o=full', 'p=full,c=f16,o=full')
"""

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from jmp._describe import described
from jmp.policy import Policy, get_policy, refuse_float8

Target = str | re.Pattern[str] | type | tuple[type, ...]
Rule = tuple[Target, str | Policy]


class UnusedRuleWarning(UserWarning):
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
      default: the policy where no rule matches.
      fallback: asked with `(path, module_types)` where none of `rules` matches, before the default:
        an adapter's own rule that norms are float32. Returns None where it does not apply.

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
        self._unused = dict.fromkeys(range(len(self._rules)))

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
          module_types: the classes of the module at `path` and of those around it, innermost
            first, where known.
          root: what the root is called, where it has a name: a target may begin with it, so that
            "*/head" finds a head at the top.
          anywhere: whether a glob may match from any name of the path on, and not only from the
            first: for paths whose first name the user did not choose.
        """
        prefixes = _path_and_ancestors(path)
        if root:
            prefixes += _path_and_ancestors(f"{root}/{path}" if path else root)
        if anywhere:
            names = path.split("/")
            tails = ["/".join(names[start:]) for start in range(len(names))]
            prefixes = [prefix for tail in tails for prefix in _path_and_ancestors(tail)]
        for index, (target, policy) in enumerate(self._rules):
            if _matches(target, prefixes, module_types):
                self._unused.pop(index, None)
                return policy
        found = self._fallback(path, module_types) if self._fallback else None
        return self.default if found is None else found

    @property
    def unused(self) -> list[str]:
        """The targets of the user's rules that have not matched yet."""
        return [_describe(self._rules[index][0]) for index in self._unused]

    def refuse_float8(self, caller: str) -> None:
        """Raises ValueError if the default or a rule has a float8, not supported by `caller`."""
        for policy in (self.default, *(policy for _, policy in self._rules)):
            refuse_float8(policy, caller)

    def warn_unused(self) -> None:
        """Warns with an `UnusedRuleWarning` that names each rule that has not matched yet."""
        if self.unused:
            warnings.warn(
                "These rules matched no parameter and no module: "
                f"{', '.join(self.unused[:8])}{' and more' * (len(self.unused) > 8)}. Check their "
                "spelling; a path is written like 'encoder/Dense_0/kernel', without the "
                "collection's name, and an earlier rule may have taken every match.",
                UnusedRuleWarning,
                stacklevel=3,
            )


def _checked(rule: object) -> tuple[Target, Policy]:
    if not (isinstance(rule, tuple) and len(rule) == 2):
        raise TypeError(
            f"A rule got {described(rule)}; expected a pair (target, policy), in a list: "
            "rules=[('head*', 'float32')]."
        )
    target, policy = rule
    classes = target if isinstance(target, tuple) else (target,)
    is_class = bool(classes) and all(isinstance(item, type) for item in classes)
    if not (isinstance(target, (str, re.Pattern)) or is_class):
        raise TypeError(
            f"A rule's target got {described(target)}; expected a glob such as 'head*', a compiled "
            "regular expression, or a module class."
        )
    return target, get_policy(policy)


def _path_and_ancestors(path: str) -> list[str]:
    names = path.split("/") if path else []
    return ["/".join(names[:end]) for end in range(len(names), 0, -1)] or [""]


def _matches(target: Target, prefixes: list[str], module_types: Sequence[type]) -> bool:
    if isinstance(target, str):
        return any(fnmatch.fnmatchcase(prefix, target) for prefix in prefixes)
    if isinstance(target, re.Pattern):
        return any(target.fullmatch(prefix) for prefix in prefixes)
    return any(issubclass(module_type, target) for module_type in module_types)


def _describe(target: Target) -> str:
    if isinstance(target, str):
        return described(target)
    if isinstance(target, re.Pattern):
        return f"re.compile({described(target.pattern)})"
    classes = target if isinstance(target, tuple) else (target,)
    return " | ".join(item.__name__ for item in classes)
