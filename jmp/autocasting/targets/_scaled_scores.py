"""Scores of an attention that float16 may not hold: they are scaled before their product.

`q @ k.T / sqrt(d)` overflows before it is divided. The power of two of such a factor goes into the
operands, half into each: they are rounded after it, as the result was, so no digit changes but
those of subnormal numbers. Operands are divided by 16 at most, so that few become subnormal. An
island that makes an operand multiplies it before it is rounded. All that is done where the result
goes to a maximum, as that of a softmax does, or to another product: there a number that has become
subnormal is as good as zero. It is not done where a logarithm or a sum reads the result, nor in a
layer, whose input would be stored once more.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp._array_calls import replaced
from jmp.autocasting._facts import compared_values, read_otherwise_values
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import as_it_is
from jmp.autocasting._steps import Environment, Island, Rewrite, Single, Step, nodes_of

WHY_SCALED = (
    "the power of two of a factor behind it is applied before, so that it does not overflow"
)
WHY_REST = "the power of two of its number is multiplied before a product"
MOST_POWERS = 4  # of two, by which an operand is divided


@dataclasses.dataclass(frozen=True)
class ScaledProduct:
    """A lowering: a product of half operands that are multiplied by powers of two."""

    factors: tuple[float, ...]

    def __call__(self, step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
        """Returns the result of the step, scaled."""
        pairs = zip(operands, self.factors, strict=True)
        scaled = [x if factor == 1 else lax.mul(x, x.dtype.type(factor)) for x, factor in pairs]
        return as_it_is(step)(scaled)


class Scaling(NamedTuple):
    """A node that multiplies or divides the result of a product by a number of the program."""

    node: Node
    place: int  # of the number among its operands
    powers: int  # of two that go before the product

    @property
    def factors(self) -> tuple[float, float]:
        """The numbers that the operands of the product are multiplied by."""
        return 0.5 ** ((self.powers + 1) // 2), 0.5 ** (self.powers // 2)

    def rest(self, *operands: Any) -> Any:
        """Returns the result of the node, given its operands, without these powers."""
        number = self.node.inputs[self.place].constant or 0.0
        number *= 0.5**self.powers if self.node.name == "div" else 2.0**self.powers
        rest = np.asarray(number, operands[1 - self.place].dtype)
        read = replaced(operands, [self.place], [rest])
        (result,) = _jax_compat.bind(self.node.equation.primitive, read, self.node.params)
        return result


def scale_before(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level; float16 scores are scaled before their product."""
    if level.half != np.float16:
        return list(steps)
    outputs = level.graph.outputs
    found = [
        (step, scaling)
        for step in steps
        if _may_be_scaled(step) and (scaling := _scaling_behind(step.node, outputs))
    ]
    if not found:
        return list(steps)
    compared = compared_values(level.graph, [])
    others = read_otherwise_values(level.graph, outputs)
    current = {node: step for step in steps for node in nodes_of(step)}
    for product, scaling in found:
        (result,) = scaling.node.outputs
        behind = _with_rest(current[scaling.node], scaling)
        if behind is not None and (result in compared or result not in others):
            current.update(dict.fromkeys(nodes_of(behind), behind))
            factors = list(scaling.factors)
            for side, value in enumerate(product.node.inputs):
                step = current[value.producer] if value.producer in current else None
                island = _with_factor(step, value, factors[side], level)
                if island is not None:
                    factors[side] = 1.0
                    current.update(dict.fromkeys(island.nodes, island))
            lowering = ScaledProduct(tuple(factors)) if set(factors) != {1.0} else None
            why = f"{product.why}; {WHY_SCALED}"
            current[product.node] = product._replace(why=why, lowering=lowering)
    return list({id(step): step for step in current.values()}.values())


def _may_be_scaled(step: Step) -> TypeGuard[Single]:
    """Returns whether a step is a half product, bound as it is, and no layer.

    A layer multiplies results by a parameter: its operands are large.
    """
    if not (isinstance(step, Single) and step.is_half and step.lowering is None):
        return False
    if step.node.name != "dot_general":
        return False
    left, right = step.node.inputs
    return left.provenance == right.provenance and left.is_float32 and right.is_float32


def _with_rest(step: Step, scaling: Scaling) -> Step | None:
    """Returns the step that scales a product's result, by the rest; None if it stays as it is."""
    if isinstance(step, Island) and scaling.node not in step.rewrites:
        rewrite = Rewrite(WHY_REST, scaling.node.inputs, scaling.rest)
        return step.rewritten({scaling.node: rewrite})
    if isinstance(step, Single) and step.lowering is None:
        return step._replace(lowering=lambda _, operands, __: [scaling.rest(*operands)])
    return None


def _with_factor(step: Step | None, value: Value, factor: float, level: Level) -> Island | None:
    """Returns an island that multiplies what it makes of a value before it is rounded.

    Returns: None if no island makes it for one operand of one product. A fused attention would read
      the value as well.
    """
    node, is_fused = value.producer, level.context.request.settings.attention == "fused"
    if not isinstance(step, Island) or node is None or len(node.outputs) != 1:
        return None
    reads = [read for user in value.users for read in user.inputs].count(value)
    is_shared = reads != 1 or value in level.graph.outputs
    if is_shared or is_fused or factor == 1 or node in step.rewrites:
        return None

    def run(*operands: Any) -> Any:
        (result,) = _jax_compat.bind(node.equation.primitive, operands, node.params)
        return result * np.float32(factor)

    why = f"multiplied by {factor:g}: {WHY_SCALED}"
    return step.rewritten({node: Rewrite(why, node.inputs, run)})


def _scaling_behind(product: Node, outputs: Sequence[Value]) -> Scaling | None:
    """Returns the multiplication or division by a number that is the only reader of a product."""
    (value,) = product.outputs
    while value not in outputs and len(value.users) == 1:
        (user,) = value.users
        if user.region != product.region or not user.is_fusible:
            return None
        if user.rule.affine and not user.rule.linear:  # it multiplies or divides
            return _scaling_by(user)
        if not user.rule.hands_on or user.rule.selects:
            return None
        (value,) = user.outputs
    return None


def _scaling_by(node: Node) -> Scaling | None:
    """Returns how a node scales down by a number that the program holds, if it does."""
    is_quotient = node.name == "div"
    for place in (1,) if is_quotient else (0, 1):
        number = node.inputs[place]
        if number.literal is None or np.ndim(number.literal) > 0:
            continue
        factor = abs(number.constant or 0.0)
        if factor == 0 or not math.isfinite(factor):
            return None
        divisor = factor if is_quotient else 1 / factor
        powers = min(2 * MOST_POWERS, math.floor(math.log2(divisor)))
        return Scaling(node, place, powers) if powers > 0 else None
    return None
