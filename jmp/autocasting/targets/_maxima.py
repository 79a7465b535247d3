"""Maxima along axes that are found in half: they are exact, and so is which numbers equal them.

Their derivative divides by how many numbers do. That is counted in float32: in half a count of ties
stops growing. Compared in float32, the numbers would be stored as a mask: a PointNet of two layers
moves 5 % more bytes.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import as_it_is, cast, with_derivative
from jmp.autocasting._steps import Arithmetic, Environment, Read, Single, on
from jmp.dtypes import FLOAT32


@on(Single)
def compare_in_half(step: Single, level: Level) -> Single:
    """Returns a step; a maximum or minimum whose result is half is found in half."""
    is_rounded = step.arithmetic is Arithmetic.ROUNDED
    if not is_rounded or step.node.name not in ("reduce_max", "reduce_min"):
        return step
    reads = (Read(step.node.inputs[0], level.half),)
    return step._replace(arithmetic=Arithmetic.HALF, reads=reads, lowering=find_in_half)


def find_in_half(step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
    """Returns the largest or smallest numbers of a half array, with their derivative."""
    axes = tuple(step.params["axes"])

    def find(array: Any) -> list[Any]:
        return as_it_is(step)([array])

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        (array,), (change,) = primals, tangents
        (found,) = find(array)
        is_found = array == lax.expand_dims(found, axes)
        # Multiplied, not selected: where the maximum is NaN, and equals none, all shares are NaN.
        ones = is_found.astype(FLOAT32)
        total = jnp.sum(cast(change, FLOAT32) * ones, axes)
        return [cast(total / jnp.sum(ones, axes), found.dtype)]

    return with_derivative(find, derivative)(*operands)
