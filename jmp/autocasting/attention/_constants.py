"""Numbers that a program computes from nothing but itself, such as causal masks.

They are computed when the program is planned, along the axes that they differ in: what only
repeats stays of length one, so that a mask of a whole batch is no larger than that of one example.
"""

import math
from collections.abc import Iterator
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

Computed = dict[Node, "np.ndarray[Any, Any] | None"]


def constant_of(value: Value, found: Computed | None = None) -> "np.ndarray[Any, Any] | None":
    """Returns the numbers of a value; None if they depend on an argument, or are too many.

    Returns: an array of the value's rank, whose axes are of its length or, where it repeats, one.
    """
    found = {} if found is None else found
    held, node = _held(value), value.origin.producer
    if held is not None:
        return np.asarray(held)
    if node is None:
        return None
    if node not in found:
        found[node] = _computed(node, found) if _is_computable(node) else None
    return found[node]


def _is_computable(last: Node) -> bool:
    """Returns whether a node depends on no argument; nothing is computed to find out."""

    def sources(node: Node | None) -> list[Node | None]:  # None of what is an argument
        inputs = () if node is None else node.inputs
        return [value.origin.producer for value in inputs if _held(value) is None]

    nodes: Iterator[Node | None] = reached([last], sources)
    return all(
        node is not None
        and len(node.outputs) == 1
        and not node.equation.effects
        and not node.rule.draws_bits
        and not _jax_compat.holds_functions(node.equation)
        for node in nodes
    )


def _held(value: Value) -> Any:
    """Returns the numbers of a value that the program holds; None if it has to compute them."""
    value = value.origin
    return value.known.array if value.held is None else value.held


def _computed(node: Node, found: Computed) -> "np.ndarray[Any, Any] | None":
    known = (constant_of(value, found) for value in node.inputs)
    operands = [numbers for numbers in known if numbers is not None]
    if len(operands) < len(node.inputs):
        return None
    if node.rule.repeats:
        return _repeated(operands[0], node)
    if node.name == "transpose":
        return operands[0].transpose(node.params["permutation"])
    if keeps_places(node):
        return operands[0]
    if is_pointwise(node):
        shape = np.broadcast_shapes(*(x.shape for x in operands))
        operands = [np.broadcast_to(x, shape) if x.ndim else x for x in operands]
    else:
        shape, *shapes = map(shape_of, (*node.outputs, *node.inputs))
        if any(map(has_symbols, (shape, *shapes))):
            return None
        operands = [np.broadcast_to(x, own) for x, own in zip(operands, shapes, strict=True)]
    if max(math.prod(shape), *(x.size for x in operands), 0) > LARGEST:
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
