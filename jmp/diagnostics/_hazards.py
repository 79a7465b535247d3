"""Hazards of a precision report: sentences to act upon. None is the rule."""

import math
from typing import Any

from jmp.autocasting._program import Traced
from jmp.diagnostics._flops import flops
from jmp.diagnostics._places import with_places
from jmp.diagnostics._ranges import HALVES
from jmp.diagnostics._rows import Row

# Float32 products that are what somebody asked for.
DELIBERATE = ("the user asked", "an inner autocast", "asked for by")

# Tensor cores read 16 bytes at a time: eight half numbers.
MULTIPLE = 8
# Products below that are over before their launch is, whatever their sizes.
LARGE = 10**6  # floating-point operations
# Sizes that this share of all floating-point operations has are worth a sentence.
SHARE = 0.01
# The channels of an image are what they are; cuDNN has kernels of its own for them.
IMAGE_CHANNELS = 4


def delicate_in_half(rows: list[Row]) -> list[str]:
    """Returns a sentence for each sum or exponential in half and each product that is not."""
    found = []
    for row in rows:
        place = _place(row.operation, row.source, row.module)
        in_half = row.dtype_in in HALVES
        if row.kind == "reduction" and in_half:
            found.append(f"{place} adds up in {row.dtype_in}: contributions stop counting")
        elif row.kind == "exponential" and in_half:
            found.append(f"{place} runs in {row.dtype_in}: it overflows, or loses all digits")
        elif row.kind == "product" and not in_half and not row.why.startswith(DELIBERATE):
            found.append(f"{place} multiplies in {row.dtype_in}: {row.why}")
    return found


def unused_rules(traced: Traced) -> list[str]:
    """Returns a sentence for each rule that matched no scope."""
    return [f"the rule {rule} matched no scope" for rule in traced.plan.words.regions.unused]


def odd_sizes(jaxpr: Any) -> list[str]:
    """Returns a sentence for half products with sizes that are no multiples of 8.

    For a GPU with tensor cores XLA copies the operands of such a matrix product into padded ones
    and cuts out the result (its passes `cublas_pad_for_gemms` and, for float16,
    `cudnn_pad_for_convolutions`), unless it takes a Triton kernel; NVIDIA's guide to matrix
    multiplication says that tensor cores are most efficient at multiples of 16 bytes. Compiled for
    an H200 with cuBLAS, 4096 x 4096 by 4096 x 4095 in float16 moves 2.3 times the bytes of its
    neighbour with 4096 columns.

    Sizes that many places share make one sentence. Products with a vector, grouped convolutions and
    ragged products are passed over: they use other kernels.

    Args:
      jaxpr: the program that runs, open; the turns of its scans count.
    """
    total = 0
    found: dict[tuple[str, str], dict[str, int]] = {}
    for equation, path, source, times in with_places(jaxpr):
        if not _is_half_product(equation):
            continue
        name = equation.primitive.name
        shapes = [tuple(atom.aval.shape) for atom in equation.invars]
        operations = flops(name, equation.params, shapes, tuple(equation.outvars[0].aval.shape))
        total += times * operations
        odd = [f"{size} {label}" for label, size in _sizes(equation) if size % MULTIPLE]
        if odd and operations >= LARGE:
            place = _place(name, source, path)
            by_place = found.setdefault((str(equation.invars[0].aval.dtype), ", ".join(odd)), {})
            by_place[place] = by_place.get(place, 0) + times * operations
    return [
        f"{_largest(by_place)} multiplies in {dtype} with {odd_of_all}, no multiple of {MULTIPLE}: "
        f"padded on a GPU, it may be slower ({sum(by_place.values()) / total:.0%} of the "
        "operations of half products)"
        for (dtype, odd_of_all), by_place in found.items()
        if sum(by_place.values()) >= SHARE * total
    ]


def _is_half_product(equation: Any) -> bool:
    is_product = equation.primitive.name in ("dot_general", "conv_general_dilated")
    return is_product and all(str(atom.aval.dtype) in HALVES for atom in equation.invars)


def _sizes(equation: Any) -> list[tuple[str, int]]:
    """Returns the sizes that tensor cores cut into pieces, with their names."""
    left, right = (atom.aval.shape for atom in equation.invars)
    params = equation.params
    if equation.primitive.name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        # The derivative with respect to a kernel exchanges batch and channels: layouts differ.
        if numbers.lhs_spec != numbers.out_spec or max(_groups(params)) > 1:
            return []
        inputs, outputs = (right[numbers.rhs_spec[axis]] for axis in (1, 0))
        sizes = [("input channels", inputs)] if inputs > IMAGE_CHANNELS else []
        return [*sizes, ("output channels", outputs)]
    (left_summed, right_summed), (left_batch, right_batch) = params["dimension_numbers"]
    rows = _others(left, (*left_summed, *left_batch))
    columns = _others(right, (*right_summed, *right_batch))
    summed = math.prod(left[axis] for axis in left_summed)
    if 1 in (rows, columns, summed):
        return []
    return [("rows", rows), ("columns", columns), ("summed elements", summed)]


def _groups(params: Any) -> tuple[int, int]:
    return params["feature_group_count"], params["batch_group_count"]


def _others(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in axes)


def _largest(operations: dict[str, int]) -> str:
    others = f", with {len(operations) - 1} other places," if len(operations) > 1 else ""
    return max(operations, key=operations.__getitem__) + others


def _place(operation: str, source: str, module: str) -> str:
    return f"{operation} at {source or '?'}" + f" ({module})" * bool(module)
