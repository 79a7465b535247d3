"""Rows of a precision report, read off a plan, and the operations and sizes of products."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jmp.autocasting._equations import is_inner_product
from jmp.autocasting._graph import downstream
from jmp.autocasting._numbers import Shape, length_of, size_of
from jmp.autocasting._operations import Operation, decisions_of, is_product
from jmp.autocasting._precision import precision_of
from jmp.autocasting._registry import Category, rule_for
from jmp.autocasting._steps import Plan, steps_of
from jmp.diagnostics._tables import grouped
from jmp.diagnostics._walk import module_and_line

# Nobody can change the channels of an image; cuDNN has kernels of its own for them.
IMAGE_CHANNELS = 4

# Products of these dtypes have fewer digits than the dtype, unless a precision says otherwise.
CHOOSES = frozenset({"float32", "complex64"})

NUMBER = re.compile(r"\d+(?=/|$)")  # at the end of a module's name


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation of a precision report, or several that agree in everything but their number.

    Attributes:
      kind: "product", "reduction", "exponential" (exp, log, powers, roots: expensive, in float32)
        or "transfer" (devices send each other an array).
      operation: the primitive.
      module: path of modules or name scopes, "" at the top.
      source: "file:line" of the user's code, or of a library's if no frame is the user's.
      dtype_in: the dtype of the floating operands as they are read.
      dtype_out: the dtype in which the result is stored.
      why: the reason of the rule or of the planner.
      precision: the precision of a product that reads float32: "HIGHEST" if autocast chooses it, as
        in `full_precision`; "default" if nothing names one, which is TF32 on a GPU and one pass of
        bfloat16 on a TPU; "HIGH, the user's" and the like if the product, or the user's global
        default, names it. "" for all other operations.
      times: how often it stands in the program, turns of loops included.
      flops: floating-point operations of all together; 0 if it is no product.

    >>> from jmp.diagnostics import precision_report
    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> (row,) = precision_report(lambda w, x: x @ w, "mixed_bfloat16")(x, x).rows
    >>> row.kind, row.dtype_in, row.flops
    ('product', 'bfloat16', 1024)
    """

    kind: str
    operation: str
    module: str
    source: str
    dtype_in: str
    dtype_out: str
    why: str
    times: int = 1
    flops: int = 0
    precision: str = ""


def rows_of(operations: Iterable[Operation]) -> list[Row]:
    """Returns the products, reductions, exponentials and transfers among a plan's operations."""
    rows = []
    for operation in operations:
        equation = operation.equation
        name = equation.primitive.name
        rule = rule_for(name)
        kind = kind_of_row(equation)
        if rule.sends and not rule.fusible:  # a constraint on the sharding may move nothing
            kind = "transfer"
        if kind is None or not operation.dtypes_out:
            continue
        flops = product_of(equation).flops if kind == "product" else 0
        has_precision = kind == "product" and not CHOOSES.isdisjoint(operation.dtypes_in)
        row = Row(
            kind,
            name,
            *module_and_line(operation),
            dtype_in=", ".join(operation.dtypes_in),
            dtype_out=", ".join(operation.dtypes_out),
            why=_added_where_sent(operation) or operation.why,
            times=operation.times,
            flops=operation.times * flops,
            precision=precision_of(equation, operation.params) if has_precision else "",
        )
        rows.append(row)
    return added_up(rows)


def _added_where_sent(operation: Operation) -> str:
    """Says in which dtype devices add up what they exchange, if an operation begins that."""
    node = operation.node
    if node.name != "all_to_all":
        return ""
    handed_on = downstream(node.outputs[0], lambda node: node.rule.casts or node.rule.moves)
    sums = (user for value in handed_on for user in value.users if user.name == "reduce_sum")
    added = next((user.outputs[0].dtype for user in sums), None)
    return f"devices exchange their parts of a sum and add them up in {added}" if added else ""


def added_up(rows: Iterable[Row], with_repeated: bool = False) -> list[Row]:
    """Returns one row for rows that differ only in times and flops, in the order of the program.

    Args:
      with_repeated: whether modules that repeat count as one, whose path is "h/*/mlp": those with
        the same names but for the numbers at their ends, such as h/0/mlp and h/1/mlp.
    """

    def merged(row: Row) -> Row:
        module = NUMBER.sub("*", row.module) if with_repeated else row.module
        return dataclasses.replace(row, module=module, times=1, flops=0)

    return [
        dataclasses.replace(
            some[0],
            module=_shared_path([row.module for row in some]),
            times=sum(row.times for row in some),
            flops=sum(row.flops for row in some),
        )
        for some in grouped(rows, merged).values()
    ]


def _shared_path(paths: Iterable[str]) -> str:
    """Returns a path with a star for each number that is not the same in all."""
    names = zip(*(path.split("/") for path in paths), strict=True)
    return "/".join(at[0] if len({*at}) == 1 else NUMBER.sub("*", at[0]) for at in names)


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision of autocast at one place that is no choice of a dtype.

    Attributes:
      what: one sentence.
      module, source, times: as in a `Row`.

    >>> from jmp.diagnostics import precision_report
    >>> weigh = jax.checkpoint(lambda scores, x: jax.nn.softmax(scores) @ x)
    >>> masked = lambda x, mask: weigh(x @ x + mask, x)
    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> (decision,) = precision_report(masked, "mixed_float16")(x, x).decisions
    >>> decision.what.split(",")[0], decision.times
    ("an array that is added or selected is held within float16's range", 1)
    """

    what: str
    module: str
    source: str
    times: int = 1


def decisions_in(plan: Plan) -> list[Decision]:
    """Returns the decisions of a plan, one for each place."""
    found: collections.Counter[Decision] = collections.Counter()
    for what, node, times in decisions_of(steps_of(plan)):
        found[Decision(what, *module_and_line(node))] += times
    return [dataclasses.replace(decision, times=times) for decision, times in found.items()]


def kind_of_row(equation: JaxprEqn) -> str | None:
    """Returns the kind of row an equation makes; None if it makes none."""
    if is_product(equation):
        return "product"
    rule = rule_for(equation.primitive.name)
    if rule.category is Category.FULL and rule.expensive:
        return "exponential"
    return "reduction" if rule.sums or is_inner_product(equation) else None


class Product(NamedTuple):
    """The floating-point operations and the sizes of a product."""

    flops: int = 0  # floating-point operations, two for each multiplication and addition
    # Sizes that tensor cores cut into pieces, with names; none if other kernels run, as for a
    # vector.
    sizes: tuple[tuple[int, str], ...] = ()


def product_of(equation: Any) -> Product:
    """Returns operations and sizes of a product; none for a primitive that is not in `PRODUCTS`."""
    name = equation.primitive.name
    if name not in PRODUCTS:
        return Product()
    left, right = (tuple(map(length_of, atom.aval.shape)) for atom in equation.invars[:2])
    return PRODUCTS[name](equation.params, left, right, size_of(equation.outvars[0].aval.shape))


def _dot(params: Any, left: Shape, right: Shape, results: int) -> Product:
    (left_summed, right_summed), (left_batch, right_batch) = params["dimension_numbers"]
    rows = _size_of_others(left, (*left_summed, *left_batch))
    columns = _size_of_others(right, (*right_summed, *right_batch))
    summed = math.prod(left[axis] for axis in left_summed)
    sizes = (rows, "rows"), (columns, "columns"), (summed, "summed elements")
    return Product(2 * results * summed, () if 1 in (rows, columns, summed) else sizes)


def _size_of_others(shape: Shape, axes: Shape) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in axes)


def _convolution(params: Any, left: Shape, right: Shape, results: int) -> Product:
    numbers = params["dimension_numbers"]
    outputs, inputs = (right[axis] for axis in numbers.rhs_spec[:2])
    # Zeros between the elements of a dilated input are not multiplied (strided gradients).
    divisor = max(1, outputs) * math.prod(params["lhs_dilation"])
    flops = 2 * results * math.prod(right) // divisor
    is_grouped = max(params["feature_group_count"], params["batch_group_count"]) > 1
    # The derivative with respect to a kernel exchanges batch and channels: layouts differ.
    if is_grouped or numbers.lhs_spec != numbers.out_spec:
        return Product(flops)
    channels = ((inputs, "input channels"), (outputs, "output channels"))
    return Product(flops, channels[inputs <= IMAGE_CHANNELS :])


def _ragged_dot(params: Any, left: Shape, right: Shape, results: int) -> Product:
    # Each row meets the matrix of its own group.
    return Product(2 * math.prod(left) * right[-1])


PRODUCTS: dict[str, Callable[[Any, Shape, Shape, int], Product]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
}
