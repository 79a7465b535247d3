"""Gradients of parameters that stay float32 until devices have added them up.

A policy asks for them with "r=f32". A product then reads its parameter in float32: the gradient of
that is a product of half operands with a float32 result, which XLA adds up between devices in
float32. An array that devices send each other on the way to products is rounded before. The
transpose of that adds up in float32.

A table on a mesh has them in any case. It may be sharded, so it is rounded before the lookup, and
the gradients of rows that repeat add up in float32.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jmp.autocasting._facts import Facts
from jmp.autocasting._graph import Node, downstream
from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import as_it_is, cast, cast_all, multiply_in_half, with_derivative
from jmp.autocasting._operations import WHY_NOT_WIDE
from jmp.autocasting._sending import WHY_SENT, find_sent, mesh_of, sends
from jmp.autocasting._steps import Arithmetic, Environment, Read, Single, Step, on
from jmp.dtypes import FLOAT32

WHY_WIDE = "the gradient of a parameter is float32 before devices add it up"
WHY_LOOKUP = "a table on a mesh: rounded before devices send it, its gradient adds up in float32"
WHY_IN_PARTS = f"{WHY_LOOKUP} on each device, and is rounded before devices add up theirs"


def widen_gradients(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps; those whose gradients are to be float32 are lowered so."""
    is_asked = any(node.region.reduces_in_float32 for node in level.graph.nodes)
    sent = find_sent(level) if is_asked else set()

    @on(Single)
    def widened(step: Single, level: Level) -> Single:
        node = step.node
        if node in level.facts.embeddings:
            return _lookup(step, level)
        if not node.region.reduces_in_float32:
            return step
        if node in sent and sends(node):
            # It comes out in float32, as its gradient comes in; products round it once more.
            lowering = partial(move_with_wide_gradient, level.half, None, True)
            return step._replace(arithmetic=Arithmetic.HALF, why=WHY_SENT, lowering=lowering)
        if node.is_product and step.is_half and _reads_parameter(node, level.facts):
            return _wide_product(step, level)
        return step

    return widened(steps, level)


def _lookup(step: Single, level: Level) -> Single:
    """Returns a lookup; its table may be sharded if it stands on a mesh, as far as types say."""
    node = step.node
    values = (node.inputs[0], *node.outputs)
    if step.arithmetic is not Arithmetic.ROUNDED or all(mesh_of(v).empty for v in values):
        return step
    parts = None if node.region.reduces_in_float32 else parts_of_rows(node)
    return step._replace(
        arithmetic=Arithmetic.HALF,
        why=WHY_IN_PARTS if parts else WHY_LOOKUP,
        reads=tuple([Read(value, level.dtypes[value]) for value in node.inputs]),
        lowering=partial(move_with_wide_gradient, level.half, parts, False),
    )


def _wide_product(step: Single, level: Level) -> Single:
    """Returns a half product that reads its parameters in float32, if it can."""
    # A convolution has no wide form: cuDNN would compute its gradient from float32 operands.
    is_wide, reason = step.node.name == "dot_general", step.node.rule.reason
    why = step.why.replace(reason, WHY_WIDE if is_wide else WHY_NOT_WIDE)
    if not is_wide:
        return step._replace(why=why)
    dependent = level.facts.dependent
    reads = [
        read if read.value in dependent or level.is_half(read.value) else Read(read.value, FLOAT32)
        for read in step.reads
    ]
    return step._replace(why=why, reads=tuple(reads), lowering=multiply_in_half)


def _reads_parameter(product: Node, facts: Facts) -> bool:
    return any(
        value.is_float32 and value not in facts.dependent and value.varies
        for value in product.inputs
    )


class Parts(NamedTuple):
    """How devices divide the rows of a lookup along their first axis."""

    number: int
    axes: tuple[str, ...]  # of the mesh
    mesh: Any


def parts_of_rows(lookup: Node) -> Parts | None:
    """Returns how devices divide the rows of a lookup, where a constraint on them says so.

    Where axes are automatic, types do not say it. Rows divided along a second axis of the indices
    are left as they are: devices would add up each part first, in float32.
    """
    (rows,), dimensions = lookup.outputs, lookup.params["dimension_numbers"]
    shape, of_table = rows.aval.shape, dimensions.offset_dims
    passed = downstream(rows, lambda node: node.rule.affine or node.rule.casts)
    readers = {user for v in passed if v.aval.shape == shape for user in v.users}
    constraints = [user for user in readers if user.name == "sharding_constraint"]
    is_plain = shape and 0 not in of_table and not dimensions.operand_batching_dims
    if not (constraints and is_plain):
        return None
    found = min(constraints, key=lambda node: node.index).params["sharding"]
    if not isinstance(found, NamedSharding):
        return None
    divided = {axis: names for axis, names in enumerate(found.spec) if names is not None}
    names = divided.get(0, PartitionSpec.UNCONSTRAINED)
    if names is PartitionSpec.UNCONSTRAINED or not {*divided} <= {0, *of_table}:
        return None
    names = names if isinstance(names, tuple) else (names,)
    number = math.prod(found.mesh.shape[name] for name in names)
    is_even = isinstance(shape[0], int) and shape[0] % number == 0
    return Parts(number, names, found.mesh) if number > 1 and is_even else None


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
