"""One flag for many gradients, in few kernels.

A check by tensor costs one or two small kernels each: a fifth of all kernels of a GPT-2's step.
Here tensors are checked together, in programs that read them in place: no byte more is moved.
Compiled for an H200 that leaves a GPT-2's step with 3 % more kernels than no check at all.

Tensors of one shape are checked element by element together, eight at a time: with more XLA writes
an intermediate array. (One long concatenation takes as few kernels, but each of its threads has to
find out, branch by branch, which tensor its element is in.) Small tensors of whatever shape are
concatenated; for them the branches do not matter.

Not where a gradient may be sharded by jit: concatenated, sharded tensors are gathered, and two of
one shape may be sharded along different axes. There the check is by tensor, and moves one flag.
"""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jmp.trees import PyTree, all_finite, as_jax_array, is_complex, is_floating

SAME_SHAPE_TOGETHER = 8
SMALL_TOGETHER = 32
SMALL = 2**12  # elements: vectors, not matrices


def gradients_finite(gradients: PyTree) -> jax.Array:
    """Returns what `all_finite` returns, from fewer kernels where the gradients lie on one device.

    >>> bool(gradients_finite({"w": jnp.ones((2, 3)), "b": jnp.array([jnp.inf])}))
    False
    """
    leaves = [
        as_jax_array(leaf)
        for leaf in jax.tree.leaves(gradients)
        if is_floating(leaf) or is_complex(leaf)
    ]
    if any(_may_be_sharded(leaf) for leaf in leaves):
        return all_finite(leaves)

    small, alike = collections.defaultdict(list), collections.defaultdict(list)
    for leaf in leaves:
        if leaf.size < SMALL:
            small[leaf.dtype].append(leaf.ravel())
        else:
            alike[leaf.shape].append(leaf)

    checks = [
        jnp.isfinite(jnp.concatenate(group)).all()
        for same_dtype in small.values()
        for group in _groups(same_dtype, SMALL_TOGETHER)
    ]
    checks += [
        functools.reduce(jnp.logical_and, map(jnp.isfinite, group)).all()
        for same_shape in alike.values()
        for group in _groups(same_shape, SAME_SHAPE_TOGETHER)
    ]
    if not checks:
        return jnp.array(True)
    return jnp.stack(checks).all()


def _groups(leaves: list[jax.Array], size: int) -> list[list[jax.Array]]:
    return [leaves[start : start + size] for start in range(0, len(leaves), size)]


def _may_be_sharded(value: Any) -> bool:
    """Returns whether jit may have sharded `value` over several devices.

    Its type names the mesh of whatever it was computed from, but for the parts that shard_map and
    pmap hand to each device whole. Without a mesh one device is certain only if there is no other.
    """
    mesh = jax.typeof(value).sharding.mesh
    if mesh.empty:
        return jax.device_count() > 1
    return any(
        size > 1 and name not in mesh.manual_axes
        for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    )
