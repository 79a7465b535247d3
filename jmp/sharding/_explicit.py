"""`gather` along explicit axes, where types say how each array is sharded."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jmp._describe import listed
from jmp.sharding._specs import (
    CALLER,
    Parameter,
    axes_by_dimension,
    check_names,
    names_in,
    partitions,
    reduced_axes,
)

_FEWEST_DIMENSIONS = 2  # of what JAX's products take as `reduced`; sums of vectors refuse it


def gathered(
    parameters: Sequence[Parameter], dtype: np.dtype, reduce_dtype: np.dtype
) -> list[jax.Array]:
    """Returns parameters resharded on a mesh with explicit axes; see `gather`.

    Warns: UserWarning, if some cannot add up in `reduce_dtype`.
    Raises: ValueError if there is no such mesh, or for an axis that it does not have.
    """
    mesh = _mesh(parameters)
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    if not explicit:
        raise ValueError(
            f"{CALLER} is for shard_map and for meshes with explicit axes. Under jit with Auto "
            "axes XLA gathers by itself what was cast: leave the call out and write "
            "jmp.autocast(fun, 'mixed_float16,r=f32'), whose sums over devices are float32."
        )
    check_names(parameters, explicit, "explicit")
    targets = [_target(parameter) for parameter in parameters]
    data = _data_axes(parameters, targets, explicit)
    adds_in_another = reduce_dtype != dtype and bool(data)
    if adds_in_another:
        _warn_of_vectors(parameters, dtype, reduce_dtype)
    results = []
    for parameter, target in zip(parameters, targets, strict=True):
        array = parameter.array
        if adds_in_another and array.ndim >= _FEWEST_DIMENSIONS:
            results.append(_moved(array, mesh, target, data, dtype, reduce_dtype))
        else:
            whole = NamedSharding(mesh, PartitionSpec(*target))
            results.append(jax.sharding.reshard(array.astype(dtype), whole))
    return results


def _moved(
    array: jax.Array,
    mesh: Any,
    target: tuple[Any, ...],
    data: frozenset[str],
    dtype: np.dtype,
    reduce_dtype: np.dtype,
) -> jax.Array:
    # The cotangent of what is `reduced` arrives as one part a device, not yet added up.
    whole = NamedSharding(mesh, PartitionSpec(*target, reduced=data))
    spec = jax.typeof(array).sharding.spec
    own = NamedSharding(mesh, spec)
    scattered_over = {name for entry in partitions(spec) for name in names_in(entry)}
    # First scattered, then the sum over replicas: in one step XLA adds up whole gradients.
    replicated = data - scattered_over
    parts = NamedSharding(mesh, PartitionSpec(*partitions(spec), unreduced=replicated))

    @jax.custom_vjp
    def move(array: jax.Array) -> jax.Array:
        resharded: jax.Array = jax.sharding.reshard(array.astype(dtype), whole)
        return resharded

    def forward(array: jax.Array) -> tuple[jax.Array, None]:
        return move(array), None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        total = cotangent.astype(reduce_dtype)
        if replicated and replicated != data:
            total = jax.sharding.reshard(total, parts)
        return (jax.sharding.reshard(total, own).astype(array.dtype),)

    move.defvjp(forward, backward)
    moved: jax.Array = move(array)
    return moved


def _mesh(parameters: Sequence[Parameter]) -> Any:
    meshes = (jax.typeof(parameter.array).sharding.mesh for parameter in parameters)
    return next((m for m in meshes if not m.empty), jax.sharding.get_abstract_mesh())


def _data_axes(
    parameters: Sequence[Parameter], targets: Sequence[tuple[Any, ...]], explicit: set[str]
) -> frozenset[str]:
    """Returns the axes to add up over: those named for it, else where nothing is sharded."""
    specs = [parameter.spec for parameter in parameters]
    named = (set(spec) if isinstance(spec, tuple) else reduced_axes(spec) for spec in specs)
    left = {name for target in targets for entry in target for name in names_in(entry)}
    return frozenset().union(*named) or frozenset(explicit - left)


def _target(parameter: Parameter) -> tuple[Any, ...]:
    """Returns the spec of a parameter afterwards."""
    if not isinstance(parameter.spec, tuple):
        return tuple(axes or None for axes in axes_by_dimension(parameter))
    own = partitions(jax.typeof(parameter.array).sharding.spec)
    kept = (tuple(n for n in names_in(entry) if n not in parameter.spec) for entry in own)
    return tuple(axes or None for axes in kept)


def _warn_of_vectors(
    parameters: Sequence[Parameter], dtype: np.dtype, reduce_dtype: np.dtype
) -> None:
    vectors = [p.path for p in parameters if p.array.ndim < _FEWEST_DIMENSIONS]
    if vectors:
        warnings.warn(
            f"{CALLER}: the gradients of {listed(vectors)} are added up in {dtype}, not in "
            f"{reduce_dtype}: along explicit axes JAX does that for parameters of two or more "
            "dimensions alone. Gather these in a call of their own, without reduce_dtype, to "
            "silence this; in shard_map all add up in the dtype asked.",
            stacklevel=4,
        )
