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
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jmp.autocasting._flow import is_row_reduction
from jmp.autocasting._graph import Node
from jmp.autocasting._values import Value

KEPT = "autocast_softmax"
ALIGNED = 8  # elements: XLA pads half products to multiples of it
RESHAPES = frozenset({"broadcast_in_dim", "reshape", "expand_dims", "copy"})


class Softmax(NamedTuple):
    """What a softmax is of.

    Attributes:
      shifted: the values it takes the exponentials of.
      rows: how many axes lie in front of a row.
    """

    shifted: Value
    rows: int


def odd_softmax(node: Node, inside: Collection[Node]) -> Softmax | None:
    """Returns the softmax that `node` is the last step of, if its rows are padded; else None.

    Args:
      inside: nodes of its island, where all of the softmax has to be.
    """
    # What reads the result inside would read the rounded one, where log(p) of a small p is -inf.
    if node.name != "div" or any(user in inside for user in node.outputs[0].users):
        return None
    powers, sums = node.inputs
    while sums.producer is not None and sums.producer.name in RESHAPES:
        sums = sums.producer.inputs[0]
    exp, total = powers.producer, sums.producer
    if exp not in inside or total not in inside or exp.name != "exp" or total.name != "reduce_sum":
        return None
    if total.inputs[0] is not powers or not is_row_reduction(total):
        return None
    shape, rows = powers.aval.shape, len(sums.aval.shape)
    is_padded = shape[-1] % ALIGNED != 0
    # Of that shape there is one sum for each row, and in the rows' order.
    by_its_own = node.inputs[1].aval.shape == (*shape[:rows], *(1 for _ in shape[rows:]))
    return Softmax(exp.inputs[0], rows) if is_padded and by_its_own else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def softmax(shifted: Any, rows: int, half: Any) -> Any:
    """Returns exp(shifted) over the sums of its rows, with the derivative of its half result."""
    powers = jnp.exp(shifted)
    return powers / _sums(powers, rows)


@softmax.defjvp
def _from_half_result(rows: int, half: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (shifted,), (tangent,) = primals, tangents
    kept = checkpoint_name(softmax(shifted, rows, half).astype(half), KEPT)
    result = kept.astype(shifted.dtype)
    return result, result * (tangent - _sums(result * tangent, rows))


def _sums(array: Any, rows: int) -> Any:
    return array.sum(tuple(range(rows, array.ndim)), keepdims=True)
