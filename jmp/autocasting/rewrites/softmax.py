"""Softmax before a product: its derivative from the half result that is kept anyway.

A product keeps its operands for the backward pass, so the half result of an attention's softmax is
kept whatever is done about the softmax itself. Its derivative needs nothing else: with y the
result, the tangent of y is y * (t - sum(y * t)). So neither are the scores kept nor the rows
computed again. What is written by hand in half does the same; here the arithmetic between is
float32.

On GPUs the rows of y, which do not quite add up to one once they are rounded, are divided by their
sums first. A row divided by its sum is the pattern by which XLA finds a softmax, for which it makes
a kernel that reads each row once, and it fuses the rest of the derivative with that. Without the
pattern it makes two kernels, and reads both arrays twice. On TPUs, where XLA adds up y * t in the
kernel of the product that gives t, the division would only cost time.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jmp.autocasting._flow import is_row_reduction
from jmp.autocasting._graph import Node
from jmp.autocasting._steps import Recompute, Rewrite, Surroundings

KEPT_WEIGHTS = "autocast_softmax"


def softmax_from_half_result(node: Node, around: Surroundings) -> Rewrite | None:
    """Rewrites the last step of a softmax that leaves in half, all of it in one island."""
    if node.name != "div" or around.recompute is not Recompute.RECOMPUTE:
        return None
    (result,), (powers, sums) = node.outputs, node.inputs
    # What reads the result inside would read the rounded one, where log(p) of a small p is -inf.
    is_read_inside = not around.inside.isdisjoint(result.users)
    if result not in around.in_half or is_read_inside:
        return None
    while sums.producer is not None and (sums.producer.rule.reshapes or sums.producer.rule.repeats):
        sums = sums.producer.inputs[0]
    exp, total = powers.producer, sums.producer
    if exp is None or total is None or not {exp, total} <= around.inside:
        return None
    is_softmax = exp.name == "exp" and total.name == "reduce_sum" and total.inputs[0] is powers
    if not is_softmax or not is_row_reduction(total):
        return None
    shape, rows = powers.aval.shape, len(sums.aval.shape)
    # There is one sum for each row, and in the rows' order.
    if node.inputs[1].aval.shape != (*shape[:rows], *(1 for _ in shape[rows:])):
        return None
    why = "a softmax before a product: its derivative is taken from its half result"
    run = functools.partial(softmax, rows, around.half, around.platform == "gpu")
    return Rewrite(why, (exp.inputs[0],), run, KEPT_WEIGHTS)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def softmax(rows: int, half: Any, adds_up_to_one: bool, shifted: Any) -> Any:
    """Returns exp(shifted) over the sums of its rows, with the derivative of its half result.

    Args:
      rows: how many of the first axes count the rows.
      half: the dtype that the result is rounded to.
      adds_up_to_one: whether the derivative divides the rounded rows by their sums.
    """
    return _divided_by_sums(jnp.exp(shifted), rows)


@softmax.defjvp
def _from_half_result(
    rows: int, half: Any, adds_up_to_one: bool, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    (shifted,), (tangent,) = primals, tangents
    rounded = softmax(rows, half, adds_up_to_one, shifted).astype(half)
    result = checkpoint_name(rounded, KEPT_WEIGHTS).astype(shifted.dtype)
    weights = _divided_by_sums(result, rows) if adds_up_to_one else result
    return result, weights * (tangent - _sums(weights * tangent, rows))


def _divided_by_sums(array: Any, rows: int) -> Any:
    return array / _sums(array, rows)


def _sums(array: Any, rows: int) -> Any:
    return array.sum(tuple(range(rows, array.ndim)), keepdims=True)
