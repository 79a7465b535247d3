"""Calls as functions of their array arguments, and derivatives with respect to some of these.

Arguments that are no arrays (`train=True`, a string, a callable) may decide what is traced. So they
are not given to JAX: `take_arrays` puts them aside, and `ArrayCall` passes them to the function as
they are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmp._jax_compat import is_concrete
from jmp._messages import described, wrong
from jmp.trees import PyTree, as_jax_array, holds_numbers, path_string, stands_for_numbers

Argnums: TypeAlias = int | Sequence[int]  # as in `jax.grad`


class Untrained(str):
    """A name in a key path of an array that is not differentiated, such as a running mean."""


def is_trained(path: tuple[Any, ...]) -> bool:
    """Returns whether a key path has no `Untrained` name."""
    return not any(isinstance(getattr(key, "key", None), Untrained) for key in path)


class StaticPart(NamedTuple):
    """The rest of a tree whose arrays were taken out.

    Attributes:
      structure: the structure of the tree.
      leaves: the other leaves, with None, which is no leaf, in place of each array.
    """

    structure: Any
    leaves: tuple[Any, ...]

    def leaves_with(self, arrays: Iterable[Any]) -> list[Any]:
        """Returns the leaves, with these arrays in place of the ones that were taken out."""
        following = iter(arrays)
        return [next(following) if leaf is None else leaf for leaf in self.leaves]

    def filled(self, arrays: Iterable[Any]) -> PyTree:
        """Returns the tree, with these arrays in place of the ones that were taken out."""
        return jax.tree.unflatten(self.structure, self.leaves_with(arrays))


def take_arrays(
    tree: PyTree,
    is_taken: Callable[[Any], bool] = holds_numbers,
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[list[Any], StaticPart]:
    """Takes the arrays out of a tree.

    >>> arrays, held = take_arrays({"x": jnp.ones(2), "train": True})
    >>> held.filled([2 * array for array in arrays])
    {'train': True, 'x': Array([2., 2.], dtype=float32)}
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    arrays = [leaf for leaf in leaves if is_taken(leaf)]
    rest = tuple(None if is_taken(leaf) else leaf for leaf in leaves)
    return arrays, StaticPart(structure, rest)


class ArrayCall:
    """`fun(*args, **kwargs)` as a function of only its arrays, in the order of the leaves.

    Attributes:
      arrays: the arrays of the call, as JAX's; a `jax.ShapeDtypeStruct` stays as it is.
      paths: their key paths in `(args, kwargs)`.
    """

    def __init__(
        self, fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._fun = fun
        self._count = len(args)
        arguments = (tuple(args), dict(kwargs))
        arrays, self._held = take_arrays(arguments, stands_for_numbers)
        self.arrays = [as_jax_array(x) if holds_numbers(x) else x for x in arrays]
        named = jax.tree_util.tree_leaves_with_path(arguments)
        self.paths = [path for path, leaf in named if stands_for_numbers(leaf)]

    def __call__(self, *arrays: Any) -> Any:
        """Calls the function with other arrays."""
        args, kwargs = self._held.filled(arrays)
        return self._fun(*args, **kwargs)

    def results(self, *arrays: Any) -> list[Any]:
        """Calls the function and returns the arrays among its results, flat."""
        return [leaf for leaf in jax.tree.leaves(self(*arrays)) if holds_numbers(leaf)]

    def within(self, argnums: Argnums, caller: str, name: str = "argnums") -> dict[int, str]:
        """Returns the arrays of some arguments: the position of each in `arrays`, and its path.

        Arrays with an `Untrained` name are left out.

        Args:
          argnums: as in `jax.grad`. With several numbers, each path starts with the number of its
            argument.
          caller, name: as for `argument_numbers`.
        """
        numbers = argument_numbers(argnums, self._count, caller, name)
        start = 2 if isinstance(argnums, int) else 1
        found: dict[int, str] = {}
        for position, path in enumerate(self.paths):
            if path[0].idx == 0 and path[1].idx in numbers and is_trained(path):
                found[position] = path_string(path[start:])
        return found

    def floating_within(self, argnums: Argnums, caller: str) -> dict[int, str]:
        """Returns the floating and complex arrays of some arguments, as `within` does.

        Raises: ValueError, with the name of `caller`, if there is none.
        """
        found = {
            position: path
            for position, path in self.within(argnums, caller).items()
            if jnp.issubdtype(self.arrays[position].dtype, jnp.inexact)
        }
        if not found:
            raise ValueError(
                f"{caller} got argnums={described(argnums)} and {self._count} positional "
                "arguments, with no floating array to differentiate there; expected the parameters."
            )
        return found


def check_numbers(arrays: Sequence[Any], caller: str, expected: str) -> None:
    """Raises TypeError for an array without numbers: a traced one, or a `jax.ShapeDtypeStruct`."""
    for array in arrays:
        if isinstance(array, jax.ShapeDtypeStruct) or not is_concrete(array):
            got = described(array)
            raise TypeError(f"{caller} got {got}, which holds no numbers; expected {expected}.")


def argument_numbers(argnums: Argnums, count: int, caller: str, name: str = "argnums") -> list[int]:
    """Returns the numbers of the arguments that `argnums` names, each once, counted from the first.

    Args:
      argnums: as in `jax.grad`.
      count: the number of positional arguments.
      caller, name: for the error, the function that was called and the parameter's name there.

    Raises: ValueError, with the name of `caller`, if one is not there; TypeError for no numbers.
    """
    numbers = [argnums] if isinstance(argnums, int) else argnums
    if not isinstance(numbers, Sequence) or not all(isinstance(n, int) for n in numbers):
        expected = "the number of an argument or several, counted from 0, not its name"
        raise wrong(TypeError, caller, argnums, expected, name=name)
    if not all(-count <= number < count for number in numbers):
        way_out = "Arguments given by keyword have none: give them by position"
        expected = f"numbers of its {count} args. {way_out}"
        raise wrong(ValueError, caller, argnums, expected, name=name)
    return list(dict.fromkeys(number % count for number in numbers))


def replaced(values: Sequence[Any], places: Sequence[int], others: Iterable[Any]) -> list[Any]:
    """Returns values with others in some of their places.

    >>> replaced([1, 2, 3], [2, 0], ["third", "first"])
    ['first', 2, 'third']
    """
    found = list(values)
    for place, other in zip(places, others, strict=True):
        found[place] = other
    return found


def vjp_at(
    function: Callable[..., tuple[Any, Any]], arrays: Sequence[Any], positions: Sequence[int]
) -> tuple[Any, Callable[[Any], Any], Any]:
    """Returns `jax.vjp` with respect to the arrays at `positions`.

    Args:
      function: of all arrays; it returns what is differentiated, and what else it computes.
    """
    of_some = lambda *some: function(*replaced(arrays, positions, some))
    return jax.vjp(of_some, *(arrays[i] for i in positions), has_aux=True)


def cotangent(result: Any, number: float) -> Any:
    """Returns the cotangent of a result that is `number` everywhere; an integer has none."""
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        return np.zeros(result.shape, jax.dtypes.float0)
    with np.errstate(over="ignore"):  # what float16 cannot hold is infinite, as in training
        return jnp.full(result.shape, number, result.dtype)
