"""The passes that every target has, and those of them too small for a file of their own."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jmp.autocasting._graph import Node, Value
from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import as_it_is, cast, with_derivative
from jmp.autocasting._passes import Pass
from jmp.autocasting._steps import Arithmetic, Environment, Island, Read, Single, Step, on
from jmp.autocasting.float8 import multiply_in_float8, send_in_float8, with_bounds
from jmp.autocasting.targets._lookups import look_up_in_half
from jmp.autocasting.targets._scaled_scores import scale_before
from jmp.autocasting.targets._slopes import slopes_from_operands, slopes_from_results
from jmp.autocasting.targets._weight_sums import sum_weights_after_turns
from jmp.autocasting.targets._wide_gradients import widen_gradients
from jmp.dtypes import FLOAT32

# Moves behind islands.


def move_behind(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns steps; what an island only moves, of a result that is half, is moved behind it.

    A Fourier transform reads float32: what is moved for it would be stored once more. Without this
    a Fourier neural operator moves 3 % more bytes.
    """
    found: list[Step] = []
    for step in steps:
        moves = _moves_of_results(step, level) if isinstance(step, Island) else []
        if isinstance(step, Island) and moves:
            nodes = tuple(node for node in step.nodes if node not in moves)
            writes = tuple(write for write in step.writes if write.value.producer not in moves)
            step = step._replace(nodes=nodes, writes=writes)
        found += [step, *(level.by_itself(node) for node in moves)]
    return found


def _moves_of_results(island: Island, level: Level) -> list[Node]:
    """Returns the nodes that move what an island stores in half, for Fourier transforms only.

    These are float32 for want of a half kernel (`Rule.rounds`). Any other reader of float32, such
    as a Cholesky decomposition or a sum, has more digits from a result that is not rounded.
    """
    half = island.written_in(level.half)
    read_else = {*level.graph.outputs, *(value for node in island.nodes for value in node.inputs)}

    def is_for_transforms(moved: Value) -> bool:
        rounds = all(user.rule.rounds for user in moved.users)
        return rounds and moved not in read_else and not level.is_out_of_range(moved, moved.users)

    moves = (node for node in island.nodes if node.rule.hands_on and not node.reads_float32)
    # A split has several results.
    return [n for n in moves if n.inputs[0] in half and all(map(is_for_transforms, n.outputs))]


# Maxima along axes are found in half: they are exact, and so is which numbers equal them.
#
# Their derivative divides by how many numbers do. That is counted in float32: in half a count of
# ties stops growing. Compared in float32, the numbers would be stored as a mask: a PointNet of two
# layers moves 5 % more bytes.


@on(Single)
def compare_in_half(step: Single, level: Level) -> Single:
    """Returns a step; a maximum or minimum whose result is half is found in half."""
    is_rounded = step.arithmetic is Arithmetic.ROUNDED
    if not is_rounded or step.node.name not in ("reduce_max", "reduce_min"):
        return step
    reads = (Read(step.node.inputs[0], level.half),)
    return step._replace(arithmetic=Arithmetic.HALF, reads=reads, lowering=find_in_half)


def find_in_half(step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
    """Returns the largest or smallest numbers of a half array, with their derivative."""
    axes = tuple(step.params["axes"])

    def find(array: Any) -> list[Any]:
        return as_it_is(step)([array])

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        (array,), (change,) = primals, tangents
        (found,) = find(array)
        is_found = array == lax.expand_dims(found, axes)
        # Multiplied, not selected: where the maximum is NaN, and equals none, all shares are NaN.
        ones = is_found.astype(FLOAT32)
        total = jnp.sum(cast(change, FLOAT32) * ones, axes)
        return [cast(total / jnp.sum(ones, axes), found.dtype)]

    return with_derivative(find, derivative)(*operands)


# In this order.

FIRST = (
    Pass("moves behind islands", "what is moved", move_behind),
    Pass("float32 gradients", "gradients of parameters", widen_gradients),
    # Sending depends on which products are float8.
    Pass("float8 products", "operands and gradients of products", multiply_in_float8),
    Pass("float8 is sent", "", send_in_float8),
    Pass("scaled scores", "products of small numbers", scale_before),
    Pass("maxima are compared in half", "", compare_in_half),
    Pass("rows that repeat few times", "gradients of these rows", look_up_in_half),
    Pass("slopes of softplus", "these slopes", slopes_from_operands),
    Pass("slopes of bounded functions", "these slopes", slopes_from_results),
    Pass("weights are summed after turns", "gradients of loops' weights", sum_weights_after_turns),
)
# Bounds see no steps that a fused attention replaces.
LAST = (Pass("float8 bounds", "the scales of float8 products", with_bounds),)
