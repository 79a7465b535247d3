"""Rows, decisions, sizes of products and hazards: a precision report reads them off a plan.

Hazards are sentences that ask the user to act. Most programs have none.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jmp.autocasting._equations import is_inner_product
from jmp.autocasting._graph import Node
from jmp.autocasting._numbers import Shape, length_of, size_of
from jmp.autocasting._operations import Operation, decisions_of, is_callers_wish, is_product
from jmp.autocasting._precision import asked_for, precision_of
from jmp.autocasting._products import WHY_EXACT, products_that_wrap
from jmp.autocasting._registry import Category, rule_for
from jmp.autocasting._steps import Plan, Single, steps_of
from jmp.diagnostics._base import FLOAT8, HALVES, grouped
from jmp.diagnostics._walk import module_and_line, place_name

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
            why=operation.why,
            times=operation.times,
            flops=operation.times * flops,
            precision=precision_of(equation, operation.params) if has_precision else "",
        )
        rows.append(row)
    return added_up(rows)


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


# Hazards.

# Tensor cores read 16 bytes at a time: eight half numbers, or sixteen in float8.
MULTIPLES = {**dict.fromkeys(HALVES, 8), FLOAT8: 16}
# Smaller products take less time than their launch, whatever their sizes.
LEAST_COUNTED = 10**6  # floating-point operations
# Operations a second of an H200, without sparsity (NVIDIA's data sheet): with all digits, in TF32.
FLOAT32_PEAK, TF32_PEAK = 67e12, 494e12
# Sizes, and products with all digits, need at least this share of all floating-point operations for
# a sentence.
SHARE = 0.01


def hazards_of(plan: Plan, operations: list[Operation], rows: list[Row]) -> Iterator[str]:
    """Yields the hazards of a plan, in the order of a report; operations and rows are its own."""
    half = str(plan.request.settings.compute_dtype)
    unasked = (one for one in operations if not is_deliberate(one, plan))
    yield from in_the_wrong_dtype(added_up(rows_of(unasked), with_repeated=True))
    yield from lost_digits(plan, half)
    yield from in_other_half(rows, half)
    yield from dear_in_float32(rows)
    for rule in plan.request.policy_rules.unused:
        yield f"the rule {rule} matched no scope"
    yield from odd_sizes(operations)
    yield from no_float8(rows)


def is_deliberate(operation: Operation, plan: Plan) -> bool:
    """Returns whether a product is in float32 because somebody asked for it, or it is exact."""
    is_asked_for = (
        is_callers_wish(operation, plan)
        or operation.node.region.is_decided
        or bool(asked_for(operation.equation))
    )
    return is_product(operation.equation) and (is_asked_for or operation.why in WHY_EXACT)


def in_the_wrong_dtype(rows: list[Row]) -> Iterator[str]:
    """Yields a sentence for each sum or exponential in half, and for each product in float32."""
    for row in rows:
        in_half = row.dtype_in in HALVES
        if row.kind == "reduction" and in_half:
            yield f"{_at(row)} adds up in {row.dtype_in}: small terms are lost"
        elif row.kind == "exponential" and in_half:
            yield f"{_at(row)} runs in {row.dtype_in}: it overflows, or loses all digits"
        elif row.kind == "product" and not (
            row.dtype_in in (*HALVES, FLOAT8) or row.precision == "HIGHEST"
        ):
            yield f"{_at(row)} multiplies in {row.dtype_in}: {row.why}"


def in_other_half(rows: list[Row], half: str) -> Iterator[str]:
    """Yields a sentence on products in the other half type, which the function casts to itself."""
    others = {*HALVES} - {half}
    found = [row for row in rows if row.kind == "product" and row.dtype_in in others]
    if found:
        first, times = found[0], sum(row.times for row in found)
        place = _and_others(_at(first), times - 1)
        yield f"{place} multiplies in {first.dtype_in}, not in {half}: {first.why}"


def dear_in_float32(rows: list[Row]) -> Iterator[str]:
    """Yields a sentence on the products that autocast binds with the highest precision.

    No tensor core multiplies them. A precision that the user or the product names gives no
    sentence.
    """
    products = [row for row in rows if row.kind == "product"]
    found = [row for row in products if row.precision == "HIGHEST"]
    total, count = (sum(row.flops for row in some) for some in (products, found))
    if count and count >= SHARE * total:
        place = _and_others(_at(max(found, key=lambda row: row.flops)), len(found) - 1)
        yield (
            f"{place} multiplies float32 with HIGHEST precision ({count / total:.0%} of the "
            f"operations of products): an H200 does {FLOAT32_PEAK / 1e12:.0f} TFLOP/s of these and "
            f"{TF32_PEAK / 1e12:.0f} in TF32, so they may take {TF32_PEAK / FLOAT32_PEAK:.1f} "
            "times as long. If TF32's 11 bits are enough, put it under "
            "jax.default_matmul_precision('tensorfloat32') inside the function"
        )


def lost_digits(plan: Plan, half: str) -> Iterator[str]:
    """Yields a sentence for each half product that loses digits which matter."""
    spacing = 512 * float(jnp.finfo(half).eps)  # of the numbers from 512 to 1024
    singles = [step for step, *_ in steps_of(plan) if isinstance(step, Single) and step.is_half]
    wrapping = products_that_wrap(plan.graph)
    wrapped = (step.node for step in singles if step.node in wrapping)
    beside_offsets = (step.node for step in singles if step.reads_offset)
    for place in dict.fromkeys(map(_place, wrapped)):
        yield (
            f"a product at {place} multiplies in {half}, and its result goes to a function that "
            f"wraps, such as sin: {half} knows 1000 to {spacing:g}. Keep the product in float32 by "
            "a rule if its results are large"
        )
    for place in dict.fromkeys(map(_place, beside_offsets)):
        yield (
            f"a product at {place} multiplies in {half} numbers to which a much larger one was "
            f"added: {half} knows 1000 to {spacing:g}. Take it away before the product, or keep "
            "the product in float32 by a rule"
        )


def odd_sizes(operations: Iterable[Operation]) -> Iterator[str]:
    """Yields a sentence for products in half or float8 with sizes that a GPU pads.

    For a GPU with tensor cores XLA copies the operands of such a matrix product into padded ones
    and cuts out the result (its passes `cublas_pad_for_gemms` and, for float16,
    `cudnn_pad_for_convolutions`), unless it takes a Triton kernel; NVIDIA's guide to matrix
    multiplication says that tensor cores are most efficient at multiples of 16 bytes. Compiled for
    an H200 with cuBLAS, 4096 x 4096 by 4096 x 4095 in float16 moves 2.3 times the bytes of its
    neighbour with 4096 columns.

    Places that share their sizes have one sentence; the turns of scans count. Products with a
    vector, grouped convolutions and ragged products have none: they use other kernels.
    """
    total = 0
    found: dict[str, collections.Counter[str]] = {}
    for operation in operations:
        dtype = ", ".join(operation.dtypes_in)
        if dtype not in MULTIPLES or not is_product(operation.equation):
            continue
        flops, sizes = product_of(operation.equation)
        total += operation.times * flops
        odd = [f"{length} {name}" for length, name in sizes if length % MULTIPLES[dtype]]
        if odd and flops >= LEAST_COUNTED:
            what = f"{dtype} with {', '.join(odd)}, no multiple of {MULTIPLES[dtype]}"
            places = found.setdefault(what, collections.Counter())
            place = f"{operation.equation.primitive.name} at {_place(operation)}"
            places[place] += operation.times * flops
    for what, places in found.items():
        share = places.total() / total
        if share >= SHARE:
            ((largest, _),) = places.most_common(1)
            yield (
                f"{_and_others(largest, len(places) - 1)} multiplies in {what}: padded on a GPU, "
                f"it may be slower ({share:.0%} of the operations of half products)"
            )


def no_float8(rows: list[Row]) -> Iterator[str]:
    """Yields why no product is float8, if the policy asks for float8 products."""
    lead = "; not float8: "
    if not any(row.dtype_in == FLOAT8 for row in rows):
        reasons = collections.Counter(row.why.split(lead)[1] for row in rows if lead in row.why)
        for why, _ in reasons.most_common(1):
            yield f"the policy asks for float8 products, and none is float8: {why}"


def _at(row: Row) -> str:
    return f"{row.operation} at {place_name(row.module, row.source)}"


def _place(found: Node | Operation) -> str:
    return place_name(*module_and_line(found))


def _and_others(first: str, others: int) -> str:
    return f"{first}, with {others} other place{'s' * (others > 1)}," if others else first
