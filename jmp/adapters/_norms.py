"""Which modules and parameters belong to a norm layer, and what that means for them.

A norm subtracts means and sums squares: 300 squared overflows float16, and a mean over thousands of
half numbers loses them. So norms compute in float32, from float32 scales, biases and statistics, in
every policy but a pure half one.
"""

import re
from collections.abc import Iterable, Sequence

from jmp.policy import Policy
from jmp.rules import PolicyRules, Rule

FLOAT32_POLICY = Policy("float32", "float32", "float32")

# WeightNorm and SpectralNorm wrap a layer and normalise its *kernel*; PreNorm and PostNorm wrap a
# whole block. What they contain must stay half.
_NORM_CLASS = re.compile(r"(?<!Weight)(?<!Spectral)(?<!Pre)(?<!Post)Norm(alization)?(\dd)?$")
_NORM_NAME = re.compile(r"(?i)(^|_)(bn|ln|gn)(_|\d|$)|norm")
_PRODUCT_PARAMETERS = {"kernel", "embedding"}


def is_norm_class(module_type: type) -> bool:
    """Returns whether a class is a norm layer, by its name or that of a class it derives from.

    >>> is_norm_class(type("BatchNorm", (), {})), is_norm_class(type("WeightNorm", (), {}))
    (True, False)
    """
    return any(_NORM_CLASS.search(base.__name__) for base in module_type.__mro__)


def is_norm_parameters(module_name: str, parameter_names: Iterable[str]) -> bool:
    """Returns whether a module's parameters are those of a norm, judged by names alone.

    >>> is_norm_parameters("bn1", ["scale", "bias"]), is_norm_parameters("norm1", ["kernel"])
    (True, False)
    """
    names = set(parameter_names)
    if names & _PRODUCT_PARAMETERS:
        return False
    affine = {"scale", "bias", "offset"}  # Haiku's bias is an offset
    return ("scale" in names and names <= affine) or bool(_NORM_NAME.search(module_name))


def keeps_norms_float32(policy: Policy, rules: Iterable[Rule] | None) -> bool:
    """Returns whether norms are float32 where no rule of the user's says otherwise.

    They are, but for an explicit empty list of rules and, without rules, for a pure half policy.
    """
    return not policy.is_pure_half if rules is None else bool(list(rules))


def rules_for_modules(policy: Policy, rules: Sequence[Rule] | None) -> PolicyRules:
    """Returns the user's rules with "norms are float32" behind them, for modules of known class."""

    def norms(path: str, module_types: Sequence[type]) -> Policy | None:
        # The module itself only: a product inside something called a norm stays half.
        del path
        return FLOAT32_POLICY if module_types and is_norm_class(module_types[0]) else None

    rules = None if rules is None else tuple(rules)
    fallback = norms if keeps_norms_float32(policy, rules) else None
    return PolicyRules(rules or (), policy, fallback=fallback)
