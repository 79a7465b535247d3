"""Forms of a step that compile to few kernels, although each of many tensors could take its own.

In the order of a step: `in_order_of_axes` lays half gradients of convolutions out as their
parameters are, and `gradients_finite` checks all gradients together.
`read_from_array` and `flag_by_size` give the flag by which a skipped step selects what it leaves as
it was, `count_by_size` the count that random bits follow from. `in_kernels_of_parameters` makes a
TPU update a parameter and its state together. None of them changes a value.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp._jax_compat import is_concrete, varying_axes
from jmp.transforms._placement import is_on_mesh, parameter_path
from jmp.transforms._rounding import needs_master
from jmp.trees import PyTree, all_finite, as_jax_array, is_inexact_array

T = TypeVar("T")
SAME_SHAPE_TOGETHER = 8
SMALL_TOGETHER = 32
SMALL_LEAF = 2**12  # elements: vectors, not matrices
ROW_COUNTS = (512, 1024, 2048, 4096, 8192)
LONGEST_ROW = 2**13  # XLA splits longer ones
FEWEST_IN_ROWS = 3  # to gather the flags of the rows takes two kernels
SHORTER_THAN_A_LAUNCH = 2**16  # elements, of which a kernel takes less time than its launch


def gradients_finite(gradients: PyTree) -> jax.Array:
    """Returns what `all_finite` returns, from fewer kernels if the gradients lie on one device.

    A check by tensor costs one or two small kernels each: a fifth of all kernels of a GPT-2's step.
    Here tensors are checked together, in programs that read them in place.

    Tensors of one shape are checked element by element together, eight at a time: with more XLA
    writes an intermediate array. (One long concatenation takes as few kernels, but each of its
    threads has to find out, branch by branch, which tensor its element is in.) Small tensors of
    whatever shape are concatenated; for them the branches do not matter.

    If jit may have sharded a gradient, the check is by tensor, and moves one flag: concatenated,
    sharded tensors are gathered, and two of one shape may be sharded along different axes.

    >>> bool(gradients_finite({"w": jnp.ones((2, 3)), "b": jnp.array([jnp.inf])}))
    False
    """
    leaves = [as_jax_array(leaf) for leaf in jax.tree.leaves(gradients) if is_inexact_array(leaf)]
    if any(map(may_be_sharded, leaves)):
        return all_finite(leaves)

    small, alike = collections.defaultdict(list), collections.defaultdict(list)
    for leaf in leaves:
        if leaf.size < SMALL_LEAF:
            small[leaf.dtype].append(leaf.ravel())
        else:
            alike[leaf.shape].append(leaf)

    of_small = (group for same in small.values() for group in chunks(same, SMALL_TOGETHER))
    checks = [jnp.isfinite(jnp.concatenate(group)).all() for group in of_small]
    of_alike = (group for same in alike.values() for group in chunks(same, SAME_SHAPE_TOGETHER))
    together = [functools.reduce(jnp.logical_and, map(jnp.isfinite, group)) for group in of_alike]
    in_rows = [each for each in together if _row_count(each) > 1]
    at_once = [each for each in together if _row_count(each) == 1]
    if len(in_rows) < FEWEST_IN_ROWS:
        in_rows, at_once = [], together
    checks += [each.all() for each in at_once]
    if in_rows:
        rows = [each.reshape(_row_count(each), -1).all(axis=1) for each in in_rows]
        # Without the barrier XLA would check each by itself again.
        checks.append(lax.optimization_barrier(jnp.concatenate(rows)).all())
    return jnp.stack(checks).all() if checks else jnp.array(True)


def _row_count(checked: jax.Array) -> int:
    """Returns in how many equal parts to check a matrix first; 1 for what to check at once.

    To reduce a large array to one flag takes XLA two kernels, of which the second is tiny. Matrices
    are reduced to a flag for each of some 512 parts in the first, and share the second: an update
    of 40 matrices and 20 vectors, all of different shapes, takes 111 kernels instead of 148, and
    moves 0.002 % more bytes. Tensors of three and more axes are not split: gradients of
    convolutions lie in memory in another order than their axes, and to split them moves them (16.7
    MB in a step of a ResNet of four blocks). To keep one of their axes instead moves 2 bytes a
    parameter more if they do lie in order.
    """
    if checked.ndim > 2:
        return 1
    fits = (n for n in ROW_COUNTS if checked.size % n == 0 and checked.size <= n * LONGEST_ROW)
    return next(fits, 1)


def chunks(items: list[T], size: int) -> list[list[T]]:
    """Returns the items in lists of at most `size`.

    >>> chunks([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    return [items[start : start + size] for start in range(0, len(items), size)]


def may_be_sharded(value: Any) -> bool:
    """Returns whether jit may have sharded `value` over several devices.

    Its type names the mesh of whatever it was computed from, but for the parts that shard_map and
    pmap hand to each device whole. Without a mesh one device is certain only if there is no other.
    """
    mesh = jax.typeof(value).sharding.mesh
    return jax.device_count() > 1 if mesh.empty else is_on_mesh(value)


def read_from_array(scalar: jax.Array, last: jax.Array) -> jax.Array:
    """Returns a scalar, read from an array that XLA must not see through.

    A select costs no kernel if XLA puts it into the one that computes the new value. It cannot if
    the new value is computed before the flag is known: 42 of the 53 running means of a
    ResNet-50 took one kernel each, as most small arrays do. XLA computes arrays of one shape
    together if all of them read some array; a scalar, as the flag is, does not count. Read from an
    array of two, it does, and biases, statistics, moments and counts are updated many at a time;
    nothing is concatenated. Compiled for an H200, a GPT-2's step has 858 kernels with loss scaling
    and 925 without, a ResNet-50's 1063 and 1053; selected by a scalar the latter has 1205, and
    moves 0.11 MB less, of 16.9 GB.

    Args:
      scalar: such as the flag.
      last: what it replaces in the state. It is read if the state lies on a mesh: if no program
        read the flag of a donated state, its buffer would stay. On one device that would take 256
        bytes of memory for nothing.

    >>> bool(read_from_array(jnp.array(True), jnp.array(False)))
    True
    """
    read = (last,) if is_on_mesh(last) else ()
    pair, *_ = lax.optimization_barrier((jnp.broadcast_to(scalar, (2,)), *read))
    return pair[0]


def flag_by_size(finite: jax.Array) -> Callable[[Any], jax.Array]:
    """Returns which flag selects a leaf: `finite` for a small one, else a scalar of its value.

    Large arrays are selected by a scalar, each in a kernel of its own, as without loss scaling. How
    fast an H200 runs kernels that update many large arrays at once was not measured.

    Args:
      finite: what `read_from_array` returned.

    >>> flag_of = flag_by_size(read_from_array(jnp.array(True), jnp.array(True)))
    >>> bool(flag_of(jnp.zeros(3))), bool(flag_of(jnp.zeros(SHORTER_THAN_A_LAUNCH + 1)))
    (True, True)
    """
    return _by_size(finite, lax.optimization_barrier(finite))


def count_by_size(count: jax.Array) -> Callable[[Any], jax.Array]:
    """Returns which copy of the count of steps a parameter's random bits are computed from.

    A small parameter reads it from an array, so that parameters of one shape are updated together,
    see `read_from_array`: with stochastic rounding 40 matrices and 20 vectors take 47 kernels on a
    GPU instead of 65. Arrays of a state do not: XLA would join the states of many vectors first,
    and have no room for their parameters in the same kernel.

    >>> int(count_by_size(jnp.array(3))(jnp.zeros(3)))
    3
    """
    return _by_size(read_from_array(count, count), count)


def _by_size(small: jax.Array, large: jax.Array) -> Callable[[Any], jax.Array]:
    return lambda leaf: small if getattr(leaf, "size", 1) <= SHORTER_THAN_A_LAUNCH else large


def in_kernels_of_parameters(state: T, params: optax.Params, updates: optax.Updates) -> T:
    """Returns the same state, computed in one kernel with the new parameters on a TPU.

    There XLA computes arrays of different dtypes in one kernel if one of them is computed from all
    others, and else in two or three, each of which reads gradient and moments: compiled for a
    TPU v5e, an update with split masters and loss scaling moves 46 bytes a parameter instead of 28,
    with moments in bfloat16 and without loss scaling 24 instead of 18. So one of the arrays that
    belong to a bfloat16 parameter is selected by a condition on the new parameter and on all the
    others. It always holds, which XLA does not know. On other devices nothing is added.

    Args:
      state: as it is after the step.
      params: as they were before it.
      updates: their changes.

    >>> params, updates = {"w": jnp.bfloat16(1)}, {"w": jnp.float32(1)}
    >>> in_kernels_of_parameters({"w": jnp.uint16(3)}, params, updates)
    {'w': Array(3, dtype=uint16)}
    """
    old, changes = (dict(jax.tree.leaves_with_path(tree)) for tree in (params, updates))
    belonging: dict[Any, dict[Any, jax.Array]] = collections.defaultdict(dict)
    for path, leaf in jax.tree.leaves_with_path(state):
        of = parameter_path(leaf, path, old)
        if of in changes and old[of].dtype == jnp.bfloat16 and not is_concrete(changes[of]):
            belonging[of][path] = leaf

    computed = {}
    for of, leaves in belonging.items():
        new = (old[of] + changes[of]).astype(jnp.bfloat16)  # as `optax.apply_updates`
        alike = [path for path, leaf in leaves.items() if _may_share_kernel(new, leaf)]
        alike.sort(key=lambda path: leaves[path].dtype.itemsize)
        if alike:
            first, *others = (leaves[path] for path in alike)
            computed[alike[0]] = lax.platform_dependent(
                first, new, *others, tpu=selected_by_all, default=lambda first, *_: first
            )
    return jax.tree.map_with_path(lambda path, leaf: computed.get(path, leaf), state)


def _may_share_kernel(new: jax.Array, leaf: jax.Array) -> bool:
    """Returns whether an array of a state, of a parameter's shape, is of its kind and place."""
    if leaf.dtype not in (jnp.uint16, jnp.bfloat16, jnp.float32):
        return False
    lie_alike = jax.typeof(leaf).sharding == jax.typeof(new).sharding
    return lie_alike and varying_axes(leaf) == varying_axes(new)


def selected_by_all(selected: jax.Array, *others: jax.Array) -> jax.Array:
    """Returns the first array, selected by a condition on each of the others that always holds."""
    for other in others:
        pattern = lax.bitcast_convert_type(other, jnp.dtype(f"uint{8 * other.dtype.itemsize}"))
        above_16_bits = pattern.astype(jnp.uint16).astype(jnp.uint32) >> 16
        selected = jnp.where(above_16_bits == 0, selected, 0)
    return selected


def in_order_of_axes(gradients: PyTree) -> PyTree:
    """Returns the same gradients, half ones of convolutions laid out as the parameters are.

    XLA lays the gradient of a convolution's kernel out in an order of its own, and all that is
    computed from it after that: masters and moments, which are stored in the order of their axes,
    are then copied, and the update of one kernel takes many. Put in order first, at two bytes a
    parameter, it is one kernel again: compiled for an H200, six convolutions with masters take 55
    kernels and 220 MB instead of 101 and 385.

    Float32 gradients stay as they are: to put them in order costs twice as much and saves nothing.
    So do gradients that jit may have sharded: to put them in order would gather them.

    >>> bool((in_order_of_axes(jnp.ones((3, 3, 2), jnp.float16)) == 1).all())
    True
    """

    def in_order(gradient: Any) -> Any:
        if not needs_master(gradient) or gradient.ndim < 3 or may_be_sharded(gradient):
            return gradient
        # A reshape to one axis needs the order of the axes; behind the barrier XLA cannot undo it.
        return lax.optimization_barrier(jnp.ravel(gradient)).reshape(gradient.shape)

    return jax.tree.map(in_order, gradients)
