"""Softmax over rows of odd lengths: its derivative from the half result that is kept anyway.

A product keeps its operands for the backward pass, so the half result of an attention's softmax is
kept whatever is done about the softmax itself. Its derivative needs nothing else: with y the
result, the tangent of y is y * (t - sum(y * t)). So neither are the scores kept nor the rows
computed again. What is written by hand in half does the same; here the arithmetic between is
float32.

That is leaner where XLA pads the products around a softmax, whose rows are no multiple of eight
long, and has to cut its rows out for every reader: the 197 tokens of a ViT-B/16 (12 % of the bytes
of a training step). Other rows are computed again: XLA does that in one kernel, and what follows it
with it, where sum and product from the half result would read everything twice (7 % of a GPT-2's).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jmp.autocasting._flow import is_row_reduction
from jmp.autocasting._graph import Node
from jmp.autocasting._numbers import length_of
from jmp.autocasting._steps import Recompute, Rewrite, Surroundings

KEPT_WEIGHTS = "autocast_softmax"
# Elements; XLA pads half products to multiples of it. With this rewrite an attention's step moves
# 11 % fewer bytes at 505, 506, 508 and 509 tokens; at 504 and 512 3 % more, in 13 % less memory.
ALIGNED = 8


def softmax_from_half_result(node: Node, around: Surroundings) -> Rewrite | None:
    """Rewrites the last step of a softmax over rows that are padded, all of it in one island."""
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
    is_padded = length_of(shape[-1]) % ALIGNED != 0
    # Of that shape there is one sum for each row, and in the rows' order.
    by_its_own = node.inputs[1].aval.shape == (*shape[:rows], *(1 for _ in shape[rows:]))
    if not (is_padded and by_its_own):
        return None
    why = "a softmax over padded rows, whose derivative is taken from its half result"
    return Rewrite(why, (exp.inputs[0],), lambda x: softmax(x, rows, around.half), KEPT_WEIGHTS)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def softmax(shifted: Any, rows: int, half: Any) -> Any:
    """Returns exp(shifted) over the sums of its rows, with the derivative of its half result."""
    powers = jnp.exp(shifted)
    return powers / _sums(powers, rows)


@softmax.defjvp
def _from_half_result(rows: int, half: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (shifted,), (tangent,) = primals, tangents
    kept = checkpoint_name(softmax(shifted, rows, half).astype(half), KEPT_WEIGHTS)
    result = kept.astype(shifted.dtype)
    return result, result * (tangent - _sums(result * tangent, rows))


def _sums(array: Any, rows: int) -> Any:
    return array.sum(tuple(range(rows, array.ndim)), keepdims=True)
