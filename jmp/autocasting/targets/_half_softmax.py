"""On GPUs a softmax before a product takes its derivative from its half result.

A product keeps its operands for the backward pass, so that half result is kept whatever is done
about the softmax itself. Its derivative needs nothing else. So neither are the scores kept nor the
rows computed again.

With y a row of the result, the tangent of y is y * (t - sum(y * t)) if y adds up to one, which it
does not quite once it is rounded. Where one score is far above the others that error is up to 25
times that of all other roundings (64 keys, one score larger by 8, bfloat16), and half models
written by hand have it. Here a row is divided by its sum, in float32; so the rows of the gradient
add up to zero. A row divided by its sum is also the pattern by which XLA finds a softmax, for which
it makes a kernel that reads each row once, and it fuses the rest of the derivative with that.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jmp.autocasting._graph import Node
from jmp.autocasting._steps import Recompute, Rewrite
from jmp.autocasting.targets._rewriting import Surroundings

KEPT_WEIGHTS = "autocast_softmax"


def softmax_from_half_result(node: Node, around: Surroundings) -> Rewrite | None:
    """Rewrites the last step of a softmax that leaves in half, all of it in one island."""
    if node.name != "div" or around.recompute is not Recompute.RECOMPUTE:
        return None
    found, (result,) = around.softmax_with(node), node.outputs
    # What reads the result inside would read the rounded one, where log(p) of a small p is -inf.
    is_read_inside = not around.inside.isdisjoint(result.users)
    if found is None or result not in around.in_half or is_read_inside:
        return None
    why = "a softmax before a product: its derivative is taken from its half result"
    run = functools.partial(softmax, len(found.total.outputs[0].aval.shape), around.half)
    return Rewrite(why, (found.argument,), run, KEPT_WEIGHTS)


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
    # Its transpose is weights * (cotangent - sum(weights * cotangent)), one way from the weights to
    # the result. That of weights * (tangent - sum(weights * tangent)) has two. XLA fuses them step
    # by step, and weighs hundreds of tilings at each: it would compile a transformer's step for up
    # to 20 % longer, into the same kernels.
    weighted = weights * tangent
    return result, weighted - weights * _sums(weighted, rows)


def _sums(array: Any, rows: int) -> Any:
    return array.sum(tuple(range(rows, array.ndim)), keepdims=True)
