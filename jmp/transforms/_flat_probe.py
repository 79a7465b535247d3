"""Whether an optimizer treats one vector as it treats a tree of tensors.

Adam does: what it makes of an element depends on that element alone, or on all of them together, as
under clipping by the global norm. Optimizers that look at the shapes of tensors, at their norms one
by one or at their paths (Muon, LAMB, Adafactor, masks) do something else on a vector, and nothing
would say so. Both ways are tried on a small model of the same paths, and compared.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jmp.transforms._flat_masters import flatten
from jmp.trees import PyTree

LARGEST_SIZE = 3  # of the dimensions of the small model: what looks at shapes tells 2 from 1
STEPS = 64  # at most, until there was an update: accumulation and warmups begin with zeros
# Of an update's element. They may differ by rounding, also in what all tensors share, such as a
# global norm. Weight decay of 1e-6 on some tensors alone makes a difference of 1e-4: parameters
# are about 100.
TOLERANCE = 1e-5


def check_takes_a_vector(
    inner: optax.GradientTransformationExtraArgs, params: optax.Params, dtype: DTypeLike
) -> None:
    """Raises ValueError if `inner` updates a vector in another way than a tree like `params`.

    It looks at structure and shapes of `params` alone, and runs under jit and eval_shape as well:
    two steps of 400 small tensors, an operation at a time, take a second or two of a CPU.
    """
    with jax.ensure_compile_time_eval(), jax.disable_jit():
        try:
            fault = _fault(inner, params, dtype)
        except Exception as error:  # whatever an optimizer raises: it does not take a vector
            raise ValueError(_message(inner, f"it raised {type(error).__name__}")) from error
    if fault:
        raise ValueError(_message(inner, fault))


def _fault(
    inner: optax.GradientTransformationExtraArgs, params: optax.Params, dtype: DTypeLike
) -> str:
    """Returns what differs, or nothing."""
    rng = np.random.default_rng(0)
    leaves, structure = jax.tree.flatten(params)
    shapes = [_small(leaf.shape) for leaf in leaves]

    def as_tree(arrays: list[np.ndarray]) -> PyTree:
        return jax.tree.unflatten(structure, [jnp.asarray(a, dtype) for a in arrays])

    # Where an optimizer factors what is large alone, the small model says nothing of the large one.
    large = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    weights = [100 * rng.standard_normal(shape) for shape in shapes]
    of_small = jax.tree.leaves(jax.eval_shape(inner.init, as_tree(weights)))
    of_large = jax.tree.leaves(jax.eval_shape(inner.init, large))
    if [_small(leaf.shape) for leaf in of_large] != [_small(leaf.shape) for leaf in of_small]:
        return "its state depends on the sizes of tensors"

    tree, vector = as_tree(weights), flatten(weights, dtype)
    states = inner.init(tree), inner.init(vector)
    moved = 0
    for _ in range(STEPS):
        gradients = [10.0 ** rng.integers(-2, 2) * rng.standard_normal(s) for s in shapes]
        steps = [
            inner.update(g, state, p, value=jnp.ones([], dtype), grad=g)
            for g, state, p in zip(
                (as_tree(gradients), flatten(gradients, dtype)), states, (tree, vector), strict=True
            )
        ]
        states = tuple(state for _, state in steps)
        of_tree = np.asarray(flatten(steps[0][0], dtype))
        of_vector = np.asarray(steps[1][0])
        rounding = TOLERANCE / 10 * np.abs(of_tree).max(initial=0)
        if not np.allclose(of_vector, of_tree, TOLERANCE, rounding, equal_nan=True):
            return "its updates differ"
        moved += bool(of_tree.any())
        if moved == 2:  # the first step of some is their sign
            return ""
    return f"it made no update in {STEPS} steps"


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(size, LARGEST_SIZE) for size in shape)


def _message(inner: optax.GradientTransformationExtraArgs, fault: str) -> str:
    return (
        "with_master_params(..., flat_master=True) got an optimizer that treats one vector "
        f"otherwise than the tensors it is made of ({fault}); it consists of "
        f"{', '.join(dict.fromkeys(_names(inner.update)))}. Leave flat_master=True out; or put "
        "masks, labels and what looks at the shapes of tensors around it with optax.partition."
    )


def _names(update: Callable[..., Any], depth: int = 8) -> Iterator[str]:
    """Yields the names of the optax transformations that an update function is made of."""
    name = getattr(update, "__qualname__", type(update).__name__).split(".<locals>")[0]
    parts = [cell.cell_contents for cell in getattr(update, "__closure__", None) or ()]
    parts += vars(getattr(update, "__self__", object)).values()  # of MultiSteps
    inside = [f for f in _functions(parts) if "update" in getattr(f, "__name__", "")]
    if not inside or depth == 0:
        yield name
    for function in inside:
        yield from _names(function, depth - 1)


def _functions(tree: PyTree) -> list[Callable[..., Any]]:
    return [leaf for leaf in jax.tree.leaves(tree) if callable(leaf)]
