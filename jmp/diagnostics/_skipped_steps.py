"""`metrics` and `check_skips`: the loss scale and the skipped steps while a model trains."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp._array_calls import check_numbers
from jmp._messages import check_number, described
from jmp.loss_scaling._scales import StaticLossScale
from jmp.transforms import WithLossScaleState
from jmp.transforms._loss_scaling import find_loss_scaling
from jmp.trees import PyTree


def metrics(opt_state: PyTree, *, steps: ArrayLike | None = None) -> dict[str, jax.Array]:
    """Returns the state of loss scaling as a flat dictionary of scalars, for any logger.

    It computes on the device and waits for nothing. Call it *inside* the jitted step and return the
    dictionary. Then the dictionary is the caller's; the state may be donated to the next step, and
    be gone before a logger reads it. Outside of jit it works as well. `jax.device_get` brings the
    whole dictionary to the host at once; do that every so many steps, since it waits for the step.

    The names, each a scalar array (under vmap of one value for each seed):
      loss_scale: float32, the scale for the next loss; 1 without scaling.
      grads_finite: bool, whether the last step was taken.
      skipped_steps: int32, steps skipped so far.
      consecutive_skips: int32, steps skipped in a row, up to the last.
      skip_rate: float32, skipped_steps / steps; only if `steps` is given.
    With `NoOpLossScale` no gradient is checked: the flag stays True and the counts stay 0.

    Args:
      opt_state: the state of an optimizer that `with_loss_scale` or `mixed_precision` made; or an
        `nnx.Optimizer` around one.
      steps: steps tried so far, *with* the skipped ones: of a loop, its index plus one. The
        optimizer's state does not hold it. Flax's `TrainState.step` counts steps taken: add
        `skipped_steps`.

    Raises: ValueError if the optimizer has no loss scaling; otherwise as
      `transforms.check_optimizer_state`.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_loss_scale(optax.sgd(0.1), DynamicLossScale(8.0))
    >>> state = tx.init(jnp.ones(2))
    >>> _, state = tx.update(jnp.array([1.0, jnp.inf]), state)
    >>> {name: value.item() for name, value in metrics(state, steps=4).items()}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'loss_scale': 4.0, 'grads_finite': False, 'skipped_steps': 1, 'consecutive_skips': 1,
     'skip_rate': 0.25}
    """
    state = _scaling(opt_state, "metrics")
    found = {"loss_scale": jnp.asarray(state.loss_scale.loss_scale, jnp.float32)}
    for name in ("grads_finite", "skipped_steps", "consecutive_skips"):
        found[name] = jnp.asarray(getattr(state, name))
    if steps is not None:
        # Counts above 2**24 are rounded in float32: by 6e-8 of the rate.
        tried = jnp.maximum(jnp.asarray(steps, jnp.float32), 1)
        found["skip_rate"] = found["skipped_steps"].astype(jnp.float32) / tried
    return found


def check_skips(opt_state: PyTree, limit: int) -> None:
    """Raises FloatingPointError if `limit` steps or more were skipped in a row, up to the last.

    A dynamic scale that is too large is halved with each skip, until steps are taken again. Skips
    that do not end have another cause: a NaN in the parameters or in the data. Call this on the
    host, outside of jit; it waits for the step, so once in a hundred steps is enough.

    Args:
      opt_state: as for `metrics`. Under vmap the seed with the most skips counts.
      limit: more than the halvings that the scale may need from its start: 25 is enough from 2**24
        down to 1.

    Raises:
      FloatingPointError: so many steps were skipped in a row.
      ValueError: `limit` is below 1; the optimizer has no loss scaling, or a wrong order.
      TypeError: called inside of jit; `limit` is no whole number; `opt_state` is an optimizer of
        optax instead of its state.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_loss_scale(optax.sgd(0.1), DynamicLossScale(8.0))
    >>> check_skips(tx.init(jnp.ones(2)), limit=25)
    """
    expected = "a whole number of steps, at least 1, such as 25"
    check_number(limit, "check_skips", expected, lambda n: n >= 1, name="limit", kind=int)
    state = _scaling(opt_state, "check_skips")
    counts = jnp.asarray(state.consecutive_skips)  # an nnx.Optimizer holds it in a Variable
    check_numbers([counts], "check_skips", "the state that a step returned, outside of jit")
    skips = np.asarray(counts)
    if skips.max(initial=0) < limit:
        return
    scales = np.broadcast_to(np.asarray(state.loss_scale.loss_scale, np.float32), skips.shape)
    scale = scales.ravel()[skips.argmax()]
    if isinstance(state.loss_scale, StaticLossScale):
        cause = "Either this static scale is too high (a dynamic one would come down), or"
    else:
        cause = "If so many halvings do not help, the scale is not the cause:"
    raise FloatingPointError(
        f"The last {skips.max()} steps were skipped, all of them: their gradients were infinite or "
        f"NaN, and the loss scale is {scale:g} by now. {cause} there is an infinity or a NaN in "
        "the parameters, the batch or the loss. diagnostics.find_nonfinite(jax.grad(loss_fn))"
        "(params, *batch) names the operation behind it; with nnx, nnx.grad and the model."
    )


def _scaling(opt_state: PyTree, caller: str) -> WithLossScaleState:
    state = find_loss_scaling(opt_state)
    if state is None:
        raise ValueError(
            f"{caller} got the state of an optimizer without loss scaling "
            f"({described(opt_state)}); expected one of transforms.with_loss_scale(optimizer, "
            "loss_scale) or of transforms.mixed_precision(optimizer, policy)."
        )
    return state
