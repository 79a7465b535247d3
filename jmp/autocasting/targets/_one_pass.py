"""The sums of a softmax's rows in one pass with their maxima, and kept: the loss of a classifier.

A softmax, or a log-sum-exp, reads its rows twice: for their maxima, and for the sums of
exp(x - maximum). As an island it would do both again in the backward pass. XLA's GPU compiler makes
one kernel of a softmax, which reads a row once. It makes none if rows are long, and none of a
log-sum-exp, which leaves no row. In these cases
  - the sums come from one reduction of pairs (maximum, sum of exp(x - maximum)), which XLA fuses
    with the reduction for the maxima. Two parts of a row make max(m, n) and
    s e^(m - max) + t e^(n - max). XLA splits such a reduction as it splits others. On other
    hardware the sums do not change: one kernel for both is no gain there, and one long sum is
    slower and less exact;
  - maxima and sums, one number each a row, are kept for the backward pass.
The end of a GPT-2, its last product and cross entropy, moves 30 % fewer bytes with it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmp import _jax_compat
from jmp.autocasting._facts import Shift, Softmax, is_row_reduction
from jmp.autocasting._graph import Node, downstream
from jmp.autocasting._numbers import length_of
from jmp.autocasting._steps import Rewrite
from jmp.autocasting.targets._rewriting import Surroundings

KEPT_ROWS = "autocast_rows"
GPUS = ("cuda", "rocm")
# Elements. XLA makes one kernel of a softmax over rows of up to 16384, which moves 2.0 times the
# bytes of the half logits; of 16385 five kernels, which move 4.06 times the bytes.
LONG = 1 << 14
# Elements, the lanes of a warp. At 32, 100 and 1000 classes a cross entropy and the product before
# it move 11 %, 19 % and 18 % fewer bytes; at 10 1 % more.
SHORT = 32


def sums_in_one_pass(node: Node, around: Surroundings) -> Rewrite | None:
    """Rewrites the sums of a softmax; keeps them, its maxima, and all that reduces long rows."""
    reduces_rows = node.rule.reduces and node.inputs[0].is_float32 and is_row_reduction(node)
    if not around.is_recomputed or not reduces_rows:
        return None
    for softmax in around.softmaxes:
        if softmax.shift is None or not _reads_rows_again(softmax, softmax.shift, around):
            continue
        if softmax.total is node:
            why = "sums of powers in one pass with the maxima of their rows, on a GPU; kept"
            run = functools.partial(_kept_sums, tuple(map(int, node.params["axes"])))
            reads = (softmax.argument, softmax.shift.rows, softmax.shift.number)
            return Rewrite(why, reads, run, KEPT_ROWS, as_stored=True)
        if softmax.shift.maxima is node:
            return _kept(node)
    return _kept(node) if is_long(_length(node)) else None


def _kept(node: Node) -> Rewrite:
    why = "one number a row, kept for the backward pass: the rows are not read again"
    return Rewrite(why, node.inputs, functools.partial(_run_and_keep, node), KEPT_ROWS, True)


def is_long(length: Any) -> bool:
    """Returns whether XLA takes a softmax over such rows apart."""
    return length_of(length) > LONG


def _length(node: Node) -> int:
    """Returns the length of the rows that `node` reduces."""
    return node.inputs[0].size // max(1, node.outputs[0].size)


def _reads_rows_again(softmax: Softmax, shift: Shift, around: Surroundings) -> bool:
    """Returns whether XLA reads rows once more for the sums of their powers.

    It does so if they are long, or if no number of a row is computed from these sums. (Otherwise,
    as in a softmax, XLA makes one kernel of all: an entropy would move 1.9 to 2.8 times the bytes.)
    """
    length = _length(softmax.total)
    if length < SHORT or is_long(length):
        return is_long(length)
    others = (one for one in around.softmaxes if one.shift and one.shift.rows is shift.rows)
    return not any(_is_spread(other.total, around) for other in others)


def _is_spread(total: Node, around: Surroundings) -> bool:
    """Returns whether a larger value of the island is computed from the sums `total`."""
    (sums,) = total.outputs
    return any(v.size > sums.size for v in downstream(sums, around.inside.__contains__))


# How it runs.


def _run_and_keep(node: Node, array: Any) -> Any:
    """Returns the result of `node`, and keeps it."""
    (result,) = _jax_compat.bind(node.equation.primitive, [array], node.params)
    return checkpoint_name(result, KEPT_ROWS)


def _kept_sums(axes: tuple[int, ...], shifted: Any, rows: Any, shift: Any) -> Any:
    return checkpoint_name(sums_of_powers(axes, shifted, rows, shift), KEPT_ROWS)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def sums_of_powers(axes: tuple[int, ...], shifted: Any, rows: Any, shift: Any) -> Any:
    """Returns the sums of exp(shifted) over the last `axes`, for shifted = rows - shift.

    It has a derivative with respect to `shifted` only. `rows` and `shift` say how to compute it.
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
    """Returns the maxima of rows and the sums of exp(rows - maximum): one reduction over `axes`.

    The sum of a row whose maximum is infinite counts the elements that equal it. A row with a NaN
    has two.
    """
    starts = jnp.full([], -jnp.inf, rows.dtype), jnp.zeros([], rows.dtype)
    maxima, sums = lax.reduce((rows, lax.full_like(rows, 1)), starts, _together, axes)
    return maxima, sums


def _together(one: Any, other: Any) -> tuple[Any, Any]:
    """Returns maximum and sum of a row, given maximum and sum of two parts of it."""
    (maximum, total), (maximum_too, total_too) = one, other
    # The difference of two infinite ones would be NaN.
    are_equal = maximum == maximum_too
    factor = lax.exp(-lax.abs(maximum - maximum_too))
    factor = lax.select(are_equal, lax.full_like(factor, 1), factor)
    is_first = maximum >= maximum_too
    larger = lax.select(is_first, total, total_too)
    smaller = lax.select(is_first, total_too, total)
    return lax.max(maximum, maximum_too), larger + factor * smaller
