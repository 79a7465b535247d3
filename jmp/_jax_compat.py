"""Everything that differs between the JAX versions we support (0.10 to 0.12), and nothing else."""

from typing import Any

import jax


def manual_axes() -> frozenset[str]:
    """Returns the mesh axes over which the code being traced is mapped (shard_map, pmap)."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.manual_axes)


def tracks_varying_axes() -> bool:
    """Returns whether types say along which manual axes a value varies (`check_vma`).

    Asked of a value that certainly varies: an axis index.
    """
    axes = manual_axes()
    if not axes:
        return False
    axis = min(axes)
    return axis in varying_axes(jax.lax.axis_index(axis))


def varying_axes(value: Any) -> frozenset[str]:
    """Returns the manual axes along which `value` varies, as far as its type says so."""
    aval = jax.typeof(value)
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(getattr(aval, "vma", ()))  # its name in earlier releases of JAX
