"""The numbers of values that depend on no argument of the program, such as causal masks.

They are computed when the program is planned. Along an axis on which a value only repeats they have
length one, so that the mask of a batch is no larger than the mask of one example.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._numbers import has_symbols, shape_of

# Larger ones are computed when the program runs. A causal mask over 8192 tokens has 2**26 numbers,
# which NumPy computes in 0.3 s; one over 4096 tokens takes 0.04 s.
LARGEST = 1 << 26

Numbers = np.ndarray[Any, Any]

# Most masks and indices are made of these. NumPy computes the same numbers at once; JAX would
# compile each operation, for the default device.
BY_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.bitwise_not,
    "floor": np.floor,
    "neg": np.negative,
    "sign": np.sign,
    "div": lambda left, right: _quotient(left, right),
    "rem": lambda left, right: np.where(right == 0, left, np.fmod(left, right)),
    "select_n": lambda which, first, second: np.where(which, second, first),
}
MOVED_BY_NUMPY: dict[str, Callable[..., Numbers | None]] = {
    "iota": lambda node: _counted_along(shape_of(node.outputs[0]), node.params["dimension"]),
    "concatenate": lambda node, *parts: np.concatenate(parts, node.params["dimension"]),
    "convert_element_type": lambda _, operand: operand,
    "reshape": lambda node, operand: operand.reshape(shape_of(node.outputs[0])),
    "cumsum": lambda node, operand: _running_sums(operand, **node.params),
    "scatter-add": lambda node, *operands: _counted(node, *operands),
}
# Of these kinds NumPy computes other numbers, such as sums in another order.
NOT_OF = {"cumsum": "f", "scatter-add": "f", "sign": "f", "rem": "f"}


def constant_of(value: Value) -> Numbers | None:
    """Returns the numbers of a value; None if they depend on an argument, or are too many.

    Returns: an array of the value's rank. Its axes have the value's lengths, or length one if the
      value repeats along them.
    """

    def computed_operands(value: Value) -> list[Value]:
        inputs = () if value.producer is None else value.producer.inputs
        return [_outside(operand) for operand in inputs if _held(operand) is None]

    if _held(value) is None:
        # Nothing is computed to find out whether everything can be.
        if not all(map(_is_computable, reached([_outside(value)], computed_operands))):
            return None
    return _computed(value, {})


def _outside(value: Value) -> Value:
    """Returns what a value is where it comes from; itself if that is a part, as in a shard_map."""
    return value.origin if shape_of(value.origin) == shape_of(value) else value


def _held(value: Value) -> Any:
    """Returns the numbers of a value that the program holds; None if it has to compute them."""
    if (value := _outside(value)).outside is not None:
        return None
    return value.known.array if value.literal is None else value.literal


def _is_computable(value: Value) -> bool:
    """Returns whether a value is no argument, and its node depends on its operands only."""
    node = value.producer
    if node is None or node.equation.effects or node.rule.draws_bits:
        return False
    return not node.holds_functions or node.rule.joins  # as a scatter does


def _computed(value: Value, found: dict[Node, list[Numbers]]) -> Numbers | None:
    held, node = _held(value), _outside(value).producer
    if held is not None:
        return np.asarray(held, value.dtype)
    if node is None:
        return None
    if node not in found:
        operands = [_computed(operand, found) for operand in node.inputs]
        known = [numbers for numbers in operands if numbers is not None]
        found[node] = _results_of(node, known) if len(known) == len(operands) else []
    return found[node][node.outputs.index(_outside(value))] if found[node] else None


def _results_of(node: Node, operands: list[Numbers]) -> list[Numbers]:
    """Returns the results of a node; none if they cannot be computed here."""
    shape = shape_of(node.outputs[0])
    if node.rule.repeats:
        (numbers,), places = operands, node.params["broadcast_dimensions"]
        lengths = dict(zip(places, numbers.shape, strict=True))
        return [numbers.reshape([lengths.get(place, 1) for place in range(len(shape))])]
    if node.name == "transpose":
        return [operands[0].transpose(node.params["permutation"])]
    if keeps_places(node):
        return operands[:1]
    if is_pointwise(node):
        shape = np.broadcast_shapes(*(x.shape for x in operands))
        operands = [np.broadcast_to(x, shape) if x.ndim else x for x in operands]
    else:
        shapes = list(map(shape_of, node.inputs))
        if any(map(has_symbols, (shape, *shapes))):
            return []
        operands = [np.broadcast_to(x, own) for x, own in zip(operands, shapes, strict=True)]
    if max(math.prod(shape), *(x.size for x in operands), 0) > LARGEST:
        return []
    with np.errstate(all="ignore"):  # infinities are as good as other numbers
        if (found := _by_numpy(node, operands)) is not None:
            return [found.astype(node.outputs[0].dtype)]
    try:
        with jax.ensure_compile_time_eval():
            results = _jax_compat.bind(node.equation.primitive, operands, node.params)
            return list(map(np.asarray, results))
    except Exception:  # it needs something that is not there yet, such as the axes of a mesh
        return []


def is_identity(node: Node) -> bool:
    """Returns whether a node and its derivative are the identity: a name, a cast to its dtype."""
    if node.name == "convert_element_type":
        return node.inputs[0].dtype == node.outputs[0].dtype
    others = ("transpose", "rev", "reshape", "stop_gradient")
    return node.rule.permutes and node.name not in others


def keeps_places(node: Node) -> bool:
    """Returns whether a node's result has the numbers of its operand, in their places."""
    return is_identity(node) or node.name == "stop_gradient"


def is_pointwise(node: Node) -> bool:
    """Returns whether each number of the result is computed from the numbers in its place."""
    rule, rank = node.rule, len(shape_of(node.outputs[0]))
    is_one_by_one = rule.fusible and (rule.cheap or rule.elementwise)
    return is_one_by_one and all(len(shape_of(value)) in (rank, 0) for value in node.inputs)


def _by_numpy(node: Node, operands: list[Numbers]) -> Numbers | None:
    kinds = {np.dtype(node.outputs[0].dtype).kind, *(x.dtype.kind for x in operands)}
    if not kinds <= {*"biuf"} or kinds & {*NOT_OF.get(node.name, "")}:
        return None
    if node.name == "select_n" and not (len(operands) == 3 and operands[0].dtype == bool):
        return None
    if node.name == "reshape" and node.params["dimensions"] is not None:
        return None
    if node.name == "convert_element_type" and not _holds(node.outputs[0].dtype, operands[0]):
        return None
    if node.name in MOVED_BY_NUMPY:
        return MOVED_BY_NUMPY[node.name](node, *operands)
    return np.asarray(BY_NUMPY[node.name](*operands)) if node.name in BY_NUMPY else None


def _holds(dtype: Any, numbers: Numbers) -> bool:
    """Returns whether NumPy casts numbers as JAX does: not those that an integer dtype lacks."""
    if numbers.dtype.kind != "f" or dtype.kind not in "iu":
        return True
    limits = np.iinfo(dtype)
    return bool(((numbers >= limits.min) & (numbers <= limits.max)).all())


def _quotient(left: Numbers, right: Numbers) -> Numbers:
    """Returns a quotient, of integers rounded towards zero; XLA divides by zero to all bits set."""
    if right.dtype.kind == "f":
        return np.divide(left, right)
    return np.where(right == 0, -np.ones_like(left), (left - np.fmod(left, right)) // right)


def _counted(node: Node, array: Numbers, places: Numbers, added: Numbers) -> Numbers | None:
    """Returns what is added up at places of one axis, as by `jnp.bincount`; None for other sums."""
    axes, mode = node.params["dimension_numbers"].inserted_window_dims, node.params["mode"]
    if (array.ndim, *axes) != (1, 0) or mode is lax.GatherScatterMode.CLIP:
        return None
    sums, places = array.copy(), places[..., 0]
    inside = (places >= 0) & (places < len(sums))  # the rest is dropped
    np.add.at(sums, places[inside], added[inside])
    return sums


def _running_sums(numbers: Numbers, axis: int, reverse: bool) -> Numbers:
    turned = np.flip(numbers, axis) if reverse else numbers
    sums = np.cumsum(turned, axis)
    return np.flip(sums, axis) if reverse else sums


def _counted_along(shape: tuple[int, ...], axis: int) -> Numbers:
    return np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
