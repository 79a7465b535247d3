"""Reading optimizer states: find a wrapper's state inside chains, and refuse orders that fail."""

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from jmp.trees import PyTree, is_array

S = TypeVar("S")


def as_transformation(transformation: object, caller: str) -> optax.GradientTransformationExtraArgs:
    """Returns an optax transformation that takes extra arguments; `MultiSteps` objects are fine."""
    if isinstance(transformation, optax.MultiSteps):
        transformation = transformation.gradient_transformation()
    if not isinstance(transformation, optax.GradientTransformation):
        raise TypeError(
            f"{caller} got inner={transformation!r}; expected an optax transformation, such as "
            "optax.adam(1e-3)."
        )
    return optax.with_extra_args_support(transformation)


def update_inner(
    inner: optax.GradientTransformationExtraArgs,
    gradients: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
    caller: str,
) -> tuple[optax.Updates, optax.OptState]:
    """Returns `inner.update(...)`; says so where it fails because the trees do not match.

    Asked only after a failure: trees that differ where `inner` does not look are none of ours.
    """
    try:
        updates, new_state = inner.update(gradients, inner_state, params, **extra_args)
    except (TypeError, ValueError) as error:
        given: Any = jax.tree.structure(gradients)
        expected: Any = jax.tree.structure(params)
        if params is None or given == expected:
            raise
        raise ValueError(
            f"{caller} got gradients of another structure than the parameters: {given} and "
            f"{expected}. Differentiate with respect to the parameters that the optimizer holds."
        ) from error
    return updates, new_state


def find_states(opt_state: optax.OptState, state_type: type[S]) -> list[S]:
    """Returns every state of `state_type` in `opt_state`, however deep, outermost first."""
    return [node for node in _nodes(opt_state) if isinstance(node, state_type)]


def check_inner_state(inner_state: optax.OptState, state_type: type, caller: str) -> None:
    """Raises ValueError if `inner_state` holds a second wrapper of the same kind."""
    if find_states(inner_state, state_type):
        raise ValueError(
            f"{caller} got an inner transformation that contains {caller} already; gradients would "
            "be handled twice. Use it once, outermost."
        )


def check_order(opt_state: optax.OptState, last_type: type, scale_type: type) -> None:
    """Raises ValueError for orders of transformations that lose or corrupt updates.

    Args:
      opt_state: the state of the whole optimizer.
      last_type: the state of the transformation that nothing in a chain may follow (masters).
      scale_type: the state of the one that must stand outside `MultiSteps` (loss scaling).
    """
    if len(find_states(opt_state, scale_type)) > 1:
        raise ValueError(
            "This optimizer contains with_loss_scale more than once; gradients would be unscaled "
            "twice. Use it once, outermost."
        )
    for node in _nodes(opt_state):
        # optax.chain keeps its parts' states in a plain tuple.
        if type(node) is tuple and any(find_states(part, last_type) for part in node[:-1]):
            raise ValueError(
                "This optimizer chains a transformation after with_master_params; it would change "
                "the parameters but not their masters. Move it inside: "
                "with_master_params(optax.chain(adam, scale))."
            )
        if isinstance(node, optax.MultiStepsState) and find_states(node, scale_type):
            raise ValueError(
                "This optimizer accumulates outside of with_loss_scale; one infinite micro-batch "
                "would ruin the accumulator for ever. Turn it round: "
                "with_loss_scale(optax.MultiSteps(adam, 4), loss_scale)."
            )


def without_weak_types(tree: PyTree) -> PyTree:
    """Gives arrays that took their dtype from a Python number that dtype for good.

    The first step would return them strongly typed, and the second step would compile again.
    """
    return jax.tree.map(
        lambda leaf: (
            jnp.asarray(leaf, leaf.dtype)
            if is_array(leaf) and getattr(leaf, "weak_type", False)
            else leaf
        ),
        tree,
    )


def _nodes(tree: PyTree) -> Iterator[tuple[Any, ...]]:
    """Yields every tuple (named or plain) in `tree`, outermost first."""
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, tuple)):
        if isinstance(node, tuple):
            yield node
            for child in node:
                yield from _nodes(child)
