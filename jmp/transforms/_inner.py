"""The transformation inside a wrapper, called so that errors say what is wrong with trees."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import optax

from jmp._messages import described, way_to_parameters, where_trees_differ, wrong
from jmp.trees import leaves_by_path, stands_for_numbers


def as_transformation(transformation: object, caller: str) -> optax.GradientTransformationExtraArgs:
    """Returns an optax transformation that takes extra arguments; `MultiSteps` objects are fine."""
    if isinstance(transformation, optax.MultiSteps):
        transformation = transformation.gradient_transformation()
    if not isinstance(transformation, optax.GradientTransformation):
        expected = "an optax transformation, such as optax.adam(1e-3)"
        more = " Did you forget to call it?" * inspect.isfunction(transformation)
        raise wrong(TypeError, caller, transformation, expected, name="inner", more=more)
    return optax.with_extra_args_support(transformation)


def init_inner(
    inner: optax.GradientTransformation, params: optax.Params, caller: str
) -> optax.OptState:
    """Returns `inner.init(params)`; says so where it fails because leaves are no arrays.

    Asked only after a failure: optimizers without moments take such leaves.
    """
    try:
        return inner.init(params)
    except (TypeError, ValueError, AttributeError) as error:
        leaves = leaves_by_path(params).items()
        others = [(p, x) for p, x in leaves if not (stands_for_numbers(x) or isinstance(x, float))]
        if not others:
            raise
        path, leaf = others[0]
        raise TypeError(
            f"{caller} got {described(leaf)} as the parameter at {path or 'the root'}; expected a "
            f"tree of arrays.{way_to_parameters(params)}"
        ) from error


def update_inner(
    inner: optax.GradientTransformationExtraArgs,
    given: optax.Updates,
    gradients: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
    caller: str,
) -> tuple[optax.Updates, optax.OptState]:
    """Returns `inner.update(...)`; says so where it fails because the trees do not match.

    Args:
      given: the gradients before they were unscaled or cast. An extra argument that is this very
        tree, as `grad=` of line searches, is replaced by `gradients` too.
    """
    extra_args = {n: gradients if value is given else value for n, value in extra_args.items()}
    with structures_compared(gradients, params, caller):
        updates, new_state = inner.update(gradients, inner_state, params, **extra_args)
    return updates, new_state


@contextlib.contextmanager
def structures_compared(
    gradients: optax.Updates, params: optax.Params | None, caller: str
) -> Iterator[None]:
    """Says so where what is inside fails because gradients and parameters do not match.

    Asked only after a failure: trees that differ where nothing looks are none of ours.

    Raises: TypeError, before anything runs, for None in the place of gradients.
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
