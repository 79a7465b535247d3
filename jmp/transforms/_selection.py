"""Selects what a skipped step leaves as it was, in few kernels.

A select costs no kernel where XLA puts it into the one that computes the new value. It cannot where
the new value is computed before the flag is known: 42 of the 53 running means of a ResNet-50 took
one kernel each, as most small arrays do. XLA computes arrays of one shape together if all of them
read some array; a scalar, as the flag is, does not count. Read from an array of two, it does, and
biases, statistics, moments and counts are updated many at a time; nothing is concatenated. Compiled
for an H200, a GPT-2's step has 858 kernels with loss scaling and 925 without, a ResNet-50's 1063
and 1053; selected by a scalar the latter has 1205, and moves 0.11 MB less, of 16.9 GB.

Large arrays are selected by a scalar, each in a kernel of its own, as without loss scaling. How
fast an H200 runs kernels that update many large arrays at once was not measured.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp.transforms._finite_check import is_on_mesh

SMALL = 2**16  # elements, of which a kernel takes less time than its launch


def read_from_array(finite: jax.Array, last: jax.Array) -> jax.Array:
    """Returns a bool scalar, read from an array that XLA must not see through.

    Args:
      finite: the flag.
      last: the flag in the state, which this one replaces. Where states lie on a mesh it is read:
        of a state that is donated, the buffer of a flag that no program reads would stay. On one
        device it takes 256 bytes of memory for nothing.

    >>> bool(read_from_array(jnp.array(True), jnp.array(False)))
    True
    """
    read = (last,) if is_on_mesh(last) else ()
    pair, *_ = lax.optimization_barrier((jnp.broadcast_to(finite, (2,)), *read))
    flag: jax.Array = pair[0]
    return flag


def flag_by_size(finite: jax.Array) -> Callable[[Any], jax.Array]:
    """Returns which flag selects a leaf: `finite` a small one, a scalar of its value a large one.

    Args:
      finite: what `read_from_array` returned.

    >>> flag_of = flag_by_size(read_from_array(jnp.array(True), jnp.array(True)))
    >>> bool(flag_of(jnp.zeros(3))), bool(flag_of(jnp.zeros(SMALL + 1)))
    (True, True)
    """
    scalar = lax.optimization_barrier(finite)
    return lambda leaf: finite if getattr(leaf, "size", 1) <= SMALL else scalar
