"""Values: the arrays of a program, and what is known of their numbers before it runs.

What is known is little, and enough: a literal's number, the range of a small array that the program
holds, whether a value was a boolean, and what it repeats.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat

FLOAT32 = np.dtype(np.float32)
# A dimension that is a symbol counts as this long.
UNKNOWN = 4096
# Arrays held in the program of at most this many elements are looked into.
LOOKED_AT = 1 << 16


class Value:
    """One array of the program.

    Attributes:
      aval: its nominal type, as traced.
      producer: the node that computes it; None for inputs, constants and literals.
      users: the nodes that read it, once each.
      literal: the scalar itself, where the jaxpr holds it.
      constant: the number every element equals, where that is known.
      is_exact: a half type holds it exactly (it was a boolean).
      is_hard: known to hold numbers that a half type does not: masks of -1e9, eps of 1e-12.
      source: the value that it repeats or reshapes, from which it is broadcast; else itself.
      size: number of elements; dimensions that are symbols count as `UNKNOWN`.
      feeds, kept, neutral, fixed, level: see `_flow`.
      dtype: what it is stored in; None until the planner has decided.
    """

    __slots__ = (
        "aval", "producer", "users", "literal", "constant", "is_exact", "is_hard", "source",
        "size", "is_float32", "feeds", "kept", "neutral", "fixed", "level", "dtype",
    )  # fmt: skip

    def __init__(self, aval: Any, producer: Any = None) -> None:
        self.aval = aval
        self.producer = producer
        self.users: list[Any] = []
        self.literal: Any = None
        self.constant: float | None = None
        self.is_exact = False
        self.is_hard = False
        self.source = self
        shape = getattr(aval, "shape", ())
        self.size = math.prod(n if isinstance(n, int) else UNKNOWN for n in shape)
        self.is_float32 = getattr(aval, "dtype", None) == FLOAT32
        self.feeds = False
        self.kept = False
        self.neutral = True
        self.fixed = True
        self.level = 0
        self.dtype: Any = None

    def is_known_as(self, outer: "Value") -> None:
        """Takes over what an outer level knows of the same value."""
        self.constant = outer.constant
        self.is_exact = outer.is_exact
        self.is_hard = outer.is_hard
        if outer.source.size <= self.size:
            self.source = outer.source

    def exceeds(self, half: np.dtype) -> bool:
        """Whether it is known to hold a number that a half type does not."""
        return self.is_hard or (self.constant is not None and not fits(self.constant, half))

    @property
    def source_size(self) -> int:
        """Elements it had before it was repeated."""
        return min(self.size, self.source.size)

    @property
    def is_vector(self) -> bool:
        """Whether it repeats an array of one axis at most, such as a bias; a mask has more."""
        return len(self.source.aval.shape) <= 1 and not self.is_hard


def literal(atom: Any) -> Value:
    """A value that stands in the jaxpr itself."""
    value = Value(atom.aval)
    value.literal = atom.val
    if np.ndim(atom.val) == 0 and value.is_float32:
        value.constant = float(atom.val)
    return value


def held_constant(constant: Any, half: np.dtype) -> Value:
    """A value that an inlined jaxpr holds by itself."""
    value = Value(_jax_compat.typeof(constant))
    value.literal = constant
    know(value, constant, half)
    return value


def know(value: Value, array: Any, half: np.dtype) -> None:
    """Writes down what can be seen of the numbers of an array held in the program."""
    if not (value.is_float32 and _jax_compat.is_concrete(array)):
        return
    if not 0 < value.size <= LOOKED_AT:
        return
    numbers = np.asarray(array).ravel()
    if (numbers == numbers[0]).all():
        value.constant = float(numbers[0])
    value.is_hard = not all(fits(float(x), half) for x in _extremes(numbers))


def _extremes(numbers: np.ndarray) -> Iterator[np.floating]:
    """Yields the largest and the smallest magnitude but zero."""
    magnitudes = np.abs(numbers[np.isfinite(numbers) & (numbers != 0)])
    if magnitudes.size:
        yield magnitudes.max()
        yield magnitudes.min()


def is_inexact(value: Any) -> bool:
    """Returns whether a value, or an atom of a jaxpr, is floating or complex."""
    dtype = getattr(value.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def fits(constant: float, half: np.dtype) -> bool:
    """Returns whether a half type holds a constant: finite if it was, and not flushed to zero."""
    if constant == 0 or not np.isfinite(constant):
        return True
    # Below the smallest normal number digits are lost one by one.
    limits = jnp.finfo(half)
    return float(limits.smallest_normal) <= abs(constant) <= float(limits.max)
