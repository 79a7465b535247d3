"""Along which axes each parameter is to be gathered, as the user said it.

Along which mapped axes a value differs from device to device.

One flag for all devices that share a loss scale.

Inside shard_map or pmap each device sees its own gradients. If one of them overflows and the others
do not, devices that share a scale and parameters would differ without an error: one of them skips,
the rest step.
Under jit with sharded arrays there is one program and one flag, and nothing to agree on.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jmp import _jax_compat
from jmp._jax_compat import varying_axes as varying_axes
from jmp._messages import described, listed, shape_text
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


def mapped_axes() -> tuple[str, ...]:
    """Returns the mesh axes over which the code being traced is mapped (shard_map, pmap)."""
    return tuple(sorted(_jax_compat.manual_axes()))


def are_tracked() -> bool:
    """Returns whether types say along which mapped axes a value varies.

    They do in `shard_map(..., check_vma=True)`, where an axis index certainly varies.
    """
    return any(axis in varying_axes(jax.lax.axis_index(axis)) for axis in mapped_axes())


def made_varying(value: Any, axes: tuple[str, ...]) -> Any:
    """Returns `value` as one that varies along `axes`, so that AD adds nothing up along them."""
    return jax.lax.pcast(value, axes, to="varying") if axes else value


def without_reduced(value: Any) -> Any:
    """Returns `value` as one whose gradient is not one part a device: what is `reduced` no
    element-wise operation takes."""
    sharding = jax.typeof(value).sharding
    if not sharding.spec.reduced:
        return value
    plain = PartitionSpec(*partitions(sharding.spec))
    return jax.sharding.reshard(value, NamedSharding(sharding.mesh, plain))


def unreduced_axes(value: Any) -> frozenset[str]:
    """Returns the axes over which `value` is still to be added up, as its type says."""
    aval = jax.typeof(value)
    mapped = getattr(getattr(aval, "manual_axis_type", None), "unreduced", ())
    return frozenset(aval.sharding.spec.unreduced) | frozenset(mapped)


AxisName = str | Sequence[str]


def axis_names(given: object, name: str, caller: str) -> tuple[str, ...]:
    """Returns names of axes, of which one may stand alone, as a tuple.

    Raises: TypeError for anything else, before an axis of that name is looked for.

    >>> axis_names("data", "axis_name", "with_loss_scale")
    ('data',)
    """
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence | Set) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"{caller} got {name}={described(given)}; expected names of axes, such as "
            '("data",), or () for none.'
        )
    return tuple(dict.fromkeys(sorted(names) if isinstance(names, Set) else names))


def agreed(
    flag: jax.Array, shared: PyTree, axis_name: AxisName, apart: Sequence[str] = ()
) -> jax.Array:
    """Returns whether `flag` holds on every device that shares the tree `shared`.

    Args:
      flag: bool scalar, possibly different from device to device.
      shared: the loss scale. Along an axis where it varies, each device keeps its own.
      axis_name: "auto", the names of axes, or () to leave the flag alone. "auto" means the mapped
        axes along which the flag varies and `shared` does not; where JAX does not track that
        (pmap, `check_vma=False`), all mapped axes. A vmap's axis is only agreed on if named.
      apart: axes along which each device keeps its own flag.
    """
    (found,) = axes_of_each([flag], shared, axis_name)
    axes = tuple(axis for axis in found if axis not in apart)
    if not axes:
        return flag
    everywhere: jax.Array = jax.lax.pmin(flag.astype(jnp.int32), axes)
    return everywhere.astype(jnp.bool_)


def axes_of_each(
    values: Sequence[jax.Array], shared: PyTree, axis_name: AxisName
) -> list[tuple[str, ...]]:
    """Returns for each value the axes that `axis_name` means; see `agreed`."""
    mapped = mapped_axes()
    tracked = bool(mapped) and are_tracked()
    if axis_name == "auto":
        if not tracked:
            return [mapped for _ in values]
        own = [varying_axes(leaf) for leaf in jax.tree.leaves(shared)]
        return [tuple(sorted(varying_axes(value).difference(*own))) for value in values]
    names = axis_names(axis_name, "axis_name", "agreed")
    # Where a value is known not to vary there is nothing to add up, and JAX may refuse to.
    return [
        tuple(n for n in names if not (tracked and n in mapped and n not in varying_axes(value)))
        for value in values
    ]
