"""Adam by hand, with half parameters and small states, as one would write it for one model.

Of each tensor a function of the parameter, what is kept beside it, both moments and the gradient
returns the first four after a step. `jmp.transforms` does the same around any optimizer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

RATE, B1, B2, EPS = 1e-3, 0.9, 0.999, 1e-8
Tensor = tuple[Any, Any, Any, Any]


def adam(value: Any, m: Any, v: Any, gradient: Any, count: Any) -> tuple[Any, Any, Any]:
    """Returns value and moments after a step, all float32."""
    gradient, step = gradient.astype(jnp.float32), (count + 1).astype(jnp.float32)
    m = B1 * m + (1 - B1) * gradient
    v = B2 * v + (1 - B2) * gradient**2
    update = (m / (1 - B1**step)) / (jnp.sqrt(v / (1 - B2**step)) + EPS)
    return value - RATE * update, m, v


def split(p: Any, low: Any, m: Any, v: Any, gradient: Any, count: Any) -> Tensor:
    """The parameter is the higher half of its master, `low` the lower one, int16."""
    high = lax.bitcast_convert_type(p, jnp.int16).astype(jnp.int32) << 16
    master = lax.bitcast_convert_type(high + low.astype(jnp.int32), jnp.float32)
    master, m, v = adam(master, m, v, gradient, count)
    pattern = lax.bitcast_convert_type(master, jnp.int32)
    p = lax.bitcast_convert_type(((pattern + 0x8000) >> 16).astype(jnp.int16), jnp.bfloat16)
    return p, pattern.astype(jnp.int16), m, v


def split_with_half_moments(p: Any, low: Any, m: Any, v: Any, g: Any, count: Any) -> Tensor:
    wide = m.astype(jnp.float32), v.astype(jnp.float32)
    p, low, m, v = split(p, low, *wide, g, count)
    return p, low, *(stochastic_half(x, count, salt) for salt, x in enumerate((m, v)))


def stochastic(p: Any, beside: Any, m: Any, v: Any, gradient: Any, count: Any) -> Tensor:
    value, m, v = adam(p.astype(jnp.float32), m, v, gradient, count)
    return stochastic_half(value, count, 2), beside, m, v


def stochastic_half(x: Any, count: Any, salt: int) -> jax.Array:
    """Returns bfloat16: the lower half of the pattern decides, with 16 random bits."""
    random = random_bits(x.shape, count, salt) >> 16
    pattern = lax.bitcast_convert_type(x, jnp.uint32) + random
    return lax.bitcast_convert_type((pattern >> 16).astype(jnp.uint16), jnp.bfloat16)


def random_bits(shape: tuple[int, ...], count: Any, salt: int) -> jax.Array:
    index = lax.iota(jnp.uint32, int(jnp.zeros(shape).size)).reshape(shape)
    x = index ^ (count.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + jnp.uint32(salt))
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


# By name: the function of a tensor, the dtype of what is kept beside it, and that of the moments.
BY_HAND: dict[str, tuple[Callable[..., Tensor], Any, Any]] = {
    "split": (split, jnp.int16, jnp.float32),
    "split-bfloat16": (split_with_half_moments, jnp.int16, jnp.bfloat16),
    "stochastic": (stochastic, None, jnp.float32),
}
