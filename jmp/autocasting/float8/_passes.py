"""Which products are float8, and what devices send each other on the way to them.

`multiply_in_float8` says which products are float8, if the policy asks for it.

`send_in_float8` lowers what devices send each other on the way to float8 products. A shard is
rounded to float8 before it is gathered, with the scale that all devices share. So the numbers are
the same as if the array was gathered and then rounded. The half array is moved too, for the sake of
its transpose: its gradient adds up over devices as the gradient of any half array does. Nothing
reads the moved half array, and no compiled program keeps it.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._emit import read_value
from jmp.autocasting._facts import Facts, only_read_by
from jmp.autocasting._graph import Graph, Node, Value, downstream
from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import as_it_is, cast
from jmp.autocasting._numbers import ValueProvenance, dtype_of, shape_of, size_of
from jmp.autocasting._registry import rule_for
from jmp.autocasting._sending import sends
from jmp.autocasting._steps import Environment, Lowering, Read, Single, Step, on
from jmp.autocasting.float8 import _arithmetic
from jmp.autocasting.float8._arithmetic import E4M3, Bound, Float8, ProductForm
from jmp.autocasting.float8._extremes import FunctionOfProduct
from jmp.dtypes import FLOAT32
from jmp.sharding._axes import without_reduced

# The functions whose results are multiplied to a value. Most values have one.
Functions = tuple[FunctionOfProduct, ...]


# How products are lowered.


# With a value these are keys of an environment: of the value as float8, which is rounded once for
# all products that read it, and of the bound of a float8 product's result.
AS_FLOAT8, BOUND = "as float8", "bound"


@dataclasses.dataclass(frozen=True, eq=False)  # each adds to the environment of its step
class ProductInFloat8:
    """A product in float8.

    Attributes:
      form: see `ProductForm`.
      factors: of each operand, the functions of other products' results that are multiplied to it:
        none, one or two. The maximum of an operand without any is computed.
    """

    form: ProductForm
    factors: tuple[Functions, ...] = ((), ())
    dtype_in = E4M3

    def __call__(
        self, step: Single, operands: Sequence[Any], environment: Environment
    ) -> list[Any]:
        """Returns the product in half; adds its bound to the environment, if it has one."""
        (half,) = step.stores
        bounds = [_bound_of(factors, environment) for factors in self.factors]
        held = [
            _in_float8(read.value, cast(operand, half), environment, bound)
            for read, operand, bound in zip(step.reads, operands, bounds, strict=True)
        ]
        result, bound = _arithmetic.multiply(operands, held, step.params, self.form, bounds)
        if bound is not None:
            environment[BOUND, step.node.outputs[0]] = bound
        return [result]


def _bound_of(functions: Functions, environment: Environment) -> Bound | None:
    bounds = []
    for function in functions:
        vectors = [read_value(Read(value, None), environment) for value in function.added]
        bound = environment[BOUND, function.product]
        bounds.append(_arithmetic.bound_behind(bound, vectors, function.extremes))
    return functools.reduce(_arithmetic.bound_of_product, bounds) if bounds else None


def _in_float8(
    value: Value, array: Any, environment: Environment, bound: Bound | None = None
) -> Float8:
    """Returns a value in float8; if the environment does not have it yet, the array is rounded."""
    if (AS_FLOAT8, value) not in environment:
        environment[AS_FLOAT8, value] = _arithmetic.hold(array, value.root.aval, bound)
    return environment[AS_FLOAT8, value]


def move_in_float8(
    in_half: Lowering | None, step: Single, operands: Sequence[Any], environment: Environment
) -> Sequence[Any]:
    """Returns the first operand moved in half, for the sake of the transpose.

    Adds it to the environment in float8, moved too.

    Args:
      in_half: how the step is lowered in half.
    """
    first, *others = operands
    numbers, scale = _in_float8(step.reads[0].value, first, environment)
    moved: Sequence[Any] = [numbers, *others]
    for equation in moves_of(step.node):
        if not is_cast(equation):
            if rule_for(equation.primitive.name).sends:
                moved = lax.optimization_barrier(moved)  # as `send_in_half` does
            moved = _jax_compat.bind(equation.primitive, moved, equation.params)
    for value, array in zip(step.node.outputs, moved, strict=True):
        environment[AS_FLOAT8, value] = Float8(without_reduced(array), scale)
    if in_half is None:
        return as_it_is(step)(operands)
    return in_half(step, operands, environment)


# Which products are float8.

WHY_FLOAT8 = "a parameter's product on the way to another: its operands are rounded to float8"
# The section on convolutions in docs/float8.md has the reasons.
WHY_CONVOLUTION = (
    "a convolution: in float8 it moves more bytes, and XLA computes the gradient of its kernel in "
    "bfloat16"
)

# Multiplications. Three products of so many (its own and two of gradients) take 1.6 us in half at
# the rate of an H200's data sheet (989e12 operations a second), and half of that in float8. That
# saves less than the launch of one kernel takes (about 2 us), and some seven more are launched. It
# was not timed: float8 begins to pay above this, and a device has to say where.
SMALL_PRODUCT = 2**28
# Tensor cores multiply float8 in pieces of 16. Thinner operands are padded to that.
THIN = 16


def multiply_in_float8(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level; its half products are float8, or say why they are not."""
    shared = _shared_factors(level.graph)

    @on(Single)
    def chosen(step: Single, level: Level) -> Single:
        node = step.node
        if not (node.region.multiplies_in_float8 and node.is_product and step.is_half):
            return step
        if node in level.facts.embeddings:  # a lookup, which the user has put in `low=`
            return step
        if why := why_not_float8(node, level):
            return step._replace(why=f"{step.why}; not float8: {why}")
        is_shared = any(v.root in shared for v in node.inputs)
        return step._replace(why=WHY_FLOAT8, lowering=ProductInFloat8(ProductForm(is_shared)))

    return chosen(steps, level)


def why_not_float8(node: Node, level: Level) -> str:
    """Returns why a product in half is not float8; "" if it is."""
    facts, context = level.facts, level.context
    if node.name == "conv_general_dilated":
        return WHY_CONVOLUTION
    if node.name != "dot_general":
        return f"{node.name} has no float8 form yet"
    if context.is_transposed:
        return "it stands in a custom_jvp, whose rule JAX transposes"
    if context.devices_part:
        return "devices may go different ways here, and would not share its scales"
    is_weight = lambda x: x not in facts.dependent and x.provenance > ValueProvenance.INTEGERS
    if context.request.settings.float8 == "weights" and not any(map(is_weight, node.inputs)):
        return "it multiplies two activations (float8='all' takes such products)"
    if not facts.carried.isdisjoint(node.outputs):
        return "a loop carries its result in float32"
    if not _feeds(node, facts):
        return "its result feeds no other product, as that of a head"
    rows, columns, summed, batches = sizes_of(node.inputs, node.params)
    if min(batches * rows, columns, summed) < THIN:
        return f"it is thinner than {THIN}"
    if batches * rows * columns * summed < SMALL_PRODUCT:
        return f"it is small: fewer than 2**{SMALL_PRODUCT.bit_length() - 1} multiplications"
    return ""


def _feeds(product: Node, facts: Facts) -> bool:
    """Returns whether a product's result goes to another, added up over devices on the way or not.

    Sums over devices are float32, so that no value `feeds` through them. But the result of a
    product whose rows are split over devices is a part of such a sum.
    """
    values = downstream(product.outputs[0], lambda u: u.is_fusible or u.rule.sums_devices)
    return not facts.feeds.isdisjoint(values)


def sizes_of(operands: Sequence[Any], params: _jax_compat.Params) -> tuple[int, int, int, int]:
    """Returns rows, columns, summed elements and batches of a `dot_general`."""
    summed, batch = params["dimension_numbers"]
    rows, columns = (
        size_of(tuple(n for axis, n in enumerate(shape_of(x)) if axis not in (*sums, *shared)))
        for x, sums, shared in zip(operands, summed, batch, strict=True)
    )
    left = shape_of(operands[0])
    inner, batches = (size_of(tuple(left[i] for i in axes)) for axes in (summed[0], batch[0]))
    return rows, columns, inner, batches


def _shared_factors(graph: Graph) -> set[Value]:
    """Returns the roots that several products read, on this level or on the outermost one."""
    factors = (value for node in graph.nodes if node.is_product for value in node.inputs)
    counts = collections.Counter(factor.root for factor in factors)
    return {
        value
        for value, count in counts.items()
        if count > 1 or sum(user.has_products for user in value.origin.users) > 1
    }


def products_in_float8(steps: Sequence[Step]) -> dict[Node, ProductInFloat8]:
    """Returns the float8 products among steps, and how they are lowered."""
    pairs = [(step.node, step.lowering) for step in steps if isinstance(step, Single)]
    return {node: lowering for node, lowering in pairs if isinstance(lowering, ProductInFloat8)}


# Arrays that devices send.

WHY_SENT_IN_FLOAT8 = "only float8 products read it afterwards: rounded to float8 before it is sent"

ROUNDED_NO_FURTHER = (FLOAT32, np.dtype(jnp.bfloat16))  # float8's scales are bfloat16


def send_in_float8(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps; those that send what only float8 products read send float8."""
    graph, readers = level.graph, set(products_in_float8(steps))
    if not readers:
        return list(steps)
    nodes = [step.node for step in steps if isinstance(step, Single)]
    moving = {node: moves for node in nodes if (moves := moves_of(node))}
    for node in reversed(graph.nodes):
        are_read = (only_read_by(value, graph, readers.__contains__) for value in node.outputs)
        if node in moving and all(are_read):
            readers.add(node)
    sent: set[Node] = set()
    for node in graph.nodes:  # what moves before the first that sends stays as it is
        if node in readers and node in moving:
            is_first = any(rule_for(move.primitive.name).sends for move in moving[node])
            if is_first or node.inputs[0].producer in sent:
                sent.add(node)

    @on(Single)
    def moved(step: Single, _: Level) -> Single:
        if step.node not in sent:
            return step
        lowering = functools.partial(move_in_float8, step.lowering)
        return step._replace(why=WHY_SENT_IN_FLOAT8, notes=(WHY_SENT_IN_FLOAT8,), lowering=lowering)

    return moved(steps, level)


def moves_of(node: Node) -> Sequence[JaxprEqn]:
    """Returns the equations that move the numbers of a node's first operand, one after the other.

    Most nodes have one, their own equation. A node that does more, or reads float32, has none.
    """
    if node.region.in_float32:
        return []
    if node.name == "custom_vjp_call":
        return _moves_inside(node.equation)
    is_moved = node.rule.hands_on or sends(node) or is_cast(node.equation)
    return [node.equation] if is_moved and not node.is_in_full else []


def is_cast(equation: JaxprEqn) -> bool:
    """Returns whether an equation casts between dtypes that hold the scales of float8."""
    dtypes = {dtype_of(atom) for atom in (*equation.invars, *equation.outvars)}
    return equation.primitive.name == "convert_element_type" and dtypes <= {*ROUNDED_NO_FURTHER}


def _moves_inside(equation: JaxprEqn) -> Sequence[JaxprEqn]:
    """Returns the equations of a custom_vjp that sends its operand; none if it does more.

    `jmp.gather_params` is such a custom_vjp, and so are gathers with a dtype for gradients' sums.
    """
    jaxpr, constants = _jax_compat.open_jaxpr(_jax_compat.called(equation.params))
    rules = [rule_for(inner.primitive.name) for inner in jaxpr.eqns]
    are_moves = all(
        rule.hands_on or rule.sends or is_cast(inner)
        for rule, inner in zip(rules, jaxpr.eqns, strict=True)
    )
    read = [inner.invars for inner in jaxpr.eqns] + [jaxpr.outvars]
    written = [jaxpr.invars] + [inner.outvars for inner in jaxpr.eqns]
    is_chain = len(jaxpr.invars) == 1 and read == written and not constants
    return jaxpr.eqns if is_chain and are_moves and any(rule.sends for rule in rules) else []
