"""Questions to one equation of a jaxpr: which rule it has, and what stands inside it.

The op table knows primitives by name. What it cannot know is in an equation's parameters: the
precision a product names, what a loop or a custom derivative holds.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jmp import _jax_compat
from jmp.autocasting._precision import asked_for
from jmp.autocasting._registry import Category, Rule
from jmp.autocasting._settings import Settings
from jmp.autocasting._tolerances import has_many_conditions, runs_to_tolerance
from jmp.autocasting._values import FLOAT32

DESCENDS = frozenset({
    "jit", "pjit", "scan", "while", "cond", "remat", "remat2", "checkpoint", "shard_map",
    "custom_jvp_call",
})  # fmt: skip
DRAWS_BITS = frozenset({
    "random_bits", "random_seed", "random_wrap", "random_unwrap", "random_split",
    "random_fold_in", "threefry2x32", "rng_bit_generator", "rng_uniform",
})  # fmt: skip
INSIDE_CUSTOM_VJP = "inside a custom_vjp, which runs as written (inside_custom_vjp=True lowers it)"


def rule_of(equation: Any, settings: Settings) -> Rule:
    """Returns the op table's row; for a custom derivative one made of what is inside it."""
    name = equation.primitive.name
    rule = settings.rule_for(name)
    if name == "while" and runs_to_tolerance(equation) and not settings.overrides_rule(name):
        return Rule(Category.FULL, "in a loop that runs to a tolerance", False)
    if name == "while" and has_many_conditions(equation):
        return Rule(Category.FULL, "in a loop that vmap gave a condition for each element", False)
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return _rule_of_custom_derivative(equation, rule, settings)
    if name == "dot_general" and is_inner_product(equation) and not settings.overrides_rule(name):
        return Rule(Category.FULL, "an inner product is a sum, such as one of squares", False)
    if (why := asked_for(equation)) and not settings.overrides_rule(name):
        return Rule(Category.FULL, why, False)
    if name == "convert_element_type":
        before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        if not (after == FLOAT32 and before in (FLOAT32, np.bool_)):
            return Rule(Category.AS_WRITTEN, "an explicit cast is the user's word", fusible=True)
    in_half = rule.category in (Category.LOW, Category.WIDEST, Category.FOLLOW) and not rule.exact
    if in_half and name not in DESCENDS and any(True for _ in _jax_compat.inner_jaxprs(equation)):
        return Rule(Category.AS_WRITTEN, "holds a function, which has its dtypes", fusible=False)
    return rule


def _rule_of_custom_derivative(equation: Any, rule: Rule, settings: Settings) -> Rule:
    full = equation.primitive.name == "custom_vjp_call"
    if full:
        rule = dataclasses.replace(rule, reason=INSIDE_CUSTOM_VJP)
    inner = list(inner_equations(equation))
    rules = [settings.rule_for(e.primitive.name) for e in inner]
    if equation.effects or any(
        r.category is Category.LOW or not (r.fusible or _jax_compat.is_jit(e))
        for r, e in zip(rules, inner, strict=True)
    ):
        return rule
    full = full or any(r.category is Category.FULL for r in rules)
    return Rule(
        Category.FULL if full else Category.FOLLOW,
        "a custom derivative: one operation, " + ("float32" if full else "as its inside"),
        fusible=True,
        expensive=any(r.expensive for r in rules),
    )


def is_inner_product(equation: Any) -> bool:
    """Returns whether a product sums over all axes of both operands, but those of the batch."""
    if equation.primitive.name != "dot_general":
        return False
    contracted, batched = equation.params["dimension_numbers"]
    return all(
        len(atom.aval.shape) == len(axes) + len(batch)
        for atom, axes, batch in zip(equation.invars, contracted, batched, strict=True)
    )


def contains_products(equation: Any, settings: Settings) -> bool:
    """Returns whether a product that may be lowered stands inside an equation."""
    return any(
        settings.rule_for(name := inner.primitive.name).category is Category.LOW
        and (settings.overrides_rule(name) or not asked_for(inner))
        for inner in inner_equations(equation)
    )


def draws_bits(jaxpr: Any) -> bool:
    """Returns whether random bits are drawn here: such a jit is a level of its own."""
    inner, _ = _jax_compat.open_jaxpr(jaxpr)
    return any(
        equation.primitive.name in DRAWS_BITS
        or any(draws_bits(nested) for nested in _jax_compat.inner_jaxprs(equation))
        for equation in inner.eqns
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, at any depth."""
    for equation in jaxpr.eqns:
        yield equation
        yield from inner_equations(equation)


def inner_equations(equation: Any) -> Iterator[Any]:
    """Yields the equations inside one, at any depth."""
    for jaxpr in _jax_compat.inner_jaxprs(equation):
        yield from equations(jaxpr)
