"""On GPUs a softmax over an odd length is padded, and so are the products beside it.

If rows or columns of a half product are no multiple of eight, XLA pads its operands for cuBLAS and
cuts its result. The scores and the weights of an attention are large. A kernel that only pads would
write each of them, and each of their cotangents, once more. Here the queries, keys and values are
padded, which are small. Then the first product returns padded scores, and the kernel of the softmax
reads padded scores and writes padded weights. These are zeros behind the end of a row, which add
nothing to the result.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import jax.numpy as jnp
from jax import lax

from jmp import _jax_compat
from jmp.autocasting._constants import is_pointwise, keeps_places
from jmp.autocasting._facts import Softmax, is_row_reduction
from jmp.autocasting._graph import Node, Value, downstream
from jmp.autocasting._kinds import Level
from jmp.autocasting._lowerings import as_it_is
from jmp.autocasting._numbers import has_symbols, shape_of
from jmp.autocasting._steps import Environment, Island, Single, Step, nodes_of
from jmp.autocasting.attention._axes import Axes, Labelled, own_axes
from jmp.autocasting.targets._softmax import KEPT_WEIGHTS
from jmp.dtypes import FLOAT32

# A GPU's half products have so many rows and columns, times a number: XLA pads others.
MULTIPLE = 8

Pads = tuple[tuple[int, ...], ...]  # the axes of each operand that are padded; () for none


def multiply_padded(
    pads: Pads, cuts: bool, step: Single, operands: Sequence[Any], _: Environment
) -> list[Any]:
    """Returns a product of operands that are padded with zeros to multiples of eight.

    Args:
      pads: along which axes each operand is padded.
      cuts: whether the result is cut to its size; else it stays padded.
    """
    padded = [_padded(array, axes) for array, axes in zip(operands, pads, strict=True)]
    results = as_it_is(step)(padded)
    shape = step.node.outputs[0].aval.shape
    return [x[tuple(map(slice, shape))] for x in results] if cuts else results


@dataclasses.dataclass(frozen=True)
class PaddedRows:
    """The nodes of a softmax whose scores come out of a padded product.

    Attributes:
      values: the rows, behind whose ends is -inf.
    """

    values: tuple[Value, ...]

    def enter(self, environment: Environment) -> Environment:
        """Ends the rows, if they enter the island."""
        return {value: self._ended(value, array) for value, array in environment.items()}

    def bind(self, node: Node, operands: Sequence[Any]) -> list[Any]:
        """Binds a node, whose operands may be longer than they were traced."""
        params = node.params
        if node.name == "broadcast_in_dim":
            # An axis of the scores along which something is repeated is not padded.
            padded = dict(zip(params["broadcast_dimensions"], operands[0].shape, strict=True))
            shape = tuple(padded.get(place, length) for place, length in enumerate(params["shape"]))
            params = {**params, "shape": shape}
        results = _jax_compat.bind(node.equation.primitive, operands, params)
        return [self._ended(v, x) for v, x in zip(node.outputs, results, strict=True)]

    def _ended(self, value: Value, rows: Any) -> Any:
        """Returns rows with -inf behind their ends, in float32; any other array as it is.

        -inf is added, not selected. The derivative of a selection is a selection, which XLA would
        try to fuse into the kernels of the backward pass. A step would compile for 15 % longer into
        the same kernels.
        """
        if value not in self.values or rows.shape[-1] == (length := value.aval.shape[-1]):
            return rows
        places = lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 1)
        return rows.astype(FLOAT32) + jnp.where(places < length, FLOAT32.type(0), -jnp.inf)


def _padded(array: Any, axes: Sequence[int]) -> Any:
    added = [(0, -n % MULTIPLE if i in axes else 0, 0) for i, n in enumerate(array.shape)]
    return lax.pad(array, jnp.zeros([], array.dtype), added) if axes else array


# Which softmaxes are padded.


def pad_softmaxes(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level; softmaxes over odd lengths are padded."""
    changed: dict[int, Step] = {}
    step_of = {node: step for step in steps for node in nodes_of(step)}
    for step in steps:
        found = _padded_steps(step, step_of, level) if isinstance(step, Island) else {}
        if changed.keys().isdisjoint(found):  # a product between two softmaxes is padded once
            changed |= found
    return [changed.get(id(step), step) for step in steps]


def _padded_steps(island: Island, step_of: Mapping[Node, Step], level: Level) -> dict[int, Step]:
    """Returns what a softmax and the products beside it become, by the ids of these steps."""
    divisions = [node for node, form in island.rewrites.items() if form.keeps == KEPT_WEIGHTS]
    if not len(divisions) == len(island.reads) == len(island.writes) == 1:
        return {}
    (division,), scores, weights = divisions, island.reads[0].value, island.writes[0].value
    are_outputs = not {scores, weights}.isdisjoint(level.graph.outputs)
    are_shared = not set(island.nodes).issuperset(scores.users) or len(weights.users) != 1
    if are_outputs or are_shared or scores.producer is None:
        return {}
    before, after = step_of.get(scores.producer), step_of[weights.users[0]]
    if not (_may_pad(before) and _may_pad(after)):
        return {}
    axes = _axes_inside(island)
    softmax = next(one for one in level.facts.softmaxes if one.division is division)
    rows = _rows_of(softmax, island, axes)
    if rows is None:
        return {}
    pads = _pads_of(before.node, after.node, Labelled(weights, axes[weights]))
    if pads is None:
        return {}
    form = island.rewrites[division]
    form = form._replace(why=f"{form.why}; its rows are padded, so that XLA pads no scores")
    rewrites = {**island.rewrites, division: form}
    return {
        id(before): before._replace(lowering=partial(multiply_padded, pads[0], False)),
        id(island): island._replace(rewrites=rewrites, lowering=PaddedRows((rows,))),
        id(after): after._replace(lowering=partial(multiply_padded, pads[1], True)),
    }


def _may_pad(step: Step | None) -> TypeGuard[Single]:
    """Returns whether a step is a half product whose operands may be padded where it stands."""
    if not isinstance(step, Single) or not step.is_half:
        return False
    mesh = step.node.outputs[0].aval.sharding.mesh
    asks_for_sharding = mesh.explicit_axes or mesh.manual_axes
    return step.node.name == "dot_general" and step.lowering is None and not asks_for_sharding


def _axes_inside(island: Island) -> dict[Value, Axes]:
    """Returns the axes of an island's arrays. Labels number the axes of the array that enters.

    It is empty if a node is not known to do the same with arrays that are longer.
    """
    (entering,) = (read.value for read in island.reads)
    found = {entering: own_axes(entering)}
    for node in island.nodes:
        (result,), operands = node.outputs, [v for v in node.inputs if shape_of(v)]
        if not operands or not found.keys() >= set(operands):
            return {}
        axes = found[operands[0]]
        if node.name == "transpose":
            axes = tuple(axes[i] for i in node.params["permutation"])
        elif node.name == "broadcast_in_dim":
            repeated = dict(zip(node.params["broadcast_dimensions"], axes, strict=True))
            axes = tuple(repeated.get(i, ()) for i in range(result.aval.ndim))
        elif node.rule.reduces:
            axes = tuple(axis for i, axis in enumerate(axes) if i not in node.params["axes"])
        elif is_pointwise(node) or keeps_places(node) or node.rule.expensive:
            axes = tuple(map(max, zip(*map(found.__getitem__, operands), strict=True)))
        else:
            return {}
        if any((n == 1) != (axis == ()) for n, axis in zip(shape_of(result), axes, strict=True)):
            return {}  # it repeats along an axis
        found[result] = axes
    return found


def _rows_of(softmax: Softmax, island: Island, axes: Mapping[Value, Axes]) -> Value | None:
    """Returns the rows whose maxima a softmax subtracts; None if its island does more than that.

    The rows may be moved before the difference, as `jax.vmap` does. Neither a maximum nor a sum of
    powers changes if rows end with -inf. So the island may have no other reduction, and no other
    array as long as the rows. Its results before the rows must be finite for padded scores.
    """
    others = [node for node in island.nodes if node.rule.reduces and node is not softmax.total]
    if not axes or [node.name for node in others] != ["reduce_max"]:
        return None
    (rows,), keys = others[0].inputs, axes[softmax.argument][-1]
    for reduction in (others[0], softmax.total):
        reduced = [axes[reduction.inputs[0]][i] for i in reduction.params["axes"]]
        if reduced != [keys] or not is_row_reduction(reduction):
            return None
    path, value = {softmax.exp, softmax.division}, softmax.argument
    while value is not rows:
        node = value.producer
        if node is None or not (node.name == "sub" or node.rule.moves):
            return None
        if any(keys in axes.get(subtracted, ()) for subtracted in node.inputs[1:]):
            return None
        path.add(node)
        value = node.inputs[0]
    after = {*downstream(rows, set(island.nodes).__contains__)} - {rows}
    before = set(island.nodes).difference(value.producer for value in after)
    as_long = {value.producer for value in after if keys in axes[value]}
    return rows if as_long <= path and all(map(_is_finite_at_zero, before)) else None


def _is_finite_at_zero(node: Node) -> bool:
    """Returns whether a function of scores and its derivative are finite for scores of zero.

    Padded queries and keys have such scores, until -inf is added.
    """
    rule = node.rule
    number_last = not any(map(shape_of, node.inputs[1:]))
    is_with_number = number_last or (node.name != "div" and not shape_of(node.inputs[0]))
    return rule.moves or rule.casts or rule.bounded or (rule.affine and is_with_number)


def _free_axes(product: Node) -> list[dict[int, int]]:
    """Returns for each operand the axes of the result that come from it, and which of its own."""
    summed, shared = product.params["dimension_numbers"]
    place = itertools.count(len(shared[0]))
    return [
        {next(place): axis for axis in range(value.aval.ndim) if axis not in (*own, *both)}
        for value, own, both in zip(product.inputs, summed, shared, strict=True)
    ]


def _pads_of(before: Node, after: Node, weights: Labelled) -> tuple[Pads, Pads] | None:
    """Returns which axes of their operands two products pad; None if nothing is to be padded.

    Args:
      before: the product that returns the scores, whose axes the labels number.
      after: the one that reads the weights.
    """
    scores, free, keys = before.outputs[0].aval, _free_axes(before), weights.axes[-1]
    if not keys or has_symbols(tuple(scores.shape[i] for places in free for i in places)):
        return None
    (key,) = keys
    of_keys = next((i for i, places in enumerate(free) if list(places) == [key.number]), None)
    if of_keys is None:
        return None
    queries = free[1 - of_keys]
    n_queries = math.prod(scores.shape[place] for place in queries)
    if n_queries == 1:  # a product with a vector, which XLA does not pad
        return None
    row = max(queries, key=scores.shape.__getitem__)
    padded = {key.number: key.length % MULTIPLE, row: n_queries % MULTIPLE}
    pads = [tuple(places[i] for i in places if padded.get(i)) for places in free]
    # An axis that may lie along one of a mesh is not padded.
    lengths = [scores.shape[place] for place in padded if padded[place]]
    devices = [n for n in scores.sharding.mesh.shape.values() if n > 1]
    if not lengths or any(length % n == 0 for length in lengths for n in devices):
        return None
    own = after.inputs.index(weights.value)
    summed, shared = after.params["dimension_numbers"]
    is_of_rows = tuple(summed[own]) == (len(weights.axes) - 1,)
    is_batch = any(label.number == row for i in shared[own] for label in weights.axes[i])
    if after.inputs.count(weights.value) > 1 or not is_of_rows or is_batch:
        return None
    of_values = tuple(summed[1 - own]) if padded[key.number] else ()
    return (pads[0], pads[1]), ((), of_values) if own == 0 else (of_values, ())
