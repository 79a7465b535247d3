"""Casts of real floating arrays, which pass any other object unchanged; masks and repetitions."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.dtypes import FLOAT32


def cast(value: Any, dtype: np.dtype | None) -> Any:
    """Casts an array to a real floating dtype; None leaves it, and so does any other object."""
    if dtype is None or getattr(value, "dtype", dtype) == dtype:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.astype(dtype)
    current = jax.sharding.get_abstract_mesh()
    if current.empty or (mesh := jax.typeof(value).sharding.mesh) == current:
        return _jax_compat.convert(value, dtype)
    # On the mesh of the array, not of the equation that the cast stands around: what `auto_axes`
    # and a lookup with `out_sharding=` change is how its axes are read.
    with jax.sharding.use_abstract_mesh(mesh):
        return _jax_compat.convert(value, dtype)


def cast_all(values: Sequence[Any], dtypes: Sequence[np.dtype | None]) -> list[Any]:
    """Casts each array to the dtype beside it."""
    return [cast(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]


def repeated(array: Any, shape: Sequence[Any]) -> Any:
    """Returns an array in float32, repeated to `shape`, whose last axes are its own."""
    if not _jax_compat.is_jax_array(array):
        array = np.asarray(array, np.float32)
    array = cast(array, FLOAT32)
    axes = range(len(shape) - array.ndim, len(shape))
    return lax.broadcast_in_dim(array, shape, tuple(axes))


# A mask adds a number at least as large: exp(-1e4) is zero in any dtype.
LEAST_CARRIED = 1e4


@jax.custom_jvp
def saturated(array: Any) -> Any:
    """Holds finite numbers within float16's range: a row masked throughout stays finite.

    Its derivative is that of the identity, so that it costs the backward pass nothing.
    """
    limit = float(jnp.finfo(np.float16).max)
    return jnp.where(jnp.isinf(array), array, jnp.clip(array, -limit, limit))


saturated.defjvp(lambda primals, tangents: (saturated(*primals), *tangents))


@jax.custom_jvp
def masked(result: Any, mask: Any, *others: Any) -> Any:
    """Holds a half sum above -inf where a mask, beside finite operands, carried it there.

    So the sum of two masks of -1e9 stays finite, as in float32, and any other overflow is seen.
    Its derivative is that of the identity.
    """
    is_carried = jnp.abs(mask) >= LEAST_CARRIED
    for operand in (mask, *others):
        is_carried &= jnp.isfinite(operand)
    return jnp.where(is_carried, jnp.maximum(result, jnp.finfo(result.dtype).min), result)


masked.defjvp(lambda primals, tangents: (masked(*primals), tangents[0]))
