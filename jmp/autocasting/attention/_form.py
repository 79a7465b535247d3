"""What one attention is, for a fused kernel: how its arrays are laid out, and what is masked."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp.autocasting.attention._axes import Axes, Layout, Sizes
from jmp.autocasting.attention._matching import Bias, Mask

Booleans = np.ndarray[Any, np.dtype[np.bool_]]


class Masking(NamedTuple):
    """What is done to the scores between scale and softmax."""

    is_causal: bool
    window: int | None  # how many keys before its own a row sees, if it is causal
    constant: Booleans | None  # another mask without inputs, where a kernel takes one; see `kept`
    biases: Sequence[Bias]  # what is not said by these three
    masks: Sequence[Mask]
    has_gradient: bool  # of a bias
    sees_a_key: bool  # each row is known to

    def kept(self, rows: int, keys: int) -> Any:
        """Returns which scores stay but for masks that are read: (batch, heads, rows, keys)."""
        if self.constant is not None:
            return self.constant
        behind = jnp.arange(rows)[None, None, :, None] - jnp.arange(keys)[None, None, None]
        if not self.is_causal:
            return jnp.ones_like(behind, bool)
        return (behind >= 0) & (self.window is None or behind <= self.window)


class Form(NamedTuple):
    """How one attention is laid out for a kernel, and what is done to its scores.

    Queries have the shape (batch, rows, heads, width), keys and values (batch, keys, groups of
    heads, width), a bias or a mask (batch, heads, rows, keys).
    """

    query: Layout
    key: Layout
    values: Layout
    result: Layout
    scale: float
    masking: Masking
    bias_axes: Axes
    sizes: Sizes


def or_average(result: Any, sees_a_key: Any, values: Any) -> Any:
    """Returns a kernel's result, and for rows that see no key the average of the values.

    That is what the plain program returns there, where all scores of a row are equal. It is chosen
    in float32: so the average's gradient, which has a term for each row, adds up in float32.
    """
    average = values.mean(1, keepdims=True, dtype=jnp.float32)
    average = jnp.repeat(average, result.shape[2] // values.shape[2], axis=2)
    chosen = jnp.where(sees_a_key, result.astype(jnp.float32), average)
    return chosen.astype(result.dtype)
