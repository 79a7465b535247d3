"""`accumulated_value_and_grad`: the gradients of a large batch, from micro-batches in one loop."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp._messages import check_function
from jmp.loss_scaling import _micro_batches
from jmp.loss_scaling._base import LossScale
from jmp.loss_scaling._gradients import check_loss_scale, check_parameters, scaled_loss
from jmp.loss_scaling._micro_batches import CALLER, Window
from jmp.sharding._axes import axis_names

P = ParamSpec("P")
Aux = TypeVar("Aux")
Skip = Literal["window", "micro_batch"]


@overload
def accumulated_value_and_grad(
    fun: Callable[P, Any],
    loss_scale: LossScale,
    steps: int,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = (1,),
    has_aux: Literal[False] = False,
    *,
    weight: Callable[..., Any] | None = None,
    skip: Skip = "window",
    accumulate_dtype: DTypeLike = jnp.float32,
    reduce_axes: str | Sequence[str] = (),
) -> Callable[P, tuple[jax.Array, Any]]: ...
@overload
def accumulated_value_and_grad(
    fun: Callable[P, tuple[Any, Aux]],
    loss_scale: LossScale,
    steps: int,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = (1,),
    *,
    has_aux: Literal[True],
    weight: Callable[..., Any] | None = None,
    skip: Skip = "window",
    accumulate_dtype: DTypeLike = jnp.float32,
    reduce_axes: str | Sequence[str] = (),
) -> Callable[P, tuple[tuple[jax.Array, Aux], Any]]: ...
@overload
def accumulated_value_and_grad(
    fun: Callable[P, tuple[Any, Aux]],
    loss_scale: LossScale,
    steps: int,
    argnums: int | Sequence[int],
    batch_argnums: int | Sequence[int],
    has_aux: Literal[True],
    *,
    weight: Callable[..., Any] | None = None,
    skip: Skip = "window",
    accumulate_dtype: DTypeLike = jnp.float32,
    reduce_axes: str | Sequence[str] = (),
) -> Callable[P, tuple[tuple[jax.Array, Aux], Any]]: ...
@overload
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
) -> Callable[P, tuple[Any, Any]]: ...
def accumulated_value_and_grad(
    fun: Callable[..., Any],
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
) -> Callable[..., tuple[Any, Any]]:
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
        divides, or trees of such. All others reach each micro-batch whole. A dropout key that is
        among these others makes the same mask in each micro-batch: put `jax.random.split(key,
        steps)` into the batch instead, so that each has a key of its own.
      weight: `weight(*batch)` counts what `fun` sums up, such as the tokens that are no padding, as
        a float32 or integer scalar. The mean is then the sum of the sums over the sum of the
        counts, as of one large batch, where micro-batches count unequally. Within `fun` gradients
        are those of the sum over a power of two near the count, so that half gradients have the
        range of a mean's. A window that counts zero gives NaN.
      skip: what a micro-batch does whose gradients are not finite. "window": the mean gradient is
        not finite either, so that loss scaling skips the window. "micro_batch": the mean is that of
        the others, and NaN if there are none; the value is a mean over the same micro-batches. The
        scale then backs off only if all are bad. Use it where rows of the data are bad, and not
        where the scale is too large.
      accumulate_dtype: the dtype of the sums. Those of float64 and of complex gradients keep their
        own.
      reduce_axes: inside `jax.shard_map` (or pmap, vmap) the axes over which rows are split: value
        and gradients are reduced over them once a window, after the loop. The parameters must be
        the same along these axes; of shards leave the axis out, gather each in the loss
        (`jmp.gather`) and return `jax.lax.pmean(loss, axis)` there. A bad micro-batch of one device
        is one micro-batch. Without it shard_map adds gradients up in each turn, as a sum and not a
        mean, or with `check_vma=False` not at all.

    Returns: a function with the signature of `fun` that returns `(value, gradients)` or
      `((value, aux), gradients)`. Value: the mean, unscaled, at least float32. Gradients: their
      mean, *still scaled*, at least float32: hand them to `jmp.transforms.with_loss_scale`. Aux:
      that of all micro-batches, of each device its own, stacked along a new first axis of `steps`;
      nothing in it is averaged or left out.
      With `steps=1` there is no loop, and without `weight` and `reduce_axes` value and gradients
      are those of `scaled_value_and_grad` bit by bit, half gradients half.

    Raises:
      TypeError: of `fun`, `loss_scale`, `steps`, `skip`, `weight`, `accumulate_dtype` or
        `reduce_axes` one is of a wrong kind; when called, as `scaled_value_and_grad`, or if a leaf
        of the batch is no array.
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
    _micro_batches.check_skip(skip)
    window = Window(
        fun=scaled_loss(fun, loss_scale, has_aux),
        loss_scale=loss_scale,
        steps=_micro_batches.number_of_steps(steps),
        argnums=argnums,
        weight=weight,
        skips_each=skip == "micro_batch",
        dtype=_micro_batches.accumulator_dtype(accumulate_dtype),
        axes=axis_names(reduce_axes, "reduce_axes", CALLER),
    )

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        check_parameters(args, argnums, CALLER)
        places = _micro_batches.batch_numbers(batch_argnums, argnums, len(args))
        _micro_batches.check_rows(args, places, window.steps)
        _micro_batches.devices_along(window.axes)  # or they are not mapped over
        _micro_batches.check_same_along(window.axes, args, argnums)
        value, aux, gradients = window.run(args, kwargs, places)
        return ((value, aux), gradients) if has_aux else (value, gradients)

    return wrapped
