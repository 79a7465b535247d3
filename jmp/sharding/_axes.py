"""Along which mapped axes a value differs from device to device."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jmp import _jax_compat
from jmp._jax_compat import varying_axes as varying_axes
from jmp.sharding._specs import partitions


def mapped_axes() -> tuple[str, ...]:
    """Returns the mesh axes over which the code being traced is mapped (shard_map, pmap)."""
    return tuple(sorted(_jax_compat.manual_axes()))


def are_tracked() -> bool:
    """Returns whether types say along which mapped axes a value varies.

    They do in `shard_map(..., check_vma=True)`, where an axis index certainly varies.
    """
    return any(axis in varying_axes(jax.lax.axis_index(axis)) for axis in mapped_axes())


def made_varying(value: Any, axes: tuple[str, ...]) -> Any:
    """Returns `value` as one that varies along `axes`, so that AD adds nothing up along them."""
    return jax.lax.pcast(value, axes, to="varying") if axes else value


def without_reduced(value: Any) -> Any:
    """Returns `value` as one whose gradient is not one part a device: what is `reduced` no
    element-wise operation takes."""
    sharding = jax.typeof(value).sharding
    if not sharding.spec.reduced:
        return value
    plain = PartitionSpec(*partitions(sharding.spec))
    return jax.sharding.reshard(value, NamedSharding(sharding.mesh, plain))


def unreduced_axes(value: Any) -> frozenset[str]:
    """Returns the axes over which `value` is still to be added up, as its type says."""
    aval = jax.typeof(value)
    mapped = getattr(getattr(aval, "manual_axis_type", None), "unreduced", ())
    return frozenset(aval.sharding.spec.unreduced) | frozenset(mapped)
