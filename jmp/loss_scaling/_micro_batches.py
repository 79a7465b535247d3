"""Batches as micro-batches: which arguments hold rows, how they are split, what counts them."""

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp._calls import argument_numbers
from jmp._describe import described, did_you_mean, listed, shape_text
from jmp.dtypes import FLOAT32, floating_dtype, is_castable, is_half
from jmp.sharding._axes import varying_axes
from jmp.trees import PyTree, as_jax_array, holds_numbers, path_string

CALLER = "accumulated_value_and_grad"
SKIPS = ("window", "micro_batch")


def number_of_steps(steps: object) -> int:
    """Returns the number of micro-batches, a Python int of at least 1."""
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral):
        raise TypeError(
            f"{CALLER} got steps={described(steps)}; expected a Python int such as 4, the number "
            "of micro-batches: it is the length of a loop, and fixed when jit compiles."
        )
    if steps < 1:
        raise ValueError(f"{CALLER} got steps={described(steps)}; expected an int of at least 1.")
    return int(steps)


def check_skip(skip: object) -> None:
    """Raises TypeError or ValueError if `skip` is not one of `SKIPS`."""
    known = " or ".join(map(repr, SKIPS))
    if not isinstance(skip, str):
        raise TypeError(f"{CALLER} got skip={described(skip)}; expected {known}.")
    if skip not in SKIPS:
        raise ValueError(
            f"{CALLER} got skip={described(skip)}; expected {known}.{did_you_mean(skip, SKIPS)}"
        )


def accumulator_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which gradients add up: any real float of at least 16 bits."""
    wanted = floating_dtype(dtype, "accumulate_dtype")
    if not is_castable(wanted) or jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError(
            f"{CALLER} got accumulate_dtype={wanted}; expected float32 or another real floating "
            "dtype of at least 16 bits (float64 needs jax_enable_x64)."
        )
    return wanted


def devices_along(axes: Sequence[str]) -> int:
    """Returns the number of devices along axes, all together.

    Raises: ValueError for an axis over which the code that is running is not mapped.
    """
    devices = 1
    for axis in axes:
        try:
            devices *= int(jax.lax.axis_size(axis))
        except NameError:
            raise ValueError(
                f"{CALLER} got reduce_axes={described(axes)}, but nothing maps over "
                f"{described(axis)} here. Call it inside jax.shard_map(..., axis_names={{...}}) "
                "over that axis, or leave reduce_axes out: under jit alone XLA reduces."
            ) from None
    return devices


def check_same_along(
    axes: Sequence[str], args: Sequence[Any], argnums: int | Sequence[int]
) -> None:
    """Raises ValueError for parameters that differ along axes over which gradients are added up.

    Where JAX tracks that (`check_vma=True`). How shards are to be gathered only the loss knows:
    the type of one says neither along which dimension it was cut nor in which dtype to send it.
    """
    for number in [argnums] if isinstance(argnums, int) else argnums:
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[number]):
            if differing := sorted(varying_axes(leaf).intersection(axes)):
                where = f"argument {number}{jax.tree_util.keystr(path)[:200]}"
                raise ValueError(
                    f"{CALLER} got {shape_text(leaf)} as {where}, which differs along "
                    f"{listed(differing)}, with reduce_axes={described(tuple(axes))}: gradients of "
                    "different parameters would be added up. Expected parameters that are the same "
                    "along these axes. For shards leave the axis out, and in the loss gather each, "
                    "jmp.gather(shard, axis, dtype), and return jax.lax.pmean(loss, axis): their "
                    "gradients are then added up as shards. Equal copies come through in_specs=P()."
                )


def batch_numbers(
    batch_argnums: int | Sequence[int], argnums: int | Sequence[int], count: int
) -> list[int]:
    """Returns the numbers of the arguments that hold rows, in the order given.

    Args:
      batch_argnums, argnums: the arguments to split, and those to differentiate at.
      count: of the positional arguments.

    Raises: ValueError if one of them is not there, or is in both; TypeError for no numbers.
    """
    split = argument_numbers(batch_argnums, count, CALLER, "batch_argnums")
    if common := split & argument_numbers(argnums, count, CALLER):
        raise ValueError(
            f"{CALLER} got batch_argnums={described(batch_argnums)} and "
            f"argnums={described(argnums)}, which share argument {min(common)}; expected the "
            "arguments that hold rows of the batch, apart from those to differentiate at."
        )
    given = [batch_argnums] if isinstance(batch_argnums, int) else batch_argnums
    return list(dict.fromkeys(number % count for number in given))


def check_rows(args: Sequence[Any], places: Sequence[int], steps: int) -> None:
    """Raises TypeError or ValueError, with path and shape, if a leaf cannot be split."""
    found = False
    for number in places:
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[number]):
            _check_leaf(leaf, f"argument {number}", path_string(path), steps)
            found = True
    if not found:
        raise ValueError(
            f"{CALLER} found no array in {_listed(places)}; expected the batch: batch_argnums "
            "names the positional arguments that hold its rows."
        )


def _listed(places: Sequence[int]) -> str:
    return f"argument {', '.join(map(str, places))}" if places else "no argument at all"


def _check_leaf(leaf: Any, argument: str, path: str, steps: int) -> None:
    where = f"{argument} at '{path[:200]}'" if path else argument
    way_out = (
        "What has no rows belongs into another argument; a key is split first, "
        f"jax.random.split(key, {steps})."
    )
    if not holds_numbers(leaf):
        raise TypeError(
            f"{CALLER} got {described(leaf)} as {where}; expected an array whose first axis is the "
            f"batch. {way_out}"
        )
    if leaf.ndim == 0:
        raise ValueError(
            f"{CALLER} got {shape_text(leaf)} as {where}; expected an array whose first axis is "
            f"the batch. {way_out}"
        )
    if leaf.shape[0] == 0 or leaf.shape[0] % steps:
        raise ValueError(
            f"{CALLER} got {shape_text(leaf)} as {where}, with steps={steps}; expected a first "
            f"axis that is a multiple of {steps}. Choose steps that divide it, drop the last rows, "
            "or pad them and give weight= a count of the others."
        )


def split_rows(batch: PyTree, steps: int) -> PyTree:
    """Returns the micro-batches of a batch, stacked: row i belongs to micro-batch i mod steps.

    Where rows are sharded over devices, each micro-batch has the same share of every device: a
    contiguous split would send most rows to another one.

    >>> split_rows(jnp.arange(6), steps=2).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """

    def split(leaf: Any) -> jax.Array:
        array = as_jax_array(leaf)
        rows = (array.shape[0] // steps, steps, *array.shape[1:])
        return jnp.swapaxes(jnp.reshape(array, rows), 0, 1)

    return jax.tree.map(split, batch)


def count_of(weight: Callable[..., Any], batch: Sequence[PyTree]) -> jax.Array:
    """Returns what `weight` counts in a micro-batch, as a scalar of at least float32."""
    result = weight(*batch)
    try:
        count = jnp.asarray(result)
    except (TypeError, ValueError):
        count = None
    if count is None or count.ndim or not _counts_exactly(count.dtype):
        got = described(result) if count is None else shape_text(count)
        raise TypeError(
            f"The function weight returned {got}; expected a float32 or integer scalar, such as "
            "mask.sum(dtype=jnp.float32), of which fun returns the sum. Half counts are refused: "
            "float16 counts to 2048 without error, bfloat16 to 256."
        )
    return count if is_castable(count.dtype) else count.astype(FLOAT32)


def _counts_exactly(dtype: np.dtype) -> bool:
    is_integer = jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_
    return is_integer or (is_castable(dtype) and not is_half(dtype))


def power_of_two(count: jax.Array) -> jax.Array:
    """Returns the largest power of two up to `count` in float32, and 1 where there is none.

    >>> [float(power_of_two(jnp.float32(count))) for count in (0, 1, 1000)]
    [1.0, 1.0, 512.0]
    """
    exponent = jax.lax.bitcast_convert_type(count.astype(FLOAT32), jnp.uint32) & 0x7F800000
    power: jax.Array = jax.lax.bitcast_convert_type(exponent, FLOAT32)
    return jnp.where((power > 0) & jnp.isfinite(power), power, 1.0)
