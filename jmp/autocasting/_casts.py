"""Casts of arrays that leave alone what is no real floating array."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax


def cast(value: Any, dtype: np.dtype | None) -> Any:
    """Casts an array to a real floating dtype; None leaves it, and so does any other object."""
    if dtype is None or getattr(value, "dtype", dtype) == dtype:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.astype(dtype)
    return lax.convert_element_type(value, dtype)


def cast_all(values: Sequence[Any], dtypes: Sequence[np.dtype | None]) -> list[Any]:
    """Casts each array to the dtype beside it."""
    return [cast(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]
