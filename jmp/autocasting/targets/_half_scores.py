"""On TPUs the scores of a softmax, less their maximum, are half.

XLA for TPUs computes exponentials again wherever they are read, in the fusions of the products
around a softmax: nothing but half scores is stored, and a derivative from the half result would
only add sums. Where the scores less their maximum are half, and their masks were applied in half
before, XLA computes maximum, difference and sums in the kernel of the product, and stores the
difference in place of the scores; else it reads the scores twice more for them. A difference of
half numbers within a factor of two of each other is exact. Otherwise it is rounded once, by about
as much as the scores were.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value, downstream
from jmp.autocasting._patterns import Shift
from jmp.autocasting._registry import Category
from jmp.autocasting._steps import Recompute, Rewrite
from jmp.autocasting.targets._rewriting import Surroundings
from jmp.dtypes import FLOAT32

# The length of a TPU's vectors. Of rows that are no multiple of it (197 tokens of a ViT) XLA makes
# a kernel of their own, with which a step moves 9 % more bytes.
VECTOR = 128


def softmax_of_half_scores(node: Node, around: Surroundings) -> Rewrite | None:
    """Rewrites masks and scales of half scores, and what a maximum leaves of them, for TPUs."""
    # No TPU multiplies float16, in which a mask might not lie below all scores.
    if around.half == np.float16 or around.recompute is not Recompute.RECOMPUTE:
        return None
    if not (node.rule.affine or node.rule.masks):  # before the island is searched
        return None
    for softmax in around.softmaxes:
        exact = softmax.shift and _exact_steps(softmax.shift, around)
        results = downstream(softmax.argument, around.inside.__contains__)
        if softmax.shift is None or exact is None or around.in_half.isdisjoint(results):
            continue
        if node in exact:
            why = "half scores, masked or scaled by a power of two: exact in half"
            return Rewrite(why, node.inputs, functools.partial(_run_in_half, node, around.half))
        length = softmax.shift.rows.aval.shape[-1]
        is_even = isinstance(length, int) and length % VECTOR == 0
        if softmax.shift.sub is node and is_even:
            why = "half scores less their maximum, in half: XLA computes it behind the product"
            return Rewrite(why, node.inputs, functools.partial(_difference, around.half))
    return None


def _exact_steps(shift: Shift, around: Surroundings) -> list[Node] | None:
    """Returns what masks and scales scores that enter in half, for a softmax alone; or None."""
    readers, scores = {shift.sub, shift.maxima}, shift.rows
    if not _is_left(shift.sub) or not _is_maximum(shift.sub.inputs[1], shift.maxima, around):
        return None
    found: list[Node] = []
    while scores not in around.entering:
        node = scores.producer
        # What else reads masked scores, such as a comparison, sees the mask as it was written.
        is_read_here = scores not in around.leaving and readers.issuperset(scores.users)
        if node is None or node not in around.inside or not is_read_here:
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


def _is_maximum(value: Value, maxima: Node, around: Surroundings) -> bool:
    """Returns whether a value is a maximum, read here alone, into which no gradient flows."""
    is_stopped = False
    while value not in around.leaving and len(value.users) == 1:
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

    Half scores lose nothing by it that a softmax would see: a power of two changes no digits but
    those of subnormal numbers, and a rounded mask of -1e9 lies as far below all scores.
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
    pairs = zip(node.inputs, operands, strict=True)
    halves = [
        _operand_in_half(x, half, v.constant is not None) if v.is_float32 else x for v, x in pairs
    ]
    (result,) = _jax_compat.bind(node.equation.primitive, halves, node.params)
    return result.astype(FLOAT32)


def _operand_in_half(array: Any, half: Any, is_constant: bool) -> Any:
    """Returns an array in half; of a constant float32's lowest number is not -inf, but finite."""
    limit = float(jnp.finfo(half).max)
    if is_constant:
        array = jnp.where(jnp.isinf(array), array, jnp.clip(array, -limit, limit))
    return jnp.asarray(array, half)


def _difference(half: Any, rows: Any, shift: Any) -> Any:
    return (rows.astype(half) - shift.astype(half)).astype(FLOAT32)
