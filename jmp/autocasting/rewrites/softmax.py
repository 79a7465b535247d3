"""Softmax: on GPUs padded, its derivative from its half result; on TPUs half differences inside.

On a GPU a softmax before a product takes its derivative from the half result. A product keeps its
operands for the backward pass, so that half result is kept whatever is done about the softmax
itself. Its derivative needs nothing else. So neither are the scores kept nor the rows computed
again.

With y a row of the result, the tangent of y is y * (t - sum(y * t)) if y adds up to one, which it
does not quite once it is rounded. Where one score is far above the others that error is up to 25
times that of all other roundings (64 keys, one score larger by 8, bfloat16), and half models
written by hand have it. Here a row is divided by its sum, in float32; so the rows of the gradient
add up to zero. A row divided by its sum is also the pattern by which XLA finds a softmax, for which
it makes a kernel that reads each row once, and it fuses the rest of the derivative with that.

On a TPU XLA computes exponentials again wherever they are read, in the fusions of the products
around a softmax: nothing but half scores is stored, and a derivative from the half result would
only add sums. Where the scores less their maximum are half, and their masks were applied in half
before, XLA computes maximum, difference and sums in the kernel of the product, and stores the
difference in place of the scores; else it reads the scores twice more for them. A difference of
half numbers within a factor of two of each other is exact. Otherwise it is rounded once, by about
as much as the scores were.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmp import _jax_compat
from jmp._jax_compat import Params
from jmp.autocasting._flow import is_row_reduction
from jmp.autocasting._graph import Graph, Node, Value, downstream
from jmp.autocasting._islands import key_of
from jmp.autocasting._kinds import Level
from jmp.autocasting._numbers import Shape, has_symbols, shape_of
from jmp.autocasting._registry import Category
from jmp.autocasting._steps import (
    Arithmetic,
    Island,
    Pads,
    Recompute,
    Rewrite,
    Single,
    Step,
    Surroundings,
    nodes_of,
)
from jmp.autocasting.attention._axes import (
    Axes,
    Labelled,
    is_pointwise,
    keeps_places,
    own_axes,
)
from jmp.autocasting.rewrites.one_pass import Powers, powers_of
from jmp.dtypes import FLOAT32

KEPT_WEIGHTS = "autocast_softmax"
# The length of a TPU's vectors. Of rows that are no multiple of it (197 tokens of a ViT) XLA makes
# a kernel of their own, with which a step moves 9 % more bytes.
VECTOR = 128
# What a GPU's half products have rows and columns of: XLA pads others to the next multiple.
MULTIPLE = 8


def softmax_from_half_result(node: Node, around: Surroundings) -> Rewrite | None:
    """Rewrites the last step of a softmax that leaves in half, all of it in one island."""
    is_candidate = around.platform == "gpu" and around.recompute is Recompute.RECOMPUTE
    if node.name != "div" or not is_candidate:
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
    # There is one sum for each row, and in the rows' order.
    if node.inputs[1].aval.shape != (*shape[:rows], *(1 for _ in shape[rows:])):
        return None
    why = "a softmax before a product: its derivative is taken from its half result"
    run = functools.partial(softmax, rows, around.half)
    return Rewrite(why, (exp.inputs[0],), run, KEPT_WEIGHTS)


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


def softmax_of_half_scores(node: Node, around: Surroundings) -> Rewrite | None:
    """Rewrites masks and scales of half scores, and what a maximum leaves of them, for TPUs."""
    # No TPU multiplies float16, in which a mask might not lie below all scores.
    is_candidate = around.platform == "tpu" and around.half != np.float16
    if not is_candidate or around.recompute is not Recompute.RECOMPUTE:
        return None
    if not (node.rule.affine or node.rule.masks):  # before the island is searched
        return None
    for powers in filter(None, (powers_of(other, around) for other in around.inside)):
        exact = _exact_steps(powers, around)
        results = downstream(powers.shifted, around.inside.__contains__)
        if exact is None or around.in_half.isdisjoint(results):
            continue
        if node in exact:
            why = "half scores, masked or scaled by a power of two: exact in half"
            return Rewrite(why, node.inputs, functools.partial(_run_in_half, node, around.half))
        length = powers.rows.aval.shape[-1]
        if powers.shifted in node.outputs and isinstance(length, int) and length % VECTOR == 0:
            why = "half scores less their maximum, in half: XLA computes it behind the product"
            return Rewrite(why, node.inputs, functools.partial(_difference, around.half))
    return None


def _exact_steps(powers: Powers, around: Surroundings) -> list[Node] | None:
    """Returns what masks and scales scores that enter in half, for a softmax alone; or None."""
    difference = powers.shifted.producer
    readers = {difference, powers.maxima}
    if difference is None or not _is_left(difference):
        return None
    if not _is_maximum(difference.inputs[1], powers.maxima, around):
        return None
    found: list[Node] = []
    scores = powers.rows
    while scores not in around.entering:
        node = scores.producer
        # What else reads masked scores, such as a comparison, sees the mask as it was written.
        is_read_here = scores not in around.leaving and readers.issuperset(scores.users)
        if node is None or node not in around.inside or not is_read_here:
            return None
        varying = [v for v in node.inputs if v.is_float32 and v.constant is None]
        if not _is_left(node) or not _is_exact_in_half(node) or len(varying) != 1:
            return None
        found.append(node)
        readers, (scores,) = {node}, varying
    return found


def _is_left(node: Node) -> bool:
    """Returns whether the user left the dtype of a node to autocast."""
    return not node.region.in_float32 and node.rule.category is not Category.FULL


def _is_maximum(value: Value, maxima: Node, around: Surroundings) -> bool:
    """Returns whether a value is a maximum, read here alone, into which no gradient flows."""
    is_stopped = False
    while value not in around.leaving and len(value.users) == 1:
        node = value.producer
        if node is None or node is maxima:
            return is_stopped and node is maxima
        operands = [operand for operand in node.inputs if operand.constant != -np.inf]
        is_first = node.name == "max" and len(operands) == 1  # of -inf and the maximum
        is_stopped |= node.name == "stop_gradient"
        if not (is_first or node.rule.moves or node.name == "stop_gradient"):
            return False
        value = operands[0]
    return False


def _is_exact_in_half(node: Node) -> bool:
    """Returns whether a node masks by a constant, or scales down by a power of two.

    Half scores lose nothing by it that a softmax would see: a power of two changes no digits but
    those of subnormal numbers, and a rounded mask of -1e9 lies as far below all scores.
    """
    operands = node.inputs if node.name == "mul" else node.inputs[1:]
    constants = [value.constant for value in operands if value.constant is not None]
    if len(constants) != 1:
        return False
    if node.name == "select_n":
        return len(operands) == 2
    digits, exponent = np.frexp(constants[0])
    scales_down = {"mul": exponent <= 1, "div": exponent >= 1}
    return bool(abs(digits) == 0.5 and scales_down.get(node.name))


def _run_in_half(node: Node, half: Any, *operands: Any) -> Any:
    """Returns the result of `node`, in float32, computed in half."""
    pairs = zip(node.inputs, operands, strict=True)
    halves = [
        _operand_in_half(x, half, v.constant is not None) if v.is_float32 else x for v, x in pairs
    ]
    (result,) = _jax_compat.bind(node.equation.primitive, halves, node.params)
    return result.astype(FLOAT32)


def _operand_in_half(array: Any, half: Any, is_constant: bool) -> Any:
    """Returns an array in half; of a constant float32's lowest number is not -inf, but finite."""
    limit = float(jnp.finfo(half).max)
    if is_constant:
        array = jnp.where(jnp.isinf(array), array, jnp.clip(array, -limit, limit))
    return jnp.asarray(array, half)


def _difference(half: Any, rows: Any, shift: Any) -> Any:
    return (rows.astype(half) - shift.astype(half)).astype(FLOAT32)


# Padding, on GPUs.


def pad_softmaxes(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level; softmaxes over odd lengths are padded, on GPUs.

    Where rows or columns of a half product are no multiple of eight, XLA pads its operands for
    cuBLAS and cuts its result. The scores and the weights of an attention are large, and each of
    them, and each of their cotangents, is written once more by a kernel that only pads. Here the
    queries, keys and values are padded, which are small. Then the scores come out padded, and the
    kernel of the softmax reads padded scores and writes padded weights: behind the end of a row
    they are zeros, which add nothing to the result.
    """
    if level.context.request.platform != "gpu" or not any(map(_kept_divisions, steps)):
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
    pads = _pads_of(before.node, after.node, Labelled(weights, axes[weights])) if rows else None
    if pads is None:
        return {}
    form = island.rewrites[division]
    form = form._replace(why=f"{form.why}; its rows are padded, so that XLA pads no scores")
    padded = island._replace(rewrites={**island.rewrites, division: form}, padded=rows)
    return {
        id(before): before._replace(pads=pads[0]),
        id(island): padded._replace(key=key_of(padded)),
        id(after): after._replace(pads=pads[1], cuts=True),
    }


def _may_pad(step: Step | None) -> TypeGuard[Single]:
    """Returns whether a step is a half product whose operands may be padded where it stands."""
    if not isinstance(step, Single) or step.arithmetic is not Arithmetic.HALF:
        return False
    mesh = step.node.outputs[0].aval.sharding.mesh
    is_plain = step.in_float8 is None and step.rounds is None
    asks_for_sharding = mesh.explicit_axes or mesh.manual_axes
    return step.node.name == "dot_general" and is_plain and not asks_for_sharding


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


# How it runs.


def multiply_padded(
    run: Callable[[Sequence[Any]], list[Any]],
    operands: Sequence[Any],
    pads: Pads,
    shape: Shape | None,
) -> list[Any]:
    """Returns a product of operands that are padded with zeros to multiples of eight.

    Args:
      run: computes it.
      pads: along which axes each operand is padded.
      shape: what the result is cut to; None leaves it padded.
    """
    results = run([_padded(x, axes) for x, axes in zip(operands, pads, strict=True)])
    return results if shape is None else [x[tuple(map(slice, shape))] for x in results]


def _padded(array: Any, axes: Sequence[int]) -> Any:
    added = [(0, -n % MULTIPLE if i in axes else 0, 0) for i, n in enumerate(array.shape)]
    return lax.pad(array, jnp.zeros([], array.dtype), added) if axes else array


def lowered_behind(rows: Any, length: int) -> Any:
    """Returns rows of this length; if they are padded, in float32, and behind their ends -inf.

    It is added: a selection has a derivative that selects, which XLA would try to fuse into the
    kernels of the backward pass, and a step would compile for 15 % longer into the same kernels.
    """
    if rows.shape[-1] == length:
        return rows
    places = lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 1)
    return rows.astype(FLOAT32) + jnp.where(places < length, FLOAT32.type(0), -jnp.inf)


def repeated_padded(array: Any, params: Params) -> Params:
    """Returns the parameters of `broadcast_in_dim` for an array that may be padded."""
    shape = list(params["shape"])
    for length, place in zip(array.shape, params["broadcast_dimensions"], strict=True):
        shape[place] = length  # what is repeated along an axis of the scores is not padded
    return {**params, "shape": tuple(shape)}
