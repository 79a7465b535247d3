"""Ways to ask whether all gradients are finite, compared: kernels and bytes on an H200.

The winner is `jmp.transforms._few_kernels`; what was tried beside it stands here, to be counted
again with another compiler. Each is a function of a list of unscaled float32 gradients.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jmp.transforms._few_kernels import gradients_finite

Gradients = list[jax.Array]


def by_tensor(gradients: Gradients) -> jax.Array:
    return jnp.stack([jnp.isfinite(g).all() for g in gradients]).all()


def concatenated(size: int, gradients: Gradients) -> jax.Array:
    flat = [g.ravel() for g in gradients]
    groups = [jnp.concatenate(flat[i : i + size]) for i in range(0, len(flat), size)]
    return jnp.stack([jnp.isfinite(group).all() for group in groups]).all()


def same_shape(size: int, gradients: Gradients) -> jax.Array:
    alike: dict[tuple[int, ...], Gradients] = {}
    for g in gradients:
        alike.setdefault(g.shape, []).append(g)
    checks = [
        functools.reduce(jnp.logical_and, map(jnp.isfinite, group[i : i + size])).all()
        for group in alike.values()
        for i in range(0, len(group), size)
    ]
    return jnp.stack(checks).all()


def norm(gradients: Gradients) -> jax.Array:
    """Wrong where a square overflows though its root would not: finite gradients above 1.8e19."""
    return jnp.isfinite(optax.global_norm(gradients))


def sums(gradients: Gradients) -> jax.Array:
    """Wrong where finite values add up to infinity: two gradients of 3e38."""
    return jnp.isfinite(sum(jnp.sum(g) for g in gradients))


def sums_of_zeros(gradients: Gradients) -> jax.Array:
    """Right: 0 * x is NaN for an infinity and for NaN, and 0 for any finite x."""
    return sum(jnp.sum(0 * g) for g in gradients) == 0


CHECKS: dict[str, Callable[[Gradients], jax.Array]] = {
    "none": lambda gradients: jnp.array(True),
    "isfinite by tensor": by_tensor,
    "norm of all (inexact)": norm,
    "sum of all (inexact)": sums,
    "sum of 0 * g": sums_of_zeros,
    "8 tensors concatenated": functools.partial(concatenated, 8),
    "16 tensors concatenated": functools.partial(concatenated, 16),
    "8 tensors of one shape": functools.partial(same_shape, 8),
    "16 tensors of one shape": functools.partial(same_shape, 16),
    "ours: 8 of one shape, 32 small ones concatenated": gradients_finite,
}
