"""Mapped axes: along which of them values differ, and how devices agree and add up along them.

Inside shard_map or pmap each device sees its own gradients. If one of them overflows and the others
do not, devices that share a scale and parameters would differ without an error: one of them skips,
the rest step. So they agree on one flag (`agreed`). Under jit with sharded arrays there is one
program and one flag, and nothing to agree on.

`add_up` adds up gradients; in which dtypes is decided by the caller, `_gather.py`, which passes a
`Wire`. A collective adds up in the dtype that it sends: in half it rounds at each of the n devices
of a ring, and in float32 it sends twice the bytes. An *exchange* has both: each device sends the
others their parts in half, all to all, and adds up the n parts of its own shard in float32. The sum
is the float32 sum of the devices' half gradients.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jmp._jax_compat import varying_axes
from jmp._messages import wrong
from jmp.trees import PyTree

AxisName = str | Sequence[str]
Names = tuple[str, ...]

# Gradients of fewer elements share an exchange: sent apart, each would wait for all devices. All
# of them are kept until the last is there, so they are not many.
_SMALL, _TOGETHER = 2**16, 2**18


def mapped_axes() -> Names:
    """Returns the mesh axes over which the code being traced is mapped (shard_map, pmap)."""
    return tuple(sorted(jax.sharding.get_abstract_mesh().manual_axes))


def are_tracked() -> bool:
    """Returns whether types say along which mapped axes a value varies.

    They do in `shard_map(..., check_vma=True)`, where an axis index certainly varies.
    """
    return any(axis in varying_axes(jax.lax.axis_index(axis)) for axis in mapped_axes())


def made_varying(value: Any, axes: Iterable[str]) -> Any:
    """Returns `value` as varying along mapped axes, so that AD adds nothing up along them."""
    missing = tuple(sorted({*axes}.intersection(mapped_axes()) - varying_axes(value)))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def without_reduced(value: Any) -> Any:
    """Returns `value` without axes that its type calls `reduced`, which no element-wise operation
    takes."""
    sharding = jax.typeof(value).sharding
    if not sharding.spec.reduced:
        return value
    plain = PartitionSpec(*sharding.spec.partitions)
    return jax.sharding.reshard(value, NamedSharding(sharding.mesh, plain))


def unreduced_axes(value: Any) -> frozenset[str]:
    """Returns the axes over which `value` is still to be added up, as its type says."""
    aval = jax.typeof(value)
    mapped = getattr(getattr(aval, "manual_axis_type", None), "unreduced", ())
    return frozenset(aval.sharding.spec.unreduced) | frozenset(mapped)


def names_by_dimension(spec: PartitionSpec, dimensions: int = 0) -> list[Names]:
    """Returns the axes that a spec names, dimension by dimension, without the axes of sums.

    Args:
      dimensions: the number of dimensions of the array; a spec may end earlier.

    >>> names_by_dimension(PartitionSpec(None, ("data", "model")), 3)
    [(), ('data', 'model'), ()]
    """
    names: list[Names] = [
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in spec.partitions
    ]
    return names + [()] * (dimensions - len(names))


def axis_names(given: object, name: str, caller: str) -> Names:
    """Returns names of axes, of which one may stand alone, as a tuple.

    Raises: TypeError for anything else, before an axis of that name is looked for.

    >>> axis_names("data", "axis_name", "with_loss_scale")
    ('data',)
    """
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence | Set) or not all(isinstance(n, str) for n in names):
        expected = 'names of axes, such as ("data",), or () for none'
        raise wrong(TypeError, caller, given, expected, name=name)
    return tuple(dict.fromkeys(sorted(names) if isinstance(names, Set) else names))


def agreed(
    flag: jax.Array, shared: PyTree, axis_name: AxisName, apart: Sequence[str] = ()
) -> jax.Array:
    """Returns whether `flag` holds on every device that shares the tree `shared`.

    Args:
      flag: bool scalar, possibly different from device to device.
      shared: the loss scale. Along an axis along which it varies, each device keeps its own.
      axis_name: "auto", the names of axes, or () to leave the flag as it is. "auto" means the
        mapped axes along which the flag varies and `shared` does not; if JAX does not track that
        (pmap, `check_vma=False`), all mapped axes. A vmap's axis is only agreed on if named.
      apart: axes along which each device keeps its own flag.
    """
    (found,) = axes_of_each([flag], shared, axis_name)
    axes = tuple(axis for axis in found if axis not in apart)
    if not axes:
        return flag
    return jax.lax.pmin(flag.astype(jnp.int32), axes).astype(jnp.bool_)


def axes_of_each(values: Sequence[jax.Array], shared: PyTree, axis_name: AxisName) -> list[Names]:
    """Returns for each value the axes that `axis_name` means; see `agreed`."""
    mapped = mapped_axes()
    tracked = bool(mapped) and are_tracked()
    if axis_name == "auto":
        if not tracked:
            return [mapped for _ in values]
        own = [varying_axes(leaf) for leaf in jax.tree.leaves(shared)]
        return [tuple(sorted(varying_axes(value).difference(*own))) for value in values]
    names = axis_names(axis_name, "axis_name", "agreed")
    # Where a value is known not to vary there is nothing to add up, and JAX may refuse to.
    return [
        tuple(n for n in names if not (tracked and n in mapped and n not in varying_axes(value)))
        for value in values
    ]


# Sums over devices.


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


class Route(NamedTuple):
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


def in_groups(
    function: Callable[[Sequence[jax.Array], Sequence[Route]], Sequence[jax.Array]],
    arrays: Sequence[jax.Array],
    routes: Sequence[Route],
) -> list[jax.Array]:
    """Calls `function` once for all arrays that share an exchange, and for each of the others.

    Args:
      arrays: shards, or whole arrays of which nothing is sharded.

    Returns: the results, in the order of the arrays.
    """
    groups: list[list[int]] = []
    filling: dict[object, tuple[list[int], int]] = {}  # a group, and its elements so far
    for number, (array, route) in enumerate(zip(arrays, routes, strict=True)):
        elements = array.size * math.prod(_size(names) for _, names in route.shards)
        is_divided = any(jax.typeof(array).sharding.spec.partitions)  # along an explicit axis
        shares = route.wire.exchanges and 0 < elements < _SMALL and not is_divided
        key = (route.names, route.replicas, route.wire) if shares else number
        group, filled = filling.get(key, ([], 1 + _TOGETHER))
        if filled + elements > _TOGETHER:
            group, filled = [], 0
            groups.append(group)
        group.append(number)
        filling[key] = group, filled + elements
    results: dict[int, jax.Array] = {}
    for group in groups:
        found = function([arrays[n] for n in group], [routes[n] for n in group])
        results |= zip(group, found, strict=True)
    return [results[number] for number in range(len(arrays))]


def add_up(parts: Sequence[jax.Array], routes: Sequence[Route]) -> Sequence[jax.Array]:
    """Adds up the parts that devices have of each gradient, in mapped code.

    Args:
      parts: whole gradients, each device its own; several only as `in_groups` gives them.

    Returns: the shard of each sum that belongs to this device, in `wire.added`; in `wire.returned`
      if it went back to replicas.
    """
    names, wire = routes[0].names, routes[0].wire
    # Over an axis of vmap nothing is sent.
    is_sent = {*names} <= {*mapped_axes()} and _size(names) > 1
    if wire.exchanges and is_sent and parts[0].size:
        return _exchange_parts(parts, routes)
    return [_reduced(part, route) for part, route in zip(parts, routes, strict=True)]


def _reduced(part: jax.Array, route: Route) -> jax.Array:
    total = part.astype(route.wire.added)
    for dimension, names in route.shards:
        total = jax.lax.psum_scatter(total, names, scatter_dimension=dimension, tiled=True)
    if not route.replicas:
        return total
    # After the scatter, which leaves less to add up.
    return jax.lax.psum(total, route.replicas).astype(route.wire.returned)


def _exchange_parts(parts: Sequence[jax.Array], routes: Sequence[Route]) -> Sequence[jax.Array]:
    names, replicas, wire = routes[0].names, routes[0].replicas, routes[0].wire
    copies = _size(replicas)
    shards = [_cut_by_device(part, route.shards) for part, route in zip(parts, routes, strict=True)]
    shapes = [shard.shape[1:] for shard in shards]
    # Of each shard a piece for each replica. One array keeps its dimensions, if the replicas divide
    # one of them: flat, it would be laid out anew on a TPU.
    even = [d for d, size in enumerate(shapes[0]) if size % copies == 0 and len(shards) == 1]
    if even:
        pieces = [_cut_by_device(parts[0], [*routes[0].shards, (even[0], replicas)])]
    else:
        pieces = [_flat(shard, copies) for shard in shards]
    sent = jnp.concatenate(pieces, 1).astype(wire.sent)
    received = jax.lax.all_to_all(sent, names, 0, 0)
    ends = np.cumsum([piece.shape[1] for piece in pieces])
    sums = jnp.split(jnp.sum(received, 0, dtype=wire.added), ends[:-1])
    if replicas:
        to = "invarying" if are_tracked() else "varying"
        gather = partial(jax.lax.all_gather, axis=even[0] if even else 0, tiled=True, to=to)
        sums = [gather(piece.astype(wire.returned), replicas) for piece in sums]
    return [
        whole if whole.shape == shape else whole[: math.prod(shape)].reshape(shape)
        for whole, shape in zip(sums, shapes, strict=True)
    ]


def _size(names: Names) -> int:
    return math.prod(map(jax.lax.axis_size, names))


def _cut_by_device(array: jax.Array, cuts: Sequence[tuple[int, Names]]) -> jax.Array:
    """Cuts dimensions into a part for each device along axes; a new first dimension counts them."""
    for number, (dimension, names) in enumerate(cuts):
        shape, at = array.shape, dimension + number
        parts = (_size(names), shape[at] // _size(names))
        array = jnp.moveaxis(array.reshape(*shape[:at], *parts, *shape[at + 1 :]), at, number)
    first, others = array.shape[: len(cuts)], array.shape[len(cuts) :]
    return array.reshape(math.prod(first), *others)


def _flat(shards: jax.Array, copies: int) -> jax.Array:
    """Returns a row for each replica of each shard, filled up with zeros."""
    rows = shards.reshape(shards.shape[0], math.prod(shards.shape[1:]))
    filled = jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % copies)])
    return filled.reshape(shards.shape[0] * copies, -1)
