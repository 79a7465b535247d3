"""The wrapped optimizer, as every transformation here treats it.

A `Wrapper` calls the inner optimizer, with errors that say which trees are wrong, and makes a
transformation of two functions. The first makes a state, which is then placed on the devices of the
parameters; the second gets arguments that were checked.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from jmp._messages import described, listed, way_to_parameters, where_trees_differ
from jmp.sharding._axes import unreduced_axes
from jmp.transforms._placement import placed
from jmp.transforms._states import (
    as_transformation,
    check_half_ones_are_seen,
    check_nothing_changes_masters,
    find_states,
    shapes_with_master,
)
from jmp.trees import cast_to_at_least_float32, leaves_by_path, stands_for_numbers

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


class Wrapper(Generic[S]):
    """A transformation around another.

    Attributes:
      inner: the other, which takes extra arguments.
      caller: the public function that wraps it, for errors.
      state_type: the class of the wrapper's state.
    """

    def __init__(self, inner: object, caller: str, state_type: type[S]) -> None:
        self.inner = as_transformation(inner, caller)
        self.caller = caller
        self.state_type = state_type

    def transformation(
        self,
        init: Callable[[optax.Params], S],
        update: Callable[..., tuple[optax.Updates, S]],
    ) -> Transformation[S]:
        """Returns the transformation of these two functions, in which arguments are checked.

        Raises: in `update`, TypeError for a state that is not its own; ValueError for gradients
          that are still to be added up.
        """

        def placed_init(params: optax.Params) -> S:
            return placed(init(params), params)

        def checked_update(
            updates: optax.Updates,
            state: S,
            params: optax.Params | None = None,
            **extra_args: Any,
        ) -> tuple[optax.Updates, S]:
            if not isinstance(state, self.state_type):
                raise TypeError(
                    f"{self.caller} got {described(state)} as its state; expected what "
                    "tx.init(params) or tx.update returned. The order is tx.update(gradients, "
                    "state, params)."
                )
            refuse_unreduced(updates, self.caller)
            return update(updates, state, params, **extra_args)

        tx: Transformation[S] = optax.GradientTransformationExtraArgs(placed_init, checked_update)
        return tx

    def init_inner(self, params: optax.Params) -> optax.OptState:
        """Returns the inner optimizer's first state, without weak types.

        Raises:
          TypeError: a leaf of `params` is no array. Asked only after a failure: optimizers without
            moments take such leaves.
          ValueError: the state holds a second wrapper of this kind.
        """
        try:
            inner_state = self.inner.init(params)
        except (TypeError, ValueError, AttributeError) as error:
            for path, leaf in leaves_by_path(params).items():
                if not (stands_for_numbers(leaf) or isinstance(leaf, float)):
                    raise TypeError(
                        f"{self.caller} got {described(leaf)} as the parameter at "
                        f"{path or 'the root'}; expected a tree of arrays."
                        f"{way_to_parameters(params)}"
                    ) from error
            raise
        if find_states(inner_state, self.state_type):
            raise ValueError(
                f"{self.caller} got an inner transformation that contains {self.caller} already; "
                "gradients would be handled twice. Use it once, outermost."
            )
        return _without_weak_types(inner_state)

    def init_inner_in_float32(self, params: optax.Params) -> optax.OptState:
        """Returns the inner optimizer's first state, of what `in_float32` returns.

        Raises: as `init_inner`; ValueError if something changes updates after masters, or if half
          parameters are hidden from the masters inside.
        """
        inner_state = self.init_inner(params)
        seen = self.in_float32(params, inner_state)
        if _dtypes(seen) != _dtypes(params):
            inner_state = self.init_inner(seen)
        check_nothing_changes_masters(inner_state)
        check_half_ones_are_seen(inner_state, params)
        return inner_state

    def in_float32(self, params: optax.Params, inner_state: optax.OptState) -> optax.Params:
        """Returns `params` in at least float32, but for those that `inner_state` has masters of.

        Moments made from half parameters would be half: Adam's eps of 1e-8 is zero in float16, and
        its second moment stalls in bfloat16.
        """
        masters = shapes_with_master(inner_state)
        if not masters.keys() <= leaves_by_path(params).keys():
            return params  # something inside rearranges the leaves, and gives them other names
        return tree_map_with_path(
            lambda path, p: p if keystr(path) in masters else cast_to_at_least_float32(p), params
        )

    def update_inner(
        self,
        given: optax.Updates,
        gradients: optax.Updates,
        inner_state: optax.OptState,
        params: optax.Params | None,
        extra_args: dict[str, Any],
    ) -> tuple[optax.Updates, optax.OptState]:
        """Returns what the inner optimizer's `update` returns.

        Args:
          given: the gradients before they were unscaled or cast. An extra argument that is this
            very tree, as `grad=` of line searches, is replaced by `gradients` too.

        Raises: as `structures_compared`.
        """
        extra_args = {n: gradients if value is given else value for n, value in extra_args.items()}
        with structures_compared(gradients, params, self.caller):
            updates, state = self.inner.update(gradients, inner_state, params, **extra_args)
        return updates, state


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
        expected: Any = jax.tree.structure(params)
        if params is None or got == expected:
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


def _dtypes(params: optax.Params) -> list[Any]:
    return [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(params)]


def _without_weak_types(inner_state: optax.OptState) -> optax.OptState:
    """Gives arrays that took their dtype from a Python number that dtype for good.

    The first step would return them strongly typed, and the second step would compile again.
    """
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf,
        inner_state,
    )
