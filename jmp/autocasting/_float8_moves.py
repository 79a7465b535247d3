"""What devices send each other on the way to float8 products: float8 is sent.

A shard is rounded to float8 before it is gathered, with the scale that all devices share, so that
the numbers are those of what was gathered and then rounded. The half array is moved beside it, for
the sake of its transpose alone: its gradient adds up over devices as that of half does. What that
move computes nothing reads, and no compiled program keeps it.
"""

import functools
from collections.abc import Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting._graph import Graph, Node
from jmp.autocasting._numbers import dtype_of
from jmp.autocasting._registry import Category, rule_for
from jmp.autocasting._sending import sends
from jmp.autocasting._steps import Single, Step
from jmp.dtypes import FLOAT32

WHY_SENT_IN_FLOAT8 = "float8 products alone read it afterwards: rounded to float8 before it is sent"

ROUNDED_NO_FURTHER = (FLOAT32, np.dtype(jnp.bfloat16))  # float8's scales are bfloat16


def send_in_float8(steps: Sequence[Step], graph: Graph) -> list[Step]:
    """Returns the steps; those that send what float8 products alone read are marked so."""
    singles = {step.node: step for step in steps if isinstance(step, Single)}
    readers = {node for node, step in singles.items() if step.in_float8 is not None}
    if not readers:
        return list(steps)
    for node in reversed(graph.nodes):
        if node in singles and _moves(node) and _is_read_by(node, readers, graph):
            readers.add(node)
    sent: set[Node] = set()
    for node in graph.nodes:  # what stands before the first that sends is moved as ever
        is_sent = _sends(node) or node.inputs[:1] and node.inputs[0].producer in sent
        if node in readers and not node.is_product and is_sent:
            sent.add(node)
    return [
        _marked(step) if isinstance(step, Single) and step.node in sent else step for step in steps
    ]


def _marked(step: Single) -> Single:
    return step._replace(why=WHY_SENT_IN_FLOAT8, moves_float8=True)


def _is_read_by(node: Node, readers: Set[Node], graph: Graph) -> bool:
    """Returns whether some nodes are all that reads the results of a node."""
    users = {user for value in node.outputs for user in value.users}
    is_result = any(value is output for value in node.outputs for output in graph.outputs)
    return bool(users) and users <= readers and not is_result


def _moves(node: Node) -> bool:
    if node.region.in_float32:
        return False
    is_full = node.rule.category is Category.FULL  # by the user's word
    is_moved = node.rule.hands_on or sends(node) or is_cast(node.equation)
    return (is_moved and not is_full) or bool(chain_in(node.equation))


def _sends(node: Node) -> bool:
    return sends(node) or bool(chain_in(node.equation))


def is_cast(equation: Any) -> bool:
    """Returns whether an equation casts between dtypes that hold the scales of float8."""
    if equation.primitive.name != "convert_element_type":
        return False
    return {dtype_of(equation.invars[0]), equation.params["new_dtype"]} <= {*ROUNDED_NO_FURTHER}


def chain_in(equation: Any) -> list[Any]:
    """Returns the equations of a custom_vjp that sends its operand; empty if it does more.

    So `jmp.gather` is written, and gathers whose gradients are added up in a dtype of their own.
    """
    if equation.primitive.name != "custom_vjp_call" or len(equation.invars) != 1:
        return []
    jaxpr, constants = _jax_compat.open_jaxpr(_jax_compat.called(equation.params))
    current = jaxpr.invars
    for inner in jaxpr.eqns:
        rule = rule_for(inner.primitive.name)
        if inner.invars != current or not (rule.hands_on or rule.sends or is_cast(inner)):
            return []
        current = inner.outvars
    is_sent = any(rule_for(inner.primitive.name).sends for inner in jaxpr.eqns)
    is_chain = is_sent and current == jaxpr.outvars and not constants
    return list(jaxpr.eqns) if is_chain else []


def move(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs an equation that moves its first operand on float8 numbers."""
    if is_cast(equation):
        return list(operands)
    if chain := chain_in(equation):
        return functools.reduce(lambda moved, inner: move(inner, moved), chain, list(operands))
    if rule_for(equation.primitive.name).sends:
        operands = lax.optimization_barrier(operands)  # as of what is sent in half, in `_emit`
    return _jax_compat.bind(equation.primitive, operands, equation.params)
