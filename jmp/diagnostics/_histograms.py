"""`exponents`: how many elements of an array lie between each two powers of two.

Read off the bit patterns, in integer arithmetic: XLA may flush subnormal floats to zero as soon as
it computes with them, and then they could not be told from zeros.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

# The exponents of every dtype but float64.
LOWEST, HIGHEST = -149, 127
SPECIAL = 3  # zeros, infinities and NaNs are counted behind them
DIGIT_BITS, DIGITS = 8, 4


def layout(dtype: DTypeLike) -> range:
    """Returns the exponents that are counted for a dtype.

    Those of float32's subnormals and normals, which all narrower types share, so that counts of
    different types can be added; float64 has a longer row of its own.
    """
    wide = np.dtype(dtype) in (np.float64, np.complex128)
    return range(-1074, 1024) if wide else range(LOWEST, HIGHEST + 1)


def exponents(array: jax.Array) -> jax.Array:
    """Counts the elements of an array by `floor(log2(abs(x)))`, real and imaginary parts each.

    The array keeps its shape all along: flattened, it would be gathered where it is sharded.

    Returns: int32 counts, int64 in x64 mode: those of the exponents of `layout`, then those of
      zeros, infinities and NaNs. Exact below 2**31.

    >>> counts = jax.jit(exponents)(jnp.array([3.0, -2.0, 0.0, jnp.inf, 1e-40]))
    >>> {int(i) + LOWEST: int(counts[i]) for i in counts[:-3].nonzero()[0]}
    {-133: 1, 1: 2}
    >>> counts[-3:].tolist()
    [1, 1, 0]
    """
    mesh = jax.typeof(array).sharding.mesh
    if not mesh.explicit_axes:
        return _exponents(array)
    # Where types name shardings, a scatter asks for the sharding of its result.
    replicated = jax.sharding.PartitionSpec()
    with jax.sharding.use_abstract_mesh(mesh):
        count = jax.sharding.auto_axes(_exponents, axes=mesh.explicit_axes, out_sharding=replicated)
        counts: jax.Array = count(array)
    return counts


def _exponents(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _exponents(array.real) + _exponents(array.imag)
    if array.dtype.itemsize == 1:
        array = array.astype(np.float32)  # exact: all of them are normal float32 numbers, or e8m0
    counted = layout(array.dtype)
    places = len(counted)
    info = jnp.finfo(array.dtype)
    signed = np.int64 if info.bits == 64 else np.int32
    bits = lax.bitcast_convert_type(array, np.dtype(f"uint{info.bits}"))
    magnitude = bits & np.array(2 ** (info.bits - 1) - 1, bits.dtype)
    stored = (magnitude >> np.array(info.nmant, bits.dtype)).astype(signed)
    fraction = magnitude & np.array(2**info.nmant - 1, bits.dtype)
    # A subnormal number is its fraction times the smallest one: the highest bit set counts.
    highest_bit = info.bits - 1 - lax.clz(magnitude).astype(signed)
    smallest = int(info.minexp) - info.nmant
    exponent = jnp.where(stored == 0, highest_bit + smallest, stored + int(info.minexp) - 1)
    special = jnp.where(fraction == 0, places + 1, places + 2)
    place = jnp.where(stored == 2**info.nexp - 1, special, exponent - counted.start)
    place = jnp.where(magnitude == 0, places, place)
    counts = jnp.zeros(places + SPECIAL, jax.dtypes.canonicalize_dtype(np.int64))
    return counts.at[place].add(1, mode="promise_in_bounds")


def digits(counts: jax.Array) -> jax.Array:
    """Splits int32[...] counts into float32[DIGITS, ...] digits of 8 bits, the lowest first.

    What a gradient adds up is float32, exact to 2**24: so many digits are exact when added up over
    2**16 turns of a loop, where the counts themselves would be so over one.
    """
    counts = counts.astype(np.int32)
    shifted = jnp.stack([counts >> DIGIT_BITS * digit for digit in range(DIGITS)])
    return (shifted & ((1 << DIGIT_BITS) - 1)).astype(np.float32)


def from_digits(sums: np.ndarray) -> np.ndarray:
    """Returns the int64[...] counts of float32[DIGITS, ...] sums of digits."""
    weights = 2 ** (DIGIT_BITS * np.arange(DIGITS, dtype=np.int64))
    return np.tensordot(weights, sums.astype(np.int64), 1)
