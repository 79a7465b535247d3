"""The sums of a softmax's rows in one pass with their maxima, and kept: the loss of a classifier.

A softmax, or a log-sum-exp, reads its rows twice: for their maxima, and for the sums of
exp(x - maximum). And as an island it would do both again in the backward pass. XLA's GPU compiler
makes one kernel of a softmax, which reads a row once; but not where rows are long, nor of a
log-sum-exp, which leaves no row. There
  - the sums come from one reduction of pairs (maximum, sum of exp(x - maximum)), which XLA fuses
    with that of the maxima. Two parts of a row make max(m, n) and s e^(m - max) + t e^(n - max).
    XLA splits such a reduction as it splits others. On other hardware the sums are what they were:
    there one kernel for both is no gain, and one long sum is slower and less exact;
  - maxima and sums, one number each a row, are kept for the backward pass.
The end of a GPT-2, its last product and cross entropy, moves 30 % fewer bytes by it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmp import _jax_compat
from jmp.autocasting._flow import is_row_reduction
from jmp.autocasting._graph import Node, Value, downstream
from jmp.autocasting._numbers import Shape, length_of
from jmp.autocasting._steps import Recompute, Rewrite
from jmp.autocasting.targets._rewriting import Surroundings

KEPT_ROWS = "autocast_rows"
GPUS = ("cuda", "rocm")
# Elements. XLA makes one kernel of a softmax over rows of up to 16384, which moves 2.0 times the
# bytes of the half logits; of 16385 five kernels, which move 4.06 times the bytes.
LONG = 1 << 14
# Elements, the lanes of a warp. At 32, 100 and 1000 classes a cross entropy and the product before
# it move 11 %, 19 % and 18 % fewer bytes; at 10 1 % more.
SHORT = 32


class Powers(NamedTuple):
    """What a sum of exp(rows - shift) is made of."""

    total: Node
    rows: Value
    maxima: Node  # of the rows; the shift is made of them
    shift: Value  # one number a row
    shifted: Value  # rows - shift


def sums_in_one_pass(node: Node, around: Surroundings) -> Rewrite | None:
    """Rewrites the sums of a softmax; keeps them, its maxima, and all that reduces long rows."""
    if around.recompute is not Recompute.RECOMPUTE or not _reduces_rows(node):
        return None
    powers = powers_of(node, around)
    if powers is not None and _reads_rows_again(powers, around):
        why = "sums of powers in one pass with the maxima of their rows, on a GPU; kept"
        run = functools.partial(_kept_sums, tuple(map(int, node.params["axes"])))
        return Rewrite(why, (powers.shifted, powers.rows, powers.shift), run, KEPT_ROWS, True)
    others = filter(None, (powers_of(other, around) for other in around.inside))
    has_sums = any(other.maxima is node and _reads_rows_again(other, around) for other in others)
    if has_sums or is_long(_length(node)):
        why = "one number a row, kept for the backward pass: the rows are not read again"
        return Rewrite(why, node.inputs, functools.partial(_run_and_keep, node), KEPT_ROWS, True)
    return None


def is_long(length: Any) -> bool:
    """Returns whether XLA takes a softmax over such rows apart."""
    return length_of(length) > LONG


def _reduces_rows(node: Node) -> bool:
    return node.rule.reduces and node.inputs[0].is_float32 and is_row_reduction(node)


def _length(node: Node) -> int:
    """Returns the length of the rows that `node` reduces."""
    return node.inputs[0].size // max(1, node.outputs[0].size)


def _reads_rows_again(powers: Powers, around: Surroundings) -> bool:
    """Returns whether XLA reads rows once more for the sums of their powers.

    So it does if they are long, or if no number of a row is made of these sums. (Of what is, as of
    a softmax, XLA makes one kernel: an entropy would move 1.9 to 2.8 times the bytes.)
    """
    length = _length(powers.total)
    if length < SHORT or is_long(length):
        return is_long(length)
    found = filter(None, (powers_of(node, around) for node in around.inside))
    totals = [other.total for other in found if other.rows is powers.rows]
    return not any(_is_spread(total, around) for total in totals)


def _is_spread(total: Node, around: Surroundings) -> bool:
    """Returns whether a larger value of the island is made of the sums `total`."""
    (sums,) = total.outputs
    return any(v.size > sums.size for v in downstream(sums, around.inside.__contains__))


# What is found in an island.


def powers_of(total: Node, around: Surroundings) -> Powers | None:
    """Returns what `total` adds up, if that is powers of rows less their maxima."""
    if total.name != "reduce_sum" or not _reduces_rows(total):
        return None
    exp = total.inputs[0].producer
    if exp is None or exp.name != "exp" or exp not in around.inside:
        return None
    (shifted,) = exp.inputs
    sub = shifted.producer
    if sub is None or sub.name != "sub" or sub not in around.inside:
        return None
    rows, subtracted = sub.inputs
    shift = _one_a_row(subtracted, rows.aval.shape, len(total.outputs[0].aval.shape))
    maxima = shift and _maxima(shift, rows, total.params["axes"], around)
    return Powers(total, rows, maxima, shift, shifted) if shift and maxima else None


def _one_a_row(value: Value, shape: Shape, rank: int) -> Value | None:
    """Returns what `value` repeats along the rows of an array, if it has one number for each.

    Args:
      shape: of the array, the first `rank` axes of which count the rows.
    """
    of_rows = (*shape[:rank], *(1 for _ in shape[rank:]))
    if value.aval.shape == of_rows:
        return value
    node = value.producer
    if value.aval.shape != shape or node is None or node.name != "broadcast_in_dim":
        return None
    source, axes = node.inputs[0], node.params["broadcast_dimensions"]
    is_of_rows = source.aval.shape in (of_rows, shape[:rank])
    return source if is_of_rows and tuple(axes) == tuple(range(len(axes))) else None


def _maxima(shift: Value, rows: Value, axes: Any, around: Surroundings) -> Node | None:
    """Returns the maxima of `rows` over `axes`, if `shift` is made of them, one number a row."""

    def stays_small(node: Node) -> bool:
        return node in around.inside and node.outputs[0].size <= shift.size

    for node in rows.users:
        if node in around.inside and node.name == "reduce_max":
            reduces = sorted(node.params["axes"]) == sorted(axes)
            if reduces and shift in downstream(node.outputs[0], stays_small):
                return node
    return None


# How it runs.


def _run_and_keep(node: Node, array: Any) -> Any:
    """Returns the result of `node`, and keeps it."""
    (result,) = _jax_compat.bind(node.equation.primitive, [array], node.params)
    return checkpoint_name(result, KEPT_ROWS)


def _kept_sums(axes: tuple[int, ...], shifted: Any, rows: Any, shift: Any) -> Any:
    return checkpoint_name(sums_of_powers(axes, shifted, rows, shift), KEPT_ROWS)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def sums_of_powers(axes: tuple[int, ...], shifted: Any, rows: Any, shift: Any) -> Any:
    """Returns the sums of exp(shifted) over `axes`, the last ones, where shifted = rows - shift.

    Its derivative is that of `shifted`; `rows` and `shift` only say how to compute it.
    """

    def in_one(_: Any, rows: Any, shift: Any) -> Any:
        maxima, sums = maxima_and_sums(axes, rows)
        return sums * jnp.exp(maxima - shift.reshape(maxima.shape))

    def as_written(shifted: Any, *_: Any) -> Any:
        return jnp.exp(shifted).sum(axes)

    on_gpus = dict.fromkeys(GPUS, in_one)
    return lax.platform_dependent(shifted, rows, shift, **on_gpus, default=as_written)


@sums_of_powers.defjvp
def _of_the_shifted(axes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    change = (jnp.exp(primals[0]) * tangents[0]).sum(axes)
    return sums_of_powers(axes, *primals), change


def maxima_and_sums(axes: tuple[int, ...], rows: Any) -> tuple[Any, Any]:
    """Returns the maxima of rows and the sums of exp(rows - maximum), by one reduction over `axes`.

    The sum of a row whose maximum is infinite counts the elements that equal it. A row with a NaN
    has two.
    """
    starts = jnp.full([], -jnp.inf, rows.dtype), jnp.zeros([], rows.dtype)
    maxima, sums = lax.reduce((rows, lax.full_like(rows, 1)), starts, _together, axes)
    return maxima, sums


def _together(one: Any, other: Any) -> tuple[Any, Any]:
    """Returns maximum and sum of a row, given those of two parts of it."""
    (maximum, total), (maximum_too, total_too) = one, other
    # The difference of two infinite ones would be NaN.
    are_equal = maximum == maximum_too
    factor = lax.exp(-lax.abs(maximum - maximum_too))
    factor = lax.select(are_equal, lax.full_like(factor, 1), factor)
    is_first = maximum >= maximum_too
    larger = lax.select(is_first, total, total_too)
    smaller = lax.select(is_first, total_too, total)
    return lax.max(maximum, maximum_too), larger + factor * smaller
