"""The wrapped optimizer, and the transformation around it, as all transformations here treat them.

`checked_inner` gives the optimizer inside, with errors that say which trees are wrong.
`transformation` makes a transformation of two functions: the first makes a state, which is then
placed on the devices of the parameters; the second gets arguments that were checked.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jmp._messages import described, listed, way_to_parameters, where_trees_differ
from jmp.sharding._axes import unreduced_axes
from jmp.transforms._placement import placed
from jmp.transforms._states import as_transformation, find_states
from jmp.trees import leaves_by_path, stands_for_numbers

S = TypeVar("S")


class Transformation(optax.GradientTransformationExtraArgs, Generic[S]):  # type: ignore[misc]
    """A `GradientTransformationExtraArgs` whose state is an `S`.

    Optax declares every state as any tree at all, so that `tx.init(params).loss_scale` would be an
    error to a type checker. It is only an annotation: our functions return optax's own class.
    """

    if TYPE_CHECKING:

        def init(self, params: Any) -> S: ...

        def update(
            self, updates: Any, state: S, params: Any = None, **extra_args: Any
        ) -> tuple[Any, S]: ...


def transformation(
    init: Callable[[optax.Params], S],
    update: Callable[..., tuple[optax.Updates, S]],
    caller: str,
    state_type: type[S],
) -> Transformation[S]:
    """Returns the transformation of these two functions, in which arguments are checked.

    Args:
      caller: the public function whose transformation it is, for errors.
      state_type: the class of its state.

    Raises: in `update`, TypeError for a state that is not its own; ValueError for gradients that
      are still to be added up.
    """

    def placed_init(params: optax.Params) -> S:
        return placed(init(params), params)

    def checked_update(
        updates: optax.Updates, state: S, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, S]:
        if not isinstance(state, state_type):
            raise TypeError(
                f"{caller} got {described(state)} as its state; expected what tx.init(params) or "
                "tx.update returned. The order is tx.update(gradients, state, params)."
            )
        refuse_unreduced(updates, caller)
        return update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(placed_init, checked_update)


def checked_inner(
    inner: object, caller: str, state_type: type
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer that `caller` wraps, with errors that say which trees are wrong.

    Its first state has no weak types.

    Raises:
      TypeError: `inner` is no transformation; in `init`, a leaf of the parameters is no array.
        Asked only after a failure: optimizers without moments take such leaves.
      ValueError: in `init`, the state holds a second one of `state_type`; in `update`, as
        `structures_compared`.
    """
    inside = as_transformation(inner, caller)

    def init(params: optax.Params) -> optax.OptState:
        try:
            state = inside.init(params)
        except (TypeError, ValueError, AttributeError) as error:
            for path, leaf in leaves_by_path(params).items():
                if not (stands_for_numbers(leaf) or isinstance(leaf, float)):
                    raise TypeError(
                        f"{caller} got {described(leaf)} as the parameter at {path or 'the root'}; "
                        f"expected a tree of arrays.{way_to_parameters(params)}"
                    ) from error
            raise
        if find_states(state, state_type):
            raise ValueError(
                f"{caller} got an inner transformation that contains {caller} already; "
                "gradients would be handled twice. Use it once, outermost."
            )
        return _without_weak_types(state)

    def update(
        updates: Any, state: optax.OptState, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        with structures_compared(updates, params, caller):
            return inside.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def with_gradients(
    extra_args: dict[str, Any], given: optax.Updates, gradients: optax.Updates
) -> dict[str, Any]:
    """Returns extra arguments in which `gradients` replace the gradients as they were given.

    Line searches get their gradients a second time, as `grad=`, the very same tree.
    """
    return {name: gradients if arg is given else arg for name, arg in extra_args.items()}


@contextlib.contextmanager
def structures_compared(
    gradients: optax.Updates, params: optax.Params | None, caller: str
) -> Iterator[None]:
    """Compares gradients and parameters if what is inside fails.

    Only then: an optimizer may take trees that differ.

    Raises:
      TypeError: None as gradients, before anything runs.
      ValueError: what is inside failed, and gradients have another structure than the parameters.
    """
    if gradients is None:
        raise TypeError(
            f"{caller} got None as gradients; expected a tree like the parameters, as "
            "jmp.scaled_value_and_grad(loss_fn, loss_scale)(params, ...) returns it beside the "
            "loss."
        )
    try:
        yield
    except (TypeError, ValueError) as error:
        got: Any = jax.tree.structure(gradients)
        if params is None or got == jax.tree.structure(params):
            raise
        raise ValueError(
            f"{caller} got gradients of another structure than the parameters: of gradients and "
            f"parameters {where_trees_differ(gradients, params)}. Differentiate with respect to "
            f"the parameters that the optimizer holds.{way_to_parameters(params)}"
        ) from error


def refuse_unreduced(updates: optax.Updates, caller: str) -> None:
    """Raises ValueError for gradients of which devices hold parts that are still to be added up."""
    for path, leaf in tree_leaves_with_path(updates):
        axes = sorted(unreduced_axes(leaf)) if isinstance(leaf, jax.Array) else []
        if axes:
            raise ValueError(
                f"{caller} got a gradient, at {keystr(path) or 'the root'}, that is still to be "
                f"added up over the axes {listed(axes)}, so that an overflow cannot be seen; "
                "expected the sum: jax.sharding.reshard(gradient, jax.typeof(parameter).sharding)."
            )


def _without_weak_types(inner_state: optax.OptState) -> optax.OptState:
    """Gives arrays that took their dtype from a Python number that dtype for good.

    The first step would return them strongly typed, and the second step would compile again.
    """
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf,
        inner_state,
    )
