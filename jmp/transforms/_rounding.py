"""How a half parameter follows its master.

By an update that is exactly the difference, in float32, of the rounded master and the parameter.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp.dtypes import is_half
from jmp.trees import is_floating


def difference_to_master(param: jax.Array, master: jax.Array) -> jax.Array:
    """Returns what must be added to `param`, in float32, to get the rounded master."""
    new = rounded_master(master, param.dtype)
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


def rounded_master(master: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns a master rounded to the nearest finite number of a half `dtype`, as float32.

    Beyond the half range that is the largest finite number: from an infinite parameter no sum leads
    back, since inf - inf is NaN. (A choice by `isfinite(master)`, to let infinite ones through,
    would break flat masters' update into a kernel a tensor.)

    Not `master.astype(dtype).astype(float32)`: XLA drops such a pair of casts on a GPU.
    """
    value = master.astype(jnp.float32)
    largest = float(jnp.finfo(dtype).max)
    if jnp.dtype(dtype) == jnp.bfloat16:
        half = jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
        return jnp.clip(half, -largest, largest)
    # reduce_precision flushes what is subnormal in float16: there, multiples of 2**-24.
    subnormal = jnp.round(value * 2.0**24) * 2.0**-24
    normal = jax.lax.reduce_precision(value, exponent_bits=5, mantissa_bits=10)
    return jnp.clip(jnp.where(jnp.abs(value) < 2.0**-14, subnormal, normal), -largest, largest)


def needs_master(param: Any) -> bool:
    """Returns whether a parameter is stored in half."""
    return is_floating(param) and is_half(param.dtype)
