"""Mapped axes: along which of them values differ, and how devices agree along them.

Inside shard_map or pmap each device sees its own gradients. If one of them overflows and the others
do not, devices that share a scale and parameters would differ without an error: one of them skips,
the rest step. So they agree on one flag (`agreed`). Under jit with sharded arrays there is one
program and one flag, and nothing to agree on.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jmp._jax_compat import varying_axes
from jmp._messages import wrong
from jmp.trees import PyTree

AxisName = str | Sequence[str]
Names = tuple[str, ...]


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


def agreed(flag: jax.Array, shared: PyTree, axis_name: AxisName, apart: Names = ()) -> jax.Array:
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
    tracked = are_tracked()
    if axis_name == "auto":
        if not tracked:
            return [mapped for _ in values]
        own = [varying_axes(leaf) for leaf in jax.tree.leaves(shared)]
        return [tuple(sorted(varying_axes(value).difference(*own))) for value in values]
    names = axis_names(axis_name, "axis_name", "agreed")
    # Where a value is known not to vary there is nothing to add up, and JAX may refuse to.
    known = mapped if tracked else ()
    varying = map(varying_axes, values)
    return [tuple(n for n in names if n not in known or n in axes) for axes in varying]
