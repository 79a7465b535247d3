"""How the modules of a model compute, and how their parameters are stored: what adapters share.

- `ModulePolicies`: how they compute. Autocast sees operations, not modules. So while a model is
  traced, each module that a rule names runs under a name scope that says the rule's policy, which
  autocast reads. Modules that no rule names open no scope and compute with the policy of the whole.
  Flax linen and Haiku let method calls be intercepted; `_marked_modules` is for the others.
- `ModuleScopes`: takes the place of `ModulePolicies` for diagnostics, which ask where an operation
  is. Every method of every module then runs in a scope that names the module's path.
- `storage_rules`: the dtype in which `cast_params` of each adapter stores a parameter.
- `policy_of_norms`: how scales, biases and statistics of norms are stored: in float32, in every
  policy but a pure half one. Norms are recognised by the names of their classes, or, if classes are
  not known, of their parameters. That norms compute in float32 is decided by their operations, as
  in any function under autocast.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from jmp.autocasting._autocast import lowered
from jmp.autocasting._request import MODULE, POLICY
from jmp.dtypes import FLOAT32, is_half
from jmp.policy import Policy, get_policy, refuse_float8
from jmp.rules import PolicyRules, Rule
from jmp.trees import PyTree, cast_leaf, cast_to_at_least_float32, is_array, path_string

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

FLOAT32_POLICY = Policy("float32", "float32", "float32")

# WeightNorm and SpectralNorm wrap a layer and normalise its *kernel*; PreNorm and PostNorm wrap a
# whole block. The layers inside them must stay half.
_NORM_CLASS = re.compile(r"(?<!Weight)(?<!Spectral)(?<!Pre)(?<!Post)Norm(alization)?(\dd)?$")
_NORM_NAME = re.compile(r"(?i)(^|_)(bn|ln|gn)(_|\d|$)|norm")
_PRODUCT_PARAMETERS = {"kernel", "embedding"}


def is_norm_class(module_type: type) -> bool:
    """Returns whether a class is a norm layer, judged by its name and the names of its bases.

    >>> is_norm_class(type("BatchNorm", (), {})), is_norm_class(type("WeightNorm", (), {}))
    (True, False)
    """
    return any(_NORM_CLASS.search(base.__name__) for base in module_type.__mro__)


def is_norm_parameters(module_name: str, parameter_names: Iterable[str]) -> bool:
    """Returns whether a module with these parameters is a norm, judged only by names.

    >>> is_norm_parameters("bn1", ["scale", "bias"]), is_norm_parameters("norm1", ["kernel"])
    (True, False)
    """
    names = set(parameter_names)
    if names & _PRODUCT_PARAMETERS:
        return False
    affine = {"scale", "bias", "offset"}  # Haiku's bias is an offset
    return ("scale" in names and names <= affine) or bool(_NORM_NAME.search(module_name))


def policy_of_norms(policy: Policy, rules: Sequence[Rule] | None) -> Policy:
    """Returns the policy of norms and their statistics, unless a rule of the user says otherwise.

    It is float32, except with an explicit empty list of rules and, without rules, in a pure half
    policy.
    """
    are_float32 = not policy.is_pure_half if rules is None else bool(rules)
    return FLOAT32_POLICY if are_float32 else policy


def _is_in_norm(path: str, classes: Sequence[type]) -> bool:
    # The innermost module only: a product inside something called a norm stays half.
    return bool(classes) and is_norm_class(classes[0])


def storage_rules(
    policy: Policy,
    rules: Sequence[Rule] | None,
    is_in_norm: Callable[[str, Sequence[type]], bool] = _is_in_norm,
) -> PolicyRules:
    """Returns the rules with which `cast_params` stores: the user's, then the rule of norms.

    Args:
      is_in_norm: called as `is_in_norm(path, classes)` for a parameter: whether it is a norm's. By
        default the class of its module decides.

    Raises: ValueError for a policy or a rule that stores in float8.
    """
    rules = None if rules is None else tuple(rules)  # read more than once
    of_norms = policy_of_norms(policy, rules)
    fallback = lambda path, classes: of_norms if is_in_norm(path, classes) else None
    found = PolicyRules(rules or (), policy, fallback=fallback)
    for each in (policy, *(get_policy(asked) for _, asked in rules or ())):
        refuse_float8(each, "cast_params")
    return found


def cast_by_paths(params: T, policy: Policy, rules: Sequence[Rule] | None) -> T:
    """Returns parameters stored as `policy` and `rules` say, for a tree without modules.

    Args:
      params: a tree; the path of a leaf is the path of its module and its own name.

    Raises: as `storage_rules`.
    Warns: `UnusedRuleWarning` for a rule that matched nothing.
    """
    names_in: dict[str, list[str]] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        module, _, name = path_string(path).rpartition("/")
        names_in.setdefault(module, []).append(name)
    norms = {m for m, names in names_in.items() if is_norm_parameters(m.split("/")[-1], names)}
    stored = storage_rules(policy, rules, lambda path, _: path.rpartition("/")[0] in norms)
    cast = lambda path, leaf: cast_leaf(leaf, stored.policy_for(path_string(path)).param_dtype)
    found = jax.tree_util.tree_map_with_path(cast, params)
    stored.warn_unused()
    return found


class ModulePolicies:
    """How one wrapped model computes: a policy, rules, and options of autocast.

    Objects of equal arguments are equal, and can replace one another.

    Args:
      policy: the policy of modules that no rule matches.
      rules: `(target, policy)` pairs, see `jmp.rules`.
      options: keyword arguments of `jmp.autocast`.
      keep_dtypes: whether a module whose `dtype` field says float32 computes in float32, unless a
        rule matches it.
      name_scopes: whether rules name scopes too, such as a scope of `jax.named_scope`, if no rule
        names a module around it.

    Raises: ValueError if the policy has a float8.
    """

    def __init__(
        self,
        policy: str | Policy,
        rules: Sequence[Rule] | None,
        options: Mapping[str, Any],
        *,
        keep_dtypes: bool = False,
        name_scopes: bool = False,
    ) -> None:
        rules = None if rules is None else tuple(rules)  # read more than once
        self.policy = get_policy(policy)
        self.statistics_dtype = policy_of_norms(self.policy, rules).param_dtype
        # The default is an object of its own: a rule may give the very policy of the whole.
        self.rules = PolicyRules(rules or (), dataclasses.replace(self.policy))
        refuse_float8(self.policy, "An adapter")
        self._options: Any = {
            name: value if isinstance(value, str) or not isinstance(value, Iterable) else (*value,)
            for name, value in options.items()
        }
        self._keep_dtypes = keep_dtypes
        self._name_scopes = name_scopes
        asked = [self.policy, *(get_policy(policy) for _, policy in rules or ())]
        halves = [each.compute_dtype for each in asked if is_half(each.compute_dtype)]
        self.lowered = halves[0] if halves else self.policy.compute_dtype
        self._key: Any = (self.policy, rules, tuple(self._options.items()), keep_dtypes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModulePolicies) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def autocast(self, fun: Callable[P, R]) -> Callable[P, R]:
        """Returns `fun` under autocast, for code that runs inside `in_force`."""
        policy = dataclasses.replace(self.policy, compute_dtype=self.lowered)
        rules = self.rules if self._name_scopes else None
        return lowered(fun, policy, rules_of_modules=rules, **self._options)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Makes these the rules that hold, instead of the rules of a wrapped model around this one.

        Warns: `UnusedRuleWarning`, at the end, for a rule that matched nothing.
        """
        # The policy of the whole, if it is float32 and only a part is half.
        whole = "" if self.policy.compute_dtype == self.lowered else f"{POLICY}{self.policy}"
        with _in_force(self), opened(whole):
            yield
        if not (self._name_scopes and is_half(self.lowered)):  # else autocast matches scopes first
            self.rules.warn_unused()

    @property
    def are_in_force(self) -> bool:
        """Whether the code being traced is inside `in_force`, and of no other wrapped model."""
        return bool(_in_force.value == self)

    def scope_of(self, module: object, path: str, classes: Sequence[type], root: str = "") -> str:
        """Returns the name scope of a module's policy: of a rule, or its own `dtype`; "" for none.

        Args:
          path: its attributes' names joined by slashes; "" is the root.
          classes: its class and the classes of the modules around it, innermost first.
          root: the name of the root; a rule's path may begin with it.
        """
        policy = self.rules.policy_for(path, classes, root=root)
        if policy is not self.rules.default:
            return f"{POLICY}{policy}"
        dtype = getattr(module, "dtype", None) if self._keep_dtypes else None
        is_float32 = not is_array(dtype) and dtype == FLOAT32  # some modules keep an array there
        return f"{POLICY}{FLOAT32_POLICY}" if is_float32 else ""

    def match_parameters(self, params: PyTree) -> None:
        """Lets rules that name single parameters of a tree match; only `cast_params` reads them."""
        for path, _ in jax.tree_util.tree_leaves_with_path(params):
            self.rules.policy_for(path_string(path))

    def widened(self, params: T) -> T:
        """Returns the parameters of a model in float32, as they are computed with."""
        self.match_parameters(params)
        return cast_to_at_least_float32(params)


def opened(scope: str) -> contextlib.AbstractContextManager[None]:
    """Returns the context of a name scope that `scope_of` returned."""
    return jax.named_scope(scope) if scope else contextlib.nullcontext()


# Part of the key of JAX's caches: a jitted part of a model is traced anew for other rules, whose
# scopes its trace would not hold.
_in_force = jax.make_user_context(default_value=None)


class ModuleScopes(ModulePolicies):
    """Names the path of each module, and gives it no policy. All of its objects are equal.

    `lift(fun, ModuleScopes())` of nnx, and `with_marked_modules` of Equinox, is `fun` itself, in
    which every method of every module among the arguments runs in a scope that names the path.
    Diagnostics read it, and say in `rules=` of that adapter what they found.
    """

    def __init__(self) -> None:
        super().__init__("float32", (), {})
        self._key = (MODULE,)

    @property
    def are_in_force(self) -> bool:
        """True: an inner model with rules of its own names its paths too."""
        return True

    def autocast(self, fun: Any) -> Any:
        """Returns the function as it is."""
        return fun

    def scope_of(self, module: object, path: str, classes: Sequence[type], root: str = "") -> str:
        """Returns the name scope that says the path."""
        return f"{MODULE}{path}"
