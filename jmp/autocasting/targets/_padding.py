"""On GPUs a softmax over an odd length is padded, and the products beside it with it.

Where rows or columns of a half product are no multiple of eight, XLA pads its operands for cuBLAS
and cuts its result. The scores and the weights of an attention are large, and each of them, and
each of their cotangents, is written once more by a kernel that only pads. Here the queries, keys
and values are padded, which are small. Then the scores come out padded, and the kernel of the
softmax reads padded scores and writes padded weights: behind the end of a row they are zeros, which
add nothing to the result.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp
from jax import lax

from jmp import _jax_compat
from jmp.autocasting._facts import is_row_reduction
from jmp.autocasting._graph import Graph, Node, Value, downstream
from jmp.autocasting._kinds import Level
from jmp.autocasting._lowerings import as_it_is
from jmp.autocasting._numbers import has_symbols, shape_of
from jmp.autocasting._steps import Arithmetic, Environment, Island, Single, Step, nodes_of
from jmp.autocasting.attention._axes import Axes, Labelled, is_pointwise, keeps_places, own_axes
from jmp.autocasting.targets._half_softmax import KEPT_WEIGHTS
from jmp.dtypes import FLOAT32

# What a GPU's half products have rows and columns of: XLA pads others to the next multiple.
MULTIPLE = 8

Pads = tuple[tuple[int, ...], ...]  # the axes of each operand that are padded; () for none


@dataclasses.dataclass(frozen=True)
class PaddedProduct:
    """A product of operands that are padded with zeros to multiples of eight.

    Attributes:
      pads: along which axes each operand is padded.
      cuts: whether the result is cut to its size; else it stays padded.
    """

    pads: Pads
    cuts: bool = False

    def bind(self, step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
        """Returns the product."""
        pairs = zip(operands, self.pads, strict=True)
        results = as_it_is(step)([_padded(array, axes) for array, axes in pairs])
        shape = step.node.outputs[0].aval.shape
        return [x[tuple(map(slice, shape))] for x in results] if self.cuts else results


@dataclasses.dataclass(frozen=True)
class PaddedRows:
    """The nodes of a softmax whose scores come out of a padded product.

    Attributes:
      values: the rows, behind whose ends is -inf.
    """

    values: tuple[Value, ...]

    def enter(self, environment: Environment) -> Environment:
        """Ends the rows, if it is they that enter."""
        return {value: self._ended(value, array) for value, array in environment.items()}

    def bind(self, node: Node, operands: Sequence[Any]) -> list[Any]:
        """Binds a node; what it repeats may be longer than it was traced."""
        params = node.params
        if node.name == "broadcast_in_dim":
            shape = list(params["shape"])
            for length, place in zip(
                operands[0].shape, params["broadcast_dimensions"], strict=True
            ):
                shape[place] = length  # what is repeated along an axis of the scores is not padded
            params = {**params, "shape": tuple(shape)}
        results = _jax_compat.bind(node.equation.primitive, operands, params)
        return [self._ended(v, x) for v, x in zip(node.outputs, results, strict=True)]

    def _ended(self, value: Value, rows: Any) -> Any:
        """Returns rows with -inf behind their ends, in float32; any other array as it is.

        It is added: the derivative of a selection is a selection, which XLA would try to fuse into
        the kernels of the backward pass, and a step would compile for 15 % longer into the same
        kernels.
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
    if not any(map(_kept_divisions, steps)):
        return list(steps)
    changed: dict[int, Step] = {}
    step_of = {node: step for step in steps for node in nodes_of(step)}
    for step in steps:
        found = _padded_steps(step, step_of, level.graph) if isinstance(step, Island) else {}
        if changed.keys().isdisjoint(found):  # a product between two softmaxes is padded once
            changed |= found
    return [changed.get(id(step), step) for step in steps]


def _kept_divisions(step: Step) -> list[Node]:
    """Returns the last steps of an island's softmaxes, whose half results are kept."""
    rewrites = step.rewrites if isinstance(step, Island) else {}
    return [node for node, form in rewrites.items() if form.keeps == KEPT_WEIGHTS]


def _padded_steps(island: Island, step_of: Mapping[Node, Step], graph: Graph) -> dict[int, Step]:
    """Returns what a softmax and the products beside it become, by the ids of these steps."""
    divisions = _kept_divisions(island)
    if not len(divisions) == len(island.reads) == len(island.writes) == 1:
        return {}
    (division,), scores, weights = divisions, island.reads[0].value, island.writes[0].value
    is_read_elsewhere = scores in graph.outputs or not set(island.nodes).issuperset(scores.users)
    if is_read_elsewhere or weights in graph.outputs or len(weights.users) != 1:
        return {}
    before = step_of.get(scores.producer) if scores.producer is not None else None
    after = step_of[weights.users[0]]
    if not (_may_pad(before) and _may_pad(after)):
        return {}
    axes = _axes_inside(island)
    rows = _rows_of(division, island, axes)
    if rows is None:
        return {}
    pads = _pads_of(before.node, after.node, Labelled(weights, axes[weights]))
    if pads is None:
        return {}
    form = island.rewrites[division]
    form = form._replace(why=f"{form.why}; its rows are padded, so that XLA pads no scores")
    rewrites = {**island.rewrites, division: form}
    return {
        id(before): before._replace(lowering=PaddedProduct(pads[0])),
        id(island): island._replace(rewrites=rewrites, lowering=PaddedRows((rows,))),
        id(after): after._replace(lowering=PaddedProduct(pads[1], cuts=True)),
    }


def _may_pad(step: Step | None) -> TypeGuard[Single]:
    """Returns whether a step is a half product whose operands may be padded where it stands."""
    if not isinstance(step, Single) or step.arithmetic is not Arithmetic.HALF:
        return False
    mesh = step.node.outputs[0].aval.sharding.mesh
    asks_for_sharding = mesh.explicit_axes or mesh.manual_axes
    return step.node.name == "dot_general" and step.lowering is None and not asks_for_sharding


def _axes_inside(island: Island) -> dict[Value, Axes]:
    """Returns the axes of an island's arrays, labelled by those of the one that enters.

    It is empty if a node is not known to do the same with arrays that are longer.
    """
    (entering,) = (read.value for read in island.reads)
    found = {entering: own_axes(shape_of(entering))}
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


def _rows_of(division: Node, island: Island, axes: Mapping[Value, Axes]) -> Value | None:
    """Returns the rows that a softmax subtracts the maxima of; None if it does more than that.

    Behind the end of a padded row is -inf, which neither a maximum nor a sum of powers sees.
    """
    reductions = [node for node in island.nodes if node.rule.reduces]
    maxima = [node for node in reductions if node.name == "reduce_max"]
    powers = division.inputs[0].producer
    if not axes or powers is None or len(reductions) != 2 or len(maxima) != 1:
        return None
    (rows,), keys = maxima[0].inputs, axes[division.inputs[0]][-1]
    after = [v for v in downstream(rows, set(island.nodes).__contains__) if v is not rows]
    before = set(island.nodes).difference(value.producer for value in after)
    if not all(map(_is_finite_at_zero, before)):
        return None
    over = {tuple(axes[node.inputs[0]][i] for i in node.params["axes"]) for node in reductions}
    if over != {(keys,)} or not all(map(is_row_reduction, reductions)):
        return None
    # Between rows and powers is one difference, which may be moved, and beside it nothing as long.
    path, value = {division, powers}, powers.inputs[0]
    while value is not rows:
        node = value.producer
        if node is None or not (node.name == "sub" or node.rule.moves):
            return None
        if any(keys in axes.get(other, ()) for other in node.inputs[1:]):
            return None
        path.add(node)
        value = node.inputs[0]
    is_alone = all(value.producer in path for value in after if keys in axes[value])
    return rows if is_alone else None


def _is_finite_at_zero(node: Node) -> bool:
    """Returns whether a function of scores, and its derivative, are finite where scores are zeros.

    Those of padded queries and keys are, until -inf is added.
    """
    rule = node.rule
    number_last = not any(map(shape_of, node.inputs[1:]))
    is_with_number = number_last or (node.name != "div" and not shape_of(node.inputs[0]))
    return rule.moves or rule.casts or rule.bounded or (rule.affine and is_with_number)


class _Side(NamedTuple):
    """What one operand of a product gives to the axes of its result."""

    places: tuple[int, ...]  # of these axes in the result
    axes: tuple[int, ...]  # the same in the operand


def _sides_of(product: Node) -> tuple[_Side, _Side]:
    summed, shared = product.params["dimension_numbers"]
    free = [
        tuple(i for i in range(value.aval.ndim) if i not in (*own, *both))
        for value, own, both in zip(product.inputs, summed, shared, strict=True)
    ]
    start, middle = len(shared[0]), len(shared[0]) + len(free[0])
    end = middle + len(free[1])
    return _Side(tuple(range(start, middle)), free[0]), _Side(tuple(range(middle, end)), free[1])


def _pads_of(before: Node, after: Node, weights: Labelled) -> tuple[Pads, Pads] | None:
    """Returns which axes of their operands two products pad; None if nothing is to be padded.

    Args:
      before: the product that gives the scores, whose axes the labels count.
      after: the one that reads the weights.
    """
    scores, sides, keys = before.outputs[0].aval, _sides_of(before), weights.axes[-1]
    of_keys = next((i for i, side in enumerate(sides) if side.places == keys != ()), None)
    if of_keys is None or has_symbols(tuple(scores.shape[i] for s in sides for i in s.places)):
        return None
    queries = sides[1 - of_keys]
    number = math.prod(scores.shape[i] for i in queries.places)
    if number == 1:  # a product with a vector, which XLA does not pad
        return None
    pads: list[tuple[int, ...]] = [(), ()]
    lengths = []
    if scores.shape[keys[0]] % MULTIPLE:
        pads[of_keys] = sides[of_keys].axes
        lengths.append(scores.shape[keys[0]])
    row = max(queries.places, key=scores.shape.__getitem__)
    if number % MULTIPLE:
        pads[1 - of_keys] = (queries.axes[queries.places.index(row)],)
        lengths.append(scores.shape[row])
    # What may lie along an axis of a mesh is not padded.
    devices = [n for n in scores.sharding.mesh.shape.values() if n > 1]
    if not lengths or any(length % n == 0 for length in lengths for n in devices):
        return None
    own = after.inputs.index(weights.value)
    summed, shared = after.params["dimension_numbers"]
    is_of_rows = tuple(summed[own]) == (len(weights.axes) - 1,)
    is_batch = any(weights.axes[i] == (row,) for i in shared[own])
    if after.inputs.count(weights.value) > 1 or not is_of_rows or is_batch:
        return None
    of_values = tuple(summed[1 - own]) if pads[of_keys] else ()
    return tuple(pads), ((), of_values) if own == 0 else (of_values, ())
