"""Modules of Flax nnx as arguments of functions that JAX traces: their arrays, and how to go back.

JAX takes an nnx module for a tree, and makes two Variables of one that stands in two places. What
`apart` makes is a tree too, with one leaf a Variable, named as rules name it; `together` makes new
modules of it, so that nothing that a function changes in them reaches the caller's.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx

from jmp._calls import Untrained
from jmp.adapters._module_scopes import ModuleScopes
from jmp.adapters._nnx_modules import lift
from jmp.trees import PyTree


@jax.tree_util.register_pytree_with_keys_class
class Apart:
    """The Variables of one of several modules that were taken apart together.

    Attributes:
      arrays: what they hold.
      names: their paths, joined by slashes; `Untrained` but for those of `nnx.Param`.
      where: the graph of all modules, and the key path of each array in it.
    """

    def __init__(self, arrays: Iterable[Any], names: tuple[str, ...], where: Any) -> None:
        self.arrays = tuple(arrays)
        self.names = names
        self.where = where

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The arrays with their names; the rest."""
        keys = map(jax.tree_util.DictKey, self.names)
        return tuple(zip(keys, self.arrays, strict=True)), (self.names, self.where)

    @classmethod
    def tree_unflatten(cls, held: Any, arrays: Any) -> "Apart":
        """The inverse of `tree_flatten_with_keys`."""
        return cls(arrays, *held)

    @property
    def parameters(self) -> dict[str, Any]:
        """The arrays that `nnx.grad` differentiates, by path."""
        named = zip(self.names, self.arrays, strict=True)
        return {name: array for name, array in named if not isinstance(name, Untrained)}


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree)


def _is_apart(value: Any) -> bool:
    return isinstance(value, Apart)


def apart(tree: PyTree) -> PyTree:
    """Returns a tree with its modules, optimizers and random-number streams taken apart."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_node)
    nodes = [leaf for leaf in leaves if _is_node(leaf)]
    if not nodes:
        return tree
    graph, state = nnx.split(nodes)
    found: list[list[tuple[Any, str, Any]]] = [[] for _ in nodes]  # key path, name, array
    for path, variable in nnx.to_flat_state(state):
        node, *inside = path
        name = "/".join(map(str, inside))
        name = name if isinstance(variable, nnx.Param) else Untrained(name)
        found[int(str(node))].append((path, name, variable.get_raw_value()))
    parts = []
    for rows in found:
        paths, names, arrays = ([row[column] for row in rows] for column in range(3))
        parts.append(Apart(arrays, tuple(names), (graph, tuple(paths))))
    following = iter(parts)
    filled = [next(following) if _is_node(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def together(tree: PyTree) -> PyTree:
    """Returns a tree in which new modules stand for those that were taken apart."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_apart)
    parts = [leaf for leaf in leaves if _is_apart(leaf)]
    if not parts:
        return tree
    flat = {
        path: array
        for part in parts
        for path, array in zip(part.where[1], part.arrays, strict=True)
    }
    following = iter(nnx.merge(parts[0].where[0], nnx.State.from_flat_path(flat)))
    filled = [next(following) if _is_apart(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def of_parts(fun: Callable[..., Any], *, in_scopes: bool) -> Callable[..., Any]:
    """Returns `fun` as a function of modules that were taken apart, which changes none.

    Args:
      fun: a function; a module or a method of one, of which a copy is called.
      in_scopes: whether the methods of its modules open scopes that say their paths.
    """
    own = fun if isinstance(fun, nnx.Module) else getattr(fun, "__self__", None)
    own = own if isinstance(own, nnx.Module) else None
    name = "__call__" if own is fun else getattr(fun, "__name__", "")
    method: Any = getattr(type(own), name, None)
    body = fun if own is None or method is None else method
    lifted = lift(body, ModuleScopes()) if in_scopes else body

    @functools.wraps(body, updated=())
    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        if body is not fun:
            args = (together(apart(own)), *args)
        elif not any(map(_is_apart, jax.tree.leaves((args, kwargs), is_leaf=_is_apart))):
            return fun(*args, **kwargs)
        args, kwargs = together((args, kwargs))
        return lifted(*args, **kwargs)

    return of_arrays
