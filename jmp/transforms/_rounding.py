"""Rounding float32 to fewer bits: to the nearest, or stochastically; and how a parameter follows.

A half parameter follows by an update that is exactly the difference, in float32, of what it becomes
and what it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp.dtypes import is_half
from jmp.trees import is_floating


def difference_to(new: jax.Array, param: jax.Array) -> jax.Array:
    """Returns what must be added to `param`, in float32, to get `new`, a number of its dtype."""
    old = param.astype(jnp.float32)
    # Equal values: the zero with the master's sign, so that -0.0 stays what it is.
    zero = jnp.copysign(jnp.float32(0), new)
    if param.dtype == jnp.float16:
        # 0.0 + -0.0 is 0.0: a master of -1e-9 needs a number that float16 rounds to -0.0.
        turns = (old == 0) & (jnp.signbit(new) != jnp.signbit(old))
        zero = jnp.where(turns, jnp.copysign(jnp.float32(2.0**-126), new), zero)
    change = new - old
    if param.dtype == jnp.bfloat16:
        # From one end of its range to the other is more than float32 can say at once.
        farthest = float(jnp.finfo(jnp.float32).max)
        change = jnp.clip(change, -farthest, farthest)
    return jnp.where(new == old, zero, change)


def rounded(master: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns a master rounded to the nearest finite number of a half `dtype`, as float32.

    Beyond the range of the dtype that is the largest finite number: from an infinite parameter no
    sum leads back, since inf - inf is NaN. (A choice by `isfinite(master)`, to let infinite ones
    through, would break flat masters' update into a kernel a tensor.)

    Not `master.astype(dtype).astype(float32)`: XLA drops such a pair of casts on a GPU.
    """
    largest = float(jnp.finfo(dtype).max)
    if jnp.dtype(dtype) == jnp.bfloat16:
        half = lax.reduce_precision(master, exponent_bits=8, mantissa_bits=7)
        return jnp.clip(half, -largest, largest).astype(jnp.float32)
    # reduce_precision flushes what is subnormal in float16: there, multiples of 2**-24.
    subnormal = jnp.round(master * 2.0**24) * 2.0**-24
    normal = lax.reduce_precision(master, exponent_bits=5, mantissa_bits=10)
    half = jnp.where(jnp.abs(master) < 2.0**-14, subnormal, normal)
    return jnp.clip(half, -largest, largest).astype(jnp.float32)


def widened(x: jax.Array) -> jax.Array:
    """Returns bfloat16 as float32, exactly.

    Not by a cast, which may flush subnormal numbers to zero, and which XLA drops after another.
    """
    pattern = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(pattern, jnp.float32)


def needs_master(param: Any) -> bool:
    """Returns whether a parameter is stored in half."""
    return is_floating(param) and is_half(param.dtype)


HALFWAY = 2**31  # bits that round to the nearest


def rounded_by(bits: jax.Array, value: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns float32 rounded to one of the two neighbours in a narrower `dtype`, as float32.

    As `rounded_to`, within the range of the dtype: beyond its largest finite number the result is
    that number, also for an infinity.

    >>> rounded_by(jnp.uint32(HALFWAY), jnp.float32(1 + 2**-8), jnp.bfloat16)
    Array(1.0078125, dtype=float32)
    """
    facts, kind = jnp.finfo(dtype), jnp.uint32
    near = rounded_to(bits, value, facts.nmant, facts.minexp)
    # By patterns: a comparison of numbers may take a subnormal one for zero.
    pattern, given = (lax.bitcast_convert_type(x, kind) for x in (near, value))
    sign, largest = given & kind(2**31), kind(np.float32(facts.max).view(np.uint32))
    pattern = jnp.minimum(pattern & kind(2**31 - 1), largest) | sign
    is_nan = given & kind(2**31 - 1) > kind(0x7F800000)
    return lax.bitcast_convert_type(jnp.where(is_nan, kind(0x7FC00000), pattern), jnp.float32)


def rounded_to(bits: jax.Array, value: jax.Array, mantissa: int, lowest: int) -> jax.Array:
    """Returns float32 rounded to one of the two neighbours in a format of fewer bits, as float32.

    The highest of the bits decide: away from zero if they, taken as a fraction below 1, and the
    fraction of the way from the lower neighbour come to 1 or more. With random bits that is
    stochastic rounding (Gupta et al. 2015, section 3), whose mean is the value: exactly for a
    normal number, to 2**-24 of a spacing for a subnormal one. With `HALFWAY` it is rounding to the
    nearest, ties away from zero. A number that the format holds stays.

    Args:
      bits: uint32 of the shape of `value`.
      value: float32; for a NaN the result is not defined.
      mantissa: the bits of the format's mantissa, without the leading 1.
      lowest: the exponent of the smallest normal number; below it numbers lie evenly.
    """
    dropped = 23 - mantissa
    pattern = lax.bitcast_convert_type(value, jnp.uint32)
    # An addition of integers carries into the exponent where the mantissa is full, as it must.
    carried = pattern + (bits >> (32 - dropped))
    normal = lax.bitcast_convert_type(carried >> dropped << dropped, jnp.float32)
    if lowest <= jnp.finfo(jnp.float32).minexp:
        return normal  # subnormal numbers as float32's own, between which the addition rounds too
    spacing = 2.0 ** (lowest - mantissa)
    size = jnp.abs(value) / spacing
    lower = jnp.floor(size)
    goes_up = (size - lower) + (bits >> 8).astype(jnp.float32) * 2.0**-24 >= 1
    even = jnp.copysign((lower + goes_up) * spacing, value)
    return jnp.where(jnp.abs(value) < 2.0**lowest, even, normal)


def code_of(bits: jax.Array, value: jax.Array, mantissa: int, lowest: int) -> jax.Array:
    """Returns what `rounded_to` does, as patterns of the narrower format without their signs.

    The exponent of a normal number is 1 at `lowest`; it is not limited. For a subnormal number the
    mean is the value to 2**-24 of a spacing, with ten bits of mantissa to 2**-20.

    Returns: uint32, of which the lowest bits are the mantissa.
    """
    dropped = 23 - mantissa
    pattern = lax.bitcast_convert_type(value, jnp.uint32) & jnp.uint32(2**31 - 1)
    below_first = jnp.uint32((lowest + 126) << mantissa)
    normal = ((pattern + (bits >> (32 - dropped))) >> dropped) - below_first
    # Below `lowest` numbers lie evenly. They are counted in integers, a spacing being 2**fraction.
    fraction = min(24, 30 - mantissa)
    size = lax.bitcast_convert_type(pattern, jnp.float32) * 2.0 ** (fraction + mantissa - lowest)
    even = (size.astype(jnp.int32).astype(jnp.uint32) + (bits >> (32 - fraction))) >> fraction
    return jnp.where(pattern < jnp.uint32((lowest + 127) << 23), even, normal)
