"""Random bits for stochastic rounding, as a function of where they are used and of nothing else.

The bits of an element follow from a seed, the count of steps, the path of its array and the index
of the element in the whole array. So they are equal on any number of devices, under jit and eager,
and after a restore; no key is stored or split. They are computed where they are used, with some ten
integer operations an element, and are never written to memory.
"""

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jmp._jax_compat import varying_axes
from jmp._messages import listed

_OF_STEP = 0x9E3779B1  # odd, near 2**32 divided by the golden ratio: steps lie far apart


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
    digest = hashlib.blake2b(f"{seed} {path}".encode(), digest_size=12).digest()
    first, second, third = (np.frombuffer(digest, np.uint32)[i] for i in range(3))
    step = _mixed(count.astype(jnp.uint32) * jnp.uint32(_OF_STEP))
    # Each array begins to count elsewhere: XLA would else compute the indices of all arrays of a
    # shape once, and write them to memory.
    index = global_index(like, path, spec, jnp.uint32(third))
    return _mixed(index ^ (step ^ first), step + second)


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


def global_index(
    like: jax.Array, path: str, spec: PartitionSpec | None, start: jax.Array | int = 0
) -> jax.Array:
    """Returns the index of each element in the whole array, in the order of rows, modulo 2**32.

    Args:
      start: uint32: the index of the first element along the last axis.
    """
    divided = _names_by_axis(like, path, spec)
    parts = [math.prod(lax.axis_size(name) for name in names) for names in divided]
    index, stride = jnp.asarray(start, jnp.uint32), 1
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
