"""Questions to one equation of a jaxpr: which rule it has, and what stands inside it.

The op table has primitives by name. What it does not have is in an equation's parameters: the
precision a product names, what a loop or a custom derivative holds.
"""

import dataclasses

import numpy as np
from jax.extend.core import JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._kinds import has_kind, kind_of
from jmp.autocasting._numbers import dtype_of, is_inexact, shape_of
from jmp.autocasting._plain_forms import contracts_nothing, multiplies_mask
from jmp.autocasting._precision import asked_for
from jmp.autocasting._propagation import inner_equations
from jmp.autocasting._registry import Category, Rule, is_foreign, rule_for
from jmp.autocasting._settings import Settings
from jmp.dtypes import FLOAT32

IN_HALF = (Category.LOW, Category.WIDEST, Category.FOLLOW)


def rule_of(equation: JaxprEqn, settings: Settings) -> Rule:
    """Returns the op table's row, as the parameters of an equation change it."""
    name = equation.primitive.name
    rule = settings.rule_for(name)
    if has_kind(name):
        return kind_of(name).rule(equation, rule, settings)
    if rule.category is Category.LOW and name not in settings.overrides:
        if is_inner_product(equation):
            return Rule(Category.FULL, "an inner product is a sum, such as one of squares")
        if why := asked_for(equation):
            return Rule(Category.FULL, why)
        if not all(map(is_inexact, equation.invars[:2])) and not multiplies_mask(equation):
            return Rule(Category.AS_WRITTEN, "no tensor core multiplies integers by half numbers")
    if name == "convert_element_type":
        before, after = dtype_of(equation.invars[0]), dtype_of(equation.outvars[0])
        if not (after == FLOAT32 and before in (FLOAT32, np.bool_)):
            why = "an explicit cast is kept as the user wrote it"
            return dataclasses.replace(rule, category=Category.AS_WRITTEN, reason=why)
    in_half = rule.category in IN_HALF and not rule.sums_backward
    if in_half and _jax_compat.holds_functions(equation):
        return Rule(Category.AS_WRITTEN, "holds a function, which has its dtypes")
    return rule


def is_inner_product(equation: JaxprEqn) -> bool:
    """Returns whether a product sums over all axes of both operands, but those of the batch."""
    if equation.primitive.name != "dot_general":
        return False
    contracted, batched = equation.params["dimension_numbers"]
    return all(
        len(shape_of(atom)) == len(axes) + len(batch)
        for atom, axes, batch in zip(equation.invars, contracted, batched, strict=True)
    )


def contains_products(equation: JaxprEqn, settings: Settings) -> bool:
    """Returns whether a product that may be lowered stands inside an equation."""
    return any(
        settings.rule_for(name := inner.primitive.name).category is Category.LOW
        and rule_of(inner, settings).category is Category.LOW
        and (name in settings.overrides or not contracts_nothing(inner))
        for inner in inner_equations(equation)
    )


def is_marker(equation: JaxprEqn) -> bool:
    """Returns whether an equation stays where nothing reads its results.

    It has effects, or is or holds a primitive of others, by which they find their place in a
    program: JAX leaves out nothing that was traced. Of the op table's own only the results count.
    """
    every = (equation, *inner_equations(equation))
    names = {inner.primitive.name for inner in every}
    return bool(equation.effects) or any(is_foreign(n) and not has_kind(n) for n in names)


def draws_bits(equation: JaxprEqn) -> bool:
    """Returns whether random bits are drawn inside: such a jit is a level of its own."""
    return any(rule_for(inner.primitive.name).draws_bits for inner in inner_equations(equation))
