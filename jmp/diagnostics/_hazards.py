"""Hazards of a precision report: sentences to act upon. None is the rule.

Hazards of float8 products: what a GPU pads, and what may cost more than it saves.
"""

import collections
import math
from collections.abc import Collection, Iterator, Sequence

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jmp.autocasting._exact_products import WHY_EXACT
from jmp.autocasting._operations import is_product, operations_of, rounded_arguments_of
from jmp.autocasting._program import Traced
from jmp.autocasting._steps import Plan
from jmp.diagnostics._ranges import FLOAT8, HALVES
from jmp.diagnostics._rows import Lines, Row, location_of, product_of
from jmp.diagnostics._walk import module_path, place_name, with_places

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
    largest, others = max(found, key=lambda row: row.flops), len(found) - 1
    more = f", with {others} other place{'s' * (others > 1)}," * (others > 0)
    return [
        f"{largest.operation} at {place_name(largest.source, largest.module)}{more} multiplies "
        f"float32 with {HIGHEST} precision ({count / total:.0%} of the operations of products): an "
        f"H200 does {FLOAT32_PEAK / 1e12:.0f} TFLOP/s of these and {TF32_PEAK / 1e12:.0f} in TF32, "
        f"so they may take {TF32_PEAK / FLOAT32_PEAK:.1f} times as long. If TF32's 11 bits are "
        "enough, put it under jax.default_matmul_precision('tensorfloat32') inside the function"
    ]


def rounded_arguments(plan: Plan, lines: Lines) -> list[str]:
    """Returns a sentence for each half product whose result reaches a function that wraps."""
    half = plan.words.settings.compute_dtype
    error = 512 * float(jnp.finfo(half).eps)  # the spacing of the numbers from 512 to 1024
    places = [
        place_name(source, module)
        for node in rounded_arguments_of(plan)
        for module, source in [location_of(node.equation, node.scope, lines)]
    ]
    return [
        f"a product at {place} multiplies in {half}, and its result goes to a function that wraps, "
        f"such as sin: {half} knows an argument of 1000 to {error:g}. Keep the product in float32 "
        "by a rule if its results are large"
        for place in dict.fromkeys(places)
    ]


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
            odd = ", ".join(f"{size} {name}" for size, name in sizes if size % HALF_MULTIPLE)
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
                f"{largest}{more} multiplies in {dtype} with {odd}, "
                f"no multiple of {HALF_MULTIPLE}: padded on a GPU, it may be slower "
                f"({share:.0%} of the operations of half products)"
            )
    return hazards


# XLA pads the sizes of a float8 product to multiples of this.
FLOAT8_MULTIPLE = 16
# Multiplications. By the data sheet of an H200 (989e12 operations a second in half, twice that in
# float8) three products of so many save 13 us in float8, which seven launches of 2 us take: so many
# kernels more a float8 product has. An estimate that no device has confirmed.
PAYS = 2**32


def float8_places(rows: Sequence[Row]) -> set[str]:
    """Returns the names of the places where float8 products stand."""
    return {place_name(row.source, row.module) for row in rows if row.dtype_in == FLOAT8}


def float8_hazards(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Returns what to know of the float8 products of a plan: sizes that are padded, small products.

    Where the policy asks for float8 and no product is, the reasons of the products.
    """
    found = [*_odd(plan), *_small(plan)]
    if not float8_places(rows):
        apart = "; not float8: "
        reasons = collections.Counter(r.why.split(apart)[1] for r in rows if apart in r.why)
        for why, _ in reasons.most_common(1):
            found.append(f"the policy asks for float8 products, and none is float8: {why}")
    return found


def _sizes(plan: Plan) -> Iterator[tuple[str, tuple[tuple[int, str], ...]]]:
    for operation in operations_of(plan):
        if FLOAT8 in operation.dtypes_in:
            module = module_path(operation.scope)
            name = f"{operation.equation.primitive.name} at {module or 'the top'}"
            yield name, product_of(operation.equation).sizes


def _odd(plan: Plan) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for name, sizes in _sizes(plan):
        odd = ", ".join(f"{size} {what}" for size, what in sizes if size % FLOAT8_MULTIPLE)
        if odd:
            found.setdefault(odd, []).append(name)
    for odd, names in found.items():
        yield (
            f"{_first(names)} multiplies in float8 with {odd}, no multiple of {FLOAT8_MULTIPLE}: "
            "padded on a GPU, which copies the operands"
        )


def _small(plan: Plan) -> Iterator[str]:
    names = [name for name, sizes in _sizes(plan) if math.prod(size for size, _ in sizes) < PAYS]
    if names:
        yield (
            f"{_first(names)} multiplies in float8 with fewer than 2**{PAYS.bit_length() - 1} "
            "multiplications: the kernels that find scales may cost more than float8 saves"
        )


def _first(names: Sequence[str]) -> str:
    others = len(names) - 1
    return names[0] + f", with {others} other{'s' * (others > 1)}," * (others > 0)
