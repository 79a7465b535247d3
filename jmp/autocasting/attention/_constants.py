"""Numbers that a program computes from nothing but itself, such as causal masks.

They are computed when the program is planned, along the axes that they differ in: what only
repeats stays of length one, so that a mask of a whole batch is no larger than that of one example.
"""

import math
from typing import Any

import jax
import numpy as np

from jmp import _jax_compat
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._numbers import has_symbols, shape_of
from jmp.autocasting.attention._axes import is_pointwise, keeps_places

# Larger ones are computed when the program runs. A causal mask over 8192 tokens has 2**26 numbers,
# which takes 2 s and 0.8 GB on two cores; one over 4096, 0.25 s.
LARGEST = 1 << 26

Found = dict[Node, "np.ndarray[Any, Any] | None"]


def constant_of(value: Value, found: Found | None = None) -> "np.ndarray[Any, Any] | None":
    """Returns the numbers of a value; None if they depend on an argument, or are too many.

    Returns: an array of the value's rank, whose axes are of its length or, where it repeats, one.
    """
    found = {} if found is None else found
    value = value.origin
    if value.held is not None:
        return np.asarray(value.held)
    if value.known.array is not None:
        return np.asarray(value.known.array)
    node = value.producer
    if node is None:
        return None
    if node not in found:
        found[node] = _computed(node, found) if _is_computable(node) else None
    return found[node]


def _is_computable(last: Node) -> bool:
    """Returns whether a node depends on no argument; nothing is computed to find out."""
    stack, seen = [last], {last}
    while stack:
        node = stack.pop()
        if len(node.outputs) != 1 or node.equation.effects or node.rule.draws_bits:
            return False
        for value in (operand.origin for operand in node.inputs):
            if value.held is not None or value.known.array is not None:
                continue
            if value.producer is None:
                return False
            if value.producer not in seen:
                seen.add(value.producer)
                stack.append(value.producer)
    return True


def _computed(node: Node, found: Found) -> "np.ndarray[Any, Any] | None":
    operands = []
    for value in node.inputs:
        numbers = constant_of(value, found)
        if numbers is None:
            return None
        operands.append(numbers)
    shape = shape_of(node.outputs[0])
    if node.rule.repeats:
        return _repeated(operands[0], node)
    if node.name == "transpose":
        return operands[0].transpose(node.params["permutation"])
    if keeps_places(node):
        return operands[0]
    shapes = [x.shape for x in operands] if is_pointwise(node) else []
    if shapes:
        shape = np.broadcast_shapes(*shapes)
        operands = [np.broadcast_to(x, shape) if x.ndim else x for x in operands]
    else:
        shapes = [shape, *map(shape_of, node.inputs)]
        if any(map(has_symbols, shapes)):
            return None
        operands = [np.broadcast_to(x, own) for x, own in zip(operands, shapes[1:], strict=True)]
    if max(math.prod(shape), *(x.size for x in operands), 0) > LARGEST:
        return None
    if _jax_compat.holds_functions(node.equation):
        return None
    try:
        with jax.ensure_compile_time_eval():
            (result,) = _jax_compat.bind(node.equation.primitive, operands, node.params)
            return np.asarray(result)
    except Exception:  # it needs what is not there yet, such as the axes of a mesh
        return None


def _repeated(numbers: "np.ndarray[Any, Any]", node: Node) -> "np.ndarray[Any, Any]":
    shape = [1] * len(shape_of(node.outputs[0]))
    for place, length in zip(node.params["broadcast_dimensions"], numbers.shape, strict=True):
        shape[place] = length
    return numbers.reshape(shape)
