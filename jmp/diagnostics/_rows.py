"""Rows, sizes of products and hazards: a precision report reads them off a plan.

Hazards are sentences that ask the user to act. Most programs have none.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Iterator

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jmp.autocasting._equations import is_inner_product
from jmp.autocasting._numbers import length_of, shape_of, size_of
from jmp.autocasting._operations import Operation, is_callers_wish, is_product, operations_of
from jmp.autocasting._precision import asked_for, precision_of
from jmp.autocasting._products import WHY_EXACT, products_that_wrap
from jmp.autocasting._registry import Category, rule_for
from jmp.autocasting._steps import Plan, Single, steps_of
from jmp.autocasting.float8._passes import sizes_of
from jmp.diagnostics._places import module_and_line, place_name
from jmp.diagnostics._reports import FLOAT8, HALVES, added_up, grouped

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


def rows_with_operations(plan: Plan) -> list[tuple[Row, Operation]]:
    """Returns the products, reductions, exponentials and transfers of a plan, a row for each."""
    found = []
    for operation in operations_of(steps_of(plan)):
        equation = operation.equation
        name = equation.primitive.name
        rule = rule_for(name)
        kind = kind_of_row(equation)
        if rule.sends and not rule.fusible:  # a constraint on the sharding may move nothing
            kind = "transfer"
        if kind is None or not operation.dtypes_out:
            continue
        flops = flops_of(equation) if kind == "product" else 0
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
        found.append((row, operation))
    return found


def with_repeated(rows: Iterable[Row]) -> list[Row]:
    """Returns one row for modules that repeat, whose path is "h/*/mlp".

    They have the same names but for the numbers at their ends, such as h/0/mlp and h/1/mlp.
    """

    def starred(row: Row) -> Row:
        return dataclasses.replace(row, module=NUMBER.sub("*", row.module), times=1, flops=0)

    renamed = []
    for some in grouped(rows, starred).values():
        path = _shared_path([row.module for row in some])
        renamed += [dataclasses.replace(row, module=path) for row in some]
    return added_up(renamed, "times", "flops")


def _shared_path(paths: Iterable[str]) -> str:
    """Returns a path with a star for each number that is not the same in all."""
    names = zip(*(path.split("/") for path in paths), strict=True)
    return "/".join(at[0] if len({*at}) == 1 else NUMBER.sub("*", at[0]) for at in names)


def kind_of_row(equation: JaxprEqn) -> str | None:
    """Returns the kind of row an equation makes; None if it makes none."""
    if is_product(equation):
        return "product"
    rule = rule_for(equation.primitive.name)
    if rule.category is Category.FULL and rule.expensive:
        return "exponential"
    return "reduction" if rule.sums or is_inner_product(equation) else None


def flops_of(equation: JaxprEqn) -> int:
    """Returns the floating-point operations of a product: two for each multiplication and addition.

    The op table has three kinds of products.
    """
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return 2 * math.prod(sizes_of(equation.invars, params))
    left, right = map(shape_of, equation.invars[:2])
    if name == "conv_general_dilated":
        outputs = length_of(right[params["dimension_numbers"].rhs_spec[0]])
        # Zeros between the elements of a dilated input are not multiplied (strided gradients).
        divisor = max(1, outputs) * math.prod(params["lhs_dilation"])
        return 2 * size_of(shape_of(equation.outvars[0])) * size_of(right) // divisor
    # In a ragged product each row meets the matrix of its own group.
    return 2 * size_of(left) * length_of(right[-1])


def tensor_core_sizes(equation: JaxprEqn) -> dict[str, int]:
    """Returns the sizes of a `dot_general` that tensor cores cut into pieces, by their names.

    There are none if other kernels run, as for a vector.
    """
    if equation.primitive.name != "dot_general":
        return {}
    rows, columns, summed, _ = sizes_of(equation.invars, equation.params)
    sizes = {"rows": rows, "columns": columns, "summed elements": summed}
    return {} if 1 in sizes.values() else sizes


# Hazards.

# Tensor cores read 16 bytes at a time: eight half numbers, or sixteen in float8.
MULTIPLES = {**dict.fromkeys(HALVES, 8), FLOAT8: 16}
# Smaller products take less time than their launch, whatever their sizes.
LEAST_COUNTED = 10**6  # floating-point operations
# Sizes, and products with all digits, need at least this share of all floating-point operations for
# a sentence.
SHARE = 0.01


def hazards_of(plan: Plan, found: list[tuple[Row, Operation]], rows: list[Row]) -> Iterator[str]:
    """Yields the hazards of a plan, in the order of a report.

    Args:
      found: what `rows_with_operations` returned; `rows` are the same, added up.
    """
    half = str(plan.request.settings.compute_dtype)
    unasked = (row for row, operation in found if not is_deliberate(operation, plan))
    yield from in_the_wrong_dtype(with_repeated(unasked), half)
    yield from dict.fromkeys(lost_digits(plan, half))  # each place once
    yield from dear_in_float32(rows)
    for rule in plan.request.policy_rules.unused:
        yield f"the rule {rule} matched no scope"
    yield from odd_sizes(found)
    yield from no_float8(rows)


def is_deliberate(operation: Operation, plan: Plan) -> bool:
    """Returns whether a product is in float32 because somebody asked for it, or it is exact."""
    return is_product(operation.equation) and (
        is_callers_wish(operation, plan)
        or operation.node.region.is_decided
        or bool(asked_for(operation.equation))
        or operation.why in WHY_EXACT
    )


def in_the_wrong_dtype(rows: list[Row], half: str) -> Iterator[str]:
    """Yields a sentence for each sum or exponential in half, and for each product in another dtype.

    A product in the other half type, which the function casts to itself, is one of these.
    """
    for row in rows:
        in_half = row.dtype_in in HALVES
        is_meant = row.dtype_in in (half, FLOAT8) or row.precision == "HIGHEST"
        if row.kind == "reduction" and in_half:
            yield f"{_at(row)} adds up in {row.dtype_in}: small terms are lost"
        elif row.kind == "exponential" and in_half:
            yield f"{_at(row)} runs in {row.dtype_in}: it overflows, or loses all digits"
        elif row.kind == "product" and not is_meant:
            yield f"{_at(row)} multiplies in {row.dtype_in}: {row.why}"


def dear_in_float32(rows: list[Row]) -> Iterator[str]:
    """Yields a sentence on the products that autocast binds with the highest precision.

    No tensor core multiplies them. A precision that the user or the product names gives no
    sentence.
    """
    products = [row for row in rows if row.kind == "product"]
    found = [row for row in products if row.precision == "HIGHEST"]
    total, count = (sum(row.flops for row in some) for some in (products, found))
    if count and count >= SHARE * total:
        place = _at(max(found, key=lambda row: row.flops))
        if others := len(found) - 1:
            place += f", with {others} other place{'s' * (others > 1)},"
        yield (
            f"{place} multiplies float32 with HIGHEST precision ({count / total:.0%} of the "
            # By NVIDIA's data sheet, without sparsity.
            "operations of products): an H200 does 67 TFLOP/s of these and 494 in TF32, so they "
            "may take 7.4 times as long. If TF32's 11 bits are enough, put it under "
            "jax.default_matmul_precision('tensorfloat32') inside the function"
        )


def lost_digits(plan: Plan, half: str) -> Iterator[str]:
    """Yields a sentence for each half product that loses digits which matter."""
    spacing = 512 * float(jnp.finfo(half).eps)  # of the numbers from 512 to 1024
    knows = f"{half} knows 1000 to {spacing:g}"
    wrapping = products_that_wrap(plan.graph)
    singles = [step for step, *_ in steps_of(plan) if isinstance(step, Single) and step.is_half]
    for step in singles:
        if step.node in wrapping:
            yield (
                f"{_half_product(step, half)}, and its result goes to a function that wraps, such "
                f"as sin: {knows}. Keep the product in float32 by a rule if its results are large"
            )
        if step.reads_offset:
            yield (
                f"{_half_product(step, half)} numbers to which a much larger one was added: "
                f"{knows}. Take it away before the product, or keep the product in float32 by a "
                "rule"
            )


def _half_product(step: Single, half: str) -> str:
    return f"a product at {place_name(*module_and_line(step.node))} multiplies in {half}"


def odd_sizes(found: list[tuple[Row, Operation]]) -> Iterator[str]:
    """Yields a sentence for products in half or float8 with sizes that a GPU pads.

    For a GPU with tensor cores XLA copies the operands of such a matrix product into padded ones
    and cuts out the result (its pass `cublas_pad_for_gemms`), unless it takes a Triton kernel;
    NVIDIA's guide to matrix multiplication says that tensor cores are most efficient at multiples
    of 16 bytes. Compiled for an H200 with cuBLAS, 4096 x 4096 by 4096 x 4095 in float16 moves 2.3
    times the bytes of its neighbour with 4096 columns.

    The turns of scans count. Products with a vector and ragged products use other kernels, and
    have no sentence; convolutions have none either.
    """
    total, odd = 0, []
    for row, operation in found:
        if row.kind != "product" or row.dtype_in not in MULTIPLES:
            continue
        total += row.flops
        multiple = MULTIPLES[row.dtype_in]
        sizes = tensor_core_sizes(operation.equation).items()
        if words := [f"{length} {name}" for name, length in sizes if length % multiple]:
            why = f"{row.dtype_in} with {', '.join(words)}, no multiple of {multiple}"
            odd.append(dataclasses.replace(row, why=why))
    for row in with_repeated(odd):
        if row.flops >= max(SHARE * total, LEAST_COUNTED * row.times):
            yield (
                f"{_at(row)} multiplies in {row.why}: padded on a GPU, it may be slower "
                f"({row.flops / total:.0%} of the operations of half products)"
            )


def no_float8(rows: list[Row]) -> Iterator[str]:
    """Yields why no product is float8, if the policy asks for float8 products."""
    lead = "; not float8: "
    reasons = [row.why.split(lead)[1] for row in rows if lead in row.why]
    if reasons and not any(row.dtype_in == FLOAT8 for row in rows):
        why = statistics.mode(reasons)
        yield f"the policy asks for float8 products, and none is float8: {why}"


def _at(row: Row) -> str:
    return f"{row.operation} at {place_name(row.module, row.source)}"
