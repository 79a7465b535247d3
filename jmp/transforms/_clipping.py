"""`clip_by_global_norm`, of gradients that devices hold shards of."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jmp._messages import check_number
from jmp.dtypes import at_least_float32
from jmp.sharding._axes import AxisName, axes_of_each, axis_names
from jmp.transforms._wrapping import refuse_unreduced
from jmp.trees import as_jax_array, is_floating, is_inexact_array


def clip_by_global_norm(
    max_norm: ArrayLike, axis_name: AxisName = "auto"
) -> optax.GradientTransformation:
    """Clips gradients by their global norm, also if each device holds a shard of them.

    Inside shard_map optax's function of this name takes the norm of one device's shards. Here the
    squares are added up, in at least float32, over the axes along which each gradient varies; what
    is replicated counts once. Under jit, sharded or not, and if nothing varies, it is optax's
    own. As with optax's, all gradients become NaN if the norm is NaN; if it is infinite, finite
    gradients become zero and infinite ones NaN. Put it inside `with_loss_scale`, as optax's.
    (Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", section 3.2.)

    Args:
      max_norm: a real scalar above zero, the largest norm that passes unchanged. Infinity clips
        nothing.
      axis_name: "auto", the names of axes, or () for each device's own norm. "auto" means the
        mapped axes along which a gradient varies. Where JAX does not track that (pmap,
        `check_vma=False`), it means all mapped axes, and every gradient counts as a shard along
        them, as along axes that are named: a replicated one would count once for each device. There
        name the axes along which all are sharded, and use optax's function if there are none.

    Returns: a transformation without a state. For an ensemble, in which each device trains a model
      of its own, `axis_name` must leave out that axis.

    Raises:
      TypeError: `max_norm` is no real number, or `axis_name` no name.
      ValueError: `max_norm` is zero, negative or NaN; in `update`, for gradients that are not added
        up yet (`unreduced`).

    >>> import optax
    >>> tx = clip_by_global_norm(1.0)
    >>> updates, _ = tx.update({"w": jnp.array([3.0, 4.0])}, optax.EmptyState())
    >>> updates["w"]
    Array([0.6, 0.8], dtype=float32)
    """
    caller = "clip_by_global_norm"
    if not isinstance(max_norm, jax.core.Tracer):
        expected = (
            "a number above zero, such as 1.0, or infinity to clip nothing: a negative norm turns "
            "gradients round, and with zero nothing trains"
        )
        max_norm = check_number(max_norm, caller, expected, lambda n: n > 0, name="max_norm")
    axis_names(axis_name, "axis_name", caller)
    on_one_device = optax.clip_by_global_norm(max_norm)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        refuse_unreduced(updates, caller)
        leaves = filter(is_inexact_array, jax.tree.leaves(updates))
        squared = list(map(as_jax_array, leaves))
        axes = axes_of_each(squared, (), axis_name)
        if not any(axes):
            return on_one_device.update(updates, state, params)
        norm = jnp.sqrt(sum(map(_sum_of_squares, squared, axes)))
        passes = norm < max_norm

        def clip(leaf: Any) -> Any:
            if not is_inexact_array(leaf):
                return leaf
            wide = leaf.astype(at_least_float32(leaf.dtype)) if is_floating(leaf) else leaf
            shorter = (wide / norm.astype(wide.dtype)) * max_norm
            return jnp.where(passes, leaf, shorter.astype(leaf.dtype))

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(on_one_device.init, update)


def _sum_of_squares(array: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Returns the sum of squares of an array, added up over axes too."""
    size = jnp.abs(array)
    total = jnp.sum(jnp.square(size.astype(at_least_float32(size.dtype))))
    return jax.lax.psum(total, names) if names else total
