"""`gather` along explicit axes, where types say how each array is sharded.

`gather` where code is mapped over devices: in shard_map, and in pmap.

`gather`: sharded parameters whole, rounded before they move; gradients added up as asked.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jmp._messages import listed, shape_text
from jmp.dtypes import floating_dtype, is_castable
from jmp.sharding._axes import (
    CALLER,
    Names,
    Parameter,
    are_tracked,
    axes_by_dimension,
    check_names,
    made_varying,
    mapped_axes,
    named_axes,
    names_in,
    partitions,
    reduced_axes,
    specs_by_leaf,
    varying_axes,
)
from jmp.trees import PyTree, as_jax_array, is_floating, path_string

_FEWEST_DIMENSIONS = 2  # of what JAX's products take as `reduced`; sums of vectors refuse it


def gathered_by_type(
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
            results.append(_moved_by_type(array, mesh, target, data, dtype, reduce_dtype))
        else:
            whole = NamedSharding(mesh, PartitionSpec(*target))
            results.append(jax.sharding.reshard(array.astype(dtype), whole))
    return results


def _moved_by_type(
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


Axes = tuple[tuple[int, Names], ...]  # by dimension, those without any left out


class _Way(NamedTuple):
    """How one parameter moves.

    Attributes:
      gathered: axes to gather it over.
      replicated: axes to add its gradient up over, along which it is the same on all devices.
    """

    gathered: Axes
    replicated: Names


def gathered_over_mapped_axes(
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
        results.append(_moved_over_mapped_axes(parameter.array, way, dtype, reduce_dtype))
    return results


def _moved_over_mapped_axes(
    array: jax.Array, way: _Way, dtype: np.dtype, reduce_dtype: np.dtype
) -> jax.Array:
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


T = TypeVar("T")


def gather(
    params: T,
    specs_or_axis: PyTree,
    dtype: DTypeLike,
    reduce_dtype: DTypeLike | None = None,
) -> T:
    """Gathers sharded parameters in `dtype`; their gradients are added up in `reduce_dtype`.

    For FSDP written by hand, in shard_map or along explicit axes. Each parameter is cast *before*
    it moves, which halves what is sent; gradients come back in the parameters' own dtype and
    sharding. Call it inside the function that is differentiated. Under jit with Auto axes there is
    nothing to call: XLA gathers what was cast, and `jmp.autocast(fun, "mixed_float16,r=f32")` adds
    up in float32.

    Gradients are summed over the axes that `specs_or_axis` names, also those of parameters that are
    replicated along them: name all axes that the rows of a batch are split along, and give the
    whole tree. With replicas of shards these are the names `("replica", "data")`, or a spec with
    `P("data", reduced={"replica"})`. Over an axis that is not named JAX adds up as it does without
    `gather`: in `dtype`, or with `check_vma=False` not at all. Do not `psum` the gradients over
    these axes again: where each device computes a mean over its own rows, divide by the number of
    devices instead.

    Along explicit axes a sum in another dtype than `dtype` uses JAX's `reduced` types. Products,
    lookups by `.at[].get`, scans and slices accept them; element-wise operations do not. Gradients
    of parameters of fewer than two dimensions are therefore added up in `dtype` there, with a
    warning. A matrix that is added, not multiplied, needs a call without `reduce_dtype`, and so
    does the kernel of a convolution.

    Args:
      params: any pytree. Leaves that are not real floating arrays come back as they are.
      specs_or_axis: an axis' name, or a tuple of names: each parameter is gathered along those it
        is sharded along, in shard_map in its first dimension (with `check_vma=False` every
        parameter that has a dimension). Or a `PartitionSpec`, or a tree of them that is a prefix of
        `params`. In shard_map it says how the parameters are sharded, as in `in_specs`; an axis
        left out is not gathered: `P("data")` for a parameter sharded as `P("data", "model")`. Along
        explicit axes it says how they are sharded afterwards, as in `jax.sharding.reshard`: `P()`,
        or `P(None, "model")`; where it names no axes as `reduced`, sums go over those along which
        nothing is sharded afterwards.
      dtype: the dtype of what is gathered, such as that of the products.
      reduce_dtype: the dtype of sums over devices; by default `dtype`, whatever the policy of an
        autocast around the call says.

    Returns: the same structure, gathered, its real floating arrays in `dtype`.

    Raises:
      TypeError: a dtype or a spec is of the wrong kind.
      ValueError: neither inside shard_map nor on a mesh with explicit axes; a name that is no axis;
        specs that do not fit `params`; a dtype other than float16, bfloat16, float32 and float64.

    It is the gathering of stage 3 of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations
    Toward Training Trillion Parameter Models", section 5.3).

    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    >>> def loss(w, x):  # the mean over one device's rows; w is one of eight shards
    ...     return jnp.mean(x @ gather(w, "data", "float16", reduce_dtype="float32"))
    >>> step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    >>> gradient = step(jnp.ones((8, 4)), jnp.ones((16, 8), jnp.float16)) / 8
    >>> gradient.dtype, gradient.shape
    (dtype('float32'), (8, 4))
    """
    cast_to = _castable(dtype, "dtype")
    add_in = cast_to if reduce_dtype is None else _castable(reduce_dtype, "reduce_dtype")
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    specs = specs_by_leaf(specs_or_axis, params)
    parameters = [
        Parameter(path_string(path) or "the parameter", as_jax_array(leaf), spec)
        for (path, leaf), spec in zip(paths_and_leaves, specs, strict=True)
        if is_floating(leaf)
    ]
    gather_all = gathered_over_mapped_axes if mapped_axes() else gathered_by_type
    results = iter(gather_all(parameters, cast_to, add_in))
    leaves = [next(results) if is_floating(leaf) else leaf for _, leaf in paths_and_leaves]
    gathered: T = jax.tree.unflatten(structure, leaves)
    return gathered


def _castable(dtype: DTypeLike, role: str) -> np.dtype:
    normalised = floating_dtype(dtype, role)
    if not is_castable(normalised):
        raise ValueError(
            f"jmp.gather got {role}={normalised}; expected float16, bfloat16, float32 or float64: "
            "float8 has scales of its own."
        )
    return normalised
