"""One element of each row, as a masked sum: `take_along_axis` in a cross entropy.

The derivative of a gather is a scatter: XLA writes a float32 array of zeros as large as the logits,
and adds one number to each row of it. The same value is a sum over `where(column == label, logits,
0)`. It is exact, because zeros add nothing, and its derivative fuses with its neighbours. Without
it a step of a GPT of width 512 moves 18 % more bytes, in 30 % more memory.

The value itself is gathered if rows are long: a sum over log(p) can only start when the sums of the
rows are known, and reads them once more (13 % of the bytes of a log-softmax over 50,304 classes and
the product before it). XLA computes shorter rows in one kernel with their sums, which a gather
would take apart (27 % more bytes).

If no gradient goes backwards, as in a loop that generates, the gather stays as it is. So it does on
TPUs, where XLA makes the same of both: the steps of five models take as many cycles and bytes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from jmp import _jax_compat
from jmp.autocasting._graph import Node
from jmp.autocasting._steps import Rewrite
from jmp.autocasting.targets._one_pass import is_long
from jmp.autocasting.targets._rewriting import Surroundings

# A smaller scatter moves few bytes, though a sum is leaner at every size measured: 12 % fewer bytes
# at 2**8 elements, 43 % at 2**14, 62 % at 2**20 (the end of a classifier and its gradient).
LARGE = 1 << 14


def pick_as_sum(node: Node, around: Surroundings) -> Rewrite | None:
    """Rewrites a gather of exactly one element of each row of a large float32 array."""
    if not (around.has_gradient and _is_pick(node)):
        return None
    if is_long(node.inputs[0].aval.shape[_axis(node)]):
        why = "one element of each row, with the derivative of a masked sum: it writes no zeros"
        return Rewrite(why, node.inputs, functools.partial(_gathered, node))
    why = "one element of each row, as a masked sum: its derivative writes no zeros"
    return Rewrite(why, node.inputs, functools.partial(_pick, node))


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
    chosen = jnp.expand_dims(indices.reshape(rows), axis)
    if mode == GatherScatterMode.CLIP:
        chosen = jnp.clip(chosen, 0, length - 1)
    columns = lax.broadcasted_iota(chosen.dtype, operand.shape, axis)
    picked = jnp.where(columns == chosen, operand, jnp.zeros([], operand.dtype)).sum(axis)
    if mode == GatherScatterMode.FILL_OR_DROP:
        fill = node.params["fill_value"] if fill is None else fill
        lost = jnp.asarray(jnp.nan if fill is None else fill, operand.dtype)
        outside = ((chosen < 0) | (chosen >= length)).reshape(rows)
        picked = jnp.where(outside, lost, picked)
    return picked.reshape(node.outputs[0].aval.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gathered(node: Node, operand: Any, indices: Any) -> Any:
    """Returns what the gather `node` returns, with the derivative of `_pick`."""
    (result,) = _jax_compat.bind(node.equation.primitive, [operand, indices], node.params)
    return result


@_gathered.defjvp
def _of_the_sum(node: Node, primals: Any, tangents: Any) -> tuple[Any, Any]:
    operand, indices = primals
    return _gathered(node, operand, indices), _pick(node, tangents[0], indices, fill=0)
