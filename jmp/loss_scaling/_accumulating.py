"""`accumulated_value_and_grad`: the gradients of a large batch, from micro-batches in one loop.

One function adds up the scaled gradients in a loop, and takes their mean. The weight of a
micro-batch and the checks follow below.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp._array_calls import Argnums, argument_numbers, replaced
from jmp._jax_compat import varying_axes
from jmp._messages import check_function, check_number, described, listed, shape_text, wrong
from jmp.dtypes import FLOAT32, at_least_float32, floating_dtype, is_castable
from jmp.loss_scaling._gradients import check_loss_scale, check_parameters, scaled_loss
from jmp.loss_scaling._scales import LossScale, array_if_any, multiply_tree
from jmp.sharding._axes import agreed, axis_names, made_varying
from jmp.trees import PyTree, all_finite, as_jax_array, holds_numbers, is_complex, is_floating

P = ParamSpec("P")
Skip = Literal["window", "micro_batch"]

CALLER = "accumulated_value_and_grad"
SKIPS = ("window", "micro_batch")


def accumulated_value_and_grad(
    fun: Callable[P, Any],
    loss_scale: LossScale,
    steps: int,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = (1,),
    has_aux: bool = False,
    *,
    weight: Callable[..., Any] | None = None,
    skip: Skip = "window",
    accumulate_dtype: DTypeLike = jnp.float32,
    reduce_axes: str | Sequence[str] = (),
) -> Callable[P, tuple[Any, Any]]:
    """Like `scaled_value_and_grad`, with a batch cut into `steps` micro-batches, one after another.

    Each micro-batch is an iteration of one `lax.scan`: memory is needed for the activations of one.
    Scaled gradients add up in float32, the scale stays, and the optimizer's update, called once,
    checks them and adjusts the scale once a window. Call it inside jit.

    Row i of the batch belongs to micro-batch i mod `steps`: rows that are sharded over devices stay
    where they are.

    Args:
      fun: returns the mean of its rows, a real floating scalar, or `(mean, aux)` with `has_aux`.
        With `weight` it returns their sum.
      loss_scale: the scale in force.
      steps: the number of micro-batches, a Python int.
      argnums, has_aux: as in `jax.value_and_grad`.
      batch_argnums: the positional arguments that hold rows: arrays with a first axis that `steps`
        divides, or trees of such. All others reach each micro-batch whole. A dropout key among
        these others makes the same mask in each micro-batch: put `jax.random.split(key, steps)`
        into the batch instead, so that each has a key of its own.
      weight: `weight(*batch)` counts the terms that `fun` sums up, such as the tokens that are no
        padding, as a float32 or integer scalar. The mean is then the sum of the sums over the sum
        of the counts, which is the mean of one large batch, also if micro-batches count unequally.
        Within `fun` the sum is divided by a power of two near the count, so that half gradients
        have the range of a mean's. A window that counts zero gives NaN.
      skip: what happens if the gradients of a micro-batch are not finite. "window": the mean
        gradient is not finite either, so that loss scaling skips the window. "micro_batch": the
        mean is over the other micro-batches, and NaN if there are none; so is the value. The scale
        then backs off only if all are bad. Use it if rows of the data are bad, and not if the scale
        is too large.
      accumulate_dtype: the dtype of the sums. Sums of float64 and of complex gradients keep their
        own.
      reduce_axes: inside `jax.shard_map` (or pmap, vmap) the axes over which rows are split: value
        and gradients are reduced over them once a window, after the loop. The parameters must be
        the same along these axes; for shards leave the axis out, gather each in the loss
        (`jmp.gather_params`) and return `jax.lax.pmean(loss, axis)` there. A bad micro-batch of one
        device is one micro-batch. Without `reduce_axes` shard_map adds gradients up in each turn,
        as a sum and not a mean, or with `check_vma=False` not at all.

    Returns: a function with the signature of `fun` that returns `(value, gradients)` or `((value,
      aux), gradients)`. Value: the mean, unscaled, at least float32. Gradients: their mean, *still
      scaled*, at least float32: hand them to `jmp.transforms.with_loss_scale`. Aux: the aux of all
      micro-batches, on each device its own, stacked along a new first axis of `steps`; nothing in
      it is averaged or left out. With `steps=1` there is no loop, and without `weight`, `skip`,
      `accumulate_dtype` and `reduce_axes` value and gradients have the numbers of
      `scaled_value_and_grad`, exactly; half gradients come in float32.

    Raises:
      TypeError: `fun`, `loss_scale`, `steps`, `skip`, `weight`, `accumulate_dtype` or `reduce_axes`
        is of a wrong kind; when called, as `scaled_value_and_grad`, or if a leaf of the batch is no
        array.
      ValueError: a wrong value of one of these; when called, before anything runs, if
        `batch_argnums` names no argument or one of `argnums`, if `steps` does not divide a leaf of
        the batch, if nothing maps over `reduce_axes`, or if a parameter differs along them (which
        `check_vma=False` hides).

    >>> loss_fn = lambda w, x: jnp.mean(w * x)
    >>> grad_fn = accumulated_value_and_grad(loss_fn, StaticLossScale(8), steps=2)
    >>> value, scaled_gradient = grad_fn(jnp.float32(3.0), jnp.arange(4.0))
    >>> float(value), float(scaled_gradient)
    (4.5, 12.0)
    """
    check_function(fun, CALLER, f"{CALLER}(loss_fn, loss_scale, steps)(*args)")
    check_loss_scale(loss_scale, CALLER)
    if weight is not None:
        check_function(weight, f"{CALLER}'s weight", "weight=lambda batch: batch['mask'].sum()")
    if skip not in SKIPS:
        kind = ValueError if isinstance(skip, str) else TypeError
        raise wrong(kind, CALLER, skip, " or ".join(map(repr, SKIPS)), name="skip")
    expected = "an int of at least 1, such as 4: the number of micro-batches, fixed under jit"
    steps = check_number(steps, CALLER, expected, lambda n: n >= 1, name="steps", kind=int)
    dtype_of = functools.partial(_dtype_of_sum, _checked_sum_dtype(accumulate_dtype))
    axes = axis_names(reduce_axes, "reduce_axes", CALLER)
    trained = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    scaled = scaled_loss(fun, loss_scale, has_aux)  # returns (scaled loss, (loss, aux))

    def micro_batch(args: Sequence[Any], kwargs: dict[str, Any], rows: Sequence[Any]) -> Any:
        """Returns what a micro-batch adds to the gradients, and its value, count and aux.

        The count is None if each micro-batch counts one: a loop would stack ones.
        """
        count = power = None
        if weight is not None:
            count = _weight_of(weight, rows)
            power = _power_of_two_up_to(count)
        elif skip == "micro_batch":
            count = jnp.float32(1)

        def loss(*args: Any, **kwargs: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            value, rest = scaled(*args, **kwargs)
            return value if power is None else value / power.astype(value.dtype), rest

        differentiate = jax.value_and_grad(loss, trained, has_aux=True)
        (_, (value, aux)), found = differentiate(*args, **kwargs)
        gradients = found if power is None else multiply_tree(found, power)
        gradients = jax.tree.map(lambda g: g.astype(dtype_of(g)), gradients)
        if skip == "micro_batch":  # selected: a product with zero would keep what is not finite
            good = agreed(all_finite(found), loss_scale, "auto", apart=axes)
            select = lambda leaf: jnp.where(good, leaf, jnp.zeros_like(leaf))
            gradients, value, count = jax.tree.map(select, (gradients, value, count))
        return gradients, (value, count, aux)

    @functools.wraps(fun)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        check_parameters(args, argnums, CALLER)
        places = _batch_numbers(batch_argnums, argnums, len(args))
        _check_rows(_leaves_of(args, places), steps)
        _check_mapped(axes)
        _check_same_along(axes, _leaves_of(args, trained))
        # Parameters vary along the axes, or each turn would reduce gradients over them.
        varying = functools.partial(made_varying, axes=axes)
        parameters = [jax.tree.map(varying, args[number]) for number in trained]
        whole = replaced(args, trained, parameters)
        batch = [args[place] for place in places]

        def turn(sums: PyTree, rows: Sequence[Any]) -> tuple[PyTree, Any]:
            gradients, terms = micro_batch(replaced(whole, places, rows), kwargs, rows)
            return jax.tree.map(jnp.add, sums, gradients), terms

        if steps == 1:
            sums, terms = micro_batch(whole, kwargs, batch)
            terms = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), terms)  # as a loop does
        else:
            arrays = jax.tree.map(jnp.asarray, tuple(parameters))
            start = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=dtype_of(x)), arrays)
            sums, terms = jax.lax.scan(turn, start, _split_rows(batch, steps))
        values, counts, aux = terms
        # The count is added up over the axes too, so that it is of all devices.
        count = jnp.float32(steps) if counts is None else counts.sum()
        totals = sums, values.sum(), count
        sums, value, count = jax.lax.psum(totals, axes) if axes else totals
        value, gradients = jax.tree.map(lambda x: _divided(x, count), (value, sums))
        if isinstance(argnums, int):
            (gradients,) = gradients
        return ((value, aux), gradients) if has_aux else (value, gradients)

    return wrapped


def _dtype_of_sum(chosen: np.dtype, gradient: jax.Array) -> np.dtype:
    """Returns the dtype in which gradients add up; of a parameter, or of a gradient of one."""
    has_its_own = gradient.dtype == np.float64 or not is_floating(gradient)
    return gradient.dtype if has_its_own else chosen


def _split_rows(batch: PyTree, steps: int) -> PyTree:
    """Returns the micro-batches of a batch, stacked: row i belongs to micro-batch i mod steps.

    If rows are sharded over devices, each micro-batch has the same share of every device: a
    contiguous split would send most rows to another device.

    >>> _split_rows(jnp.arange(6), steps=2).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """

    def split(leaf: Any) -> jax.Array:
        array = as_jax_array(leaf)
        rows = (array.shape[0] // steps, steps, *array.shape[1:])
        return jnp.swapaxes(jnp.reshape(array, rows), 0, 1)

    return jax.tree.map(split, batch)


def _divided(total: jax.Array, count: jax.Array) -> jax.Array:
    """Returns a sum over a count, in at least float32."""
    if is_complex(total):
        count = count.astype(total.real.dtype)
        return jax.lax.complex(total.real / count, total.imag / count)
    total = total.astype(at_least_float32(total.dtype))
    return total / count.astype(total.dtype)


# The weight of a micro-batch.


def _weight_of(weight: Callable[..., Any], batch: Sequence[PyTree]) -> jax.Array:
    """Returns the weight of a micro-batch, as a scalar of at least float32."""
    result = weight(*batch)
    count = array_if_any(result)
    exact = jnp.integer, jnp.bool_, jnp.float32, jnp.float64
    if count is None or count.ndim or not any(jnp.issubdtype(count.dtype, k) for k in exact):
        got = described(result) if count is None else shape_text(count)
        raise TypeError(
            f"The function weight returned {got}; expected a float32 or integer scalar, such as "
            "mask.sum(dtype=jnp.float32), of which fun returns the sum. Half counts are refused: "
            "float16 counts to 2048 without error, bfloat16 to 256."
        )
    return count if is_castable(count.dtype) else count.astype(FLOAT32)


def _power_of_two_up_to(count: jax.Array) -> jax.Array:
    """Returns the largest power of two up to `count` in float32, and 1 if there is none.

    >>> [float(_power_of_two_up_to(jnp.float32(count))) for count in (0, 1, 1000, 2**24 - 1)]
    [1.0, 1.0, 512.0, 8388608.0]
    """
    exponent = jax.lax.bitcast_convert_type(count.astype(FLOAT32), jnp.uint32) & 0x7F800000
    power = jax.lax.bitcast_convert_type(exponent, FLOAT32)
    return jnp.where((power > 0) & jnp.isfinite(power), power, 1.0)


# Checks of the arguments, before anything runs.


def _checked_sum_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns a dtype in which gradients add up: any real float of at least 16 bits."""
    wanted = floating_dtype(dtype, "accumulate_dtype")
    if not is_castable(wanted) or jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError(
            f"{CALLER} got accumulate_dtype={wanted}; expected float32 or another real floating "
            "dtype of at least 16 bits (float64 needs jax_enable_x64)."
        )
    return wanted


def _check_mapped(axes: Sequence[str]) -> None:
    """Raises ValueError for an axis over which the code that is running is not mapped."""
    for axis in axes:
        try:
            jax.lax.axis_size(axis)
        except NameError:
            raise ValueError(
                f"{CALLER} got reduce_axes={described(axes)}, but nothing maps over "
                f"{described(axis)} here. Call it inside jax.shard_map(..., axis_names={{...}}) "
                "over that axis, or leave reduce_axes out: XLA reduces under plain jit."
            ) from None


def _leaves_of(args: Sequence[Any], numbers: Sequence[int]) -> list[tuple[str, Any]]:
    """Returns the leaves of some arguments, each with its place."""
    return [
        (f"argument {number}{jax.tree_util.keystr(path)[:200]}", leaf)
        for number in numbers
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[number])
    ]


def _check_same_along(axes: Sequence[str], leaves: Sequence[tuple[str, Any]]) -> None:
    """Raises ValueError for parameters that differ along axes over which gradients are added up.

    JAX tracks that with `check_vma=True`. Only the loss knows how to gather shards: the type of a
    shard says neither along which dimension it was cut nor in which dtype to send it.
    """
    for where, leaf in leaves:
        if differing := sorted(varying_axes(leaf).intersection(axes)):
            raise ValueError(
                f"{CALLER} got {shape_text(leaf)} as {where}, which differs along "
                f"{listed(differing)}, with reduce_axes={described(tuple(axes))}: gradients of "
                "different parameters would be added up. Expected parameters that are the same "
                "along these axes. For shards leave the axis out, and in the loss gather each, "
                "jmp.gather_params(shard, axis, dtype), and return jax.lax.pmean(loss, axis): "
                "their gradients are then added up as shards. Equal copies come through "
                "in_specs=P()."
            )


def _batch_numbers(batch_argnums: Argnums, argnums: Argnums, count: int) -> list[int]:
    """Returns the numbers of the arguments that hold rows, in the order given.

    Args:
      batch_argnums, argnums: the arguments to split, and those to differentiate at.
      count: the number of positional arguments.

    Raises: ValueError if one of them is not there, or is in both; TypeError for no numbers.
    """
    split = argument_numbers(batch_argnums, count, CALLER, "batch_argnums")
    if common := {*split} & {*argument_numbers(argnums, count, CALLER)}:
        raise ValueError(
            f"{CALLER} got batch_argnums={described(batch_argnums)} and "
            f"argnums={described(argnums)}, which share argument {min(common)}; expected the "
            "arguments that hold rows of the batch, apart from those to differentiate at."
        )
    return split


def _check_rows(leaves: Sequence[tuple[str, Any]], steps: int) -> None:
    """Raises TypeError or ValueError if a leaf of the batch cannot be split."""
    if not leaves:
        raise ValueError(
            f"{CALLER} found no array in the batch; expected rows in the positional arguments that "
            "batch_argnums names."
        )
    way_out = (
        "Values without rows belong in another argument; split a key first, "
        f"jax.random.split(key, {steps})."
    )
    for where, leaf in leaves:
        if not holds_numbers(leaf):
            raise TypeError(
                f"{CALLER} got {described(leaf)} as {where}; expected an array whose first axis is "
                f"the batch. {way_out}"
            )
        if leaf.ndim == 0 or leaf.shape[0] == 0 or leaf.shape[0] % steps:
            raise ValueError(
                f"{CALLER} got {shape_text(leaf)} as {where}, with steps={steps}; expected an "
                f"array whose first axis is a multiple of {steps}. Choose steps that divide it, "
                f"drop the last rows, or pad them and give weight= a count of the others. {way_out}"
            )
