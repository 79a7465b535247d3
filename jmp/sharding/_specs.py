"""Along which axes each parameter is to be gathered, as the user said it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jmp._describe import described, listed, shape_text
from jmp.trees import PyTree

CALLER = "jmp.gather"
Names = tuple[str, ...]


class Parameter(NamedTuple):
    """A parameter, and what the user said of it.

    Attributes:
      path: its names joined by slashes, for messages.
      array: in its own dtype, sharded.
      spec: names of axes, or a spec.
    """

    path: str
    array: jax.Array
    spec: Names | PartitionSpec


def specs_by_leaf(specs_or_axis: PyTree, params: PyTree) -> list[Any]:
    """Returns, for each leaf of `params`, names of axes or a spec.

    Raises:
      TypeError: what is given is neither.
      ValueError: a tree of specs does not fit.
    """
    count = len(jax.tree.leaves(params))
    if _are_names(specs_or_axis):
        return [_spec(specs_or_axis)] * count
    try:
        whole = jax.tree.broadcast(specs_or_axis, params, is_leaf=_is_spec)
    except ValueError:
        raise ValueError(
            f"{CALLER} got specs that do not fit the parameters: {described(specs_or_axis)} for "
            f"{described(params)}. Expected an axis' name, a PartitionSpec, or a tree of them with "
            "the parameters' structure, which may end earlier."
        ) from None
    return [_spec(leaf) for leaf in jax.tree.leaves(whole, is_leaf=_is_spec)]


def axes_by_dimension(parameter: Parameter) -> list[Names]:
    """Returns the axes that the parameter's spec names, dimension by dimension.

    Raises: ValueError for a spec of more dimensions, or one that leaves some to XLA.
    """
    entries = partitions(parameter.spec)
    if len(entries) > parameter.array.ndim:
        raise ValueError(
            f"{CALLER} got the spec {parameter.spec} for {parameter.path}, which is "
            f"{shape_text(parameter.array)}; expected one of at most {parameter.array.ndim} "
            "dimensions."
        )
    if any(entry is PartitionSpec.UNCONSTRAINED for entry in entries):
        raise ValueError(
            f"{CALLER} got the spec {parameter.spec} for {parameter.path}, which leaves a "
            "dimension to XLA; expected the names of axes, or None for a dimension."
        )
    return [names_in(entry) for entry in entries] + [()] * (parameter.array.ndim - len(entries))


def named_axes(parameter: Parameter) -> set[str]:
    """Returns all axes that the user named for a parameter."""
    if isinstance(parameter.spec, tuple):
        return set(parameter.spec)
    gathered = (name for names in axes_by_dimension(parameter) for name in names)
    return {*gathered, *reduced_axes(parameter.spec)}


def reduced_axes(spec: Any) -> frozenset[str]:
    """Returns the axes that a spec says its array's gradient is to be added up over."""
    return frozenset(spec.reduced)


def partitions(spec: Any) -> tuple[Any, ...]:
    """Returns a spec's entries, without what it says of sums."""
    return tuple(spec.partitions)


def names_in(entry: Any) -> Names:
    """Returns the axes that one entry of a spec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def check_names(parameters: Iterable[Parameter], known: Iterable[str], kind: str) -> None:
    """Raises ValueError if an axis that was named is none of `known`.

    Args:
      kind: what kind of axes these are, such as "mapped".
    """
    known = sorted(known)
    for parameter in parameters:
        for name in sorted(named_axes(parameter)):
            if name not in known:
                raise ValueError(
                    f"{CALLER} got the axis {described(name)} for {parameter.path}; expected one "
                    f"of the {kind} axes: {listed(known)}."
                )


def _are_names(value: Any) -> bool:
    names = (value,) if isinstance(value, str) else value
    is_sequence = isinstance(names, (tuple, list)) and len(names) > 0
    return is_sequence and all(isinstance(name, str) for name in names)


def _is_spec(node: Any) -> bool:
    return isinstance(node, (PartitionSpec, NamedSharding)) or _are_names(node)


def _spec(leaf: Any) -> Names | PartitionSpec:
    if isinstance(leaf, NamedSharding):
        return leaf.spec
    if isinstance(leaf, PartitionSpec):
        return leaf
    if _are_names(leaf):
        return (leaf,) if isinstance(leaf, str) else tuple(leaf)
    raise TypeError(
        f"{CALLER} got {described(leaf)} for a spec; expected an axis' name, such as 'data', or a "
        "jax.sharding.PartitionSpec."
    )
