"""`gather` where code is mapped over devices: in shard_map, and in pmap."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jmp._describe import listed, shape_text
from jmp.sharding._axes import are_tracked, made_varying, mapped_axes, varying_axes
from jmp.sharding._specs import (
    CALLER,
    Names,
    Parameter,
    axes_by_dimension,
    check_names,
    named_axes,
)

Axes = tuple[tuple[int, Names], ...]  # by dimension, those without any left out


class _Way(NamedTuple):
    """How one parameter moves.

    Attributes:
      gathered: axes to gather it over.
      replicated: axes to add its gradient up over, along which it is the same on all devices.
    """

    gathered: Axes
    replicated: Names


def gathered(
    parameters: Sequence[Parameter], dtype: np.dtype, reduce_dtype: np.dtype
) -> list[jax.Array]:
    """Returns parameters gathered over mapped axes; see `gather`.

    Raises: ValueError for an axis that is not mapped, or one along which types say that a parameter
      is not sharded.
    """
    check_names(parameters, mapped_axes(), "mapped")
    named = {name for parameter in parameters for name in named_axes(parameter)}
    tracked = bool(named) and are_tracked()
    results = []
    for parameter in parameters:
        axes = _tracked_axes(parameter) if tracked else _axes(parameter, parameter.spec)
        own = varying_axes(parameter.array) if tracked else {n for _, names in axes for n in names}
        way = _Way(axes, tuple(sorted(named - own)))
        results.append(_moved(parameter.array, way, dtype, reduce_dtype))
    return results


def _moved(array: jax.Array, way: _Way, dtype: np.dtype, reduce_dtype: np.dtype) -> jax.Array:
    @jax.custom_vjp
    def move(array: jax.Array) -> jax.Array:
        # Varying before it meets the data: AD would add up along these axes itself, in `dtype`.
        moving: jax.Array = made_varying(array.astype(dtype), way.replicated)
        for dimension, axes in way.gathered:
            moving = jax.lax.all_gather(moving, axes, axis=dimension, tiled=True)
        return moving

    def forward(array: jax.Array) -> tuple[jax.Array, None]:
        return move(array), None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        total = cotangent.astype(reduce_dtype)
        for dimension, axes in way.gathered:
            total = jax.lax.psum_scatter(total, axes, scatter_dimension=dimension, tiled=True)
        if way.replicated:  # after the scatter, which leaves less to add up
            total = jax.lax.psum(total, way.replicated)
        return (total.astype(array.dtype),)

    move.defvjp(forward, backward)
    moved: jax.Array = move(array)
    return moved


def _tracked_axes(parameter: Parameter) -> Axes:
    """Returns the axes to gather a parameter over, where types say along which it varies."""
    varies = varying_axes(parameter.array)
    if isinstance(parameter.spec, tuple):
        axes = tuple(name for name in parameter.spec if name in varies)
        if axes and not parameter.array.ndim:
            raise ValueError(
                f"{CALLER} got {parameter.path}, a scalar that differs along {listed(axes)}; "
                "expected a dimension along which to gather it. Leave it out of the call."
            )
        return _axes(parameter, axes)
    found = _axes(parameter, parameter.spec)
    for name in (name for _, names in found for name in names):
        if name not in varies:
            raise ValueError(
                f"{CALLER} got the spec {parameter.spec} for {parameter.path}, which is "
                f"{shape_text(parameter.array)} and the same on all devices along '{name}'. "
                "Expected how it lies, as shard_map's in_specs say it; P() if it is whole."
            )
    return found


def _axes(parameter: Parameter, spec: Names | PartitionSpec) -> Axes:
    if isinstance(spec, tuple):
        return ((0, spec),) if spec and parameter.array.ndim else ()
    by_dimension = enumerate(axes_by_dimension(parameter))
    return tuple((dimension, axes) for dimension, axes in by_dimension if axes)
