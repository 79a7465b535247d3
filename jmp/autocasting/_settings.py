"""What one call of `autocast` was asked for, checked and hashable."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jmp._messages import described
from jmp.autocasting import _registry
from jmp.autocasting._registry import Category, Rule, primitive_name
from jmp.dtypes import is_half
from jmp.policy import Policy, refuse_float8, refuse_product_dtype, refuse_reduce_dtype

CHOICES = {
    "recompute": ("auto", "none", "all"),
    "attention": ("plain", "fused"),
    "float8": ("weights", "all"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of one call that the planner reads."""

    compute_dtype: np.dtype  # float16 or bfloat16
    overrides: tuple[tuple[str, Category], ...] = ()  # categories of primitives, for this call
    recompute: str = "auto"  # which islands are computed again in the backward pass
    inside_custom_vjp: bool = False  # what is inside custom_vjp functions is lowered too
    fuses_attention: bool = False  # where JAX's cuDNN attention takes it
    reduces_in_float32: bool = False  # what adds up gradients between devices
    multiplies_in_float8: bool = False  # where no rule says otherwise
    float8: str = "weights"  # which products may be float8, where the policy says so

    def overrides_rule(self, name: str) -> bool:
        """Returns whether this call gave a primitive a category of its own."""
        return any(overridden == name for overridden, _ in self.overrides)

    def rule_for(self, name: str) -> Rule:
        """Returns the rule of a primitive, this call's overrides applied."""
        rule = _registry.rule_for(name)
        for overridden, category in self.overrides:
            if overridden == name:
                return dataclasses.replace(
                    rule,
                    category=category,
                    sums_backward=False,
                    # What the user asks for in half is no part of a float32 island.
                    fusible=rule.fusible and category is not Category.LOW,
                    reason=f"asked for by {category.value}=",
                )
        return rule


def check_policy(policy: Policy) -> None:
    """Raises ValueError for dtypes of a policy, or of a rule's, that autocast does not support."""
    refuse_float8(policy, "autocast")
    refuse_reduce_dtype(policy, "autocast")
    refuse_product_dtype(policy, "autocast")


def settings_for(
    policy: Policy,
    *,
    low: Iterable[Any] = (),
    full: Iterable[Any] = (),
    follow: Iterable[Any] = (),
    recompute: str = "auto",
    inside_custom_vjp: bool = False,
    attention: str = "plain",
    float8: str = "weights",
) -> Settings | None:
    """Checks what `autocast` was given; None if nothing is to be lowered."""
    overrides: dict[str, Category] = {}
    for category, primitives in (
        (Category.LOW, low),
        (Category.FULL, full),
        (Category.FOLLOW, follow),
    ):
        if isinstance(primitives, str):
            raise TypeError(
                f"autocast got {category.value}={described(primitives)}; expected a sequence of "
                f"primitives or of their names, such as {category.value}=[{described(primitives)}]."
            )
        if not isinstance(primitives, Iterable):
            raise TypeError(
                f"autocast got {category.value}={described(primitives)}; expected a sequence of "
                f"primitives or of their names, such as {category.value}=['exp']."
            )
        for name in map(primitive_name, primitives):
            if name in overrides:
                raise ValueError(
                    f"autocast got {described(name)} both in {overrides[name].value}= and in "
                    f"{category.value}=; give it one category."
                )
            overrides[name] = category
    chosen = (("recompute", recompute), ("attention", attention), ("float8", float8))
    for option, choice in chosen:
        if choice not in CHOICES[option]:
            raise (ValueError if isinstance(choice, str) else TypeError)(
                f"autocast got {option}={described(choice)}; expected one of {CHOICES[option]}."
            )
    check_policy(policy)
    dtype = np.dtype(policy.compute_dtype)
    if dtype == np.float32:
        return None
    if not is_half(dtype):
        raise ValueError(
            f"autocast got the compute dtype {dtype}; expected float16 or bfloat16, or float32 to "
            "switch it off."
        )
    return Settings(
        compute_dtype=dtype,
        overrides=tuple(overrides.items()),
        recompute=recompute,
        inside_custom_vjp=inside_custom_vjp,
        fuses_attention=attention == "fused",
        reduces_in_float32=policy.reduce_dtype is not None,
        multiplies_in_float8=policy.product_dtype is not None,
        float8=float8,
    )
