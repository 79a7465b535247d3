"""Softmaxes with half scores or half results.

On GPUs a softmax before a product takes its derivative from its half result. A product keeps its
operands for the backward pass, so that half result is kept in any case. The derivative of the
softmax needs nothing else: no scores are kept, and no rows are computed again.

With y a row of the result, the tangent of y is y * (t - sum(y * t)) if y adds up to one, which it
does not quite once it is rounded. If one score is far above the others, that error is up to 25
times the error of all other roundings (64 keys, one score larger by 8, bfloat16); half models
written by hand have it. Here a row is divided by its sum, in float32, so the rows of the gradient
add up to zero. A row divided by its sum is also the pattern by which XLA finds a softmax. It makes
a kernel of that which reads each row once, and fuses the rest of the derivative with it.

On TPUs the scores of a softmax, less their maximum, are half. XLA for TPUs computes exponentials
again wherever they are read, in the fusions of the products around a softmax. Nothing but half
scores is stored, and a derivative from the half result would only add sums. If the scores less
their maximum are half, and their masks were applied in half before, XLA computes maximum,
difference and sums in the kernel of the product, and stores the difference in place of the scores.
Otherwise it reads the scores twice more for them. A difference of half numbers within a factor of
two of each other is exact. Any other difference is rounded once, by about as much as the scores
were.
"""

import functools
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jmp import _jax_compat
from jmp.autocasting._facts import Shift, softmaxes_within
from jmp.autocasting._graph import Node, Value, downstream
from jmp.autocasting._level import Level
from jmp.autocasting._registry import Category
from jmp.autocasting._steps import Island, Rewrite, on
from jmp.dtypes import FLOAT32

KEPT_WEIGHTS = "autocast_softmax"
# The length of a TPU's vectors. Of rows that are no multiple of it (197 tokens of a ViT) XLA makes
# a kernel of their own, with which a step moves 9 % more bytes.
VECTOR = 128


# On GPUs.


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
            run = functools.partial(softmax, len(one.total.outputs[0].aval.shape), level.half)
            found[one.division] = Rewrite(why, (one.argument,), run, KEPT_WEIGHTS)
    return island.rewritten(found)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def softmax(rows: int, half: Any, shifted: Any) -> Any:
    """Returns exp(shifted) over the sums of its rows, with the derivative of its half result.

    Args:
      rows: how many of the first axes count the rows.
      half: the dtype that the result is rounded to.
    """
    powers = jnp.exp(shifted)
    return powers / _sums(powers, rows)


@softmax.defjvp
def _from_half_result(rows: int, half: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (shifted,), (tangent,) = primals, tangents
    rounded = softmax(rows, half, shifted).astype(half)
    result = checkpoint_name(rounded, KEPT_WEIGHTS).astype(shifted.dtype)
    weights = result / _sums(result, rows)
    # The transpose of this form, weights * (cotangent - sum(weights * cotangent)), has one way from
    # the weights to the result. The transpose of weights * (tangent - sum(weights * tangent)) has
    # two. XLA fuses them step by step, and weighs hundreds of tilings at each: it would compile a
    # transformer's step for up to 20 % longer, into the same kernels.
    weighted = weights * tangent
    return result, weighted - weights * _sums(weighted, rows)


def _sums(array: Any, rows: int) -> Any:
    return array.sum(tuple(range(rows, array.ndim)), keepdims=True)


# On TPUs.


@on(Island)
def softmax_of_half_scores(island: Island, level: Level) -> Island:
    """Rewrites masks and scales of half scores, and the difference from their maximum, for TPUs."""
    half, inside, in_half = level.half, set(island.nodes), island.written_in(level.half)
    # No TPU multiplies float16, in which a mask might not lie below all scores.
    if half == np.float16 or not island.is_recomputed:
        return island
    found = {}
    for one in softmaxes_within(level.facts.softmaxes, inside):
        exact = one.shift and _exact_steps(one.shift, island, half)
        results = downstream(one.argument, inside.__contains__)
        if one.shift is None or exact is None or in_half.isdisjoint(results):
            continue
        for node in exact:
            why = "half scores, masked or scaled by a power of two: exact in half"
            found[node] = Rewrite(why, node.inputs, functools.partial(_run_in_half, node, half))
        length, sub = one.shift.rows.aval.shape[-1], one.shift.sub
        if isinstance(length, int) and length % VECTOR == 0:
            why = "half scores less their maximum, in half: XLA computes it behind the product"
            found[sub] = Rewrite(why, sub.inputs, functools.partial(_difference, half))
    return island.rewritten(found)


def _exact_steps(shift: Shift, island: Island, half: np.dtype) -> list[Node] | None:
    """Returns the nodes that mask and scale half scores; None if more than a softmax reads them."""
    readers, scores = {shift.sub, shift.maxima}, shift.rows
    entering = {read.value for read in island.reads if read.dtype == half}
    leaving = {write.value for write in island.writes}
    if not _is_left(shift.sub) or not _is_maximum(shift.sub.inputs[1], shift.maxima, leaving):
        return None
    found: list[Node] = []
    while scores not in entering:
        node = scores.producer
        # Other readers of masked scores, such as a comparison, see the mask as it was written.
        is_read_here = scores not in leaving and readers.issuperset(scores.users)
        if node is None or node not in island.nodes or not is_read_here:
            return None
        varying = [v for v in node.inputs if v.is_float32 and v.constant is None]
        if not _is_left(node) or not _is_exact_in_half(node) or len(varying) != 1:
            return None
        found.append(node)
        readers, (scores,) = {node}, varying
    return found


def _is_left(node: Node) -> bool:
    """Returns whether the user left the dtype of a node to autocast."""
    return not node.region.in_float32 and node.rule.category is not Category.FULL


def _is_maximum(value: Value, maxima: Node, leaving: Set[Value]) -> bool:
    """Returns whether a value is a maximum that only the softmax reads, without a gradient."""
    is_stopped = False
    while value not in leaving and len(value.users) == 1:
        node = value.producer
        if node is None or node is maxima:
            return is_stopped and node is maxima
        operands = [operand for operand in node.inputs if operand.constant != -np.inf]
        is_first = node.name == "max" and len(operands) == 1  # of -inf and the maximum
        is_stopped |= node.name == "stop_gradient"
        if not (is_first or node.rule.moves or node.name == "stop_gradient"):
            return False
        value = operands[0]
    return False


def _is_exact_in_half(node: Node) -> bool:
    """Returns whether a node masks by a constant, or scales down by a power of two.

    A softmax sees no difference if half scores are masked or scaled so. A power of two changes only
    the digits of subnormal numbers, and a rounded mask of -1e9 lies as far below all scores.
    """
    operands = node.inputs if node.name == "mul" else node.inputs[1:]
    constants = [value.constant for value in operands if value.constant is not None]
    if len(constants) != 1:
        return False
    if node.name == "select_n":
        return len(operands) == 2
    digits, exponent = np.frexp(constants[0])
    scales_down = {"mul": exponent <= 1, "div": exponent >= 1}
    return bool(abs(digits) == 0.5 and scales_down.get(node.name))


def _run_in_half(node: Node, half: Any, *operands: Any) -> Any:
    """Returns the result of `node`, in float32, computed in half."""
    limit, halves = float(jnp.finfo(half).max), []
    for value, array in zip(node.inputs, operands, strict=True):
        if value.constant is not None and value.is_float32:  # its finite numbers stay finite
            array = jnp.where(jnp.isinf(array), array, jnp.clip(array, -limit, limit))
        halves.append(jnp.asarray(array, half) if value.is_float32 else array)
    (result,) = _jax_compat.bind(node.equation.primitive, halves, node.params)
    return result.astype(FLOAT32)


def _difference(half: Any, rows: Any, shift: Any) -> Any:
    return (rows.astype(half) - shift.astype(half)).astype(FLOAT32)
