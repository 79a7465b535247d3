"""The user's wishes: the options of one call of `autocast`, and of places in the program.

Options are `Settings`. Places are regions, told apart by the name scopes they stand in. Every
equation carries its scopes, so that they stay under jit, grad, vmap, scan and nesting. Four sorts
of scopes say something:
  - `full_precision` opens the scope FULL_PRECISION: no product in it is lowered, and those that
    name no precision have the highest (`_precision`);
  - `autocast` opens the scope AUTOCAST: what stands in it is decided already, so that an autocast
    around it leaves it as it is;
  - adapters, who know each module's class and path, open the scope POLICY with the policy that a
    rule asks of a module: the innermost holds;
  - modules (Flax, Haiku) and `jax.named_scope` open scopes of their own, which `rules=` name.

Diagnostics call a place by the path of its module, and take it from the scopes. Modules of nnx and
Equinox open none by themselves: the adapters open one for each call of a module (MODULE).
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jmp import _jax_compat
from jmp._messages import described, wrong
from jmp.autocasting import _registry
from jmp.autocasting._passes import platforms, target_of
from jmp.autocasting._registry import Category, primitive_name
from jmp.dtypes import FLOAT32, is_half
from jmp.policy import Policy, check_for_autocast, get_policy
from jmp.rules import PolicyRules, Rule

CHOICES = {
    "recompute": ("auto", "none", "all"),
    "attention": ("plain", "fused"),
    "float8": ("weights", "all"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The policy and the options of one call of `autocast` that the planner reads; see `autocast`.

    Attributes:
      rules_of_modules: those of an adapter, in the place of `rules`: what it matches against
        modules names scopes too.
      overrides: the primitives, by name, to which this call gives a category of its own.

    Raises: TypeError or ValueError for what `autocast` does not take.
    """

    policy: Policy
    low: dataclasses.InitVar[Iterable[Any]] = ()
    full: dataclasses.InitVar[Iterable[Any]] = ()
    follow: dataclasses.InitVar[Iterable[Any]] = ()
    rules: Sequence[Rule] = ()
    rules_of_modules: PolicyRules | None = None
    recompute: str = "auto"
    attention: str = "plain"
    float8: str = "weights"
    platform: str | None = None
    overrides: dict[str, Category] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self, low: Any, full: Any, follow: Any) -> None:
        given = {Category.LOW: low, Category.FULL: full, Category.FOLLOW: follow}
        for category, primitives in given.items():
            for name in _names_of_primitives(category.value, primitives):
                if name in self.overrides:
                    raise ValueError(
                        f"autocast got {described(name)} both in {self.overrides[name].value}= and "
                        f"in {category.value}=; give it one category."
                    )
                self.overrides[name] = category
        for option, choices in {**CHOICES, "platform": (None, *platforms())}.items():
            choice = getattr(self, option)
            if choice not in choices:
                kind = ValueError if isinstance(choice, str) else TypeError
                raise wrong(kind, "autocast", choice, f"one of {choices}", name=option)
        check_for_autocast(self.policy)
        if not (self.compute_dtype == FLOAT32 or is_half(self.compute_dtype)):
            raise ValueError(
                f"autocast got the compute dtype {self.compute_dtype}; expected float16 or "
                "bfloat16, or float32 to switch it off."
            )
        object.__setattr__(self, "rules", _checked_rules(self.rules, self.compute_dtype))

    @functools.cached_property
    def compute_dtype(self) -> np.dtype:
        """The dtype of products: float16 or bfloat16; float32 if nothing is to be lowered."""
        return np.dtype(self.policy.compute_dtype)

    def rule_for(self, name: str) -> _registry.Rule:
        """Returns the rule of a primitive, this call's overrides applied."""
        rule = _registry.rule_for(name)
        if name not in self.overrides:
            return rule
        category = self.overrides[name]
        return dataclasses.replace(
            rule,
            category=category,
            sums_backward=False,
            # A primitive that the user asks for in half is no part of a float32 island.
            fusible=rule.fusible and category is not Category.LOW,
            reason=f"asked for by {category.value}=",
        )


def _names_of_primitives(option: str, primitives: Any) -> tuple[str, ...]:
    """Returns the names of the primitives that an option was given."""
    is_text = isinstance(primitives, str)
    if is_text or not isinstance(primitives, Iterable):
        example = described(primitives) if is_text else "'exp'"
        expected = f"a sequence of primitives or of their names, such as {option}=[{example}]"
        raise wrong(TypeError, "autocast", primitives, expected, name=option)
    return tuple(map(primitive_name, primitives))


def _checked_rules(rules: Iterable[Rule], compute_dtype: np.dtype) -> tuple[Rule, ...]:
    """Returns rules that `autocast` in `compute_dtype` can follow.

    Raises: TypeError or ValueError for others.
    """
    rules = tuple(rules) if isinstance(rules, Iterator) else rules  # read more than once
    PolicyRules(rules, "float32")  # checks that they are pairs, and reads the policies
    for target, text in rules:
        if not isinstance(target, str | re.Pattern):
            raise TypeError(
                f"autocast got a rule for {described(target)}; its rules name scopes, not "
                "classes. Expected a glob such as '*LayerNorm*' or a compiled regular expression."
            )
        _check_dtype(get_policy(text), compute_dtype, described(target))
    return tuple(rules)


def _check_dtype(policy: Policy, compute_dtype: np.dtype, where: str) -> None:
    """Raises ValueError if a rule asks for what is neither the dtype around it nor float32."""
    check_for_autocast(policy)
    dtype = np.dtype(policy.compute_dtype)
    if compute_dtype == FLOAT32 and is_half(dtype):
        return  # autocast is switched off, and its rules with it
    if dtype not in (compute_dtype, FLOAT32):
        raise ValueError(
            f"autocast computes in {compute_dtype}; a rule for the scope {where} asks for {dtype}. "
            "Expected the same dtype or float32; wrap that part in an autocast of its own."
        )


# Regions.

FULL_PRECISION = "jmp.full_precision"
AUTOCAST = "jmp.autocast"
POLICY = "jmp.policy:"


@dataclasses.dataclass(frozen=True)
class Region:
    """The user's wishes for one place in the program."""

    in_float32: bool = False  # operations run in float32, products with all digits
    is_decided: bool = False  # an inner autocast has decided here
    output_dtype: np.dtype | None = None  # float32 results that leave the region are rounded to it
    reduces_in_float32: bool = False  # gradients of parameters are float32 before they are reduced
    multiplies_in_float8: bool = False  # products may be float8, if they are half
    keeps_results: bool = False  # half products have float32 results


class Request:
    """The user's wishes: the options of a call, and those for places in the program by `rules=`.

    It is made for one call that is planned, for the hardware of `target`: with all its passes, or
    those up to `last_pass`.

    Rules are matched against name scopes; what was found is remembered. The options hold outside
    all rules. A rule's target matches from any scope of a path on: "head*" finds "GPT/head". A
    policy with float32 compute runs its scope in float32; if its output dtype is half, what leaves
    the scope is rounded to half. One with half compute says of its scope whether products may be
    float8, and whether their results are float32.
    """

    def __init__(self, settings: Settings, last_pass: str | None = None) -> None:
        self.settings = settings
        # Asked while a call is planned, and no sooner: it may start JAX's backends.
        target = target_of(settings.platform or jax.default_backend())
        self.target = target if last_pass is None else target.until(last_pass)
        self._half = half = settings.compute_dtype
        others = ("product_dtype", "result_dtype")
        asked = {name: getattr(settings.policy, name) for name in others}
        default = Policy(np.float32, half, half, **asked)
        self.policy_rules = settings.rules_of_modules or PolicyRules(settings.rules, default)
        self._found: dict[Any, Region] = {}  # by name stack
        self._of_policies: dict[Policy, Region] = {}

    def region(self, stack: Any) -> Region:
        """Returns what holds under a name stack."""
        key = stack.stack
        if key not in self._found:
            self._found[key] = self._find(_jax_compat.scope_names(stack))
        return self._found[key]

    def _find(self, names: list[str]) -> Region:
        if AUTOCAST in names:
            return Region(in_float32=True, is_decided=True)
        if FULL_PRECISION in names:
            return Region(in_float32=True)
        policy = self._policy_for(names)
        if policy not in self._of_policies:
            _check_dtype(policy, self._half, described(joined_path(names)))
            self._of_policies[policy] = self._region_of(policy)
        return self._of_policies[policy]

    def _region_of(self, policy: Policy) -> Region:
        if policy.compute_dtype == self._half:
            reduce_dtype = policy.reduce_dtype or self.settings.policy.reduce_dtype
            return Region(
                reduces_in_float32=reduce_dtype is not None,
                multiplies_in_float8=policy.product_dtype is not None,
                keeps_results=policy.result_dtype is not None,
            )
        rounds = policy.output_dtype == self._half
        return Region(in_float32=True, output_dtype=self._half if rounds else None)

    def _policy_for(self, names: list[str]) -> Policy:
        named = [name for name in names if name.startswith(POLICY)]
        if named:
            return get_policy(named[-1].removeprefix(POLICY))
        # As in an adapter, whose modules open a scope of their policy: the innermost module that a
        # rule names, before other scopes.
        for path in module_paths(names):
            policy = self.policy_rules.policy_for(path)
            if policy is not self.policy_rules.default:
                return policy
        scopes = "/".join(name for name in names if not name.startswith("jmp."))
        return self.policy_rules.policy_for(scopes, anywhere=True)


# Paths of modules in name scopes.

MODULE = "jmp.module:"


def joined_path(names: Sequence[str]) -> str:
    """Returns name scopes joined by slashes, without our own; a module's path begins anew.

    Args:
      names: scopes, outermost first.

    >>> joined_path(["jmp.module:", "jmp.module:block/mlp", "gate", "jmp.autocast"])
    'block/mlp/gate'
    """
    path: list[str] = []
    for name in names:
        if name.startswith(MODULE):
            path = [name.removeprefix(MODULE)]
        elif not name.startswith("jmp."):
            path.append(name)
    return "/".join(filter(None, path))


def module_paths(names: Sequence[str]) -> list[str]:
    """Returns the paths of the modules among name scopes, the innermost first.

    >>> module_paths(["jmp.module:", "jmp.module:block/mlp", "eqx.nn.Linear"])
    ['block/mlp', '']
    """
    return [name.removeprefix(MODULE) for name in reversed(names) if name.startswith(MODULE)]
