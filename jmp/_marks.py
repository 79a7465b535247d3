"""A mark on a function or module: which dtype its products are computed in.

Steps read it, to refuse an optimizer that was made for another policy.
"""

import functools
from typing import TypeVar

import numpy as np
from jax.typing import DTypeLike

T = TypeVar("T")

LOWERED_TO = "__jmp_lowered_to__"


def mark_lowered(fun: T, dtype: DTypeLike) -> T:
    """Returns `fun`, marked."""
    setattr(fun, LOWERED_TO, np.dtype(dtype))
    return fun


def lowered_to(fun: object) -> np.dtype | None:
    """Returns the dtype of a function or module, or of what a function wraps; None if not marked.

    >>> str(lowered_to(jax.jit(autocast(lambda x: x @ x, "mixed_bfloat16"))))
    'bfloat16'
    """
    while fun is not None:
        dtype: np.dtype | None = getattr(fun, LOWERED_TO, None)
        if dtype is not None:
            return dtype
        fun = fun.func if isinstance(fun, functools.partial) else getattr(fun, "__wrapped__", None)
    return None
