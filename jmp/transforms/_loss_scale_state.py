"""The loss scale inside an optimizer's state: read it, replace it, refuse orders that fail.

`loss_scale_state` and `set_loss_scale` come first, then the orders: `check_optimizer_state` for a
finished optimizer, and `find_loss_scaling` for steps that undo what a chain has after loss scaling.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from jmp import _jax_compat
from jmp._messages import described
from jmp.loss_scaling import LossScale, NoOpLossScale
from jmp.transforms import _states
from jmp.transforms._loss_scaling import WithLossScaleState
from jmp.trees import PyTree

S = TypeVar("S")


def loss_scale_state(opt_state: PyTree) -> WithLossScaleState | None:
    """Returns the `WithLossScaleState` inside an optimizer's state, or None if there is none.

    Raises: as `check_optimizer_state`.

    >>> loss_scale_state(()) is None
    True
    """
    check_optimizer_state(opt_state)
    return find_loss_scaling(opt_state)


def set_loss_scale(opt_state: S, new: LossScale) -> S:
    """Returns an optimizer's state with its loss scale replaced, of whatever class either is.

    Go on with the optimizer that you have, or with one made with the new scale: a step reads the
    scale from the state. Everything else stays: moments, `grads_finite` and the counts of skipped
    steps. Only with `NoOpLossScale` no later step would change `grads_finite`, so that it becomes
    True, and `consecutive_skips` zero. For a checkpoint of another scale: restore it into a state
    of the scale that was saved, then replace that.

    Args:
      opt_state: the state of an optimizer that is `with_loss_scale`, or a chain with it. Its
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


def check_optimizer_state(opt_state: PyTree) -> None:
    """Raises ValueError if an optimizer combines these transformations in an order that fails.

    Those orders are: anything before loss scaling in a chain, which would see scaled gradients;
    a transformation with a state after it, which a skip would not stop; loss scaling twice, or
    inside `partition`, `masked`, `apply_if_finite`, `MultiSteps` and the like; anything chained
    after masters, or masters inside `lookahead` and others that change updates. `named_chain` is
    a chain.

    A transformation sees its own part of the state, so neither `init` nor `update` can refuse these
    orders in a training step of your own: call this once, with `tx.init(params)`. `masters` checks
    the orders of masters, `loss_scale_state` all. The adapters call it too. They accept
    transformations after loss scaling, because their steps undo on a skip what these changed.

    Raises: ValueError for such an order; TypeError for an optimizer in the place of its state.

    >>> check_optimizer_state(())
    """
    check_order(opt_state)


def find_loss_scaling(opt_state: optax.OptState) -> WithLossScaleState | None:
    """Returns the state of loss scaling, also if a transformation with a state comes after it.

    For steps that undo, on a skip, what came after; see `transforms.check_optimizer_state`.
    """
    check_order(opt_state, undone_on_a_skip=True)
    return next(iter(_states.find_states(opt_state, WithLossScaleState)), None)


def check_order(opt_state: optax.OptState, *, undone_on_a_skip: bool = False) -> None:
    """Raises ValueError for orders that fail; see `transforms.check_optimizer_state`.

    Around loss scaling fails all but the earlier part of a chain. In a chain a later part fails if
    it has a state of its own: a skip does not reach it, and its moments and counts move, and with
    them the parameters.

    Args:
      undone_on_a_skip: whether the step undoes, on a skip, what a chain's later part did.
    """
    _states.check_nothing_changes_masters(opt_state)
    scaled = _states.locate(opt_state, WithLossScaleState)
    if len(scaled) > 1:
        raise ValueError(
            "This optimizer contains with_loss_scale more than once; gradients would be unscaled "
            "twice, or by several scales. Use it once, outermost. One optimizer for several groups "
            "is with_loss_scale(optax.partition(...), loss_scale)."
        )
    for node, position in (pair for found in scaled for pair in found.around):
        if type(node) in _states.STORAGES:
            check_no_loss_scaling_inside(node.inner_state, _states.STORAGES[type(node)].caller)
        if isinstance(node, optax.MultiStepsState):
            raise ValueError(
                "This optimizer accumulates outside of with_loss_scale; one infinite micro-batch "
                "would make the accumulator NaN for all later steps. Swap the two: "
                "with_loss_scale(optax.MultiSteps(adam, 4), loss_scale)."
            )
        if outer := _states.wrapper_of_optax(node):
            raise ValueError(
                f"This optimizer has with_loss_scale inside {outer}, which sees gradients that are "
                "still scaled, or hides a skipped step. Put it around: "
                f"with_loss_scale({outer}(...), loss_scale)."
            )
        if _states.is_chain(node) and position > 0:
            raise ValueError(
                "This optimizer chains a transformation before with_loss_scale; it sees gradients "
                "that are still scaled: clipping them to 1, for one, would make updates 65536 "
                "times too small. Move it inside: "
                "with_loss_scale(optax.chain(clip_by_global_norm, adam), loss_scale)."
            )
        later_parts = _states.children(node)[position + 1 :] if _states.is_chain(node) else []
        if jax.tree.leaves(later_parts) and not undone_on_a_skip:
            raise ValueError(
                "This optimizer chains a transformation with a state after with_loss_scale; a "
                "skipped step would move that state and the parameters. Move it inside: "
                "with_loss_scale(optax.chain(clip, adam), loss_scale). (The steps of "
                "jmp.adapters undo it, and take such a chain.)"
            )


def check_no_loss_scaling_inside(inner_state: optax.OptState, caller: str) -> None:
    """Raises ValueError if a skipped step would not reach what is kept beside half parameters."""
    if _states.find_states(inner_state, WithLossScaleState):
        raise ValueError(
            f"{caller} got an inner transformation that contains with_loss_scale; a skipped step "
            f"would still move what {caller} counts and keeps. Swap the two: "
            f"with_loss_scale({caller}(adam), loss_scale)."
        )
