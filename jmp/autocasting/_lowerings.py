"""How the planner's own steps are lowered, where a primitive is not bound as it is.

A lowering is a function (`_steps.Lowering`). Passes define others beside themselves.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from jmp import _jax_compat
from jmp.autocasting._casts import cast, cast_all, masked
from jmp.autocasting._steps import Environment, Single
from jmp.autocasting._wide_gradients import jvp, product_as, weight_product_p, with_derivative
from jmp.dtypes import FLOAT32


def as_it_is(step: Single) -> Callable[..., list[Any]]:
    """Returns a function of operands that binds a step's primitive."""
    primitive, params = step.node.equation.primitive, step.params
    return lambda operands, params=params: _jax_compat.bind(primitive, operands, params)


def add_masks(
    masks: Sequence[int], step: Single, operands: Sequence[Any], _: Environment
) -> list[Any]:
    """Returns a sum on its way to a softmax, held above -inf where a mask carried it there.

    Args:
      masks: which operands may be one.
    """
    results = as_it_is(step)(operands)
    for mask in masks:
        others = [x for i, x in enumerate(operands) if i != mask]
        results = [masked(result, operands[mask], *others) for result in results]
    return results


def send_in_half(step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
    """Moves an array between devices that is rounded before, from behind a barrier.

    Without it XLA may round what was sent: under jit it reads a constraint on the rounded parameter
    as one on the parameter, and gathers that.
    """
    return as_it_is(step)(lax.optimization_barrier(operands))


class Parts(NamedTuple):
    """How devices divide the rows of a lookup along their first axis."""

    number: int
    axes: tuple[str, ...]  # of the mesh
    mesh: Any


def move_with_wide_gradient(
    half: np.dtype,
    parts: Parts | None,
    is_sent: bool,
    step: Single,
    operands: Sequence[Any],
    _: Environment,
) -> list[Any]:
    """Moves the first operand in half, by indices perhaps; the transpose runs in float32.

    Args:
      parts: of a lookup's rows: the gradient of each adds up in float32, and is rounded before
        those of all are added up.
      is_sent: whether devices send it each other.
    """

    def move(arrays: Sequence[Any]) -> list[Any]:
        return as_it_is(step)(lax.optimization_barrier(arrays) if is_sent else arrays)

    def forward(rounded: Any, _: Any, *indices: Any) -> list[Any]:
        return cast_all(move([rounded, *indices]), step.stores)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        # The rounded array changes as the array does.
        change, indices = cast(tangents[1], FLOAT32), primals[2:]
        if parts is not None:
            rows = _look_up_in_parts(move, change, indices[0], half, parts)
            return cast_all([rows], step.stores)
        # XLA would make one scatter of a lookup's gradient and what is added to it, and gather
        # that for it.
        return cast_all(move([lax.optimization_barrier(change), *indices]), step.stores)

    # Rounded outside: one cast for the forward and the backward pass, and for a second
    # derivative.
    rounded = cast(operands[0], half)
    return with_derivative(forward, derivative)(rounded, *operands)


def _look_up_in_parts(
    run: Callable[..., list[Any]], table: Any, indices: Any, half: np.dtype, parts: Parts
) -> Any:
    """Looks rows up in one copy of the table for each part of the indices.

    XLA adds up over devices directly behind a scatter, in its dtype. The transpose of this has one
    scatter for each part. Each device holds one of them, which is as large as the single scatter
    would be. It is rounded, and then added up over devices.
    """
    one_each = PartitionSpec(parts.axes, *[PartitionSpec.UNCONSTRAINED] * table.ndim)
    tables = lax.with_sharding_constraint(
        lax.broadcast(cast(table, half), (parts.number,)), NamedSharding(parts.mesh, one_each)
    )
    length, *others = indices.shape
    divided = indices.reshape(parts.number, length // parts.number, *others)
    (rows,) = jax.vmap(lambda *operands: run(operands))(cast(tables, FLOAT32), divided)
    return rows.reshape(length, *rows.shape[2:])


def multiply_in_half(
    half: np.dtype, step: Single, operands: Sequence[Any], _: Environment
) -> list[Any]:
    """Returns a `dot_general` in half, with float32 gradients for operands that are float32.

    A float32 result is what tensor cores have added up. Products of the backward pass have half
    operands in any case.
    """
    result: Any = step.stores[0]
    wide = [i for i in (0, 1) if operands[i].dtype == FLOAT32]
    narrow = [i for i in (0, 1) if i not in wide]

    def forward(left: Any, right: Any, *_: Any) -> list[Any]:
        return [product_as(result, (left, right), step.params)]

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        # An operand rounded outside changes as the operand does, which comes in float32 too.
        of_halves = [(i, tangents[i]) for i in narrow]
        changes = []
        for position, change in (*of_halves, *zip(wide, tangents[2:], strict=True)):
            if isinstance(change, SymbolicZero):
                continue
            factors = [change if i == position else primals[i] for i in (0, 1)]
            if position in wide:
                changes.append(weight_product_p.bind(*factors, weight=position, **step.params))
            else:
                changes.append(lax.dot_general_p.bind(*factors, **step.params))
        return [reduce(lax.add, cast_all(changes, [result] * len(changes)))]

    halves = [cast(x, half) for x in operands]
    return with_derivative(forward, derivative)(*halves, *(operands[i] for i in wide))


def multiply_to_float32(step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
    """Returns any other product of half operands, in float32; gradients are those of a half one."""
    run = as_it_is(step)

    def forward(*operands: Any) -> list[Any]:
        return run(operands, params={**step.params, "preferred_element_type": FLOAT32})

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        _, changes = jvp(lambda *arrays: run(arrays), primals, tangents)
        return cast_all(changes, [FLOAT32])

    return with_derivative(forward, derivative)(*operands)
