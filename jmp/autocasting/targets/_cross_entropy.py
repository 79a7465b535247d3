"""Rows on GPUs, such as those of a classifier's loss: their sums in one pass, and picks of labels.

Sums in one pass. A softmax, or a log-sum-exp, reads its rows twice: for their maxima, and for the
sums of exp(x - maximum). As an island it would do both again in the backward pass. XLA's GPU
compiler makes one kernel of a softmax, which reads a row once. It makes none if rows are long, and
none of a log-sum-exp, which leaves no row. In these cases
  - the sums come from one reduction of pairs (maximum, sum of exp(x - maximum)), which XLA fuses
    with the reduction for the maxima. Two parts of a row make max(m, n) and
    s e^(m - max) + t e^(n - max). XLA splits such a reduction as it splits others. On other
    hardware the sums do not change: one kernel for both is no gain there, and one long sum is
    slower and less exact;
  - maxima and sums, one number each a row, are kept for the backward pass.
The end of a GPT-2, its last product and cross entropy, moves 30 % fewer bytes with it.

Picks. `take_along_axis` gathers one element of each row, such as the logits of labels. The
derivative of a gather is a scatter: XLA writes a float32 array of zeros as large as the logits, and
adds one number to each row of it. The same value is a sum over `where(column == label, logits,
0)`. It is exact, because zeros add nothing, and its derivative fuses with its neighbours. Without
it a step of a GPT of width 512 moves 18 % more bytes, in 30 % more memory.

The value itself is gathered if rows are long: a sum over log(p) can only start when the sums of the
rows are known, and reads them once more (13 % of the bytes of a log-softmax over 50,304 classes and
the product before it). XLA computes shorter rows in one kernel with their sums, which a gather
would take apart (27 % more bytes).

If no gradient goes backwards, as in a loop that generates, the gather stays as it is. So it does on
TPUs, where XLA makes the same of both: the steps of five models take as many cycles and bytes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import GatherScatterMode

from jmp import _jax_compat
from jmp.autocasting._facts import Shift, Softmax, softmaxes_within
from jmp.autocasting._graph import Node, downstream
from jmp.autocasting._level import Level
from jmp.autocasting._numbers import length_of
from jmp.autocasting._steps import Island, Rewrite, on

KEPT_ROWS = "autocast_rows"
GPUS = ("cuda", "rocm")
# Elements. XLA makes one kernel of a softmax over rows of up to 16384, which moves 2.0 times the
# bytes of the half logits; of 16385 five kernels, which move 4.06 times the bytes.
LONG = 1 << 14
# Elements, the lanes of a warp. At 32, 100 and 1000 classes a cross entropy and the product before
# it move 11 %, 19 % and 18 % fewer bytes; at 10 1 % more.
SHORT = 32


@on(Island)
def sums_in_one_pass(island: Island, level: Level) -> Island:
    """Rewrites the sums of a softmax; keeps them, its maxima, and all that reduces long rows."""
    if not island.is_recomputed:
        return island
    found = {node: _kept(node) for node in island.nodes if _reduces_long_rows(node)}
    softmaxes = list(softmaxes_within(level.facts.softmaxes, set(island.nodes)))
    for softmax in softmaxes:
        shift, total = softmax.shift, softmax.total
        if shift is None or not _reads_rows_again(softmax, shift, softmaxes, island):
            continue
        why = "sums of powers in one pass with the maxima of their rows, on a GPU; kept"
        run = partial(_kept_sums, tuple(map(int, total.params["axes"])))
        reads = (softmax.argument, shift.rows, shift.number)
        found[total] = Rewrite(why, reads, run, KEPT_ROWS, as_stored=True)
        found[shift.maxima] = _kept(shift.maxima)
    return island.rewritten(found)


def _reduces_long_rows(node: Node) -> bool:
    reduces_rows = node.rule.reduces and node.inputs[0].is_float32 and node.reduces_rows
    return reduces_rows and is_long(_length(node))


def _kept(node: Node) -> Rewrite:
    why = "one number a row, kept for the backward pass: the rows are not read again"
    return Rewrite(why, node.inputs, partial(_run_and_keep, node), KEPT_ROWS, as_stored=True)


def is_long(length: Any) -> bool:
    """Returns whether XLA takes a softmax over such rows apart."""
    return length_of(length) > LONG


def _length(node: Node) -> int:
    """Returns the length of the rows that `node` reduces."""
    return node.inputs[0].size // max(1, node.outputs[0].size)


def _reads_rows_again(
    softmax: Softmax, shift: Shift, softmaxes: Sequence[Softmax], island: Island
) -> bool:
    """Returns whether XLA reads rows once more for the sums of their powers.

    It does so if they are long, or if no number of a row is computed from these sums. (Otherwise,
    as in a softmax, XLA makes one kernel of all: an entropy would move 1.9 to 2.8 times the bytes.)
    """
    length = _length(softmax.total)
    if length < SHORT or is_long(length):
        return is_long(length)
    inside = set(island.nodes)
    all_sums = (x.total.outputs[0] for x in softmaxes if x.shift and x.shift.rows is shift.rows)
    is_spread = (
        value.size > sums.size
        for sums in all_sums
        for value in downstream(sums, inside.__contains__)
    )
    return not any(is_spread)


# How it runs.


def _run_and_keep(node: Node, array: Any) -> Any:
    """Returns the result of `node`, and keeps it."""
    (result,) = _jax_compat.bind(node.equation.primitive, [array], node.params)
    return checkpoint_name(result, KEPT_ROWS)


def _kept_sums(axes: tuple[int, ...], shifted: Any, rows: Any, shift: Any) -> Any:
    return checkpoint_name(sums_of_powers(axes, shifted, rows, shift), KEPT_ROWS)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def sums_of_powers(axes: tuple[int, ...], shifted: Any, rows: Any, shift: Any) -> Any:
    """Returns the sums of exp(shifted) over the last `axes`, for shifted = rows - shift.

    It has a derivative with respect to `shifted` only. `rows` and `shift` say how to compute it.
    """

    def in_one(_: Any, rows: Any, shift: Any) -> Any:
        maxima, sums = maxima_and_sums(axes, rows)
        return lax.mul(sums, lax.exp(lax.sub(maxima, lax.reshape(shift, maxima.shape))))

    def as_written(shifted: Any, *_: Any) -> Any:
        return lax.reduce_sum(lax.exp(shifted), axes)

    on_gpus = dict.fromkeys(GPUS, in_one)
    return lax.platform_dependent(shifted, rows, shift, **on_gpus, default=as_written)


@sums_of_powers.defjvp
def _of_the_shifted(axes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    change = lax.reduce_sum(lax.mul(lax.exp(primals[0]), tangents[0]), axes)
    return sums_of_powers(axes, *primals), change


def maxima_and_sums(axes: tuple[int, ...], rows: Any) -> tuple[Any, Any]:
    """Returns the maxima of rows and the sums of exp(rows - maximum): one reduction over `axes`.

    The sum of a row whose maximum is infinite counts the elements that equal it. A row with a NaN
    has two.
    """
    starts = rows.dtype.type(-np.inf), rows.dtype.type(0)
    maxima, sums = lax.reduce((rows, lax.full_like(rows, 1)), starts, _together, axes)
    return maxima, sums


def _together(one: Any, other: Any) -> tuple[Any, Any]:
    """Returns maximum and sum of a row, given maximum and sum of two parts of it."""
    (maximum, total), (maximum_too, total_too) = one, other
    # The difference of two infinite ones would be NaN.
    are_equal = lax.eq(maximum, maximum_too)
    factor = lax.exp(lax.neg(lax.abs(lax.sub(maximum, maximum_too))))
    factor = lax.select(are_equal, lax.full_like(factor, 1), factor)
    is_first = lax.ge(maximum, maximum_too)
    larger = lax.select(is_first, total, total_too)
    smaller = lax.select(is_first, total_too, total)
    return lax.max(maximum, maximum_too), lax.add(larger, lax.mul(factor, smaller))


# Picks.

# A sum moves fewer bytes at every size measured: 12 % at 2**8 elements, 43 % at 2**14, 62 % at
# 2**20 (the end of a classifier and its gradient). A gather computes less, and a small one moves
# little.
LARGE = 1 << 14


@on(Island)
def pick_as_sum(island: Island, level: Level) -> Island:
    """Rewrites gathers of exactly one element of each row of a large float32 array."""
    if not level.context.has_gradient:
        return island
    return island.rewritten({node: _as_sum(node) for node in island.nodes if _is_pick(node)})


def _as_sum(node: Node) -> Rewrite:
    if is_long(node.inputs[0].aval.shape[_axis(node)]):
        why = "one element of each row, with the derivative of a masked sum: it writes no zeros"
        return Rewrite(why, node.inputs, partial(_gathered, node))
    why = "one element of each row, as a masked sum: its derivative writes no zeros"
    return Rewrite(why, node.inputs, partial(_pick, node))


def _is_pick(node: Node) -> bool:
    """Returns whether a node gathers exactly one element of each row of a large float32 array."""
    if node.name != "gather" or node.inputs[0].size < LARGE:
        return False
    operand, indices = (value.aval for value in node.inputs)
    numbers = node.params["dimension_numbers"]
    rows = numbers.operand_batching_dims
    return (
        node.inputs[0].is_float32
        and not numbers.offset_dims  # so that the one axis that is indexed is collapsed
        and len(numbers.start_index_map) == 1
        and len(rows) == len(operand.shape) - 1
        and tuple(numbers.start_indices_batching_dims) == tuple(range(len(rows)))
        and indices.size == operand.size // operand.shape[_axis(node)]
        and node.params["mode"] != GatherScatterMode.ONE_HOT
    )


def _axis(node: Node) -> int:
    return int(node.params["dimension_numbers"].start_index_map[0])


def _pick(node: Node, operand: Any, indices: Any, fill: float | None = None) -> Any:
    """Returns what the gather `node` returns.

    Args:
      fill: the result outside of the operand; None for the gather's own.
    """
    axis, mode = _axis(node), node.params["mode"]
    length = operand.shape[axis]
    rows = operand.shape[:axis] + operand.shape[axis + 1 :]
    chosen = lax.expand_dims(lax.reshape(indices, rows), [axis])
    if mode == GatherScatterMode.CLIP:
        chosen = jnp.clip(chosen, 0, length - 1)
    columns = lax.broadcasted_iota(chosen.dtype, operand.shape, axis)
    one_each = jnp.where(lax.eq(columns, chosen), operand, operand.dtype.type(0))
    picked = lax.reduce_sum(one_each, [axis])
    if mode == GatherScatterMode.FILL_OR_DROP:
        fill = node.params["fill_value"] if fill is None else fill
        lost = operand.dtype.type(np.nan if fill is None else fill)
        outside = lax.bitwise_or(chosen < 0, chosen >= length)
        picked = jnp.where(lax.reshape(outside, rows), lost, picked)
    return lax.reshape(picked, node.outputs[0].aval.shape)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gathered(node: Node, operand: Any, indices: Any) -> Any:
    """Returns what the gather `node` returns, with the derivative of `_pick`."""
    (result,) = _jax_compat.bind(node.equation.primitive, [operand, indices], node.params)
    return result


@_gathered.defjvp
def _of_the_sum(node: Node, primals: Any, tangents: Any) -> tuple[Any, Any]:
    operand, indices = primals
    return _gathered(node, operand, indices), _pick(node, tangents[0], indices, fill=0)
