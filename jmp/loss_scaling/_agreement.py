"""One flag for all devices that share a loss scale.

Inside shard_map or pmap each device sees its own gradients. If one of them overflows and the others
do not, devices that share a scale and parameters would part in silence: one skips, the rest step.
Under jit with sharded arrays there is one program and one flag, and nothing to agree on.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmp.sharding._axes import are_tracked, mapped_axes, varying_axes
from jmp.trees import PyTree

AxisName = str | Sequence[str]


def agreed(
    flag: jax.Array, shared: PyTree, axis_name: AxisName, apart: Sequence[str] = ()
) -> jax.Array:
    """Returns whether `flag` holds on every device that shares the tree `shared`.

    Args:
      flag: bool scalar, possibly different from device to device.
      shared: the loss scale. Along an axis where it varies, each device keeps its own.
      axis_name: "auto", the names of axes, or () to leave the flag alone. "auto" means the mapped
        axes along which the flag varies and `shared` does not; where JAX does not track that
        (pmap, `check_vma=False`), all mapped axes. A vmap's axis is only agreed on if named.
      apart: axes along which each device keeps its own flag.
    """
    axes = tuple(axis for axis in _axes(flag, shared, axis_name) if axis not in apart)
    if not axes:
        return flag
    everywhere: jax.Array = jax.lax.pmin(flag.astype(jnp.int32), axes)
    return everywhere.astype(jnp.bool_)


def _axes(flag: jax.Array, shared: PyTree, axis_name: AxisName) -> tuple[str, ...]:
    mapped, tracked = mapped_axes(), are_tracked()
    varying = varying_axes(flag)
    if axis_name != "auto":
        names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        # Where the flag is known not to vary there is nothing to agree on, and JAX may refuse to.
        return tuple(n for n in names if not (tracked and n in mapped and n not in varying))
    if tracked:
        own = [varying_axes(leaf) for leaf in jax.tree.leaves(shared)]
        return tuple(sorted(varying.difference(*own)))
    return mapped
