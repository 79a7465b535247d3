"""Whether an array is finite, and how large its numbers are: small functions, compiled by shape."""

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat

FINITE, INFINITE, NAN = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Operand:
    """What an operation read; as the device sees it, which may take subnormal numbers for zero."""

    dtype: str
    shape: tuple[int, ...]
    smallest: float  # magnitude of the finite elements that are not zero; 0.0 if there are none
    largest: float
    zeros: int  # how many elements are zero; exact below 2**31
    nonfinite: int  # how many are infinite or NaN


def is_inexact(value: object) -> bool:
    """Returns whether a value, or a type, is an array of floating or complex numbers."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or _jax_compat.is_reference(value):
        return False
    return jnp.issubdtype(dtype, jnp.inexact)


def state_of(value: object) -> int:
    """Returns `NAN` if an element is NaN, else `INFINITE` if one is infinite, else `FINITE`."""
    if not is_inexact(value):
        return FINITE
    here = _here(value)
    return int(_state(np, here) if isinstance(here, np.ndarray) else _state_on_device(here))


def operand(value: Any) -> Operand:
    """Returns the ranges of a floating or complex array."""
    here = _here(value)
    ranges = _ranges(np, here) if isinstance(here, np.ndarray) else _ranges_on_device(here)
    return Operand(str(value.dtype), np.shape(value), *(x.item() for x in ranges))


@jax.jit
def tamed(x: jax.Array) -> jax.Array:
    """Returns the array with a one for each infinity and NaN."""
    return jnp.where(jnp.isfinite(_wide(x)), x, jnp.ones_like(x))


def _state(numpy: ModuleType, x: Any) -> Any:
    x = _wide(x)
    infinite = numpy.where(numpy.isfinite(x).all(), FINITE, INFINITE)
    return numpy.where(numpy.isnan(x).any(), NAN, infinite)


def _ranges(numpy: ModuleType, x: Any) -> Any:
    magnitudes = abs(_wide(x))
    is_zero, is_finite = magnitudes == 0, numpy.isfinite(magnitudes)
    counts = is_finite & ~is_zero
    smallest = numpy.min(magnitudes, initial=numpy.inf, where=counts)
    largest = numpy.max(magnitudes, initial=0, where=counts)
    smallest = numpy.where(counts.any(), smallest, 0)
    return smallest, largest, *(numpy.sum(c, dtype=numpy.int32) for c in (is_zero, ~is_finite))


_state_on_device = jax.jit(functools.partial(_state, jnp))
_ranges_on_device = jax.jit(functools.partial(_ranges, jnp))


def _here(value: Any) -> Any:
    """An array of NumPy where the numbers are on the host anyway: nothing to compile."""
    value = _jax_compat.on_all_devices(value)
    if isinstance(value, jax.Array) and value.is_fully_addressable:
        is_on_host = all(device.platform == "cpu" for device in value.devices())
        return np.asarray(value) if is_on_host else value
    return np.asarray(value) if isinstance(value, np.generic) else value


def _wide(x: Any) -> Any:
    """Halves and float8 as float32, exactly: their subnormal numbers are normal there."""
    return x.astype(np.float32) if x.dtype.itemsize <= 2 else x
