"""Hazards of a precision report: sentences that ask the user to act. Most programs have none."""

import collections
from collections.abc import Iterable, Iterator

import jax.numpy as jnp

from jmp.autocasting._graph import Node
from jmp.autocasting._operations import Operation, is_product
from jmp.autocasting._products import WHY_EXACT
from jmp.autocasting._steps import Plan, Single, steps_of
from jmp.diagnostics._ranges import FLOAT8, HALVES
from jmp.diagnostics._rows import Row, added_up, product_of
from jmp.diagnostics._walk import module_and_line, place_name

# Reasons of float32 products that the user asked for, or that belong to no network.
DELIBERATE = ("the user asked", "an inner autocast", "asked for by", *WHY_EXACT)

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
    yield from delicate_in_half(added_up(rows, with_repeated=True))
    yield from lost_digits(plan, half)
    yield from in_other_half(rows, half)
    yield from dear_in_float32(rows)
    for rule in plan.request.policy_rules.unused:
        yield f"the rule {rule} matched no scope"
    yield from odd_sizes(operations)
    yield from no_float8(rows)


def delicate_in_half(rows: list[Row]) -> Iterator[str]:
    """Yields a sentence for each sum or exponential in half, and for each product in float32."""
    for row in rows:
        in_half = row.dtype_in in HALVES
        if row.kind == "reduction" and in_half:
            yield f"{_at(row)} adds up in {row.dtype_in}: small terms are lost"
        elif row.kind == "exponential" and in_half:
            yield f"{_at(row)} runs in {row.dtype_in}: it overflows, or loses all digits"
        elif row.kind == "product" and not (
            row.dtype_in in (*HALVES, FLOAT8)
            or row.precision == "HIGHEST"
            or row.why.startswith(DELIBERATE)
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
    wrapped = (step.node for step in singles if step.node.is_wrapped)
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
