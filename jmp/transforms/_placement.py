"""Where the state of an optimizer lies: each array as its parameter, the others on the same mesh.

Optax makes moments of zeros, which depend on no parameter: under jit XLA puts them on one device or
on every device whole, and scalars lie on one device even if parameters were sharded before. Then
the first step moves them and the second compiles again, and a checkpoint of two processes cannot be
written. Here a state is placed when it is made:

* outside of jit by `device_put`;
* under jit by a select between the array and its parameter, by a flag that is false. XLA gives all
  operands of a select one sharding. The flag comes out of a barrier: a select by a constant is
  removed before shardings are decided, on GPUs even one inside a call. Compiled for eight H200s,
  AdamW's state of six float32 transformer layers takes 66 kernels and 16 bytes a parameter of a
  shard, and nothing is sent; left to XLA it takes 66 kernels and 123 bytes, all moments whole.

The paths say which array belongs to which parameter: Adam's `.mu['dense']['kernel']` ends with
the path of the parameter, `['dense']['kernel']`. If parameters lie on one device nothing is done.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path, tree_map_with_path

from jmp import _jax_compat
from jmp._messages import described, wrong
from jmp.sharding._axes import names_by_dimension
from jmp.trees import PyTree

S = TypeVar("S")
Path: TypeAlias = tuple[Any, ...]  # of keys
ByPath: TypeAlias = dict[Any, Any]  # leaves by their `Path`
BOX = GetAttrKey("value")  # of what is in a Variable of Flax nnx, or in a box of linen


def state_shardings(tx: optax.GradientTransformation | optax.MultiSteps, params: PyTree) -> PyTree:
    """Returns where each array of an optimizer's state belongs: a tree like `tx.init(params)`.

    For `jax.jit(tx.init, out_shardings=...)`, the `out_shardings` of a training step, and a
    checkpoint that is restored on other devices than those that saved it. The states of
    `with_loss_scale` and `with_master_params` lie like this by default; this is for every
    optimizer, and for a state that is sharded where its parameters are not (stage 1 of ZeRO,
    Rajbhandari et al. 2020, section 5.1): give `jax.ShapeDtypeStruct`s with the shardings that the
    state shall have.

    An array gets the sharding of the parameter that has its shape and whose path is the end of the
    array's own path; if several fit, of the one with the longest path. If none fits, it is
    replicated on the parameters' mesh: scalars, Adafactor's factored moments.

    Args:
      tx: any optax transformation, or a `MultiSteps` object. It is traced, not run.
      params: arrays, or `jax.ShapeDtypeStruct`s with a sharding.

    Returns: the structure of `tx.init(params)`, with a sharding for each array.

    Raises:
      TypeError: `tx` is no transformation.
      ValueError: a parameter has no sharding.

    >>> import optax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> sharded = NamedSharding(mesh, PartitionSpec("data"))
    >>> params = {"w": jax.ShapeDtypeStruct((16, 2), jnp.float32, sharding=sharded)}
    >>> adam, _ = state_shardings(optax.adam(1e-3), params)
    >>> adam.mu["w"].spec, adam.count.spec
    (P('data',), P())
    """
    if not isinstance(tx, optax.GradientTransformation | optax.MultiSteps):
        expected = "an optax transformation, such as optax.adam(1e-3)"
        raise wrong(TypeError, "state_shardings", tx, expected, name="tx")
    for path, leaf in tree_leaves_with_path(params):
        if not isinstance(getattr(leaf, "sharding", None), Sharding):
            raise ValueError(
                f"state_shardings got {described(leaf)} without a sharding at params{keystr(path)};"
                " expected an array, or a jax.ShapeDtypeStruct(shape, dtype, sharding=...), and no "
                "tracer: call it outside of jit."
            )
    return _shardings(jax.eval_shape(tx.init, params), params)


def placed(state: S, params: PyTree) -> S:
    """Returns a state just made, with its arrays placed as `state_shardings` says.

    Args:
      state: any tree; `tx.init(params)`, or what else goes on a mesh with the parameters.
      params: the parameters. If they lie on one device, `state` is returned as it is.
    """
    leaves = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    if all(map(_jax_compat.is_concrete, leaves)):
        return _put(state, params) if _mesh_of(leaves) else state
    anchor = next(filter(is_on_mesh, leaves), None)
    return state if anchor is None else _tied(state, params, anchor)


def _shardings(state: PyTree, params: PyTree) -> PyTree:
    """Returns the sharding of every leaf of `state`, by that of the parameters."""
    leaves = jax.tree.leaves(params)
    mesh = _mesh_of(leaves)
    of_one_device = next((leaf.sharding for leaf in leaves if hasattr(leaf, "sharding")), None)
    replicated = NamedSharding(mesh, PartitionSpec()) if mesh else of_one_device
    by_path: ByPath = dict(tree_leaves_with_path(params))

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> Any:
        found = getattr(by_path.get(parameter_path(leaf, path, by_path)), "sharding", None)
        if found is None and (rows := _parameter_of_scales(leaf, path, by_path)) is not None:
            found = _of_blocks(getattr(rows, "sharding", None), leaf.shape)
        return replicated if found is None else found

    return tree_map_with_path(sharding_of, state)


def _put(state: S, params: PyTree) -> S:
    """Returns a state made of parameters that lie on a mesh, also one made inside of jit."""

    def put(leaf: Any, sharding: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if _jax_compat.is_concrete(leaf):
            return jax.device_put(leaf, sharding)
        is_named = isinstance(sharding, NamedSharding)
        return lax.with_sharding_constraint(leaf, sharding) if is_named else leaf

    return jax.tree.map(put, state, _shardings(state, params))


def _tied(state: S, params: PyTree, anchor: jax.Array) -> S:
    """Returns a state under jit, whose arrays lie as their parameters.

    Args:
      anchor: a parameter on the mesh. A program that reads no parameter would run on one device:
        this one reads the anchor. Inside of a shard_map the devices are decided, and its scalars
        must not vary as the anchor does.
    """
    by_path: ByPath = dict(tree_leaves_with_path(params))
    mesh = jax.typeof(anchor).sharding.mesh
    read = () if mesh.manual_axes else (anchor,)
    never, *_ = lax.optimization_barrier((jnp.array(False), *read))

    def tie(path: Path, leaf: Any, sharding: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        leaf = reshard_where_types_say(leaf, sharding)
        param: Any = by_path.get(parameter_path(leaf, path, by_path))
        if param is None and (rows := _parameter_of_scales(leaf, path, by_path)) is not None:
            if mesh.explicit_axes:
                return leaf
            param = jnp.broadcast_to(rows[..., :1], leaf.shape)
        if _can_be_tied(leaf, param):
            return lax.select(never, jnp.real(param).astype(leaf.dtype), leaf)
        leaf, *_ = lax.optimization_barrier((leaf, *read))
        if leaf.ndim and read and not mesh.explicit_axes:
            # XLA would shard it as what it was computed from.
            return lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec()))
        return leaf

    return tree_map_with_path(tie, state, _shardings(state, jax.tree.map(jax.typeof, params)))


def _can_be_tied(leaf: jax.Array, param: Any) -> bool:
    """Returns whether a select may choose between them: not between memories, nor for PRNG keys."""
    if not isinstance(param, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return jax.typeof(leaf).memory_space == jax.typeof(param).memory_space


def reshard_where_types_say(x: jax.Array, sharding: Any) -> jax.Array:
    """Returns an array with another sharding on a mesh whose axes are explicit; else as it is."""
    own = jax.typeof(x).sharding
    if not own.mesh.explicit_axes or own == sharding:
        return x
    there: Any = x.sharding if _jax_compat.is_concrete(x) else own
    return jax.sharding.reshard(x, NamedSharding(there.mesh, sharding.spec))


def is_on_mesh(value: Any) -> bool:
    """Returns whether the type of `value` names a mesh of devices that jit may divide it among."""
    mesh = jax.typeof(value).sharding.mesh
    sizes = zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    return any(size > 1 and name not in mesh.manual_axes for name, size in sizes)


def parameter_path(leaf: Any, path: Path, params: ByPath) -> Path | None:
    """Returns the path of the parameter to which a leaf of the state at `path` belongs, or None.

    It is the parameter that has the leaf's shape, and the longest path that ends `path`. The codes
    of a `StoredArray` belong to the parameter of that array, also if they lie in a Variable of Flax
    nnx, as its parameters do.
    """
    if path[-1:] == (BOX,) and _is_field(path[:-1], "codes"):
        path = (*path[:-2], BOX)
    path = path[:-1] if _is_field(path, "codes") else path
    for start in range(len(path) + 1):
        param: Any = params.get(path[start:])
        if hasattr(param, "shape") and param.shape == getattr(leaf, "shape", None):
            return path[start:]
    return None


def _parameter_of_scales(leaf: Any, path: Path, params: ByPath) -> Any:
    """Returns the parameter whose rows a leaf scales: the `scales` of a `StoredArray`."""
    if not _is_field(path, "scales"):
        return None
    for start in range(len(path)):
        of = path[start:-1]
        param: Any = next((params[each] for each in (of, (*of, BOX)) if each in params), None)
        if hasattr(param, "shape") and param.shape[:-1] == leaf.shape[:-1]:
            return param
    return None


def _of_blocks(sharding: Any, shape: tuple[int, ...]) -> Any:
    """Returns a parameter's sharding for the scales of its rows, or of blocks of them.

    The scales of blocks lie along the last axis as the blocks do, if that can be.
    """
    if not isinstance(sharding, NamedSharding):
        return None
    entries = spec_of_blocks(sharding, len(shape), shape[-1])
    while not sharding.mesh.explicit_axes and entries and entries[-1] is None:
        entries.pop()  # as jit writes the sharding of a result; types write each None
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def spec_of_blocks(sharding: Any, rank: int, count: int) -> list[Any]:
    """Returns along what the axes of rows lie, the last one whole if its blocks were divided."""
    *entries, last = [*sharding.spec, *[None] * rank][:rank]
    names = names_by_dimension(sharding.spec, rank)[-1]
    parts = math.prod(sharding.mesh.shape[name] for name in names)
    return [*entries, None if count % parts else last]


def _is_field(path: tuple[Any, ...], name: str) -> bool:
    return bool(path) and getattr(path[-1], "name", None) == name


def _mesh_of(leaves: Sequence[Any]) -> Any:
    """Returns the mesh of the parameters, of several the largest; None if they lie on none."""
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return max(meshes, key=lambda mesh: mesh.size, default=None)
