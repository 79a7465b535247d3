"""Questions to one equation of a jaxpr: which rule it has, and what stands inside it.

The op table has primitives by name. What it does not have is in an equation's parameters: the
precision a product names, what a loop or a custom derivative holds.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._kinds import has_kind, kind_of
from jmp.autocasting._numbers import dtype_of, is_inexact, length_of, shape_of
from jmp.autocasting._precision import asked_for
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
    if rule.category is Category.LOW and not settings.overrides_rule(name):
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
    if in_half and any(True for _ in _jax_compat.inner_jaxprs(equation)):
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


def is_low(equation: JaxprEqn) -> bool:
    """Returns whether an equation multiplies matrices, in whatever dtypes."""
    return rule_for(equation.primitive.name).category is Category.LOW


def contracts_nothing(equation: JaxprEqn) -> bool:
    """Returns whether a float32 product sums over no axis, or over axes of length one alone."""
    if equation.primitive.name != "dot_general" or asked_for(equation):
        return False
    (left_summed, _), _ = equation.params["dimension_numbers"]
    left = shape_of(equation.invars[0])
    if not all(length_of(left[axis]) == 1 for axis in left_summed):
        return False
    return {dtype_of(atom) for atom in (*equation.invars, *equation.outvars)} == {FLOAT32}


def as_multiplication(equation: JaxprEqn) -> Jaxpr:
    """Returns a product that contracts nothing as what it is: an elementwise multiplication."""
    types = [atom.aval for atom in equation.invars]
    return _in_place_of(equation, _multiplication(*types, equation.params["dimension_numbers"]))


@functools.lru_cache(maxsize=256)
def _multiplication(left: Any, right: Any, dimension_numbers: Any) -> Any:
    (left_summed, right_summed), (left_batch, right_batch) = dimension_numbers

    def own_axes(array: jax.Array, batch: Sequence[int], summed: Sequence[int]) -> jax.Array:
        free = [axis for axis in range(array.ndim) if axis not in {*batch, *summed}]
        array = lax.transpose(array, (*batch, *free, *summed))
        return lax.squeeze(array, range(len(batch) + len(free), array.ndim))

    def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
        left = own_axes(left, left_batch, left_summed)
        right = own_axes(right, right_batch, right_summed)
        end, batch = left.ndim, len(left_batch)
        left = lax.expand_dims(left, range(end, end + right.ndim - batch))
        return lax.mul(left, lax.expand_dims(right, range(batch, end)))

    return jax.make_jaxpr(multiply)(left, right).jaxpr


def multiplies_mask(equation: JaxprEqn) -> bool:
    """Returns whether a float32 product has booleans as one operand, which half types hold."""
    if equation.primitive.name != "dot_general" or asked_for(equation):
        return False
    dtypes = {dtype_of(atom) for atom in equation.invars}
    return dtypes == {FLOAT32, np.dtype(bool)} and dtype_of(equation.outvars[0]) == FLOAT32


def with_mask_cast(equation: JaxprEqn) -> Jaxpr:
    """Returns a product with booleans as users write it: the booleans cast to float32 before it."""
    types = [atom.aval for atom in equation.invars]
    return _in_place_of(equation, _product_of_float32(*types, tuple(equation.params.items())))


@functools.lru_cache(maxsize=256)
def _product_of_float32(left: Any, right: Any, params: Any) -> Any:
    def multiply(*operands: jax.Array) -> Any:
        cast = [lax.convert_element_type(array, FLOAT32) for array in operands]
        return lax.dot_general_p.bind(*cast, **dict(params))

    return jax.make_jaxpr(multiply)(left, right).jaxpr


def _in_place_of(equation: JaxprEqn, traced: Jaxpr) -> Jaxpr:
    """Returns a jaxpr whose equations stand on the line, in the scopes and on the mesh of one."""
    source, context = equation.source_info, equation.ctx
    in_place = [inner.replace(source_info=source, ctx=context) for inner in traced.eqns]
    jaxpr: Jaxpr = traced.replace(eqns=in_place)
    return jaxpr


def contains_products(equation: JaxprEqn, settings: Settings) -> bool:
    """Returns whether a product that may be lowered stands inside an equation."""
    return any(
        is_low(inner)
        and rule_of(inner, settings).category is Category.LOW
        and (settings.overrides_rule(inner.primitive.name) or not contracts_nothing(inner))
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


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr, at any depth."""
    for equation in jaxpr.eqns:
        yield equation
        yield from inner_equations(equation)


def inner_equations(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields the equations inside one, at any depth."""
    for jaxpr in _jax_compat.inner_jaxprs(equation):
        yield from equations(jaxpr)


def sum_over_own_axes(equation: JaxprEqn) -> JaxprEqn:
    """Returns a psum over axes of the array itself, as vmap makes it, as the plain sum it is."""
    params = equation.params
    axes = params.get("axes", ())
    is_plain = (
        equation.primitive.name in _jax_compat.PSUMS
        and len(equation.invars) == 1
        and all(isinstance(axis, int) for axis in axes)
        and params.get("axis_index_groups") is None
    )
    if not is_plain:
        return equation
    operand: Any = equation.invars[0].aval
    struct = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
    plain = jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, axes))(struct).eqns[-1]
    summed: JaxprEqn = equation.replace(primitive=plain.primitive, params=plain.params)
    return summed
