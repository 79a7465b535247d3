"""Whether an optimizer treats one vector as it treats a tree of tensors.

Adam does: what it makes of an element depends on that element alone, or on all of them together, as
under clipping by the global norm. Optimizers that look at the shapes of tensors, at their norms one
by one or at their paths (Muon, LAMB, Adafactor, masks) do something else on a vector, and nothing
would say so. Both ways are tried on a small model of the same paths, and compared. No trial passes
every threshold, so those parts of optax that have one for each tensor are refused by name as well.

Master parameters as one flat vector, for models with hundreds of small tensors.

An optimizer on one vector launches a few kernels where one on a tree launches one a tensor. The
price is bytes: gradients are gathered into the vector, and parameters are cut out of it.
"""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import DTypeLike

from jmp.dtypes import is_half
from jmp.trees import PyTree, is_floating, path_string

# Parts of optax that change a tensor on one side of a threshold alone, which may lie anywhere.
ONE_BY_ONE = {
    "adaptive_grad_clip",
    "clip_by_block_rms",
    "scale_by_param_block_norm",
    "scale_by_param_block_rms",
    "scale_by_trust_ratio",
}
LARGEST_SIZE = 3  # of the dimensions of the small model: what looks at shapes tells 2 from 1
# Sizes of weights and of gradients. Tensors beside one another have others, and every tensor has
# other ones at every step: with 1e6 a weight decay of 1e-6 shows beside an update of Adam.
WEIGHTS = (1.0, 1e-2, 1e6)
GRADIENTS = (1.0, 1e3, 1e-3)
# Added to the optimizer's counts before a step: it passes warmups, and sees what begins late.
LATER = {2: 100, 3: 10_000}
# Of the largest element of a tensor. They may differ by rounding in what all tensors share, such as
# a global norm; sums in which terms cancel, as Prodigy's, were seen to differ by 1e-5.
TOLERANCE = 1e-4
GIVEN = {"value", "grad"}  # the extra arguments of `update` that the trial has

# The weights, the gradients, and what is added to counts.
Step = tuple[list[np.ndarray], list[np.ndarray], int]


def check_takes_a_vector(
    inner: optax.GradientTransformationExtraArgs, params: optax.Params, dtype: DTypeLike
) -> None:
    """Raises ValueError if `inner` updates a vector in another way than a tree like `params`.

    It looks at structure and shapes of `params` alone, and runs under jit and eval_shape as well:
    four steps of 400 small tensors, an operation at a time, take 1.2 seconds of a CPU with Adam,
    and two seconds more where JAX has compiled none of the operations yet.
    Inside `MultiSteps`, which adds up element by element, the optimizer is tried as if alone.
    """
    functions = _functions(inner.update)
    named = sorted(ONE_BY_ONE & {_name(f) for f in functions if _module(f).startswith("optax")})
    if named:
        raise ValueError(_message(functions, f"{' and '.join(named)} takes each on its own"))
    for steps in filter(_accumulates, map(_owner, functions)):
        check_takes_a_vector(steps.inner_opt, params, dtype)
    wrapped = _name(inner.update) == "with_extra_args_support"
    if any(_accumulates(_owner(f)) for f in functions[wrapped : wrapped + 1]):
        return
    with jax.ensure_compile_time_eval(), jax.disable_jit():
        fault = _fault(inner, params, dtype, _needed(functions))
    if fault:
        raise ValueError(_message(functions, fault))


def _fault(
    inner: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    dtype: DTypeLike,
    needed: list[str],
) -> str:
    """Returns what differs, or nothing; raises ValueError if the tree cannot be updated either."""
    leaves, structure = jax.tree.flatten(params)
    steps = _steps([_small(leaf.shape) for leaf in leaves], dtype)

    def as_tree(arrays: list[np.ndarray]) -> PyTree:
        return jax.tree.unflatten(structure, jax.device_put(arrays))

    of_vector, raised = [], ""
    try:
        of_vector = list(_course(inner, steps, lambda arrays: jnp.asarray(_joined(arrays))))
    except Exception as error:  # whatever an optimizer raises
        if needed:
            raise ValueError(_untried(f"its update needs {' and '.join(needed)}")) from error
        raised = f"it raised {type(error).__name__} for a vector"
    try:
        of_tree = _course(inner, steps, as_tree)
        states = [next(of_tree)[1]]
        # What factors large tensors alone: the small model says nothing of the large one.
        large = [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf in leaves]
        of_large = jax.eval_shape(inner.init, jax.tree.unflatten(structure, large))
        if _small_shapes(of_large) != _small_shapes(states[0]):
            return "its state depends on the sizes of tensors"
        if raised:
            next(of_tree)
            return raised
        moved = 0
        for of_both in zip(of_vector[1:], of_tree, strict=True):
            updates, states = ([step[part] for step in of_both] for part in (0, 1))
            if not _agree(*updates):
                return "its updates differ"
            moved += any(np.any(leaf) for leaf in jax.tree.leaves(updates[0]))
    except Exception as error:
        raise ValueError(_untried(f"it raised {type(error).__name__} for a tree too")) from error
    # The first update of some is their sign, and says little.
    return "" if moved > 1 or _agree(*states) else "its states differ"


def _steps(shapes: list[tuple[int, ...]], dtype: DTypeLike) -> list[Step]:
    """Returns steps that are so many that every size of weights meets every one of gradients."""
    rng = np.random.default_rng(0)
    pairs = len(WEIGHTS) * len(GRADIENTS)

    def tensors(sizes: tuple[float, ...], offsets: Iterable[int]) -> list[np.ndarray]:
        return [
            np.asarray(sizes[offset % len(sizes)] * rng.standard_normal(shape), dtype)
            for offset, shape in zip(offsets, shapes, strict=True)
        ]

    steps = []
    # Many tensors, of which a step takes long, have all pairs at once.
    for step in range(4 if len(shapes) >= pairs else pairs):
        offsets = range(step, step + len(shapes))
        weights = tensors(WEIGHTS, offsets)
        gradients = tensors(GRADIENTS, (offset + offset // len(WEIGHTS) for offset in offsets))
        steps.append((weights, gradients, LATER.get(step, 0)))
    return steps


def _course(
    inner: optax.GradientTransformationExtraArgs,
    steps: list[Step],
    arrange: Callable[[list[np.ndarray]], PyTree],
) -> Iterator[tuple[optax.Updates, optax.OptState]]:
    """Yields updates and state of every step, and before them no updates and the first state."""
    state = _with_learning_rates(inner.init(arrange(steps[0][0])))
    yield (), state
    for weights, gradients, later in steps:
        gradient, params = arrange(gradients), arrange(weights)
        state = _with_counts(state, later)
        value = jnp.ones([], weights[0].dtype)
        updates, state = inner.update(gradient, state, params, value=value, grad=gradient)
        yield updates, state


def _with_learning_rates(state: optax.OptState) -> optax.OptState:
    """Gives `inject_hyperparams` a learning rate where it has none yet: zero updates hide all."""

    def injects(node: Any) -> bool:
        return isinstance(node, tuple) and hasattr(node, "hyperparams")

    def with_a_rate(node: Any) -> Any:
        if not injects(node) or np.any(node.hyperparams.get("learning_rate", 1)):
            return node
        rate = jnp.ones_like(node.hyperparams["learning_rate"])
        return node._replace(hyperparams={**node.hyperparams, "learning_rate": rate})

    return jax.tree.map(with_a_rate, state, is_leaf=injects)


def _with_counts(state: optax.OptState, later: int) -> optax.OptState:
    def advanced(leaf: Any) -> Any:
        counts = jnp.ndim(leaf) == 0 and jnp.result_type(leaf) in (jnp.int32, jnp.int64)
        return leaf + later if later and counts else leaf

    return jax.tree.map(advanced, state)


def _agree(of_vector: PyTree, of_tree: PyTree) -> bool:
    """Returns whether both have the same elements, whatever arrays they are cut into."""
    got, leaves = _joined(jax.tree.leaves(of_vector)), jax.tree.leaves(of_tree)
    if got.size != _joined(leaves).size:
        return False
    expected = [_joined([leaf]) for leaf in leaves]
    parts = np.split(got, np.cumsum([leaf.size for leaf in expected], dtype=int))
    return all(
        np.allclose(a, b, TOLERANCE, TOLERANCE * _largest(b), equal_nan=True)
        for a, b in zip(parts, expected, strict=False)
    )


def _largest(array: np.ndarray) -> float:
    """Returns the largest magnitude of the elements that are finite, or zero."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=0))


def _joined(arrays: Sequence[Any]) -> np.ndarray:
    """Returns the elements of arrays that hold numbers; keys of random numbers are left out."""
    numbers = [x for x in arrays if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)]
    return np.concatenate([np.ravel(x) for x in numbers] or [np.zeros(0)])


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(size, LARGEST_SIZE) for size in shape)


def _small_shapes(state: optax.OptState) -> list[tuple[int, ...]]:
    return [_small(jnp.shape(leaf)) for leaf in jax.tree.leaves(state)]


def _message(functions: list[Callable[..., Any]], fault: str) -> str:
    names = dict.fromkeys(_name(f) for f in functions if not _parts(f))
    return (
        "with_master_params(..., flat_master=True) got an optimizer that treats one vector "
        f"otherwise than the tensors it is made of ({fault}); it consists of {', '.join(names)}. "
        "Leave flat_master=True out; or put masks, labels and what looks at the shapes of tensors "
        "around it with optax.partition."
    )


def _untried(reason: str) -> str:
    return (
        "with_master_params(..., flat_master=True) got an optimizer that could not be tried on a "
        f"small model ({reason}); expected one that can, as nothing else shows that it treats one "
        "vector as the tensors it is made of. Leave flat_master=True out."
    )


def _functions(update: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Returns an update function and those of the transformations that it is made of, in order."""
    found: list[Callable[..., Any]] = []
    waiting = [update]
    while waiting:
        function = waiting.pop()
        if function not in found:
            found.append(function)
            waiting += reversed(_parts(function))
    return found


def _parts(update: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Returns the update functions in the closure of one, or in the object that it belongs to."""
    held = [_contents(cell) for cell in getattr(update, "__closure__", None) or ()]
    held += getattr(_owner(update), "__dict__", {}).values()  # of MultiSteps
    held.append(getattr(update, "__wrapped__", None))  # by jit
    leaves = [_update_of(leaf) for value in held for leaf in _leaves(value)]
    return [f for f in leaves if callable(f)]


def _is_transformation(value: object) -> bool:
    return isinstance(value, optax.GradientTransformation)


def _update_of(value: Any) -> Any:
    """Returns the update function of a transformation, or one itself, which its name tells."""
    if isinstance(value, optax.GradientTransformation):
        return value.update
    return value if "update" in getattr(value, "__name__", "") else None


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _leaves(value: Any) -> list[Any]:
    try:
        return jax.tree.leaves(value, is_leaf=_is_transformation)
    except (TypeError, ValueError):  # a dictionary whose keys JAX cannot sort
        return []


def _accumulates(owner: object) -> bool:
    return isinstance(owner, optax.MultiSteps)


def _owner(function: Callable[..., Any]) -> Any:
    return getattr(function, "__self__", None)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__).split(".<locals>")[0]


def _module(function: Callable[..., Any]) -> str:
    return getattr(function, "__module__", None) or ""


def _needed(functions: list[Callable[..., Any]]) -> list[str]:
    """Returns the arguments that some update function requires and the trial does not have."""
    readable = [f for f in functions if inspect.isfunction(f) or inspect.ismethod(f)]
    parameters = [p for f in readable for p in inspect.signature(f).parameters.values()]
    required = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    return sorted(required - GIVEN)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlatMasters:
    """The masters of a tree of half parameters, one after the other, in the order of its leaves.

    A pytree with one leaf, the vector; the layout is static.

    Attributes:
      vector: float32 or float64, of as many elements as the parameters have.
      paths: the parameters' paths, as `jax.tree_util.keystr` writes them.
      shapes: the parameters' shapes.

    >>> flat = FlatMasters.from_tree({"b": jnp.ones(2, jnp.float16)}, "float32")
    >>> flat.vector.shape, flat.leaves()["['b']"].dtype
    ((2,), dtype('float32'))
    """

    vector: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_tree(cls, params: optax.Params, dtype: DTypeLike) -> "FlatMasters":
        """Returns masters in `dtype` of parameters that are all of one half dtype.

        Raises: ValueError for no parameters at all, more than one dtype, or one that is not half.
        """
        found = tree_leaves_with_path(params)
        _check_one_half_dtype(found)
        return cls(
            vector=flatten([leaf for _, leaf in found], dtype),
            paths=tuple(keystr(path) for path, _ in found),
            shapes=tuple(leaf.shape for _, leaf in found),
        )

    def leaves(self) -> dict[str, jax.Array]:
        """Returns every master, in the vector's dtype and its parameter's shape, by path."""
        return dict(zip(self.paths, split(self.vector, self.shapes), strict=True))


def flatten(tree: PyTree, dtype: DTypeLike) -> jax.Array:
    """Returns the leaves of `tree` in `dtype`, one after the other in a vector."""
    return jnp.concatenate([jnp.ravel(leaf).astype(dtype) for leaf in jax.tree.leaves(tree)])


def split(vector: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Returns the arrays of these shapes that follow one another in `vector`."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    parts = jnp.split(vector, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def map_vectors(
    function: Callable[[jax.Array], jax.Array], tree: PyTree
) -> tuple[PyTree, list[jax.Array]]:
    """Maps a pointwise function over the leaves of `tree`, all floating ones of a dtype at a time.

    Returns: the mapped tree, and the vectors that its leaves were cut from beside the leaves that
      are not floating. XLA puts the leaves of a vector together again at no cost.
    """
    leaves, structure = jax.tree.flatten(tree)
    vectors = []
    groups: dict[np.dtype, list[int]] = {}
    for position, leaf in enumerate(leaves):
        if is_floating(leaf):
            groups.setdefault(leaf.dtype, []).append(position)
        else:
            leaves[position] = function(leaf)
            vectors.append(leaves[position])
    for dtype, positions in groups.items():
        group = [leaves[position] for position in positions]
        vectors.append(function(flatten(group, dtype)))
        parts = split(vectors[-1], [leaf.shape for leaf in group])
        for position, part in zip(positions, parts, strict=True):
            leaves[position] = part
    return jax.tree.unflatten(structure, leaves), vectors


def _check_one_half_dtype(found: list[tuple[tuple[Any, ...], Any]]) -> None:
    examples: dict[str, str] = {}
    for path, leaf in found:
        dtype = str(np.dtype(getattr(leaf, "dtype", type(leaf))))
        examples.setdefault(dtype, path_string(path))
    if len(examples) == 1 and is_floating(found[0][1]) and is_half(found[0][1].dtype):
        return
    got = ", ".join(f"{dtype} ({path or 'the root'})" for dtype, path in examples.items())
    raise ValueError(
        f"with_master_params(..., flat_master=True) got parameters of {got or 'no dtype at all'}; "
        "expected half ones of a single dtype. Give every dtype a group of its own with "
        "optax.partition, and float32 parameters an optimizer without masters."
    )
