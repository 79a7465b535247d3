"""How arrays of an optimizer's state are stored in one or two bytes a number.

`encoded` makes `StoredArray`s of float32 arrays, whose `decoded` gives them back, rounded:

* "bfloat16": as they are; its range is that of float32.
* "float16" and "float8_e4m3fn": each row, along the last axis, divided by a power of two that puts
  its largest number just inside the range.
* "int8": blocks of up to 256 numbers of a row, divided likewise. A code is a float16 number cut to
  three bits of mantissa, which leaves nine bits. In a block with a negative number the highest bit
  of the exponent is left out: codes reach from the largest number down to 2**-17 of it. A block
  without any, such as a block of a second moment, needs no sign: codes reach down to 2**-32. Codes
  with even spacing would make zeros of the small numbers of a block, and Adam divides by them.

Scales are powers of two, so that multiplying by them rounds nothing.

If a second moment became zero and the first did not, Adam would divide by its eps only.
So in a row or block without negative numbers a positive one never becomes zero: below the smallest
number of the format it counts as that one.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jmp.transforms._few_kernels import may_be_sharded
from jmp.transforms._placement import reshard_where_types_say, spec_of_blocks
from jmp.transforms._rounding import HALFWAY, code_of, rounded_by
from jmp.trees import register_for_export

KINDS = ("bfloat16", "float16", "float8_e4m3fn", "int8")
BLOCK = 256
MOST_CHOICES = 16  # blocks of a row among which each number's is chosen by comparisons
MANTISSA = 3  # bits of the mantissa of codes
LARGEST_CODE = 1.875  # with a sign; without, 2**15 times as much
LEAST_EXPONENT = -14  # the exponent of the smallest normal number of float16
LARGEST_SIGNED, LARGEST = 127, 247  # codes of these
LEAST_SCALE = -126  # as an exponent


@register_for_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of an optimizer's state in one or two bytes a number.

    Attributes:
      codes: of the array's shape: bfloat16, float16, float8_e4m3fn, or uint8 for "int8":
        floats with three bits of mantissa, and no integers on an even grid.
      scales: bfloat16: the powers of two that multiply the codes of a row, or of a block of a row;
        a negative one for a block of "int8" whose codes have signs. None for "bfloat16".
      kind: one of `KINDS`.

    >>> stored = encoded(jnp.float32([[1.0, 1e-3, 3e-9]]), "int8")
    >>> stored.codes.dtype, stored.decoded()
    (dtype('uint8'), Array([[1.0000000e+00, 9.7656250e-04, 3.0267984e-09]], dtype=float32))
    """

    codes: jax.Array
    scales: jax.Array | None
    kind: str = dataclasses.field(metadata={"static": True})

    def decoded(self) -> jax.Array:
        """Returns the array, float32."""
        if self.scales is None:
            return self.codes.astype(jnp.float32)
        scales = self.scales.astype(jnp.float32)
        if self.kind == "int8":
            return _number_of_codes(self.codes, scales)
        return self.codes.astype(jnp.float32) * scales


def encoded(
    value: jax.Array,
    kind: str,
    bits: jax.Array | None = None,
    peaks: Sequence[jax.Array] | None = None,
    least: jax.Array | int = LEAST_SCALE,
) -> StoredArray:
    """Returns a float32 array as a `StoredArray`.

    An infinity or NaN stays one; in "int8" its whole block becomes infinities or NaNs.

    Args:
      value: float32 of at least one axis.
      kind: one of `KINDS`.
      bits: uint32 of its shape that decide the rounding, see `code_of`; None for the nearest.
      peaks: of `value`, from `peaks_of`; None to find them.
      least: `LEAST_SCALE`, or an array of it that arrays of this shape share, see `least_scales`.
    """
    if bits is None:
        bits = jnp.full_like(value, HALFWAY, dtype=jnp.uint32)
    if kind == "bfloat16":
        half = jnp.where(jnp.isfinite(value), rounded_by(bits, value, jnp.bfloat16), value)
        return StoredArray(half.astype(jnp.bfloat16), None, kind)
    if peaks is None:
        (peaks,) = peaks_of([value], kind)
    codes = (_codes_of_blocks if kind == "int8" else _codes_of_rows)(value, kind, bits, *peaks)
    # Scales after codes: the old ones can then be overwritten without a copy.
    codes, highest, lowest = lax.optimization_barrier((codes, *peaks))
    scales = _scales(kind, highest, lowest, jnp.asarray(least, jnp.int32))
    return StoredArray(codes, scales.astype(jnp.bfloat16), kind)


def least_scales(like: jax.Array) -> jax.Array:
    """Returns `LEAST_SCALE` in float32, of the shape of an array's scales or peaks.

    XLA computes the scales of arrays that share this in one kernel on a GPU, and else in one each.
    """
    # In float32: of integers XLA would give this array to other kernels too, and join those.
    return lax.optimization_barrier(jnp.full_like(like, LEAST_SCALE))


def peaks_of(values: Sequence[jax.Array], kind: str) -> list[tuple[jax.Array, ...]]:
    """Returns for each of some arrays of one shape what its scales follow from.

    They are the largest numbers of its rows, for "int8" of its blocks, and the largest of their
    negatives. All are found together: on a GPU in one kernel, which reads once what the arrays are
    computed from.
    """
    rows = list(map(_in_blocks, values)) if kind == "int8" else values
    # An infinity says nothing of the numbers beside it; codes of 8 bits have none.
    both = [each for row in rows for each in (row, -row)]
    found = _largest(both, only_finite=kind != "int8")
    return list(zip(found[::2], found[1::2], strict=True))


def _codes_of_rows(
    value: jax.Array, kind: str, bits: jax.Array, highest: jax.Array, lowest: jax.Array
) -> jax.Array:
    facts = jnp.finfo(kind)
    # A number that would be rounded to 2**128 is an infinity when it is decoded.
    top = 2.0**128 * (1 - 2.0 ** -(facts.nmant + 1))
    exponent = _exponent(jnp.maximum(highest, lowest), float(facts.max))[..., None]
    size = jnp.clip(value, -top, top) * _exp2(-exponent)
    code = code_of(bits, size, facts.nmant, facts.minexp)
    code = _not_lost(code, value, ~(lowest <= 0)[..., None])
    pattern = {8: jnp.uint8, 16: jnp.uint16}[facts.bits]
    largest, infinity, nan = (
        jnp.uint32(np.asarray(x, facts.dtype).view(pattern)) for x in (facts.max, np.inf, np.nan)
    )
    beyond = jnp.where(jnp.isnan(value), nan, infinity)
    code = jnp.where(jnp.isfinite(value), jnp.minimum(code, largest), beyond)
    signed = code | _sign_of(value) >> (32 - facts.bits)
    return lax.bitcast_convert_type(signed.astype(pattern), facts.dtype)


def _codes_of_blocks(
    value: jax.Array, kind: str, bits: jax.Array, highest: jax.Array, lowest: jax.Array
) -> jax.Array:
    exponent, has_sign = _exponent_of_codes(_of_each(highest, value), _of_each(lowest, value))
    code = code_of(bits, value * _exp2(-exponent), MANTISSA, LEAST_EXPONENT)
    code = _not_lost(code, value, has_sign)
    # Numbers that XLA computes again beside the peaks may exceed them by a rounding.
    code = jnp.minimum(code, jnp.where(has_sign, jnp.uint32(LARGEST_SIGNED), LARGEST))
    return jnp.where(has_sign, code | _sign_of(value) >> 24, code).astype(jnp.uint8)


def _sign_of(value: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(value, jnp.uint32) & jnp.uint32(2**31)


def _not_lost(code: jax.Array, value: jax.Array, has_sign: jax.Array) -> jax.Array:
    """Returns codes; without signs they are at least 1 for positive numbers, 0 for others."""
    return jnp.where(has_sign, code, jnp.where(value > 0, jnp.maximum(code, 1), jnp.uint32(0)))


def _largest(arrays: list[jax.Array], *, only_finite: bool) -> Sequence[jax.Array]:
    """Returns the largest number of each row of each array, all in one reduction."""

    def counted(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(x), x, 0) if only_finite else x

    def larger(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        # Counted here and not before the reduction: XLA would write the results to memory.
        return tuple(lax.max(counted(x), counted(y)) for x, y in zip(a, b, strict=True))

    if any(map(may_be_sharded, arrays)):  # a reduction of several arrays would gather them
        return [jnp.max(counted(array), axis=-1) for array in arrays]
    zeros = tuple(jnp.zeros((), jnp.float32) for _ in arrays)
    return lax.reduce(tuple(arrays), zeros, larger, (arrays[0].ndim - 1,))


def _exponent(peak: jax.Array, largest: float, least: jax.Array | int = LEAST_SCALE) -> jax.Array:
    """Returns the least exponent of a power of two by which `peak` is divided to `largest` or less.

    Within 126 of zero, so that the power and its inverse are normal numbers of float32.
    """
    fraction, exponent = math.frexp(largest)  # of which the mantissa is 2 * fraction
    beyond = 2**23 - 1 - round((2 * fraction - 1) * 2**23)
    # The addition carries into the exponent if the mantissa is larger than the one of `largest`.
    pattern = lax.bitcast_convert_type(peak, jnp.int32) + beyond
    return jnp.clip((pattern >> 23) - 127 - (exponent - 1), least, -LEAST_SCALE)


def _exp2(exponent: jax.Array | int) -> jax.Array:
    """Returns exact powers of two, float32, of exponents of normal numbers."""
    return lax.bitcast_convert_type(jnp.asarray((exponent + 127) << 23, jnp.int32), jnp.float32)


def _scales(kind: str, highest: jax.Array, lowest: jax.Array, least: jax.Array | int) -> jax.Array:
    peak = jnp.maximum(highest, lowest)
    if kind != "int8":
        return _exp2(_exponent(peak, float(jnp.finfo(kind).max), least))[..., None]
    exponent, has_sign = _exponent_of_codes(highest, lowest, least)
    scale = jnp.where(has_sign, -_exp2(exponent), _exp2(exponent))
    return jnp.where(jnp.isfinite(peak), scale, peak)


def _exponent_of_codes(
    highest: jax.Array, lowest: jax.Array, least: jax.Array | int = LEAST_SCALE
) -> tuple[jax.Array, jax.Array]:
    """Returns of each block the exponent of its scale, and whether its codes have signs."""
    has_sign = ~(lowest <= 0)  # also of a NaN
    exponent = _exponent(jnp.maximum(highest, lowest), LARGEST_CODE, least)
    return jnp.maximum(exponent - jnp.where(has_sign, 0, 15), least), has_sign


def _number_of_codes(codes: jax.Array, scales: jax.Array) -> jax.Array:
    scale, code = _of_each(scales, codes), codes.astype(jnp.uint16)
    has_sign = scale < 0
    cut = code + jnp.where(has_sign, code & 128, 0)  # puts the sign where float16 has it
    return lax.bitcast_convert_type(cut << 7, jnp.float16).astype(jnp.float32) * jnp.abs(scale)


def _in_blocks(x: jax.Array) -> jax.Array:
    """Returns rows as equal blocks of at most 256, the last filled up with zeros."""
    *rows, length = x.shape
    count, size = _block_sizes(length)
    x = reshard_where_types_say(x, _of_whole_rows(x, count))
    padded = jnp.pad(x, [(0, 0)] * len(rows) + [(0, count * size - length)])
    return padded.reshape(*rows, count, size)


def _of_each(of_blocks: jax.Array, like: jax.Array) -> jax.Array:
    """Returns, for each number of an array, what its block has."""
    count, size = _block_sizes(like.shape[-1])
    sharding = _of_whole_rows(like, count)
    of_blocks = reshard_where_types_say(of_blocks, sharding)

    def by_shape(of_blocks: jax.Array) -> jax.Array:
        wide = jnp.broadcast_to(of_blocks[..., None], (*of_blocks.shape, size))
        return wide.reshape(*of_blocks.shape[:-1], count * size)[..., : like.shape[-1]]

    def by_choice(of_blocks: jax.Array) -> jax.Array:
        block = lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1) // size
        each = jnp.broadcast_to(of_blocks[..., :1], like.shape)
        for number in range(1, count):
            each = jnp.where(block >= number, of_blocks[..., number : number + 1], each)
        return each

    # A TPU lays the blocks of the first out anew, three times as long as all else. A GPU computes
    # the second so long that XLA would keep float32 moments between kernels.
    if count > MOST_CHOICES or any(sharding.spec):
        each = by_shape(of_blocks)
    else:
        each = lax.platform_dependent(of_blocks, tpu=by_choice, default=by_shape)
    return reshard_where_types_say(each, jax.typeof(like).sharding)


def _of_whole_rows(x: jax.Array, count: int) -> Any:
    """Returns the sharding of an array; its last axis is whole if the sharding divides blocks."""
    sharding = jax.typeof(x).sharding
    return sharding.update(spec=PartitionSpec(*spec_of_blocks(sharding, x.ndim, count)))


def _block_sizes(length: int) -> tuple[int, int]:
    """Returns how many blocks a row has, and their size; the last may be partly beyond the row."""
    count = max(1, math.ceil(length / BLOCK))
    return count, math.ceil(length / count)
