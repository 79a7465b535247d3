"""What one call of `autocast` was asked for, checked and hashable."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jmp._messages import described, wrong
from jmp.autocasting import _registry
from jmp.autocasting._registry import Category, Rule, primitive_name
from jmp.dtypes import FLOAT32, is_half
from jmp.policy import Policy, refuse_float8, refuse_product_dtype, refuse_reduce_dtype

CHOICES = {
    "recompute": ("auto", "none", "all"),
    "attention": ("plain", "fused"),
    "float8": ("weights", "all"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The policy and the options of one call of `autocast` that the planner reads; see there.

    Primitives of `low`, `full` and `follow` are given by themselves or by name; names are kept.

    Raises: TypeError or ValueError for what `autocast` does not take.
    """

    policy: Policy
    low: Iterable[Any] = ()
    full: Iterable[Any] = ()
    follow: Iterable[Any] = ()
    recompute: str = "auto"
    inside_custom_vjp: bool = False
    attention: str = "plain"
    float8: str = "weights"

    def __post_init__(self) -> None:
        found: dict[str, Category] = {}
        for category in (Category.LOW, Category.FULL, Category.FOLLOW):
            option = category.value
            names = _names_of_primitives(option, getattr(self, option))
            for name in names:
                if name in found:
                    raise ValueError(
                        f"autocast got {described(name)} both in {found[name].value}= and in "
                        f"{option}=; give it one category."
                    )
                found[name] = category
            object.__setattr__(self, option, names)
        for option, choices in CHOICES.items():
            choice = getattr(self, option)
            if choice not in choices:
                kind = ValueError if isinstance(choice, str) else TypeError
                raise wrong(kind, "autocast", choice, f"one of {choices}", name=option)
        check_policy(self.policy)
        if not (self.compute_dtype == FLOAT32 or is_half(self.compute_dtype)):
            raise ValueError(
                f"autocast got the compute dtype {self.compute_dtype}; expected float16 or "
                "bfloat16, or float32 to switch it off."
            )

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype of products: float16 or bfloat16; float32 if nothing is to be lowered."""
        return np.dtype(self.policy.compute_dtype)

    @functools.cached_property
    def overrides(self) -> Mapping[str, Category]:
        """The primitives to which this call gives a category of its own."""
        return {
            name: category
            for category in (Category.LOW, Category.FULL, Category.FOLLOW)
            for name in getattr(self, category.value)
        }

    def rule_for(self, name: str) -> Rule:
        """Returns the rule of a primitive, this call's overrides applied."""
        rule = _registry.rule_for(name)
        if name not in self.overrides:
            return rule
        category = self.overrides[name]
        return dataclasses.replace(
            rule,
            category=category,
            sums_backward=False,
            # What the user asks for in half is no part of a float32 island.
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


def check_policy(policy: Policy) -> None:
    """Raises ValueError for dtypes of a policy, or of a rule's, that autocast does not support."""
    refuse_float8(policy, "autocast")
    refuse_reduce_dtype(policy, "autocast")
    refuse_product_dtype(policy, "autocast")
