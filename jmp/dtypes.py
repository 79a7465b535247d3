"""Names of dtypes, and which dtypes the library casts.

Its functions cast *real floating dtypes of at least 16 bits*: float16, bfloat16, float32,
float64. Narrower floats (float8 and below) are storage formats that carry their own scales: they
have names here, so that a policy can spell them, but no cast of a whole tree touches them.

Users are given dtypes as JAX's *scalar types*, such as `jnp.float16`; the library works with
`np.dtype`, which `np.dtype(scalar_type)` gives.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp._messages import described, did_you_mean, wrong

HALF_DTYPES: tuple[np.dtype, np.dtype] = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16))
FLOAT32 = np.dtype(np.float32)
# By scalar type, which byte orders share.
_HALF = frozenset(dtype.type for dtype in HALF_DTYPES)
_CASTABLE = frozenset({*_HALF, np.float32, np.float64})


# The short and long names of each dtype. The keys are scalar types, the one form in which
# `np.float16` and `jnp.float16` hash alike.
dtype_to_names: dict[type, tuple[str, ...]] = {
    np.dtype(jnp.bfloat16).type: ("bf16", "bfloat16"),
    np.float16: ("f16", "float16"),
    np.float32: ("full", "f32", "float32"),
    np.float64: ("f64", "float64"),
}
for _name in sorted(name for name in dir(jnp) if name.startswith("float8_")):
    dtype_to_names[np.dtype(getattr(jnp, _name)).type] = (_name.replace("float", "f"), _name)
_name_to_dtype = {name: np.dtype(t) for t, names in dtype_to_names.items() for name in names}
_WIDE = tuple(name for name in _name_to_dtype if not name.startswith(("f8_", "float8_")))
_KNOWN = f"one of {', '.join(_WIDE)}, or a float8 dtype such as float8_e4m3fn"


class ScalarType(Protocol):
    """What `jnp.float16` is: it equals and hashes as `np.float16`, and makes arrays when called."""

    __name__: str

    @property
    def dtype(self) -> np.dtype: ...

    def __call__(self, x: Any) -> jax.Array: ...


def scalar_type(dtype: DTypeLike) -> ScalarType:
    """Returns JAX's scalar type of a dtype that has a name here.

    >>> scalar_type(np.dtype("float16")) is jnp.float16
    True
    """
    return getattr(jnp, np.dtype(dtype).name)


def half_dtype() -> ScalarType:
    """Returns the half-precision type of the default device: bfloat16 on a TPU, else float16.

    A GPU since Ampere computes in bfloat16 as fast as in float16; there name "bfloat16" if range
    matters more than precision.

    Returns: `jnp.float16` or `jnp.bfloat16`, which make an array when called.

    >>> half_dtype()(2**15)
    Array(3.277e+04, dtype=float16)
    """
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def parse_dtype(name: str, others: Iterable[str] = ()) -> np.dtype:
    """Returns the dtype called `name`, such as "f16", "bfloat16", "full", "half" or "f8_e4m3fn".

    "half" asks the default device (see `half_dtype`); every other name touches no device.

    Args:
      others: names of something else that is expected too, for the error.

    Raises: ValueError that lists the known names.

    >>> parse_dtype("bf16")
    dtype(bfloat16)
    """
    if name == "half":
        return np.dtype(half_dtype())
    if name not in _name_to_dtype:
        known = ("half", *_WIDE, *others)
        raise ValueError(
            f"Unknown dtype {described(name)}.{did_you_mean(name, [*others, *_name_to_dtype])} "
            f"Expected one of {', '.join(known)}, or a float8 dtype such as float8_e4m3fn."
        )
    return _name_to_dtype[name]


def can_hold(wide: np.dtype, narrow: np.dtype) -> bool:
    """Returns whether each number of the dtype `narrow` is one of `wide`.

    >>> float16, bfloat16 = HALF_DTYPES
    >>> can_hold(FLOAT32, bfloat16), can_hold(float16, FLOAT32), can_hold(bfloat16, float16)
    (True, False, False)
    """
    first, second = jnp.finfo(wide), jnp.finfo(narrow)
    return bool(first.nmant >= second.nmant and first.maxexp >= second.maxexp)


def floating_dtype(dtype: DTypeLike, role: str) -> np.dtype:
    """Normalises `dtype` (a name, scalar type or `np.dtype`) and refuses all but real floats.

    Args:
      dtype: what the user gave.
      role: what it was given for, named in the error.

    Raises:
      TypeError: it is no dtype at all.
      ValueError: an unknown name, or a dtype that is not real floating.

    >>> floating_dtype("f16", "compute_dtype")
    dtype('float16')
    """
    if isinstance(dtype, str):
        return parse_dtype(dtype)
    expected = f"a real floating dtype or its name, {_KNOWN}"
    # np.dtype(None) would be float64, and np.dtype(array) the dtype of the array.
    if dtype is None or isinstance(dtype, (jax.Array, np.ndarray, np.generic)):
        raise wrong(TypeError, role, dtype, expected)
    try:
        normalised = np.dtype(dtype)
    except (TypeError, ValueError):
        raise wrong(TypeError, role, dtype, expected) from None
    if normalised.type not in dtype_to_names:
        raise wrong(ValueError, role, dtype, expected)
    return np.dtype(normalised.type)  # in the machine's byte order


def is_half(dtype: DTypeLike) -> bool:
    """Returns whether `dtype` is float16 or bfloat16."""
    return np.dtype(dtype).type in _HALF


def is_castable(dtype: DTypeLike) -> bool:
    """Returns whether tree casts touch `dtype`: float16, bfloat16, float32 or float64."""
    return getattr(dtype, "type", None) in _CASTABLE


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """Returns float32 for half dtypes and `dtype` itself for float32, float64."""
    return FLOAT32 if is_half(dtype) else np.dtype(np.dtype(dtype).type)
