"""Hazards of a precision report: sentences to act upon. None is the rule."""

import collections
import math
from collections.abc import Collection, Iterable, Sequence

import jax.numpy as jnp

from jmp.autocasting._exact_products import WHY_EXACT
from jmp.autocasting._graph import Node
from jmp.autocasting._operations import Operation, is_product
from jmp.diagnostics._ranges import FLOAT8, HALVES
from jmp.diagnostics._rows import Row, product_of
from jmp.diagnostics._walk import Placed, path_of, place_name, source_line

# Float32 products that the user asked for, or that are none of a network.
DELIBERATE = ("the user asked", "an inner autocast", "asked for by", *WHY_EXACT)

# What a `Row` says of a product that autocast binds so.
HIGHEST = "HIGHEST"

# Tensor cores read 16 bytes at a time: eight half numbers.
HALF_MULTIPLE = 8
# Products below that are over before their launch is, whatever their sizes.
LARGE = 10**6  # floating-point operations
# Operations a second of an H200, without sparsity (NVIDIA's data sheet): with all digits, in TF32.
FLOAT32_PEAK, TF32_PEAK = 67e12, 494e12
# Sizes that this share of all floating-point operations has are worth a sentence, and so are
# products with all digits.
SHARE = 0.01

# XLA pads the sizes of a float8 product to multiples of this.
FLOAT8_MULTIPLE = 16
# Multiplications. By the data sheet of an H200 (989e12 operations a second in half, twice that in
# float8) three products of so many save 13 us in float8, which seven launches of 2 us take: so many
# kernels more a float8 product has. An estimate that no device has confirmed.
PAYS = 2**32


def delicate_in_half(rows: list[Row]) -> list[str]:
    """Returns a sentence for each sum or exponential in half and each product that is not."""
    found = []
    for row in rows:
        place = f"{row.operation} at {place_name(row.source, row.module)}"
        in_half = row.dtype_in in HALVES
        if row.kind == "reduction" and in_half:
            found.append(f"{place} adds up in {row.dtype_in}: small terms are lost")
        elif row.kind == "exponential" and in_half:
            found.append(f"{place} runs in {row.dtype_in}: it overflows, or loses all digits")
        elif row.kind == "product" and not (
            in_half
            or row.dtype_in == FLOAT8
            or row.precision == HIGHEST
            or row.why.startswith(DELIBERATE)
        ):
            found.append(f"{place} multiplies in {row.dtype_in}: {row.why}")
    return found


def dear_in_float32(rows: list[Row]) -> list[str]:
    """Returns a sentence on the products that autocast binds with the highest precision.

    No tensor core multiplies them. Where the user, or the product, named a precision, it is known.
    """
    products = [row for row in rows if row.kind == "product"]
    total = sum(row.flops for row in products)
    found = [row for row in products if row.precision == HIGHEST]
    count = sum(row.flops for row in found)
    if not count or count < SHARE * total:
        return []
    largest = max(found, key=lambda row: row.flops)
    place = f"{largest.operation} at {place_name(largest.source, largest.module)}"
    return [
        f"{_and_others(place, len(found) - 1, ' place')} multiplies "
        f"float32 with {HIGHEST} precision ({count / total:.0%} of the operations of products): an "
        f"H200 does {FLOAT32_PEAK / 1e12:.0f} TFLOP/s of these and {TF32_PEAK / 1e12:.0f} in TF32, "
        f"so they may take {TF32_PEAK / FLOAT32_PEAK:.1f} times as long. If TF32's 11 bits are "
        "enough, put it under jax.default_matmul_precision('tensorfloat32') inside the function"
    ]


def rounded_arguments(rounded: Iterable[Node], half: str) -> list[str]:
    """Returns a sentence for each half product whose result reaches a function that wraps."""
    error = 512 * float(jnp.finfo(half).eps)  # the spacing of the numbers from 512 to 1024
    places = [
        place_name(source_line(node.equation, node.around), path_of(node.equation, node.around))
        for node in rounded
    ]
    return [
        f"a product at {place} multiplies in {half}, and its result goes to a function that wraps, "
        f"such as sin: {half} knows an argument of 1000 to {error:g}. Keep the product in float32 "
        "by a rule if its results are large"
        for place in dict.fromkeys(places)
    ]


def odd_sizes(placed: Iterable[Placed], elsewhere: Collection[str] = ()) -> list[str]:
    """Returns a sentence for half products with sizes that are no multiples of 8.

    For a GPU with tensor cores XLA copies the operands of such a matrix product into padded ones
    and cuts out the result (its passes `cublas_pad_for_gemms` and, for float16,
    `cudnn_pad_for_convolutions`), unless it takes a Triton kernel; NVIDIA's guide to matrix
    multiplication says that tensor cores are most efficient at multiples of 16 bytes. Compiled for
    an H200 with cuBLAS, 4096 x 4096 by 4096 x 4095 in float16 moves 2.3 times the bytes of its
    neighbour with 4096 columns.

    Sizes that many places share make one sentence; the turns of scans count. Products with a
    vector, grouped convolutions and ragged products are passed over: they use other kernels. So
    are those that stand at one of the places `elsewhere`, in float8.
    """
    total = 0
    found: dict[tuple[str, str], collections.Counter[str]] = {}
    for equation, path, source, times in placed:
        place = place_name(source, path)
        if place in elsewhere or not is_product(equation):
            continue
        dtypes = {str(atom.aval.dtype) for atom in equation.invars[:2]}
        if dtypes.issubset(HALVES):
            flops, sizes = product_of(equation)
            total += times * flops
            odd = _odd_sizes(sizes, HALF_MULTIPLE)
            if odd and flops >= LARGE:
                by_place = found.setdefault((min(dtypes), odd), collections.Counter())
                by_place[f"{equation.primitive.name} at {place}"] += times * flops
    hazards = []
    for (dtype, odd), by_place in found.items():
        share = by_place.total() / total
        ((largest, _),) = by_place.most_common(1)
        if share >= SHARE:
            hazards.append(
                f"{_and_others(largest, len(by_place) - 1, ' place')} multiplies in {dtype} with "
                f"{odd}, no multiple of {HALF_MULTIPLE}: padded on a GPU, it may be slower "
                f"({share:.0%} of the operations of half products)"
            )
    return hazards


def float8_places(rows: Sequence[Row]) -> set[str]:
    """Returns the names of the places where float8 products stand."""
    return {place_name(row.source, row.module) for row in rows if row.dtype_in == FLOAT8}


def float8_hazards(operations: Iterable[Operation], rows: Sequence[Row]) -> list[str]:
    """Returns what to know of the float8 products of a plan: sizes that are padded, small products.

    Where the policy asks for float8 and no product is, the reasons of the products.
    """
    by_odd_sizes: dict[str, list[str]] = {}
    small = []
    for operation in operations:
        if FLOAT8 not in operation.dtypes_in:
            continue
        equation = operation.equation
        place = f"{equation.primitive.name} at {path_of(equation, operation.around) or 'the top'}"
        sizes = product_of(equation).sizes
        if odd := _odd_sizes(sizes, FLOAT8_MULTIPLE):
            by_odd_sizes.setdefault(odd, []).append(place)
        if math.prod(size for size, _ in sizes) < PAYS:
            small.append(place)
    hazards = [
        f"{_and_others(places[0], len(places) - 1)} multiplies in float8 with {odd}, no multiple "
        f"of {FLOAT8_MULTIPLE}: padded on a GPU, which copies the operands"
        for odd, places in by_odd_sizes.items()
    ]
    if small:
        hazards.append(
            f"{_and_others(small[0], len(small) - 1)} multiplies in float8 with fewer than "
            f"2**{PAYS.bit_length() - 1} multiplications: the kernels that find scales may cost "
            "more than float8 saves"
        )
    if not float8_places(rows):
        lead = "; not float8: "
        reasons = collections.Counter(r.why.split(lead)[1] for r in rows if lead in r.why)
        for why, _ in reasons.most_common(1):
            hazards.append(f"the policy asks for float8 products, and none is float8: {why}")
    return hazards


def _odd_sizes(sizes: Iterable[tuple[int, str]], multiple: int) -> str:
    return ", ".join(f"{size} {name}" for size, name in sizes if size % multiple)


def _and_others(first: str, others: int, what: str = "") -> str:
    return f"{first}, with {others} other{what}{'s' * (others > 1)}," if others else first
