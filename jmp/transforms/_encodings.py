"""How arrays of an optimizer's state are stored in one or two bytes a number.

`encoded` makes a `StoredArray` of a float32 array, whose `decoded` gives it back, rounded:

* "bfloat16": as it is; its range is that of float32.
* "float16" and "float8_e4m3fn": each row, along the last axis, divided by a power of two that puts
  its largest number just inside the range.
* "int8": blocks of up to 256 numbers of a row, each with a float32 scale, and codes that are small
  floating-point numbers themselves: three bits of mantissa below an exponent. Codes that are spaced
  evenly would make zeros of the small numbers of a block, and Adam divides by them. A block with a
  negative number spends one bit on signs, and reaches from its largest number down to 2**-18 of it;
  a block without any, as those of second moments, uses that bit for the exponent: 2**-34.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jmp.transforms._rounding import HALFWAY, rounded_by, rounded_to

BLOCK = 256
MANTISSA = 3  # bits of the codes' mantissa
LARGEST_CODE = 1.875  # 2 - 2**-3: what the largest code stands for, times the scale
SIGNED, UNSIGNED = -14, -30  # exponents of the smallest normal codes: of 4 and of 5 bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of an optimizer's state in one or two bytes a number.

    Attributes:
      codes: of the array's shape: bfloat16, float16, float8_e4m3fn, or uint8 for "int8".
      scales: for each row, or block of a row, what its codes are multiplied by: bfloat16 powers of
        two or, for "int8", float32; None for bfloat16.
      kind: "bfloat16", "float16", "float8_e4m3fn" or "int8".

    >>> stored = encoded(jnp.float32([[1.0, 1e-3, 3e-9]]), "int8")
    >>> stored.codes.dtype, stored.decoded()
    (dtype('uint8'), Array([[1.0000000e+00, 9.7656250e-04, 2.9802325e-09]], dtype=float32))
    """

    codes: jax.Array
    scales: jax.Array | None
    kind: str = dataclasses.field(metadata={"static": True})

    def decoded(self) -> jax.Array:
        """Returns the array, float32."""
        _, decode = KINDS[self.kind]
        return decode(self.codes, self.scales)


def encoded(value: jax.Array, kind: str, bits: jax.Array | None = None) -> StoredArray:
    """Returns a float32 array as a `StoredArray`.

    An infinity or NaN stays one; in "int8" its whole block becomes infinities or NaNs.

    Args:
      value: float32 of at least one axis.
      kind: one of `KINDS`.
      bits: uint32 of its shape by which to round, as in `rounded_to`; None for the nearest.
    """
    if bits is None:
        bits = jnp.full_like(value, HALFWAY, dtype=jnp.uint32)
    encode, _ = KINDS[kind]
    codes, scales = encode(value, bits)
    return StoredArray(codes, scales, kind)


Encoded = tuple[jax.Array, jax.Array | None]
Kind = tuple[
    Callable[[jax.Array, jax.Array], Encoded],
    Callable[[jax.Array, jax.Array | None], jax.Array],
]


def _to_bfloat16(value: jax.Array, bits: jax.Array) -> Encoded:
    return _finite_rounded(value, bits, jnp.bfloat16), None


def _from_bfloat16(codes: jax.Array, scales: jax.Array | None) -> jax.Array:
    return codes.astype(jnp.float32)


def _finite_rounded(value: jax.Array, bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.where(jnp.isfinite(value), rounded_by(bits, value, dtype), value).astype(dtype)


def _by_rows(dtype: jnp.dtype) -> Kind:
    top = jnp.finfo(dtype).maxexp - 1  # the exponent of the largest number

    def encode(value: jax.Array, bits: jax.Array) -> Encoded:
        largest = jnp.max(jnp.abs(value), axis=-1, keepdims=True)
        # The power of two that brings it below the range's last, of which a part is missing.
        exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - (top - 1)
        scale = lax.bitcast_convert_type(jnp.clip(exponent, 1, 252) << 23, jnp.float32)
        return _finite_rounded(value * (1 / scale), bits, dtype), scale.astype(jnp.bfloat16)

    def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
        return codes.astype(jnp.float32) * scales.astype(jnp.float32)

    return encode, decode


def _to_codes(value: jax.Array, bits: jax.Array) -> Encoded:
    blocks = _in_blocks(value)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) * (1 / LARGEST_CODE)
    has_sign = ~(jnp.min(blocks, axis=-1, keepdims=True) >= 0)
    lowest = jnp.where(has_sign, SIGNED, UNSIGNED)
    size = jnp.where(scale > 0, jnp.abs(blocks) / scale, 0)
    near = rounded_to(_in_blocks(bits), size, MANTISSA, lowest)
    near = jnp.clip(near, 0, LARGEST_CODE)
    pattern = lax.bitcast_convert_type(near, jnp.int32) >> (23 - MANTISSA)
    even = (near * _exp2(MANTISSA - lowest)).astype(jnp.int32)
    code = jnp.where(near < _exp2(lowest), even, pattern - _first_normal(lowest))
    code = code + 128 * (has_sign & jnp.signbit(blocks))
    # The sign of the scale says which codes these are.
    scales = jnp.where(has_sign, -scale, scale)
    return _in_rows(code.astype(jnp.uint8), value.shape), scales[..., 0]


def _from_codes(codes: jax.Array, scales: jax.Array) -> jax.Array:
    scale = scales[..., None]
    code, has_sign = _in_blocks(codes).astype(jnp.int32), jnp.signbit(scale)
    lowest = jnp.where(has_sign, SIGNED, UNSIGNED)
    number = jnp.where(has_sign, code & 127, code)
    pattern = (number + _first_normal(lowest)) << (23 - MANTISSA)
    normal = lax.bitcast_convert_type(pattern, jnp.float32)
    even = number.astype(jnp.float32) * _exp2(lowest - MANTISSA)
    size = jnp.where(number < 2**MANTISSA, even, normal) * jnp.abs(scale)
    return _in_rows(jnp.where(has_sign & (code > 127), -size, size), codes.shape)


def _first_normal(lowest: jax.Array) -> jax.Array:
    """Returns what the pattern of a normal code, without the bits that it lacks, begins at."""
    return (lowest + 126) << MANTISSA


def _exp2(exponent: jax.Array) -> jax.Array:
    """Returns exact powers of two, float32, of exponents of normal numbers."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _in_blocks(x: jax.Array) -> jax.Array:
    """Returns rows as equal blocks of at most 256, the last filled up with zeros."""
    *rows, length = x.shape
    count = math.ceil(length / BLOCK)
    size = math.ceil(length / count)
    padded = jnp.pad(x, [(0, 0)] * len(rows) + [(0, count * size - length)])
    return padded.reshape(*rows, count, size)


def _in_rows(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return blocks.reshape(*shape[:-1], -1)[..., : shape[-1]]


KINDS: dict[str, Kind] = {
    "bfloat16": (_to_bfloat16, _from_bfloat16),
    "float16": _by_rows(jnp.dtype(jnp.float16)),
    "float8_e4m3fn": _by_rows(jnp.dtype(jnp.float8_e4m3fn)),
    "int8": (_to_codes, _from_codes),
}
