"""`gather_params` makes sharded parameters whole: they are rounded before they move, and their
gradients are sent and added up in the dtypes that the user names.

The user says for each parameter along which axes it lies. If code is mapped over devices
(shard_map, pmap) that is enough to gather it; along explicit axes types say how each array is
sharded, and the user says how the parameter is sharded afterwards.

A collective adds up in the dtype that it sends: in half it rounds at each of the n devices of a
ring, and in float32 it sends twice the bytes. An *exchange* has both: each device sends the others
their parts in half, all to all, and adds up the n parts of its own shard in float32. The sum is the
float32 sum of the devices' half gradients.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jmp._jax_compat import is_of_tpus, varying_axes
from jmp._messages import PrecisionWarning, described, listed, shape_text, wrong
from jmp.dtypes import can_hold, floating_dtype, is_castable
from jmp.sharding._axes import Names, are_tracked, made_varying, mapped_axes, names_by_dimension
from jmp.trees import PyTree, as_jax_array, is_floating, path_string

T = TypeVar("T")
Move = Callable[[jax.Array], jax.Array]  # from device to device

CALLER = "jmp.gather_params"
_FEWEST_DIMENSIONS = 2  # of what JAX's products take as `reduced`; sums of vectors refuse it
# Gradients of fewer elements are sent as they add up. XLA joins many such sums in one, and nothing
# joins exchanges: each of them would wait for all devices.
_FEWEST_EXCHANGED = 2**16


class Parameter(NamedTuple):
    """A parameter, and what the user said of it.

    Attributes:
      path: its names joined by slashes, for messages.
      array: in its own dtype, sharded.
      dimensions: the axes that a spec names, for each dimension; None if the user gave only names.
      sums: the axes to add up over: the user's names, along which it is gathered too, or the axes
        that a spec calls `reduced`.
    """

    path: str
    array: jax.Array
    dimensions: list[Names] | None
    sums: Names

    @property
    def axes(self) -> frozenset[str]:
        """All axes that the user named for it."""
        return frozenset(self.sums).union(*(self.dimensions or ()))


class Wire(NamedTuple):
    """The dtypes of a sum over devices.

    Attributes:
      sent: of gradients in an exchange; smaller ones are sent in `added`.
      added: in which they add up.
      returned: of sums that go back to all replicas of a parameter.
    """

    sent: np.dtype
    added: np.dtype
    returned: np.dtype

    @property
    def exchanges(self) -> bool:
        """Whether devices add up in another dtype than they send, which no collective does."""
        return self.sent != self.added


class Route(NamedTuple):
    """Where the sum of a gradient belongs, and how it gets there.

    Attributes:
      shards: the axes along which the parameter is sharded, with the dimension of each.
      replicas: the axes along which it is the same, and its gradients are not.
    """

    shards: tuple[tuple[int, Names], ...]
    replicas: Names
    wire: Wire

    @property
    def names(self) -> Names:
        """All axes to add up over."""
        return (*itertools.chain(*(names for _, names in self.shards)), *self.replicas)


def gather_params(
    params: T,
    specs_or_axis: PyTree,
    dtype: DTypeLike,
    reduce_dtype: DTypeLike | None = None,
    *,
    send_dtype: DTypeLike | None = None,
    return_dtype: DTypeLike | None = None,
) -> T:
    """Gathers sharded parameters in `dtype`; their gradients are added up in `reduce_dtype`.

    It is for hand-written FSDP, in shard_map or along explicit axes. Each parameter is cast
    *before* it moves, which halves what is sent; gradients come back in the parameters' own dtype
    and sharding. Call it inside the function that is differentiated. Under jit with Auto axes there
    is nothing to call: XLA gathers the cast parameters, and `jmp.autocast(fun,
    "mixed_float16,r=f32")` adds up in float32.

    Gradients are summed over the axes that `specs_or_axis` names, also for parameters that are
    replicated along them: name all axes that the rows of a batch are split along, and give the
    whole tree. With replicas of shards these are the names `("replica", "data")`, or a spec with
    `P("data", reduced={"replica"})`. Over an axis that is not named JAX adds up as it does without
    `gather_params`: in `dtype`, or with `check_vma=False` not at all. Do not `psum` the gradients
    over these axes again: if each device computes a mean over its own rows, divide by the number of
    devices instead.

    With a half `dtype` and a float32 `reduce_dtype` devices exchange half gradients: each sends the
    others the parts of their shards, and adds up in float32 what it receives. The shards of FSDP
    take the bytes of a half sum. Under autocast gather in half only what products read, and
    embeddings and norm scales in float32: autocast keeps what is half.

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
        or `P(None, "model")`; if it names no axes as `reduced`, sums go over the axes along which
        nothing is sharded afterwards.
      dtype: the dtype in which parameters are gathered, such as the dtype of the products.
      reduce_dtype: the dtype of sums over devices; by default `dtype`, whatever the policy of an
        autocast around the call says.
      send_dtype: the dtype in which devices send each other gradients. The default is `dtype` if
        `reduce_dtype` holds its numbers, and otherwise `reduce_dtype`; on TPUs it is
        `reduce_dtype`, which is faster there. A dtype narrower than `dtype` rounds each device's
        gradient once. Gradients of fewer than 65,536 elements are sent in `reduce_dtype`.
      return_dtype: the dtype of sums that go back to the replicas of a parameter; by default
        `reduce_dtype`. Half rounds each sum once, and data parallelism then takes the bytes of a
        half sum. The whole sum must not overflow in it.

    Returns: the same structure, gathered, its real floating arrays in `dtype`.

    Raises:
      TypeError: a dtype or a spec is of the wrong kind.
      ValueError: neither inside shard_map nor on a mesh with explicit axes; a name that is no axis;
        specs that do not fit `params`; a dtype other than float16, bfloat16, float32 and float64;
        a `reduce_dtype` that does not hold the numbers of `send_dtype`.

    This is the gathering of stage 3 of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations
    Toward Training Trillion Parameter Models", section 5.3).

    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    >>> def loss(w, x):  # the mean over one device's rows; w is one of eight shards
    ...     return jnp.mean(x @ gather_params(w, "data", "float16", reduce_dtype="float32"))
    >>> rows = P("data")
    >>> step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=rows, out_specs=rows)
    >>> gradient = step(jnp.ones((8, 4)), jnp.ones((16, 8), jnp.float16)) / 8
    >>> gradient.dtype, gradient.shape
    (dtype('float32'), (8, 4))
    """
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    specs = _specs_by_leaf(specs_or_axis, params)
    parameters = [
        _parameter(path_string(path) or "the parameter", as_jax_array(leaf), spec)
        for (path, leaf), spec in zip(paths_and_leaves, specs, strict=True)
        if is_floating(leaf)
    ]
    of_arrays = (jax.typeof(parameter.array).sharding.mesh for parameter in parameters)
    meshes = () if mapped_axes() else (mesh for mesh in of_arrays if not mesh.empty)
    mesh = next(iter(meshes), jax.sharding.get_abstract_mesh())
    cast_to = _castable(dtype, "dtype")
    add_in = _castable(reduce_dtype, "reduce_dtype", cast_to)
    # A TPU adds up in the kernel that computes a gradient: a step of eight layers of 1024 x 1024
    # took 0.76 of the cycles of half sums on a v5e, and 1.25 with exchanges.
    sends_half = can_hold(add_in, cast_to) and not is_of_tpus(mesh)
    send_in = _castable(send_dtype, "send_dtype", cast_to if sends_half else add_in)
    if not can_hold(add_in, send_in):
        expected = f"a dtype whose numbers reduce_dtype={add_in} holds too"
        raise wrong(ValueError, CALLER, str(send_in), expected, name="send_dtype")
    wire = Wire(send_in, add_in, _castable(return_dtype, "return_dtype", add_in))
    gather_all = _gathered_over_mapped_axes if mapped_axes() else _gathered_by_type
    results = iter(gather_all(parameters, cast_to, wire, mesh))
    leaves = [next(results) if is_floating(leaf) else leaf for _, leaf in paths_and_leaves]
    return jax.tree.unflatten(structure, leaves)


def _castable(dtype: Any, role: str, default: np.dtype | None = None) -> np.dtype:
    if dtype is None and default is not None:
        return default
    normalised = floating_dtype(dtype, role)
    if not is_castable(normalised):
        raise ValueError(
            f"{CALLER} got {role}={normalised}; expected float16, bfloat16, float32 or float64: "
            "float8 has scales of its own."
        )
    return normalised


def _moved(array: jax.Array, dtype: np.dtype, send: Move, add_up: Move) -> jax.Array:
    """Sends an array in `dtype`.

    Args:
      send: moves it to its new sharding.
      add_up: moves its cotangents back, and adds them up.
    """

    @jax.custom_vjp
    def move(array: jax.Array) -> jax.Array:
        return send(array.astype(dtype))

    backward = lambda _, cotangent: (add_up(cotangent).astype(array.dtype),)
    move.defvjp(lambda array: (move(array), None), backward)
    return move(array)


# Code that is mapped over devices: in shard_map, and in pmap.


def _gathered_over_mapped_axes(
    parameters: Sequence[Parameter], dtype: np.dtype, wire: Wire, mesh: Any
) -> list[jax.Array]:
    """Returns parameters gathered over mapped axes.

    Raises: ValueError for an axis that is not mapped, or one along which types say that a parameter
      is not sharded.
    """
    _check_axes_exist(parameters, mesh.manual_axes, "mapped")
    named = {name for parameter in parameters for name in parameter.axes}
    tracked = are_tracked()

    def gathered(parameter: Parameter) -> jax.Array:
        shards = _axes_to_gather(parameter, tracked)
        sharded = frozenset(name for _, names in shards for name in names)
        own = varying_axes(parameter.array) if tracked else sharded
        route = Route(shards, tuple(sorted(named - own)), wire)

        def send(moving: jax.Array) -> jax.Array:
            # Varying before it meets the data: AD would add up along these axes itself, in `dtype`.
            moving = made_varying(moving, route.replicas)
            for dimension, names in shards:
                moving = jax.lax.all_gather(moving, names, axis=dimension, tiled=True)
            return moving

        return _moved(parameter.array, dtype, send, partial(_added_up, route=route))

    return list(map(gathered, parameters))


def _axes_to_gather(parameter: Parameter, tracked: bool) -> tuple[tuple[int, Names], ...]:
    """Returns the axes to gather a parameter over, for each dimension that has any.

    Args:
      tracked: whether types say along which axes it differs; else it may along all.
    """
    path, array = parameter.path, parameter.array
    differs = varying_axes(array) if tracked else frozenset(mapped_axes())
    if parameter.dimensions is None:
        names = tuple(name for name in parameter.sums if name in differs)
        if names and not array.ndim and tracked:
            raise ValueError(
                f"{CALLER} got {path}, a scalar that differs along {listed(names)}; "
                "expected a dimension along which to gather it. Leave it out of the call."
            )
        return ((0, names),) if names and array.ndim else ()
    for name in itertools.chain(*parameter.dimensions):
        if name not in differs:
            raise ValueError(
                f"{CALLER} got a spec with '{name}' for {path}, which is {shape_text(array)} and "
                f"the same on all devices along '{name}'. Expected how it lies, as shard_map's "
                "in_specs say it; P() if it is whole."
            )
    return tuple((number, names) for number, names in enumerate(parameter.dimensions) if names)


def _added_up(part: jax.Array, route: Route) -> jax.Array:
    """Adds up the parts that devices have of a gradient, in mapped code.

    Args:
      part: a whole gradient, each device its own.

    Returns: the shard of the sum that belongs to this device, in `wire.added`; in `wire.returned`
      if it went back to replicas.
    """
    # Over an axis of vmap nothing is sent.
    is_sent = {*route.names} <= {*mapped_axes()} and jax.lax.axis_size(route.names) > 1
    if route.wire.exchanges and is_sent and part.size >= _FEWEST_EXCHANGED:
        dimension = _dimension_of_replicas(part, route)
        if dimension is not None:
            return _exchanged_parts(part, route, dimension)
    total = part.astype(route.wire.added)
    for dimension, names in route.shards:
        total = jax.lax.psum_scatter(total, names, scatter_dimension=dimension, tiled=True)
    if not route.replicas:
        return total
    # After the scatter, which leaves less to add up.
    return jax.lax.psum(total, route.replicas).astype(route.wire.returned)


def _dimension_of_replicas(part: jax.Array, route: Route) -> int | None:
    """Returns a dimension of which the replicas of a shard can add up equal pieces, if any."""
    shape = list(part.shape)
    for dimension, names in route.shards:
        shape[dimension] //= jax.lax.axis_size(names)
    copies = jax.lax.axis_size(route.replicas)
    return next((number for number, size in enumerate(shape) if size % copies == 0), None)


def _exchanged_parts(part: jax.Array, route: Route, dimension: int) -> jax.Array:
    """Sends each device the parts of its shard, of replicas a piece each, and adds them up."""
    cuts = [*route.shards, (dimension, route.replicas)]
    pieces = _cut_by_device(part, cuts).astype(route.wire.sent)
    received = jax.lax.all_to_all(pieces, route.names, 0, 0)
    total = jnp.sum(received, 0, dtype=route.wire.added)
    if not route.replicas:
        return total
    to = "invarying" if are_tracked() else "varying"
    total = total.astype(route.wire.returned)
    return jax.lax.all_gather(total, route.replicas, axis=dimension, tiled=True, to=to)


def _cut_by_device(array: jax.Array, cuts: Sequence[tuple[int, Names]]) -> jax.Array:
    """Cuts dimensions into a part for each device along axes; a new first dimension counts them."""
    for number, (dimension, names) in enumerate(cuts):
        shape, at, devices = array.shape, dimension + number, jax.lax.axis_size(names)
        parts = (devices, shape[at] // devices)
        array = jnp.moveaxis(array.reshape(*shape[:at], *parts, *shape[at + 1 :]), at, number)
    return jax.lax.collapse(array, 0, len(cuts))


# Along explicit axes, where types say how each array is sharded.


def _gathered_by_type(
    parameters: Sequence[Parameter], dtype: np.dtype, wire: Wire, mesh: Any
) -> list[jax.Array]:
    """Returns parameters resharded on a mesh with explicit axes.

    Warns: PrecisionWarning, if the gradients of some cannot be sent and added up as asked.
    Raises: ValueError if there is no such mesh, or for an axis that it does not have.
    """
    explicit = frozenset(mesh.explicit_axes)
    if not explicit:
        raise ValueError(
            f"{CALLER} was called outside of a shard_map, and without a mesh with explicit axes. "
            "With shard_map, call it in the function that is mapped. Under jit with Auto axes XLA "
            "itself gathers what was cast: leave the call out and write "
            "jmp.autocast(fun, 'mixed_float16,r=f32'), whose sums over devices are float32."
        )
    _check_axes_exist(parameters, explicit, "explicit")
    targets = list(map(_names_afterwards, parameters))
    # The axes to add up over: the named ones, else all along which nothing is sharded.
    left = {name for target in targets for names in target for name in names}
    data = frozenset().union(*(p.sums for p in parameters)) or explicit - left
    adds_in_another = (wire.added != dtype or wire.exchanges) and bool(data)
    vectors = [p.path for p in parameters if p.array.ndim < _FEWEST_DIMENSIONS]
    if adds_in_another and vectors:
        warnings.warn(
            f"{CALLER}: the gradients of {listed(vectors)} are added up in {dtype} as they are, "
            f"not sent in {wire.sent} and added up in {wire.added}: along explicit axes JAX does "
            "that only for parameters of two or more dimensions. Gather these in a call of their "
            "own, only with dtype, to silence this; in shard_map all add up as asked.",
            PrecisionWarning,
            stacklevel=3,
        )

    def gathered(parameter: Parameter, target: list[Names]) -> jax.Array:
        array, partitions = parameter.array, [names or None for names in target]
        # The cotangent of what is `reduced` arrives as one part a device, not yet added up.
        reduced = data if adds_in_another and array.ndim >= _FEWEST_DIMENSIONS else frozenset()
        whole = NamedSharding(mesh, PartitionSpec(*partitions, reduced=reduced))
        if reduced:
            return _moved_by_type(array, whole, dtype, wire)
        return jax.sharding.reshard(array.astype(dtype), whole)

    return list(map(gathered, parameters, targets))


def _moved_by_type(
    array: jax.Array, whole: NamedSharding, dtype: np.dtype, wire: Wire
) -> jax.Array:
    spec, data = jax.typeof(array).sharding.spec, whole.spec.reduced
    own = NamedSharding(whole.mesh, spec)
    # First scattered, then the sum over replicas: in one step XLA adds up whole gradients.
    replicated = data.difference(*names_by_dimension(spec))
    parts = NamedSharding(whole.mesh, PartitionSpec(*spec.partitions, unreduced=replicated))
    route = _route_by_type(names_by_dimension(spec, array.ndim), whole, wire)

    def add_up(total: jax.Array) -> jax.Array:
        if wire.exchanges and route is not None:
            return _exchanged_by_type(total, own, route)
        total = total.astype(wire.added)
        if replicated and replicated != data:
            total = jax.sharding.reshard(total, parts)
        return jax.sharding.reshard(total, own)

    return _moved(array, dtype, lambda x: jax.sharding.reshard(x, whole), add_up)


def _exchanged_by_type(total: jax.Array, own: NamedSharding, route: Route) -> jax.Array:
    # Types have no word for one device's part of a sum, which they do not check then.
    explicit, parts = {*own.mesh.explicit_axes}, jax.typeof(total).sharding.spec
    shard_map: Any = partial(jax.shard_map, mesh=own.mesh, axis_names=explicit, check_vma=False)
    return shard_map(partial(_added_up, route=route), in_specs=(parts,), out_specs=own.spec)(total)


def _route_by_type(own: list[Names], whole: NamedSharding, wire: Wire) -> Route | None:
    """Returns the way back to the shards of a parameter.

    None if shards that are gathered do not lie side by side in what was gathered.
    """
    data, shards = whole.spec.reduced, []
    left = names_by_dimension(whole.spec, len(own))
    for dimension, (names, kept) in enumerate(zip(own, left, strict=True)):
        gathered = names[len(kept) :]
        if (*kept, *gathered) != names or not data.issuperset(gathered):
            return None
        if gathered:
            shards.append((dimension, gathered))
    return Route(tuple(shards), tuple(sorted(data.difference(*own))), wire)


def _names_afterwards(parameter: Parameter) -> list[Names]:
    """Returns the axes that a parameter is sharded along afterwards, dimension by dimension."""
    if parameter.dimensions is not None:
        return parameter.dimensions
    own = names_by_dimension(jax.typeof(parameter.array).sharding.spec)
    return [tuple(name for name in names if name not in parameter.sums) for names in own]


# The user's names of axes, or specs.


def _specs_by_leaf(specs_or_axis: PyTree, params: PyTree) -> list[Any]:
    """Returns what the user gave for each leaf of `params`.

    Raises: ValueError if a tree of specs does not fit.
    """
    is_spec = lambda node: isinstance(node, PartitionSpec | NamedSharding) or _are_names(node)
    try:
        whole = jax.tree.broadcast(specs_or_axis, params, is_leaf=is_spec)
    except ValueError:
        raise ValueError(
            f"{CALLER} got specs that do not fit the parameters: {described(specs_or_axis)} for "
            f"{described(params)}. Expected an axis' name, a PartitionSpec, or a tree of them with "
            "the parameters' structure, which may end earlier."
        ) from None
    # By the structure of `params`: a list of them has become a list of names, which is also a spec.
    structure: Any = jax.tree.structure(params)
    return list(structure.flatten_up_to(whole))


def _parameter(path: str, array: jax.Array, spec: Any) -> Parameter:
    """Returns a parameter with what a spec, or names of axes, say of it.

    Raises:
      TypeError: `spec` is neither.
      ValueError: it has more dimensions, or leaves some to XLA (`PartitionSpec.UNCONSTRAINED`).
    """
    if _are_names(spec):
        return Parameter(path, array, None, (spec,) if isinstance(spec, str) else tuple(spec))
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"{CALLER} got {described(spec)} for a spec; expected an axis' name, such as 'data', "
            "or a jax.sharding.PartitionSpec."
        )
    entries = spec.partitions
    if len(entries) > array.ndim or PartitionSpec.UNCONSTRAINED in entries:
        raise ValueError(
            f"{CALLER} got the spec {spec} for {path}, which is {shape_text(array)}; expected the "
            f"names of axes, or None, for each of at most {array.ndim} dimensions."
        )
    return Parameter(path, array, names_by_dimension(spec, array.ndim), tuple(spec.reduced))


def _check_axes_exist(parameters: Iterable[Parameter], known: Iterable[str], kind: str) -> None:
    """Raises ValueError if an axis that was named is none of `known`.

    Args:
      kind: what kind of axes these are, such as "mapped".
    """
    for parameter in parameters:
        if unknown := sorted(parameter.axes.difference(known)):
            raise ValueError(
                f"{CALLER} got the axis {described(unknown[0])} for {parameter.path}; expected one "
                f"of the {kind} axes: {listed(sorted(known))}."
            )


def _are_names(value: Any) -> bool:
    names = (value,) if isinstance(value, str) else value
    is_sequence = isinstance(names, (tuple, list)) and len(names) > 0
    return is_sequence and all(isinstance(name, str) for name in names)
