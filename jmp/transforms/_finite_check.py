"""One flag for many gradients, in few kernels.

A check by tensor costs one or two small kernels each: a fifth of all kernels of a GPT-2's step.
Here tensors are checked together, in programs that read them in place.

Tensors of one shape are checked element by element together, eight at a time: with more XLA writes
an intermediate array. (One long concatenation takes as few kernels, but each of its threads has to
find out, branch by branch, which tensor its element is in.) Small tensors of whatever shape are
concatenated; for them the branches do not matter.

To reduce a large array to one flag takes XLA two kernels, of which the second is tiny. Matrices are
reduced to a flag for each of some 512 parts in the first, and share the second: an update of 40
matrices and 20 vectors, all of different shapes, takes 111 kernels instead of 148, and moves
0.002 % more bytes. Not so tensors of three and more axes: gradients of convolutions lie in memory
in another order than their axes, and to split them moves them (16.7 MB in a step of a ResNet of
four blocks). To keep one of their axes instead moves 2 bytes a parameter more where they do lie in
order.

Not where a gradient may be sharded by jit: concatenated, sharded tensors are gathered, and two of
one shape may be sharded along different axes. There the check is by tensor, and moves one flag.
"""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp.trees import PyTree, all_finite, as_jax_array, is_complex, is_floating

SAME_SHAPE_TOGETHER = 8
SMALL_TOGETHER = 32
SMALL = 2**12  # elements: vectors, not matrices
ROWS = (512, 1024, 2048, 4096, 8192)
LONGEST_ROW = 2**13  # XLA splits longer ones
FEWEST_IN_ROWS = 3  # to gather the flags of the rows takes two kernels


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
    if any(may_be_sharded(leaf) for leaf in leaves):
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
    together = [
        functools.reduce(jnp.logical_and, map(jnp.isfinite, group))
        for same_shape in alike.values()
        for group in _groups(same_shape, SAME_SHAPE_TOGETHER)
    ]
    at_once = [each for each in together if not _rows(each)]
    in_rows = [each for each in together if _rows(each)]
    if len(in_rows) < FEWEST_IN_ROWS:
        at_once, in_rows = together, []
    checks += [each.all() for each in at_once]
    if in_rows:
        rows = [each.reshape(_rows(each), -1).all(axis=1) for each in in_rows]
        # Behind a barrier, or XLA would check each by itself again.
        checks.append(lax.optimization_barrier(jnp.concatenate(rows)).all())
    if not checks:
        return jnp.array(True)
    return jnp.stack(checks).all()


def _rows(checked: jax.Array) -> int | None:
    """Returns in how many equal parts to check a matrix first; None for what to check at once."""
    if checked.ndim > 2:
        return None
    fits = (n for n in ROWS if checked.size % n == 0 and checked.size <= n * LONGEST_ROW)
    return next(fits, None)


def _groups(leaves: list[jax.Array], size: int) -> list[list[jax.Array]]:
    return [leaves[start : start + size] for start in range(0, len(leaves), size)]


def may_be_sharded(value: Any) -> bool:
    """Returns whether jit may have sharded `value` over several devices.

    Its type names the mesh of whatever it was computed from, but for the parts that shard_map and
    pmap hand to each device whole. Without a mesh one device is certain only if there is no other.
    """
    if jax.typeof(value).sharding.mesh.empty:
        return jax.device_count() > 1
    return is_on_mesh(value)


def is_on_mesh(value: Any) -> bool:
    """Returns whether the type of `value` names a mesh of devices that jit may divide it among."""
    mesh = jax.typeof(value).sharding.mesh
    return any(
        size > 1 and name not in mesh.manual_axes
        for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    )
