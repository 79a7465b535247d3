"""Where two dtypes meet: a call that crosses the border, a layer that will not."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jmp.trees import cast_floating


def call_across_border(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    inner: np.dtype,
    outer: np.dtype,
    is_cell: bool,
) -> Any:
    """Returns `call(*args, **kwargs)` with floating inputs in `inner` and outputs in `outer`.

    A recurrent cell's carry, its first argument and first result, is left out: it must leave a
    scan's step with the dtype it came with, which Flax makes float32.
    """
    if not is_cell or not args:
        args, kwargs = cast_floating((args, kwargs), inner)
        return cast_floating(call(*args, **kwargs), outer)
    carry, *inputs = args
    inputs, kwargs = cast_floating((inputs, kwargs), inner)
    new_carry, output = call(carry, *inputs, **kwargs)
    new_carry = jax.tree.map(lambda new, old: new.astype(old.dtype), new_carry, carry)
    return new_carry, cast_floating(output, outer)


def warn_if_explicitly_float32(module: Any, path: str, dtype: np.dtype) -> None:
    """Warns of a layer whose author chose float32 where the policy computes in another dtype."""
    if np.dtype(module.dtype) == np.float32 and dtype != np.float32:
        warnings.warn(
            f"{type(module).__name__} {path!r} says dtype=float32 and stays in float32, though the "
            f"policy computes in {dtype}. Build the model with dtype=None, or if float32 is meant, "
            f"say so with the rule ({path!r}, 'float32').",
            stacklevel=2,
        )
