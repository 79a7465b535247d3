"""Random bits for stochastic rounding, as a function of where they are used and of nothing else.

The bits of an element follow from a seed, the count of steps, the path of its array and the index
of the element in the whole array. So they are equal on any number of devices, under jit and eager,
and after a restore; no key is stored or split. They are computed where they are used, with some ten
integer operations an element, and are never written to memory.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jmp._jax_compat import varying_axes
from jmp._messages import listed

# Odd numbers near 2**32 divided by the golden ratio, by e and by pi: as good as any others that
# have about as many ones as zeros.
_OF_STEP, _OF_SEED, _OF_PATH = 0x9E3779B1, 0x5E2D58D9, 0x517CC1B7


def random_bits(
    seed: int, count: jax.Array, path: str, like: jax.Array, spec: PartitionSpec | None
) -> jax.Array:
    """Returns uint32 of the shape of `like`, each bit of each as good as the flip of a coin.

    Args:
      seed: the user's.
      count: int32 scalar: how many steps were taken.
      path: which array this is, as `keystr` writes it.
      like: an array of the shape and on the devices of the result.
      spec: how the axes of `like` are divided inside of a shard_map; None where they are not.

    Raises: ValueError if `like` differs between the devices of a shard_map, and `spec` does not say
      along which of its axes.
    """
    step = jnp.uint32(_OF_STEP) * count.astype(jnp.uint32) + jnp.uint32(seed * _OF_SEED % 2**32)
    names = jnp.uint32(zlib.crc32(path.encode()) * _OF_PATH % 2**32)
    first, second = _mixed(step ^ names), _mixed(step + jnp.uint32(zlib.adler32(path.encode())))
    return _mixed(global_index(like, path, spec) ^ first, second)


def _mixed(x: jax.Array, key: jax.Array | int = 0) -> jax.Array:
    """Returns uint32 that depend on `x` in all bits; for each key another permutation of 2**32.

    Multiplications by odd numbers alternate with shifts, as in the last steps of MurmurHash3
    (Appleby 2011), whose two factors these are; the key comes in between.
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) + key
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def global_index(like: jax.Array, path: str, spec: PartitionSpec | None) -> jax.Array:
    """Returns the index of each element in the whole array, in the order of rows, modulo 2**32."""
    divided = _names_by_axis(like, path, spec)
    parts = [math.prod(lax.axis_size(name) for name in names) for names in divided]
    index, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(like.ndim)):
        # From the devices' own axes XLA divides the numbers among them; one long vector it would
        # make whole on each.
        along = _iota(like, axis)
        if divided[axis]:
            start = lax.axis_index(divided[axis]).astype(jnp.uint32) * like.shape[axis]
            along = along + start
        index = index + along * jnp.uint32(stride % 2**32)
        stride *= like.shape[axis] * parts[axis]
    return index


def _iota(like: jax.Array, axis: int) -> jax.Array:
    sharding = jax.typeof(like).sharding
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    place: Any = {"out_sharding": sharding} if is_explicit else {}
    return lax.broadcasted_iota(jnp.uint32, like.shape, axis, **place)


def _names_by_axis(like: jax.Array, path: str, spec: PartitionSpec | None) -> list[tuple[str, ...]]:
    """Returns along which axes of a shard_map each axis of an array is divided."""
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    entries = [*(spec or ())] if mapped else []
    entries += [None] * (like.ndim - len(entries))
    names = [entry if isinstance(entry, tuple) else (entry,) for entry in entries]
    divided = [tuple(name for name in each if name in mapped) for each in names]
    unknown = varying_axes(like) - {name for each in divided for name in each}
    if unknown and spec is None:
        raise ValueError(
            f"Stochastic rounding got {path or 'an array'} that differs between the devices of the "
            f"mapped axes {listed(sorted(unknown))}, and does not know which part each holds. Give "
            "it what the shard_map got for the parameters: specs=<the tree of PartitionSpecs>."
        )
    return divided
