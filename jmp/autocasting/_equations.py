"""Questions to one equation of a jaxpr: which rule it has, and whether another says it better.

The op table has primitives by name. The rest is in an equation's parameters: the precision that a
product names, the functions that a loop or a custom derivative holds.

Some equations are written in another primitive before anything is planned:
- A product that contracts nothing, or only axes of length one, is an elementwise multiplication.
- A product with booleans is one of float32 numbers, to which users cast them: exact in half too.
- A psum over axes of the array itself, as vmap makes it, is a plain sum.
- What the body of a scan joins of its constants is joined before the scan. The LSTM of Flax joins
  the kernels of its gates in each turn. Joined before the loop they are one weight: it is rounded
  once, and its gradient is one product (`targets/_weight_sums`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jmp import _jax_compat
from jmp._jax_compat import Params
from jmp.autocasting._kinds import has_kind, kind_of
from jmp.autocasting._numbers import dtype_of, fits, is_inexact, length_of, shape_of, size_of
from jmp.autocasting._precision import asked_for
from jmp.autocasting._propagation import inner_equations
from jmp.autocasting._registry import Category, Rule, is_foreign, rule_for
from jmp.autocasting._request import Settings
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
    fill = equation.params.get("fill_value")
    if rule.looks_up and fill is not None and not fits(float(fill), settings.compute_dtype):
        why = "a half type does not hold what it fills in beyond the end"
        return dataclasses.replace(rule, category=Category.FULL, reason=why)
    if name == "reshape" and equation.params.get("dimensions") is not None:
        return dataclasses.replace(rule, reshapes=False, permutes=True)
    if name == "convert_element_type":
        before, after = dtype_of(equation.invars[0]), dtype_of(equation.outvars[0])
        if not (after == FLOAT32 and before in (FLOAT32, np.bool_)):
            why = "an explicit cast is kept as the user wrote it"
            return dataclasses.replace(rule, category=Category.AS_WRITTEN, reason=why)
    if rule.sums_backward and _repeats_nothing(equation, rule):
        return _without_sum(rule)
    in_half = rule.category in IN_HALF and not rule.sums_backward
    if in_half and _jax_compat.holds_functions(equation):
        return Rule(Category.AS_WRITTEN, "holds a function, which has its dtypes")
    return rule


@functools.cache  # a layer has several such equations
def _without_sum(rule: Rule) -> Rule:
    return dataclasses.replace(rule, sums_backward=False, reason="moves data")


def _repeats_nothing(equation: JaxprEqn, rule: Rule) -> bool:
    """Returns whether each number of the first operand stands in the result once at most."""
    if rule.looks_up:
        return bool(equation.params.get("unique_indices", False))
    before, after = map(shape_of, (equation.invars[0], equation.outvars[0]))
    return rule.repeats and size_of(before) == size_of(after)


def is_inner_product(equation: JaxprEqn) -> bool:
    """Returns whether a product sums over all axes of both operands, but those of the batch."""
    if equation.primitive.name != "dot_general":
        return False
    contracted, batched = equation.params["dimension_numbers"]
    return all(
        len(shape_of(atom)) == len(axes) + len(batch)
        for atom, axes, batch in zip(equation.invars, contracted, batched, strict=True)
    )


def contains_products(equations: Iterable[JaxprEqn], settings: Settings) -> bool:
    """Returns whether a product that may be lowered is among equations."""
    return any(
        settings.rule_for(name := equation.primitive.name).category is Category.LOW
        and rule_of(equation, settings).category is Category.LOW
        and (name in settings.overrides or not contracts_nothing(equation))
        for equation in equations
    )


def is_marker(equation: JaxprEqn, inner: Iterable[JaxprEqn]) -> bool:
    """Returns whether an equation stays where nothing reads its results.

    It has effects, or is or holds a primitive of others, by which they find their place in a
    program: JAX leaves out nothing that was traced. A primitive of the op table counts only if its
    result is read.

    Args:
      inner: the equations inside it.
    """
    return bool(equation.effects) or any(map(_is_of_others, (equation, *inner)))


def _is_of_others(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    return is_foreign(name) and not has_kind(name)


def draws_bits(equation: JaxprEqn) -> bool:
    """Returns whether a jit draws random bits: it is a level of its own."""
    inner = inner_equations(equation) if _jax_compat.is_jit(equation) else ()
    return any(rule_for(each.primitive.name).draws_bits for each in inner)


# Plain forms.


def plain_form(equation: JaxprEqn, settings: Settings) -> Jaxpr | None:
    """Returns an equation in other primitives; None for one that stays as it is."""
    name = equation.primitive.name
    form: Callable[..., Any] | None = None
    if name in settings.overrides:
        return None
    if name == "dot_general":
        if contracts_nothing(equation):
            form = _multiplication
        elif multiplies_mask(equation):
            form = _product_of_float32
    elif name in _jax_compat.PSUMS and _sums_own_axes(equation):
        form = _plain_sum
    elif name == "scan" and (joined := _joined_constants(equation)):
        if contains_products(inner_equations(equation), settings):
            form = functools.partial(_scan_after, joined, equation)
    if form is None:
        return None
    traced: Any = jax.make_jaxpr(functools.partial(form, equation.params))
    jaxpr = traced(*(atom.aval for atom in equation.invars)).jaxpr
    # On the line, in the scopes and on the mesh of the equation.
    place = {"source_info": equation.source_info, "ctx": equation.ctx}
    plain: Jaxpr = jaxpr.replace(eqns=[inner.replace(**place) for inner in jaxpr.eqns])
    return plain


def contracts_nothing(equation: JaxprEqn) -> bool:
    """Returns whether a float32 product sums over no axis, or only over axes of length one."""
    params = equation.params
    if equation.primitive.name != "dot_general" or asked_for(equation):
        return False
    if params.get("out_sharding") is not None:  # which a multiplication cannot be told
        return False
    (left_summed, _), _ = params["dimension_numbers"]
    left = shape_of(equation.invars[0])
    if not all(length_of(left[axis]) == 1 for axis in left_summed):
        return False
    return {dtype_of(atom) for atom in (*equation.invars, *equation.outvars)} == {FLOAT32}


def multiplies_mask(equation: JaxprEqn) -> bool:
    """Returns whether a product of float32 numbers with booleans has a float32 result."""
    if equation.primitive.name != "dot_general" or asked_for(equation):
        return False
    dtypes = {dtype_of(atom) for atom in equation.invars}
    return dtypes == {FLOAT32, np.dtype(bool)} and dtype_of(equation.outvars[0]) == FLOAT32


def _sums_own_axes(equation: JaxprEqn) -> bool:
    """Returns whether a psum is over axes of its array, and over no devices."""
    params, is_of_one = equation.params, len(equation.invars) == 1
    are_own_axes = all(isinstance(axis, int) for axis in params.get("axes", ()))
    return is_of_one and are_own_axes and params.get("axis_index_groups") is None


def _multiplication(params: Params, left: jax.Array, right: jax.Array) -> jax.Array:
    (left_summed, right_summed), (left_batch, right_batch) = params["dimension_numbers"]
    left = _batch_first(left, left_batch, left_summed)
    right = _batch_first(right, right_batch, right_summed)
    end, batch = left.ndim, len(left_batch)
    left = lax.expand_dims(left, range(end, end + right.ndim - batch))
    return lax.mul(left, lax.expand_dims(right, range(batch, end)))


def _batch_first(array: jax.Array, batch: Sequence[int], summed: Sequence[int]) -> jax.Array:
    """Returns an array without the axes that are summed, those of the batch first."""
    free = [axis for axis in range(array.ndim) if axis not in {*batch, *summed}]
    array = lax.transpose(array, (*batch, *free, *summed))
    return lax.squeeze(array, range(len(batch) + len(free), array.ndim))


def _product_of_float32(params: Params, *operands: jax.Array) -> Any:
    cast = [lax.convert_element_type(array, FLOAT32) for array in operands]
    return lax.dot_general_p.bind(*cast, **params)


def _plain_sum(params: Params, array: jax.Array) -> jax.Array:
    return lax.reduce_sum(array, params["axes"])


# Constants of a scan that its body joins.


def _joined_constants(equation: JaxprEqn) -> list[JaxprEqn]:
    """Returns the equations in the body of a scan that join its constants, in order.

    Those that slice, transpose or reshape what is joined are among them. A slice by itself stays in
    the loop: before the loop it would be a copy. An equation that is no scan has none.
    """
    if equation.primitive.name != "scan" or equation.effects:
        return []
    scan = _jax_compat.Scan.of(equation.params)
    body, _ = _jax_compat.open_jaxpr(scan.body)
    constants, found = set(body.invars[: scan.n_consts]), []
    for inner in body.eqns:
        read = _variables_of(inner)
        if read and read <= constants and _arranges(inner):
            found.append(inner)
            constants.update(inner.outvars)
    kept: list[JaxprEqn] = []
    joined: set[Any] = set()
    for inner in reversed(found):
        if rule_for(inner.primitive.name).rearranges or not joined.isdisjoint(inner.outvars):
            kept.append(inner)
            joined |= _variables_of(inner)
    return kept[::-1]


def _variables_of(equation: JaxprEqn) -> set[Any]:
    return {atom for atom in equation.invars if not isinstance(atom, Literal)}


def _arranges(equation: JaxprEqn) -> bool:
    rule = rule_for(equation.primitive.name)
    does_more = rule.repeats or rule.sums_backward or rule.looks_up or rule.sends or rule.writes
    is_float32 = any(dtype_of(result) == FLOAT32 for result in equation.outvars)
    return is_float32 and (rule.hands_on or rule.rearranges) and not does_more


def _scan_after(
    joined: Iterable[JaxprEqn], equation: JaxprEqn, params: Params, *operands: Any
) -> Any:
    """Returns the results of a scan; `joined` equations of its body stand before it."""
    scan = _jax_compat.Scan.of(params)
    body, held = _jax_compat.open_jaxpr(scan.body)
    constants, _, _ = scan.split(operands)
    known = _run(joined, dict(zip(body.invars, constants, strict=False)))
    rest = [inner for inner in body.eqns if known.keys().isdisjoint(inner.outvars)]

    def turn(*arrays: Any) -> list[Any]:
        own = zip((*body.constvars, *body.invars), (*held, *arrays), strict=True)
        values = _run(rest, {**known, **dict(own)})
        return [x.val if isinstance(x, Literal) else values[x] for x in body.outvars]

    return kind_of("scan").emit(equation, operands, [turn])


def _run(equations: Iterable[JaxprEqn], values: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the values, and the results of equations among them."""
    for equation in equations:
        operands = [x.val if isinstance(x, Literal) else values[x] for x in equation.invars]
        with _jax_compat.place_of(equation, equation.source_info.name_stack):
            results = _jax_compat.bind(equation.primitive, operands, equation.params)
        values.update(zip(equation.outvars, results, strict=True))
    return values
