"""Rounding float32 to fewer bits: to the nearest, or by random bits; and how a parameter follows.

`rounded` and `rounded_by` give numbers of a half dtype as float32, `code_of` the patterns of any
format. A half parameter follows by an update that is exactly the difference, in float32, of
what it becomes and what it is (`difference_to`).

`RandomBits` depend only on their place: the bits of an element follow from a seed, the count of
steps, the path of its array and the index of the element in the whole array. So they are equal on
any number of devices, under jit and eager, and after a restore; no key is stored or split. They are
computed where they are used, with some ten integer operations an element, and are never written to
memory.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import DTypeLike

from jmp._jax_compat import varying_axes
from jmp._messages import check_number, listed, wrong
from jmp.dtypes import is_half
from jmp.sharding._axes import are_tracked, mapped_axes, names_by_dimension
from jmp.trees import PyTree, is_floating

HALFWAY = 2**31  # bits that round to the nearest


def difference_to(new: jax.Array, param: jax.Array) -> jax.Array:
    """Returns what must be added to `param`, in float32, to get `new`, a number of its dtype."""
    old = param.astype(jnp.float32)
    # Equal values: the zero with the master's sign, so that -0.0 stays what it is.
    zero = jnp.copysign(jnp.float32(0), new)
    if param.dtype == jnp.float16:
        # 0.0 + -0.0 is 0.0: a master of -1e-9 needs a number that float16 rounds to -0.0.
        turns = (old == 0) & (jnp.signbit(new) != jnp.signbit(old))
        zero = jnp.where(turns, jnp.copysign(jnp.float32(2.0**-126), new), zero)
    change = new - old
    if param.dtype == jnp.bfloat16:
        # From one end of its range to the other is more than float32 can say at once.
        farthest = float(jnp.finfo(jnp.float32).max)
        change = jnp.clip(change, -farthest, farthest)
    return jnp.where(new == old, zero, change)


def shown_after(change: jax.Array, param: jax.Array) -> jax.Array:
    """Returns what `optax.apply_updates` makes of a parameter, as float32.

    That is what was asked for, unless one step shrinks a number of bfloat16 more than 65536-fold,
    one of float16 4096-fold, or to a negative zero: no float32 difference says exactly that.
    """
    sum_ = param.astype(jnp.float32) + change
    if param.dtype == jnp.bfloat16:
        # From the new parameter itself: what is kept beside it then comes out of the same kernel on
        # a TPU. Else XLA would read everything once more, only for the parameter.
        return widened(sum_.astype(param.dtype))
    return rounded(sum_, param.dtype)


def rounded(master: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns a master rounded to the nearest finite number of a half `dtype`, as float32.

    Beyond the range of the dtype that is the largest finite number: from an infinite parameter no
    sum leads back, since inf - inf is NaN.

    `master.astype(dtype).astype(float32)` would not round on a GPU: XLA drops such a pair of casts.
    """
    largest = float(jnp.finfo(dtype).max)
    if jnp.dtype(dtype) == jnp.bfloat16:
        half = lax.reduce_precision(master, exponent_bits=8, mantissa_bits=7)
        return jnp.clip(half, -largest, largest).astype(jnp.float32)
    # reduce_precision flushes what is subnormal in float16: there, multiples of 2**-24.
    subnormal = jnp.round(master * 2.0**24) * 2.0**-24
    normal = lax.reduce_precision(master, exponent_bits=5, mantissa_bits=10)
    half = jnp.where(jnp.abs(master) < 2.0**-14, subnormal, normal)
    return jnp.clip(half, -largest, largest).astype(jnp.float32)


def widened(x: jax.Array) -> jax.Array:
    """Returns bfloat16 as float32, exactly.

    A cast may flush subnormal numbers to zero, and XLA drops a cast after another.
    """
    pattern = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(pattern, jnp.float32)


def needs_master(param: Any) -> bool:
    """Returns whether a parameter is stored in half."""
    return is_floating(param) and is_half(param.dtype)


def rounded_by(bits: jax.Array, value: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns float32 rounded to one of the two neighbours in a narrower `dtype`, as float32.

    Beyond the largest finite number of the dtype the result is that number, also for an infinity.

    >>> rounded_by(jnp.uint32(HALFWAY), jnp.float32(1 + 2**-8), jnp.bfloat16)
    Array(1.0078125, dtype=float32)
    """
    facts, kind = jnp.finfo(dtype), jnp.uint32
    narrow = f"uint{facts.bits}"
    largest, nan = (kind(np.asarray(x, facts.dtype).view(narrow)) for x in (facts.max, np.nan))
    code = jnp.minimum(code_of(bits, value, facts.nmant, facts.minexp), largest)
    given = lax.bitcast_convert_type(value, kind)
    is_nan = given & kind(2**31 - 1) > kind(0x7F800000)
    sign = (given & kind(2**31)) >> (32 - facts.bits)
    pattern = jnp.where(is_nan, nan, code | sign).astype(narrow)
    result = lax.bitcast_convert_type(pattern, facts.dtype)
    return widened(result) if facts.dtype == jnp.bfloat16 else result.astype(jnp.float32)


def code_of(bits: jax.Array, value: jax.Array, mantissa: int, lowest: int) -> jax.Array:
    """Returns float32 rounded to a neighbour in a format of fewer bits, as that format's patterns.

    The highest of the bits decide: away from zero if they, taken as a fraction below 1, and the
    fraction of the way from the lower neighbour come to 1 or more. With random bits that is
    stochastic rounding (Gupta et al. 2015, section 3), whose mean is the value: exactly for a
    normal number, to 2**-24 of a spacing for a subnormal one, with ten bits of mantissa to 2**-20.
    With `HALFWAY` it is rounding to the nearest, ties away from zero. A number that the format
    holds stays.

    Args:
      bits: uint32 of the shape of `value`.
      value: float32; for a NaN the result is not defined.
      mantissa: the bits of the format's mantissa, without the leading 1.
      lowest: the exponent of the smallest normal number; below it numbers lie evenly.

    Returns: uint32, of which the lowest bits are the mantissa, without the sign. The exponent of a
      normal number is 1 at `lowest`; it is not limited.
    """
    dropped = 23 - mantissa
    pattern = lax.bitcast_convert_type(value, jnp.uint32) & jnp.uint32(2**31 - 1)
    below_first = jnp.uint32((lowest + 126) << mantissa)
    # An addition of integers carries into the exponent if the mantissa is full, as it must.
    normal = ((pattern + (bits >> (32 - dropped))) >> dropped) - below_first
    if lowest <= jnp.finfo(jnp.float32).minexp:
        return normal  # subnormal numbers as float32's own, between which the addition rounds too
    # Below `lowest` numbers lie evenly. They are counted in integers, a spacing being 2**fraction.
    fraction = min(24, 30 - mantissa)
    size = lax.bitcast_convert_type(pattern, jnp.float32) * 2.0 ** (fraction + mantissa - lowest)
    even = (size.astype(jnp.int32).astype(jnp.uint32) + (bits >> (32 - fraction))) >> fraction
    return jnp.where(pattern < jnp.uint32((lowest + 127) << 23), even, normal)


class RandomBits:
    """Where random bits come from, for what rounds stochastically.

    Args:
      caller: the public function that rounds: different callers get different bits.
      seed: the user's.
      specs: a tree with a PartitionSpec for each parameter, if a shard_map divides them.

    Raises: TypeError for a seed that is no integer, or for specs that are no PartitionSpecs.
    """

    def __init__(self, caller: str, seed: Any, specs: PyTree = None) -> None:
        self.caller = caller
        self.seed = check_number(seed, caller, "an integer such as 0", name="seed", kind=int)
        self.specs: dict[str, Any] | None = None  # by path
        if specs is not None:
            is_spec = lambda node: node is None or isinstance(node, PartitionSpec)
            leaves = tree_leaves_with_path(specs, is_leaf=is_spec)
            self.specs = {keystr(path): spec or PartitionSpec() for path, spec in leaves}
        for path, spec in (self.specs or {}).items():
            if not isinstance(spec, PartitionSpec):
                expected = "a tree of PartitionSpecs like the parameters"
                raise wrong(TypeError, caller, spec, expected, name=f"specs{path}")

    def at(self, path: str, like: jax.Array, count: jax.Array) -> jax.Array:
        """Returns uint32 of the shape of `like`, each bit as good as the flip of a coin.

        Args:
          path: of a parameter, or of an array of a state, which ends with its parameter's path.
          like: an array of the parameter's shape, on the devices of the result.
          count: int32 scalar: the steps before this one.

        Raises: ValueError inside of a shard_map or pmap if `like` may differ between devices, and
          no specs say along which of its axes.
        """
        name = f"{self.caller} {self.seed} {path}"
        digest = hashlib.blake2b(name.encode(), digest_size=12).digest()
        first, second, third = np.frombuffer(digest, np.uint32)
        # A product or a cast, read by the kernels of many arrays, would be one more kernel.
        step = lax.bitcast_convert_type(count, jnp.uint32)
        # Each array begins to count elsewhere: XLA would else compute the indices of all arrays of
        # a shape once, and write them to memory.
        index = global_index(like, path, self.spec_of(path), jnp.uint32(third))
        # Mixed anew for each array and step: if the ranges of two large arrays overlap once, they
        # do not in the next step.
        return _mixed(index ^ _mixed(step ^ first), _mixed(step + second))

    def spec_of(self, path: str) -> PartitionSpec | None:
        """Returns how the parameter at the end of a path is divided; None without specs."""
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
    like: jax.Array, path: str, spec: PartitionSpec | None, start: jax.Array
) -> jax.Array:
    """Returns the index of each element in the whole array, in the order of rows, modulo 2**32.

    Args:
      start: uint32, added to the position along each axis.
    """
    divided = _names_by_axis(like, path, spec)
    parts = list(map(lax.axis_size, divided))
    sharding = jax.typeof(like).sharding
    place: Any = {"out_sharding": sharding} if sharding.mesh.explicit_axes else {}
    index, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(like.ndim)):
        # From the devices' own axes XLA divides the numbers among them; one long vector it would
        # make whole on each.
        along = lax.broadcasted_iota(jnp.uint32, like.shape, axis, **place) + start
        if divided[axis]:
            along = along + lax.axis_index(divided[axis]).astype(jnp.uint32) * like.shape[axis]
        index = index + along * jnp.uint32(stride % 2**32)
        stride *= like.shape[axis] * parts[axis]
    return index


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
