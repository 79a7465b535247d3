"""Random bits for stochastic rounding, as a function of where they are used and of nothing else.

The bits of an element follow from a seed, the count of steps, the path of its array and the index
of the element in the whole array. So they are equal on any number of devices, under jit and eager,
and after a restore; no key is stored or split. They are computed where they are used, with some ten
integer operations an element, and are never written to memory.
"""

import dataclasses
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from jmp._jax_compat import varying_axes
from jmp._messages import listed, wrong
from jmp.sharding._axes import are_tracked, mapped_axes, names_by_dimension
from jmp.trees import PyTree


@dataclasses.dataclass(frozen=True)
class RandomBits:
    """Where random bits come from, for what rounds stochastically.

    Attributes:
      caller: the public function that rounds: different callers get different bits.
      seed: the user's.
      specs: a PartitionSpec for each parameter by path, where a shard_map divides them.
    """

    caller: str
    seed: int
    specs: dict[str, PartitionSpec] | None = None

    @classmethod
    def of(cls, caller: str, seed: object, specs: PyTree = None) -> "RandomBits":
        """Returns the bits that a user described.

        Raises: TypeError for a seed that is no integer, or for specs that are no PartitionSpecs.
        """
        if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
            raise wrong(TypeError, caller, seed, "an integer such as 0", name="seed")
        if specs is None:
            return cls(caller, int(seed))
        is_spec = lambda node: node is None or isinstance(node, PartitionSpec)
        leaves = tree_leaves_with_path(specs, is_leaf=is_spec)
        by_path = {keystr(path): spec or PartitionSpec() for path, spec in leaves}
        for path, spec in by_path.items():
            if not isinstance(spec, PartitionSpec):
                expected = "a tree of PartitionSpecs like the parameters"
                raise wrong(TypeError, caller, spec, expected, name=f"specs{path}")
        return cls(caller, int(seed), by_path)

    def at(self, path: str, like: jax.Array, count: jax.Array | None) -> jax.Array | None:
        """Returns uint32 of the shape of `like`, each bit as good as the flip of a coin.

        Args:
          path: of a parameter, or of an array of a state, which ends with that of its parameter.
          like: an array of the parameter's shape, on the devices of the result.
          count: int32 scalar: the steps before this one; None returns None.

        Raises: ValueError inside of a shard_map or pmap if `like` may differ between devices, and
          no specs say along which of its axes.
        """
        if count is None:
            return None
        name = f"{self.caller} {self.seed} {path}"
        digest = hashlib.blake2b(name.encode(), digest_size=12).digest()
        first, second, third = (np.frombuffer(digest, np.uint32)[i] for i in range(3))
        # A product or a cast, read by the kernels of many arrays, would be one more kernel.
        step = lax.bitcast_convert_type(count, jnp.uint32)
        # Each array begins to count elsewhere: XLA would else compute the indices of all arrays of
        # a shape once, and write them to memory.
        index = global_index(like, path, self.spec_of(path), jnp.uint32(third))
        # Mixed anew for each array and step: where the ranges of two large arrays overlap once,
        # they do not in the next step.
        return _mixed(index ^ _mixed(step ^ first), _mixed(step + second))

    def spec_of(self, path: str) -> PartitionSpec | None:
        """Returns how the parameter at the end of a path is divided; None where nobody said."""
        if self.specs is None:
            return None
        end = max(filter(path.endswith, self.specs), key=len, default=None)
        if end is None:
            raise ValueError(
                f"{self.caller} got specs without an entry for {path}; expected one PartitionSpec "
                "for each parameter, PartitionSpec() for those that are whole on each device. A "
                "tree of fewer, which a shard_map may take, is not enough."
            )
        return self.specs[end]


def _mixed(x: jax.Array, key: jax.Array | int = 0) -> jax.Array:
    """Returns uint32 that depend on `x` in all bits; for each key another permutation of 2**32.

    Multiplications by odd numbers alternate with shifts, as in the last steps of MurmurHash3
    (Appleby 2011), whose two factors these are; the key comes in between.
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) + key
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def global_index(
    like: jax.Array, path: str, spec: PartitionSpec | None, start: jax.Array | int = 0
) -> jax.Array:
    """Returns the index of each element in the whole array, in the order of rows, modulo 2**32.

    Args:
      start: uint32, added to the position along each axis.
    """
    divided = _names_by_axis(like, path, spec)
    parts = [math.prod(lax.axis_size(axis) for axis in axes) for axes in divided]
    index, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(like.ndim)):
        # From the devices' own axes XLA divides the numbers among them; one long vector it would
        # make whole on each.
        along = _iota(like, axis) + jnp.asarray(start, jnp.uint32)
        if divided[axis]:
            along = along + lax.axis_index(divided[axis]).astype(jnp.uint32) * like.shape[axis]
        index = index + along * jnp.uint32(stride % 2**32)
        stride *= like.shape[axis] * parts[axis]
    return index


def _iota(like: jax.Array, axis: int) -> jax.Array:
    sharding = jax.typeof(like).sharding
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    place: Any = {"out_sharding": sharding} if is_explicit else {}
    return lax.broadcasted_iota(jnp.uint32, like.shape, axis, **place)


def _names_by_axis(like: jax.Array, path: str, spec: PartitionSpec | None) -> list[tuple[str, ...]]:
    """Returns along which axes of a shard_map each axis of an array is divided."""
    mapped = mapped_axes()
    names = names_by_dimension(spec or PartitionSpec(), like.ndim)
    divided = [tuple(axis for axis in each if axis in mapped) for each in names]
    unknown = varying_axes(like) - {axis for each in divided for axis in each}
    if spec is None and (unknown or (mapped and not are_tracked())):
        axes = listed(sorted(unknown) or mapped)
        raise ValueError(
            f"Stochastic rounding got {path or 'an array'} that may differ between devices of the "
            f"mapped axes {axes}, and does not know which part each holds. Give it what the "
            "shard_map got for the parameters, PartitionSpec() for those that are whole on each: "
            "with_stochastic_rounding(inner, specs=<the tree of PartitionSpecs>)."
        )
    return divided
