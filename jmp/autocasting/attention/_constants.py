"""The numbers of values that depend on no argument of the program, such as causal masks.

They are computed when the program is planned. Along an axis on which a value only repeats they have
length one, so that the mask of a batch is no larger than the mask of one example.
"""

import math
from typing import Any

import jax
import numpy as np

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._numbers import has_symbols, shape_of
from jmp.autocasting.attention._axes import is_pointwise, keeps_places

# Larger ones are computed when the program runs. A causal mask over 8192 tokens has 2**26 numbers,
# which takes 2 s and 0.8 GB on two cores; one over 4096, 0.25 s.
LARGEST = 1 << 26

Numbers = np.ndarray[Any, Any]


def constant_of(value: Value) -> Numbers | None:
    """Returns the numbers of a value; None if they depend on an argument, or are too many.

    Returns: an array of the value's rank. Its axes have the value's lengths, or length one if the
      value repeats along them.
    """

    def computed_operands(value: Value) -> list[Value]:
        inputs = () if value.producer is None else value.producer.inputs
        return [operand.origin for operand in inputs if _held(operand) is None]

    if _held(value) is None:
        # Nothing is computed to find out whether everything can be.
        needed = reached([value.origin], computed_operands)
        if not all(map(_is_computable, needed)):
            return None
    return _computed(value, {})


def _held(value: Value) -> Any:
    """Returns the numbers of a value that the program holds; None if it has to compute them."""
    value = value.origin
    return value.known.array if value.literal is None else value.literal


def _is_computable(value: Value) -> bool:
    """Returns whether a value is no argument, and its node depends on its operands only."""
    node = value.producer
    return (
        node is not None
        and len(node.outputs) == 1
        and not node.equation.effects
        and not node.rule.draws_bits
        and not node.holds_functions
    )


def _computed(value: Value, found: dict[Node, Numbers | None]) -> Numbers | None:
    held, node = _held(value), value.origin.producer
    if held is not None:
        return np.asarray(held)
    if node is None:
        return None
    if node not in found:
        operands = [_computed(operand, found) for operand in node.inputs]
        known = [numbers for numbers in operands if numbers is not None]
        found[node] = _result_of(node, known) if len(known) == len(operands) else None
    return found[node]


def _result_of(node: Node, operands: list[Numbers]) -> Numbers | None:
    shape = shape_of(node.outputs[0])
    if node.rule.repeats:
        (numbers,), places = operands, node.params["broadcast_dimensions"]
        lengths = dict(zip(places, numbers.shape, strict=True))
        return numbers.reshape([lengths.get(place, 1) for place in range(len(shape))])
    if node.name == "transpose":
        return operands[0].transpose(node.params["permutation"])
    if keeps_places(node):
        return operands[0]
    if is_pointwise(node):
        shape = np.broadcast_shapes(*(x.shape for x in operands))
        operands = [np.broadcast_to(x, shape) if x.ndim else x for x in operands]
    else:
        shapes = list(map(shape_of, node.inputs))
        if any(map(has_symbols, (shape, *shapes))):
            return None
        operands = [np.broadcast_to(x, own) for x, own in zip(operands, shapes, strict=True)]
    if max(math.prod(shape), *(x.size for x in operands), 0) > LARGEST:
        return None
    try:
        with jax.ensure_compile_time_eval():
            (result,) = _jax_compat.bind(node.equation.primitive, operands, node.params)
            return np.asarray(result)
    except Exception:  # it needs something that is not there yet, such as the axes of a mesh
        return None
