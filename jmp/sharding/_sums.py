"""Sums over devices: in which dtype devices send each other gradients, and add them up.

A collective adds up in the dtype that it sends: in half it rounds at each of the n devices of a
ring, and in float32 it sends twice the bytes. An *exchange* has both: each device sends the others
their parts in half, all to all, and adds up the n parts of its own shard in float32. The sum is
that of the devices' half gradients, and is rounded nowhere else.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp._jax_compat import platform_of_mesh
from jmp.dtypes import FLOAT32
from jmp.sharding._axes import are_tracked, mapped_axes

Names = tuple[str, ...]

# Gradients of fewer elements share one exchange: sent apart, each would wait for all devices.
_SMALL = 2**16


class Wire(NamedTuple):
    """The dtypes of a sum over devices.

    Attributes:
      sent: of what devices send each other.
      added: in which they add up.
      returned: of sums that go back to all replicas of a parameter.
    """

    sent: np.dtype
    added: np.dtype
    returned: np.dtype

    @property
    def exchanges(self) -> bool:
        """Whether devices add up in another dtype than they send, which no collective does."""
        return self.sent != self.added


class Place(NamedTuple):
    """Where the sum of a gradient belongs, and how it gets there.

    Attributes:
      shards: the axes along which the parameter is sharded, with the dimension of each.
      replicas: the axes along which it is the same, and its gradients are not.
    """

    shards: tuple[tuple[int, Names], ...]
    replicas: Names
    wire: Wire

    @property
    def names(self) -> Names:
        """All axes to add up over."""
        return (*itertools.chain(*(names for _, names in self.shards)), *self.replicas)


def holds(wide: np.dtype, narrow: np.dtype) -> bool:
    """Returns whether each number of the dtype `narrow` is one of `wide`.

    >>> holds(np.dtype("float32"), jnp.dtype("bfloat16")), holds(np.dtype("float16"), FLOAT32)
    (True, False)
    """
    common: np.dtype = jax.dtypes.result_type(wide, narrow)
    return common == wide


def prefers_exchanges() -> bool:
    """Returns whether exchanges are the faster way on the devices of the mesh.

    A TPU adds up inside the kernel that computes a gradient: a step of eight layers of 1024 x 1024
    took 0.76 of the cycles of half sums on a v5e, and 1.25 with exchanges.
    """
    return platform_of_mesh() != "tpu"


def in_groups(
    function: Callable[[Sequence[jax.Array], Sequence[Place]], Sequence[jax.Array]],
    arrays: Sequence[jax.Array],
    places: Sequence[Place],
) -> list[jax.Array]:
    """Calls a function of arrays and places for those that are added up together.

    Args:
      arrays: shards, or whole arrays of which nothing is sharded.
    """
    groups: dict[object, list[int]] = {}
    for number, (array, place) in enumerate(zip(arrays, places, strict=True)):
        whole = array.size * math.prod(jax.lax.axis_size(names) for _, names in place.shards)
        shares = place.wire.exchanges and 0 < whole < _SMALL
        key = (place.names, place.replicas, place.wire) if shares else number
        groups.setdefault(key, []).append(number)
    results = dict[int, jax.Array]()
    for group in groups.values():
        found = function([arrays[n] for n in group], [places[n] for n in group])
        results.update(zip(group, found, strict=True))
    return [results[number] for number in range(len(arrays))]


def added_up(parts: Sequence[jax.Array], places: Sequence[Place]) -> Sequence[jax.Array]:
    """Adds up the parts that devices have of each gradient, in mapped code.

    Args:
      parts: whole gradients, each device its own; several only as `in_groups` gives them.

    Returns: the shard of each sum that belongs to this device, in `wire.added`; in `wire.returned`
      if it went back to replicas.
    """
    names, wire = places[0].names, places[0].wire
    if wire.exchanges and names and jax.lax.axis_size(names) > 1 and parts[0].size:
        return _exchanged(parts, places)
    return [_reduced(part.astype(wire.added), p) for part, p in zip(parts, places, strict=True)]


def summed(arrays: Sequence[jax.Array], axes: Names, sent: np.dtype) -> list[jax.Array]:
    """Adds up arrays over `axes`; each device has its own parts, and all get the sums.

    Args:
      sent: the dtype in which float32 arrays are sent; others are sent in their own.
    """
    wires = [Wire(sent if a.dtype == FLOAT32 else a.dtype, a.dtype, a.dtype) for a in arrays]
    return in_groups(added_up, arrays, [Place((), axes, wire) for wire in wires])


def _reduced(part: jax.Array, place: Place) -> jax.Array:
    for dimension, names in place.shards:
        part = jax.lax.psum_scatter(part, names, scatter_dimension=dimension, tiled=True)
    # After the scatter, which leaves less to add up.
    return jax.lax.psum(part, place.replicas) if place.replicas else part


def _exchanged(parts: Sequence[jax.Array], places: Sequence[Place]) -> Sequence[jax.Array]:
    names, replicas, wire = places[0].names, places[0].replicas, places[0].wire
    copies = jax.lax.axis_size(replicas) if replicas else 1
    shards = [_by_device(part, place.shards) for part, place in zip(parts, places, strict=True)]
    shapes = [shard.shape[1:] for shard in shards]
    # Along a dimension that the replicas divide: flat, an array is laid out anew on a TPU.
    divided = next((d for d, size in enumerate(shapes[0]) if size % copies == 0), None)
    if len(shards) > 1 or divided is None:
        divided, shards = 0, [_flat(shard, copies) for shard in shards]
    rows = [_merged(_split(shard, 1 + divided, copies, to=1), 2) for shard in shards]
    joined = jnp.concatenate(rows, 1) if len(rows) > 1 else rows[0]
    received = jax.lax.all_to_all(joined.astype(wire.sent), names, 0, 0)
    total = jnp.sum(received, 0, dtype=wire.added)
    ends = np.cumsum([row.shape[1] for row in rows])
    sums = jnp.split(total, ends[:-1]) if len(rows) > 1 else [total]
    if replicas:
        to = "invarying" if are_tracked() and {*replicas} <= {*mapped_axes()} else "varying"
        gather = partial(jax.lax.all_gather, axis=divided, tiled=True, to=to)
        sums = [gather(piece.astype(wire.returned), replicas) for piece in sums]
    return [
        total if total.shape == shape else total[: math.prod(shape)].reshape(shape)
        for total, shape in zip(sums, shapes, strict=True)
    ]


def _by_device(part: jax.Array, shards: Sequence[tuple[int, Names]]) -> jax.Array:
    """Returns a gradient with a new first dimension: the devices, which get a shard each."""
    for number, (dimension, names) in enumerate(reversed(shards)):
        part = _split(part, dimension + number, jax.lax.axis_size(names))
    return _merged(part, len(shards))


def _split(array: jax.Array, dimension: int, into: int, to: int = 0) -> jax.Array:
    """Splits a dimension into equal pieces, which the new dimension `to` counts."""
    shape = array.shape
    pieces = (into, shape[dimension] // into)
    cut = array.reshape(*shape[:dimension], *pieces, *shape[dimension + 1 :])
    return jnp.moveaxis(cut, dimension, to)


def _merged(array: jax.Array, dimensions: int) -> jax.Array:
    """Makes one dimension of the first `dimensions`; of none, one of size 1."""
    first, others = array.shape[:dimensions], array.shape[dimensions:]
    return array.reshape(math.prod(first), *others)


def _flat(shards: jax.Array, copies: int) -> jax.Array:
    """Returns rows of a multiple of `copies` numbers, filled up with zeros."""
    rows = shards.reshape(shards.shape[0], math.prod(shards.shape[1:]))
    return jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % copies)])
