"""`set_loss_scale`: an optimizer's state with another loss scale in it."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jmp import _jax_compat
from jmp._messages import described
from jmp.loss_scaling import LossScale, NoOpLossScale
from jmp.transforms import _states
from jmp.transforms._loss_scaling import find_loss_scaling
from jmp.transforms._states import WithLossScaleState

S = TypeVar("S")


def set_loss_scale(opt_state: S, new: LossScale) -> S:
    """Returns an optimizer's state with its loss scale replaced, of whatever class either is.

    Go on with the optimizer that you have, or with one made with the new scale: the scale in force
    is read from the state. Everything else stays: moments, `grads_finite` and the counts of skipped
    steps. With `NoOpLossScale` alone no later step would change `grads_finite`, so that it becomes
    True, and `consecutive_skips` zero. For a checkpoint of another scale: restore it into a state
    of the scale that was saved, then replace that.

    Args:
      opt_state: the state of an optimizer that contains `with_loss_scale`, alone or in a chain. Its
        arrays may be concrete, traced, or `jax.ShapeDtypeStruct`.
      new: the scale to go on with. Its arrays are copied, so that it may be used again after the
        state was donated. For a state that `jax.vmap` made, a single scale is repeated for each
        member.

    Returns: the state, of the same structure but for the scale. In an abstract state the scale is
      abstract too; on a mesh its arrays lie where the state's flags lie.

    Raises:
      TypeError: `new` is not a loss scale, or `opt_state` is an optimizer and not its state.
      ValueError: the state holds no loss scale, or the optimizer's order is wrong, see
        `check_optimizer_state`; or `new` is neither a single scale nor one for each member.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_loss_scale(optax.adam(1e-3), DynamicLossScale(8.0))
    >>> state = set_loss_scale(tx.init(jnp.ones(2)), StaticLossScale(512))
    >>> state.loss_scale
    StaticLossScale(loss_scale=512.0)
    """
    if not isinstance(new, LossScale):
        raise TypeError(
            f"set_loss_scale got {described(new)} as the new scale; expected a loss "
            "scale such as jmp.torch_loss_scale(). The order is "
            "set_loss_scale(opt_state, new)."
        )
    if find_loss_scaling(opt_state) is None:
        raise ValueError(
            "set_loss_scale got an optimizer's state without a loss scale; expected that of "
            "an optimizer with jmp.transforms.with_loss_scale. To give it one, wrap the optimizer, "
            "tx = with_loss_scale(inner, new), and put the old state into a fresh one: "
            "tx.init(params)._replace(inner_state=opt_state)."
        )
    return _states.map_states(lambda state: _with_scale(state, new), opt_state, WithLossScaleState)


def _with_scale(state: WithLossScaleState, new: LossScale) -> WithLossScaleState:
    flag: Any
    (flag,), wrapping = jax.tree.flatten(state.grads_finite)  # nnx holds arrays in Variables
    shapes = {leaf.shape for leaf in jax.tree.leaves(new)}
    if not shapes <= {(), flag.shape}:
        raise ValueError(
            f"set_loss_scale got a scale of the shapes {sorted(shapes)}; expected scalars, or "
            f"{flag.shape} as the state's flags are: one scale for each member."
        )

    def placed(leaf: Any) -> Any:
        if isinstance(flag, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(flag.shape, leaf.dtype, sharding=flag.sharding)
        copy = jnp.broadcast_to(jnp.array(leaf), flag.shape)
        is_placed = isinstance(flag, jax.Array) and _jax_compat.is_concrete(flag)
        if is_placed and len(flag.sharding.device_set) > 1:
            return jax.device_put(copy, flag.sharding)
        return copy

    def in_state(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.tree.unflatten(wrapping, [placed(leaf)]), tree)

    if isinstance(new, NoOpLossScale):
        last = {"grads_finite": jnp.array(True), "consecutive_skips": jnp.zeros([], jnp.int32)}
        state = state._replace(**in_state(last))
    return state._replace(loss_scale=in_state(new))
