"""A value's numbers, as far as they are known before the program runs.

It is little, and enough: a literal's number, the range of a small array that the program holds,
whether a value was a boolean, what it repeats, and what it is made of.
"""

import enum
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp.dtypes import FLOAT32

Shape = tuple[Any, ...]

# A dimension that is a symbol counts as this long. Then all islands of a layer with a symbolic
# batch are recomputed from width 4 on, as at a batch of 4096; at 64 none is at width 64.
UNKNOWN = 4096
# Arrays held in the program of at most this many elements are looked into. That takes 0.08 ms for
# 2**16 elements, 1 ms for 2**20 and 16 ms for 2**22, for each array.
LOOKED_AT = 1 << 16


class ValueProvenance(enum.IntEnum):
    """The sources of a value, down to the inputs of the program; the largest counts."""

    CONSTANTS = 0  # literals, iota, and what is computed only from these
    CHOICES = 1  # the same, asked what is equal: one-hot rows, which look others up
    INTEGERS = 2  # integers and booleans too, such as comparisons: no gradient flows into it
    TABLES = 3  # NumPy arrays of the program too, such as a filterbank; they might be weights
    INPUTS = 4  # floating inputs, other arrays that the program closes over, random numbers
    PRODUCTS = 5  # results of products, or something unknown


class Known(NamedTuple):
    """A value's numbers, as far as they are known."""

    constant: float | None = None  # the number that every element equals
    fits_half: bool = False  # a half type holds it exactly: it was a boolean
    is_extreme: bool = False  # it holds numbers that a half type does not: -1e9, 1e-12
    source: Shape | None = None  # of the value that it repeats or reshapes; None: its own
    array: Any = None  # the array that the program holds in its place; None: it is computed
    smallest: float = 0.0  # the smallest magnitude of a small one, zero included
    provenance: ValueProvenance = ValueProvenance.CONSTANTS  # what it is made of


NOTHING = Known()
MADE_OF = {provenance: Known(provenance=provenance) for provenance in ValueProvenance}


def provenance_of_array(array: Any) -> ValueProvenance:
    """Returns what an array that the program closes over, or a reference to one, is made of."""
    is_table = isinstance(array, np.ndarray | np.generic)
    return ValueProvenance.TABLES if is_table else ValueProvenance.INPUTS


# Decisions that depend on a size ask one of these three: comparing a symbol is an error of JAX.


def length_of(dimension: Any) -> int:
    """Returns how long a dimension is; one that is a symbol counts as `UNKNOWN`."""
    return dimension if isinstance(dimension, int) else UNKNOWN


@functools.lru_cache(1024)  # it is asked for every value
def size_of(shape: Shape) -> int:
    """Returns the number of elements; dimensions that are symbols count as `UNKNOWN`."""
    return math.prod([n if isinstance(n, int) else UNKNOWN for n in shape])


def has_symbols(shape: Shape) -> bool:
    """Returns whether the length of a dimension is known only when the program runs."""
    return not all(isinstance(n, int) for n in shape)


def known_number(number: float, half: np.dtype) -> Known:
    """Returns what is known of a value that is one number throughout."""
    return Known(number, is_extreme=not fits(number, half))


def known_of(array: Any, half: np.dtype) -> Known:
    """Returns what can be seen of the numbers of an array held in the program."""
    provenance = provenance_of_array(array)
    if not _jax_compat.is_concrete(array) or _jax_compat.is_reference(array):
        return MADE_OF[provenance]
    if getattr(array, "dtype", None) != FLOAT32 or not 0 < array.size <= LOOKED_AT:
        return Known(array=array, provenance=provenance)
    numbers = np.asarray(array).ravel()
    constant = float(numbers[0]) if (numbers == numbers[0]).all() else None
    magnitudes = np.abs(numbers[np.isfinite(numbers) & (numbers != 0)])
    extremes = (magnitudes.max(), magnitudes.min()) if magnitudes.size else ()
    is_extreme = not all(fits(float(x), half) for x in extremes)
    smallest = float(np.abs(numbers).min())
    return Known(constant, False, is_extreme, None, array, smallest, provenance)


def dtype_of(atom: Any) -> np.dtype | None:
    """Returns the dtype of a value, or of an atom of a jaxpr; None for what has none."""
    return getattr(atom.aval, "dtype", None)


def shape_of(atom: Any) -> Shape:
    """Returns the shape of a value, or of an atom of a jaxpr; () for what has none."""
    return getattr(atom.aval, "shape", ())


def is_inexact(value: Any) -> bool:
    """Returns whether a value, or an atom of a jaxpr, is floating or complex."""
    return _is_inexact(dtype_of(value))


@functools.cache  # it is asked more often than anything else
def _is_inexact(dtype: np.dtype | None) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


@functools.lru_cache  # programs repeat their constants
def fits(constant: float, half: np.dtype) -> bool:
    """Returns whether a half type holds a constant: finite if it was, and not flushed to zero."""
    if constant == 0 or not np.isfinite(constant):
        return True
    # Below the smallest normal number digits are lost one by one.
    limits = jnp.finfo(half)
    return float(limits.smallest_normal) <= abs(constant) <= float(limits.max)
