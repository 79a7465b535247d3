"""Equations that another primitive says better: they are written so before anything is planned.

- A product that contracts nothing, or axes of length one alone, is an elementwise multiplication.
- A product with booleans is one of float32 numbers, to which users cast them: exact in half too.
- A psum over axes of the array itself, as vmap makes it, is a plain sum.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._numbers import dtype_of, length_of, shape_of
from jmp.autocasting._precision import asked_for
from jmp.autocasting._registry import Params
from jmp.autocasting._settings import Settings
from jmp.dtypes import FLOAT32

Form = Callable[..., Any]  # of an equation's parameters and operands


def plain_form(equation: JaxprEqn, settings: Settings) -> Jaxpr | None:
    """Returns an equation in other primitives; None for one that stays as it is."""
    name = equation.primitive.name
    find = _FORMS.get(name)
    form = None if find is None or name in settings.overrides else find(equation)
    if form is None:
        return None
    types = tuple(atom.aval for atom in equation.invars)
    traced = _traced(form, types, tuple(equation.params.items()))
    # On the line, in the scopes and on the mesh of the equation.
    place = {"source_info": equation.source_info, "ctx": equation.ctx}
    jaxpr: Jaxpr = traced.replace(eqns=[inner.replace(**place) for inner in traced.eqns])
    return jaxpr


@functools.lru_cache(maxsize=256)
def _traced(form: Form, types: Sequence[Any], params: Sequence[tuple[str, Any]]) -> Any:
    return jax.make_jaxpr(functools.partial(form, dict(params)))(*types).jaxpr


# Products.


def contracts_nothing(equation: JaxprEqn) -> bool:
    """Returns whether a float32 product sums over no axis, or over axes of length one alone."""
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


def _form_of_product(equation: JaxprEqn) -> Form | None:
    if contracts_nothing(equation):
        return _multiplication
    return _product_of_float32 if multiplies_mask(equation) else None


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


# Sums over devices.


def _form_of_psum(equation: JaxprEqn) -> Form | None:
    params = equation.params
    is_plain = (
        len(equation.invars) == 1
        and all(isinstance(axis, int) for axis in params.get("axes", ()))
        and params.get("axis_index_groups") is None
    )
    return _plain_sum if is_plain else None


def _plain_sum(params: Params, array: jax.Array) -> jax.Array:
    return lax.reduce_sum(array, params["axes"])


_FORMS: Mapping[str, Callable[[JaxprEqn], Form | None]] = {
    "dot_general": _form_of_product,
    **dict.fromkeys(_jax_compat.PSUMS, _form_of_psum),
}
