"""Softmaxes between two products, on GPUs: their derivatives, and their padding.

The derivative is taken from the half result. A product keeps its operands for the backward pass, so
that half result is kept in any case. The derivative of the softmax needs nothing else: no scores
are kept, and no rows are computed again.

With y a row of the result, the tangent of y is y * (t - sum(y * t)) if y adds up to one, which it
does not quite once it is rounded. If one score is far above the others, that error is up to 25
times the error of all other roundings (64 keys, one score larger by 8, bfloat16); half models
written by hand have it. Here a row is divided by its sum, in float32, so the rows of the gradient
add up to zero. A row divided by its sum is also the pattern by which XLA finds a softmax. It makes
a kernel of that which reads each row once, and fuses the rest of the derivative with it.

A softmax over an odd length is padded, and so are the products beside it. If rows or columns of a
half product are no multiple of eight, XLA pads its operands for cuBLAS and cuts its result. The
scores and the weights of an attention are large. A kernel that only pads would write each of them,
and each of their cotangents, once more. Here the queries, keys and values are padded, which are
small. Then the first product returns padded scores, and the kernel of the softmax reads padded
scores and writes padded weights. These are zeros behind the end of a row, which add nothing to the
result.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmp._jax_compat import has_named_axes
from jmp.autocasting._facts import softmaxes_within
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import as_it_is, cast
from jmp.autocasting._numbers import has_symbols, shape_of
from jmp.autocasting._steps import (
    Environment,
    Island,
    Lowering,
    Rewrite,
    Single,
    Step,
    nodes_of,
    on,
)
from jmp.autocasting.attention._axes import Labelled
from jmp.autocasting.attention._fusing import replaced_steps
from jmp.autocasting.attention._matching import Attention, NotFused, find_attention
from jmp.autocasting.targets._scaled_scores import ScaledProduct
from jmp.dtypes import FLOAT32

# The derivative.

KEPT_WEIGHTS = "autocast_softmax"


@on(Island)
def softmax_from_half_result(island: Island, level: Level) -> Island:
    """Rewrites the last step of a softmax that leaves in half, all of it in one island."""
    if not island.is_recomputed:
        return island
    found, inside, in_half = {}, set(island.nodes), island.written_in(level.half)
    for one in softmaxes_within(level.facts.softmaxes, inside):
        if one.division is None:
            continue
        (result,) = one.division.outputs
        # A reader inside would get the rounded result: log(p) of a small p would be -inf.
        if result in in_half and inside.isdisjoint(result.users):
            why = "a softmax before a product: its derivative is taken from its half result"
            run = partial(softmax, len(one.total.outputs[0].aval.shape), level.half)
            found[one.division] = Rewrite(why, (one.argument,), run, KEPT_WEIGHTS)
    return island.rewritten(found)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def softmax(rows: int, half: Any, shifted: Any) -> Any:
    """Returns exp(shifted) over the sums of its rows, with the derivative of its half result.

    Args:
      rows: how many of the first axes count the rows.
      half: the dtype that the result is rounded to.
    """
    powers = lax.exp(shifted)
    return lax.div(powers, _sums(powers, rows))


@softmax.defjvp
def _from_half_result(rows: int, half: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (shifted,), (tangent,) = primals, tangents
    rounded = cast(softmax(rows, half, shifted), half)
    result = cast(checkpoint_name(rounded, KEPT_WEIGHTS), shifted.dtype)
    weights = lax.div(result, _sums(result, rows))
    # The transpose of this form, weights * (cotangent - sum(weights * cotangent)), has one way from
    # the weights to the result. The transpose of weights * (tangent - sum(weights * tangent)) has
    # two. XLA fuses them step by step, and weighs hundreds of tilings at each: it would compile a
    # transformer's step for up to 20 % longer, into the same kernels.
    weighted = lax.mul(weights, tangent)
    return result, lax.sub(weighted, lax.mul(weights, _sums(weighted, rows)))


def _sums(array: Any, rows: int) -> Any:
    axes = tuple(range(rows, array.ndim))
    return lax.expand_dims(lax.reduce_sum(array, axes), axes)


# Padding.

# A GPU's half products have so many rows and columns, times a number: XLA pads others.
MULTIPLE = 8

Pads = Sequence[Sequence[int]]  # the axes of each operand that are padded


def multiply_padded(
    pads: Pads,
    cuts: bool,
    inner: Lowering | None,
    step: Single,
    operands: Sequence[Any],
    environment: Environment,
) -> list[Any]:
    """Returns a product of operands that are padded with zeros to multiples of eight.

    Args:
      pads: along which axes each operand is padded.
      cuts: whether the result is cut to its size; else it stays padded.
      inner: how the step is lowered, if it is not bound as it is.
    """
    padded = [_padded(array, axes) for array, axes in zip(operands, pads, strict=True)]
    results = inner(step, padded, environment) if inner else as_it_is(step)(padded)
    shape = step.node.outputs[0].aval.shape
    return [x[tuple(map(slice, shape))] if cuts else x for x in results]


def _padded(array: Any, axes: Sequence[int]) -> Any:
    added = [(0, -n % MULTIPLE if i in axes else 0, 0) for i, n in enumerate(array.shape)]
    return lax.pad(array, jnp.zeros([], array.dtype), added) if axes else array


def softmax_padded(softmax: Any, length: int, rows: Any) -> Any:
    """Returns the softmax of float32 rows, with zeros for weights behind their ends.

    -inf is added there, not selected. The derivative of a selection is a selection, which XLA would
    try to fuse into the kernels of the backward pass. A step would compile for 15 % longer into the
    same kernels.

    Args:
      softmax: a function of rows less their maxima.
      length: of a row, without what is padded.
    """
    if rows.shape[-1] != length:
        places = lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 1)
        rows = rows + jnp.where(places < length, FLOAT32.type(0), -jnp.inf)
    return softmax(rows - lax.stop_gradient(rows.max(-1, keepdims=True)))


# Which softmaxes are padded.


def pad_softmaxes(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level; softmaxes over odd lengths are padded."""
    changed: dict[int, Step] = {}
    step_of = {node: step for step in steps for node in nodes_of(step)}
    for step in steps:
        found = _padded_steps(step, step_of, level) if isinstance(step, Island) else {}
        if changed.keys().isdisjoint(found):  # a product between two softmaxes is padded once
            changed |= found
    return [changed.get(id(step), step) for step in steps]


def _padded_steps(island: Island, step_of: Mapping[Node, Step], level: Level) -> dict[int, Step]:
    """Returns what a softmax and the products beside it become, by the ids of these steps."""
    divisions = [node for node, form in island.rewrites.items() if form.keeps == KEPT_WEIGHTS]
    if not len(divisions) == len(island.reads) == len(island.writes) == 1:
        return {}
    (division,), weights = divisions, island.writes[0].value
    attention = _attention_without_masks(weights, step_of, level)
    if attention is None or not _takes_longer_arrays(island, attention, division):
        return {}
    before, after, pads = step_of[attention.scores], step_of[attention.result], _pads_of(attention)
    if pads is None or not (_may_pad(before) and _may_pad(after)):
        return {}
    form = island.rewrites[division]
    form = form._replace(
        why=f"{form.why}; its rows are padded, so that XLA pads no scores",
        reads=(attention.argument,),
        run=partial(softmax_padded, form.run, attention.keys.length),
    )
    of_scores, of_values = pads
    of_result = ((), of_values) if after.node.inputs[0] is weights else (of_values, ())
    padded_before = partial(multiply_padded, of_scores, False, before.lowering)
    padded_after = partial(multiply_padded, of_result, True, after.lowering)
    return {
        id(before): before._replace(lowering=padded_before),
        id(island): island._replace(rewrites={**island.rewrites, division: form}),
        id(after): after._replace(lowering=padded_after),
    }


def _attention_without_masks(
    weights: Value, step_of: Mapping[Node, Step], level: Level
) -> Attention | None:
    """Returns the attention with these weights: two products, and a softmax between them."""
    if len(weights.users) != 1:
        return None
    try:
        attention = find_attention(weights.users[0], level.facts.softmaxes)
        group = replaced_steps(attention, step_of, level) if attention else []
    except NotFused:
        return None
    if attention is None or attention.terms or len(group) != 3:
        return None
    return None if attention.values.value is weights else attention


def _takes_longer_arrays(island: Island, attention: Attention, division: Node) -> bool:
    """Returns whether a softmax subtracts only a maximum, and the rest is of no fixed length."""
    # One reduction is the sum of powers.
    reductions = [node.name for node in island.nodes if node.rule.reduces]
    subtracts_maximum = len(reductions) == 2 and "reduce_max" in reductions
    between = {*island.nodes}.intersection(attention.nodes) - {division}
    is_fixed = (
        node.rule.reshapes or node.rule.repeats or len(list(filter(shape_of, node.inputs))) != 1
        for node in between
    )
    return subtracts_maximum and not any(is_fixed)


def _may_pad(step: Step) -> TypeGuard[Single]:
    """Returns whether a step is a half product whose operands may be padded where it stands."""
    if not (isinstance(step, Single) and step.is_half):
        return False
    is_plain = step.lowering is None or isinstance(step.lowering, ScaledProduct)
    return is_plain and not has_named_axes(step.node.outputs[0])


def _pads_of(attention: Attention) -> tuple[Pads, Sequence[int]] | None:
    """Returns along which axes the operands of the first product, and the values, are padded.

    Returns: None if nothing is to be padded.
    """
    keys, rows = attention.keys, attention.rows
    if not rows or has_symbols(tuple(label.length for label in (*rows, keys))):
        return None  # XLA pads no product with a vector
    row = max(rows, key=lambda label: label.length)
    n_queries = math.prod(label.length for label in rows)
    padded = {label for label, n in ((row, n_queries), (keys, keys.length)) if n % MULTIPLE}
    # An axis that may lie along one of a mesh is not padded.
    mesh = attention.scores.outputs[0].aval.sharding.mesh
    devices = [n for n in mesh.shape.values() if n > 1]
    if not padded or any(label.length % n == 0 for label in padded for n in devices):
        return None

    def along(operand: Labelled) -> Sequence[int]:
        return [i for i, axis in enumerate(operand.axes) if not padded.isdisjoint(axis)]

    query, key = along(attention.query), along(attention.key)
    operands = (query, key) if attention.are_queries_left else (key, query)
    return operands, along(attention.values)
