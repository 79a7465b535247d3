"""Hazards of float8 products: what a GPU pads, and what may cost more than it saves."""

import collections
import math
from collections.abc import Iterator, Sequence

from jmp.autocasting._operations import operations_of
from jmp.autocasting._steps import Plan
from jmp.diagnostics._places import module_path, place_name
from jmp.diagnostics._ranges import FLOAT8
from jmp.diagnostics._rows import Row, product_of

# XLA pads the sizes of a float8 product to multiples of this.
MULTIPLE = 16
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
        odd = ", ".join(f"{size} {what}" for size, what in sizes if size % MULTIPLE)
        if odd:
            found.setdefault(odd, []).append(name)
    for odd, names in found.items():
        yield (
            f"{_first(names)} multiplies in float8 with {odd}, no multiple of {MULTIPLE}: padded "
            "on a GPU, which copies the operands"
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
