"""The operations of a plan, at any depth, and the dtypes that they run in.

What says that autocast lowered no product at all stands here too.
"""

import collections
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from jmp import _jax_compat
from jmp.autocasting._equations import is_inner_product
from jmp.autocasting._graph import FULL, HALF, Node
from jmp.autocasting._islands import Island
from jmp.autocasting._loops import turns
from jmp.autocasting._plan import Plan
from jmp.autocasting._precision import asked_for
from jmp.autocasting._regions import AUTOCAST, FULL_PRECISION
from jmp.autocasting._registry import NO_RULE, Category, rule_for

WIDE = frozenset({"float32", "float64", "complex64", "complex128"})


class NoHalfProductWarning(UserWarning):
    """A function has products, and a half policy lowered none of them."""


class Operation(NamedTuple):
    """One equation that stands in a plan, or inside a node that is bound as a whole.

    Attributes:
      equation: the jaxpr's.
      node: the plan's node; `equation` is its own, or stands inside it.
      scope: its name stack from the outermost level down.
      times: how often it runs, turns of loops included.
      dtypes_in, dtypes_out: of its floating operands as they are read, and results as stored.
    """

    equation: Any
    node: Node
    scope: Any
    times: int
    dtypes_in: list[str]
    dtypes_out: list[str]


def operations_of(plan: Plan, times: int = 1) -> Iterator[Operation]:
    """Yields the operations of a plan, nested ones included."""
    for step in plan.steps:
        if isinstance(step, Island):
            for node in step.nodes:
                yield from _operations_of_node(node, plan, times, FULL)
        else:
            yield from _operations_of_node(step, plan, times, None)


def _operations_of_node(
    node: Node, plan: Plan, times: int, inside: str | None
) -> Iterator[Operation]:
    count = turns(node) if node.name == "scan" else 1
    if node.mode == "nested":
        for inner in node.inner if isinstance(node.inner, list) else [node.inner]:
            yield from operations_of(inner.plan, times * count)
        return
    if any(True for _ in _jax_compat.inner_jaxprs(node.equation)):
        # Bound as a whole, in the dtypes it was traced with: a region, a custom derivative.
        for jaxpr in _jax_compat.inner_jaxprs(node.equation):
            yield from _operations_as_written(jaxpr, node, node.scope, times * count)
        return
    half = str(plan.context.settings.compute_dtype)
    read = inside or (half if node.mode == HALF else FULL)
    dtypes_in = [read if value.is_float32 else _dtype(value) for value in node.inputs]
    dtypes_out = [str(v.dtype) if v.is_float32 else _dtype(v) for v in node.outputs]
    yield Operation(node.equation, node, node.scope, times, *_named(dtypes_in, dtypes_out))


def _operations_as_written(jaxpr: Any, node: Node, outer: Any, times: int) -> Iterator[Operation]:
    for equation in jaxpr.eqns:
        inner = list(_jax_compat.inner_jaxprs(equation))
        count = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        scope = outer + equation.source_info.name_stack
        for nested in inner:
            yield from _operations_as_written(nested, node, scope, count)
        if not inner:
            dtypes = [[_dtype(v) for v in side] for side in (equation.invars, equation.outvars)]
            yield Operation(equation, node, scope, times, *_named(*dtypes))


def _named(*sides: list[str]) -> Iterator[list[str]]:
    return (list(dict.fromkeys(filter(None, dtypes))) for dtypes in sides)


def _dtype(value: Any) -> str:
    """Returns the name of a floating or complex dtype; "" for any other."""
    dtype = getattr(value.aval, "dtype", None)
    return str(dtype) if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) else ""


def is_product(equation: Any) -> bool:
    """Returns whether an equation is a product by the op table; an inner product is a sum."""
    name = equation.primitive.name
    return rule_for(name).category is Category.LOW and not is_inner_product(equation)


def warn_if_no_product_is_half(plan: Plan, name: str) -> bool:
    """Warns of a plan whose products are all float32, unless autocast's caller asked for it.

    The caller asks with `rules=`, `full=`, `full_precision` and an autocast inside.

    Returns: whether it warned.
    """
    reasons: collections.Counter[str] = collections.Counter()
    is_surprise = False
    for operation in operations_of(plan):
        if is_product(operation.equation) and operation.dtypes_in:
            if not WIDE.issuperset(operation.dtypes_in):
                return False
            reasons[_reason(operation)] += 1
            is_surprise |= not _is_callers_wish(operation, plan)
    if is_surprise:
        (why, first), *others = reasons.most_common()
        listed = [f"{first} product{'s' * (first > 1)}: {why}"]
        listed += [f"{count}: {why}" for why, count in others]
        warnings.warn(
            f"autocast computes no product of {name!r} in {plan.context.settings.compute_dtype}. "
            f"{'; '.join(listed)}. jmp.diagnostics.precision_report says where each one stands.",
            NoHalfProductWarning,
            stacklevel=6,  # the call of the wrapped function
        )
    return is_surprise


def _reason(operation: Operation) -> str:
    node = operation.node
    if node.region.is_full:
        return node.why
    if asked := asked_for(operation.equation):
        return asked
    if node.rule != NO_RULE:
        return node.why
    return f"inside {node.name.removesuffix('_call')}, which runs as written"


def _is_callers_wish(operation: Operation, plan: Plan) -> bool:
    if operation.node.region.is_full:
        return True
    if plan.context.settings.overrides_rule(operation.equation.primitive.name):
        return True
    return bool({AUTOCAST, FULL_PRECISION} & set(_jax_compat.scope_names(operation.scope)))
