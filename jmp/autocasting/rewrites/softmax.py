"""Softmax before a product: its derivative from the half result that is kept anyway.

A product keeps its operands for the backward pass, so the half result of an attention's softmax is
kept whatever is done about the softmax itself. Its derivative needs nothing else. So neither are
the scores kept nor the rows computed again.

With y a row of the result, the tangent of y is y * (t - sum(y * t)) if y adds up to one, which it
does not quite once it is rounded. Where one score is far above the others that error is up to 25
times that of all other roundings (64 keys, one score larger by 8, bfloat16), and half models
written by hand have it. Here a row is divided by its sum, in float32; so the rows of the gradient
add up to zero.

Where it is divided depends on what XLA fuses. On a GPU, at once: a row divided by its sum is the
pattern by which XLA finds a softmax, for which it makes a kernel that reads each row once, and it
fuses the rest of the derivative with that. Otherwise it makes two kernels, and reads both arrays
twice. On a TPU, at the end: there XLA adds up y and y * t where the product that gives t is
computed, which it could not do if y * t had to wait for the sums of y.
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
    run = functools.partial(softmax, rows, around.half, around.platform)
    return Rewrite(why, (exp.inputs[0],), run, KEPT_WEIGHTS)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def softmax(rows: int, half: Any, platform: str, shifted: Any) -> Any:
    """Returns exp(shifted) over the sums of its rows, with the derivative of its half result.

    Args:
      rows: how many of the first axes count the rows.
      half: the dtype that the result is rounded to.
      platform: "gpu" or "tpu".
    """
    powers = jnp.exp(shifted)
    return powers / _sums(powers, rows)


@softmax.defjvp
def _from_half_result(
    rows: int, half: Any, platform: str, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    (shifted,), (tangent,) = primals, tangents
    rounded = softmax(rows, half, platform, shifted).astype(half)
    result = checkpoint_name(rounded, KEPT_WEIGHTS).astype(shifted.dtype)
    if platform == "gpu":
        weights = result / _sums(result, rows)
        return result, weights * (tangent - _sums(weights * tangent, rows))
    factor = 1 / _sums(result, rows)
    mean = factor * _sums(result * tangent, rows)
    return result, result * (tangent - mean) * factor


def _sums(array: Any, rows: int) -> Any:
    return array.sum(tuple(range(rows, array.ndim)), keepdims=True)
