"""Optax's transformation, with the type of its state."""

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import optax

S = TypeVar("S")


class Transformation(optax.GradientTransformationExtraArgs, Generic[S]):  # type: ignore[misc]
    """A `GradientTransformationExtraArgs` whose state is an `S`.

    Optax declares every state as any tree at all, so that `tx.init(params).loss_scale` would be an
    error to a type checker. An annotation only: what our functions return is optax's own class.
    """

    if TYPE_CHECKING:

        def init(self, params: Any) -> S: ...

        def update(
            self, updates: Any, state: S, params: Any = None, **extra_args: Any
        ) -> tuple[Any, S]: ...
