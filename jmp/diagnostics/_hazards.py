"""Hazards of a precision report: sentences to act upon. None is the rule."""

import collections
from collections.abc import Collection

from jax.extend.core import Jaxpr

from jmp.autocasting._exact_products import WHY_EXACT
from jmp.autocasting._operations import is_product
from jmp.autocasting._program import Traced
from jmp.diagnostics._places import place_name, with_places
from jmp.diagnostics._ranges import FLOAT8, HALVES
from jmp.diagnostics._rows import Row, product_of

# Float32 products that the user asked for, or that are none of a network.
DELIBERATE = ("the user asked", "an inner autocast", "asked for by", *WHY_EXACT)

# Tensor cores read 16 bytes at a time: eight half numbers.
MULTIPLE = 8
# Products below that are over before their launch is, whatever their sizes.
LARGE = 10**6  # floating-point operations
# Sizes that this share of all floating-point operations has are worth a sentence.
SHARE = 0.01


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
            in_half or row.dtype_in == FLOAT8 or row.why.startswith(DELIBERATE)
        ):
            found.append(f"{place} multiplies in {row.dtype_in}: {row.why}")
    return found


def unused_rules(traced: Traced) -> list[str]:
    """Returns a sentence for each rule that matched no scope."""
    unused = traced.plan.words.regions.rules.unused
    return [f"the rule {rule} matched no scope" for rule in unused]


def odd_sizes(jaxpr: Jaxpr, elsewhere: Collection[str] = ()) -> list[str]:
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
    for equation, path, source, times in with_places(jaxpr):
        dtypes = {str(atom.aval.dtype) for atom in equation.invars[:2]}
        if place_name(source, path) in elsewhere:
            continue
        if is_product(equation) and dtypes.issubset(HALVES):
            flops, sizes = product_of(equation)
            total += times * flops
            odd = ", ".join(f"{size} {name}" for size, name in sizes if size % MULTIPLE)
            if odd and flops >= LARGE:
                by_place = found.setdefault((min(dtypes), odd), collections.Counter())
                place = f"{equation.primitive.name} at {place_name(source, path)}"
                by_place[place] += times * flops
    hazards = []
    for (dtype, odd), by_place in found.items():
        share, others = by_place.total() / total, len(by_place) - 1
        ((largest, _),) = by_place.most_common(1)
        if share >= SHARE:
            more = f", with {others} other place{'s' * (others > 1)}," * (others > 0)
            hazards.append(
                f"{largest}{more} multiplies in {dtype} with {odd}, no multiple of {MULTIPLE}: "
                "padded on a GPU, it may be slower "
                f"({share:.0%} of the operations of half products)"
            )
    return hazards
