"""`gather`: sharded parameters whole, rounded before they move; gradients added up as asked."""

from typing import TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from jmp.dtypes import floating_dtype, is_castable
from jmp.sharding import _explicit, _shard_map
from jmp.sharding._axes import mapped_axes
from jmp.sharding._specs import Parameter, specs_by_leaf
from jmp.trees import PyTree, as_jax_array, is_floating, path_string

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
    way = _shard_map if mapped_axes() else _explicit
    results = iter(way.gathered(parameters, cast_to, add_in))
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
