"""`with_loss_scale`: unscale, run the optimizer, check, step or skip, adjust the scale.

`_wrapping` calls the optimizer inside, and has the checks of orders. `_few_kernels` has forms of
the check of gradients and of the select that compile to few kernels; in plain JAX they are
`all_finite` and `jnp.where`.

Then `mixed_precision`: loss scaling and master parameters in one call, as a policy asks for them.
Last, of a scale inside an optimizer's state: `loss_scale_state` and `set_loss_scale` read and
replace it.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_map_with_path

from jmp._messages import listed, wrong
from jmp.dtypes import is_half
from jmp.loss_scaling._gradients import check_loss_scale
from jmp.loss_scaling._scales import LossScale, NoOpLossScale, torch_loss_scale
from jmp.policy import Policy, get_policy, mark_lowered, refuse_float8
from jmp.sharding._axes import AxisName, agreed, axis_names
from jmp.transforms import _few_kernels, _half_parameters, _wrapping
from jmp.transforms._masters import kept_by_path
from jmp.transforms._placement import placed
from jmp.trees import PyTree, cast_to_at_least_float32, leaves_by_path, select_leaves

S = TypeVar("S")


@_wrapping.register_wrapper("with_loss_scale", _wrapping.SCALES)
class WithLossScaleState(NamedTuple):
    """State of `with_loss_scale`.

    Attributes:
      loss_scale: the `jmp.LossScale` for the next loss.
      grads_finite: bool scalar: whether the last gradients were finite, and with that the step
        taken. With `NoOpLossScale` nothing is checked: it stays True, also after an infinity.
      skipped_steps: int32 scalar: steps skipped so far.
      consecutive_skips: int32 scalar: steps skipped in a row. If it keeps growing, the model itself
        gives infinities or NaNs, and no scale helps.
      inner_state: state of the wrapped optimizer.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_loss_scale(optax.sgd(0.1), DynamicLossScale(8.0))
    >>> state = tx.init(jnp.ones(2))
    >>> float(state.loss_scale.loss_scale), bool(state.grads_finite), int(state.skipped_steps)
    (8.0, True, 0)
    """

    loss_scale: LossScale
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    inner_state: PyTree


def with_loss_scale(
    inner: _wrapping.Optimizer,
    loss_scale: LossScale,
    *,
    axis_name: AxisName = "auto",
) -> _wrapping.Transformation[WithLossScaleState]:
    """Wraps an optimizer so that it takes scaled gradients and skips steps that overflowed.

    `update` casts the gradients to at least float32, unscales them with the state's scale, checks
    them once and runs `inner` on them, so that clipping inside `inner` sees true gradients. If any
    was infinite or NaN the updates are -0.0 (added to a number it changes nothing, not even the
    sign of a zero) and the inner state stays as it is: moments, counts and schedules. Both results
    are computed, and one is selected by `jnp.where`; a `lax.cond` would copy every donated buffer.
    Extra arguments reach `inner`.

    With `NoOpLossScale` nothing is checked or selected: the program is `inner` on float32
    gradients.

    Make it the outermost. A transformation before it in a chain, or around it as `apply_if_finite`,
    sees scaled gradients, or hides a skip. One after it in a chain runs on a skipped step too, on
    updates of -0.0: moments change, and `add_decayed_weights` shrinks the parameters. The steps of
    `jmp.adapters` undo that, and refuse the other orders. A training step of your own reads the
    scale by `transforms.loss_scale_state(opt_state)`, or checks the finished optimizer once by
    `transforms.check_optimizer_state(tx.init(params))`: both refuse every order that fails. `init`
    and `update` see what is inside them and not what is around them.

    `init` puts the state, with the state of `inner`, where the parameters lie; see
    `transforms.state_shardings`. Under jit optax's own moments come out on one device or whole on
    each.

    Wrap it *around* `optax.MultiSteps`: the other way round one infinite micro-batch ruins the
    accumulator, which optax resets by multiplying with zero, and 0 * inf is NaN.

    Args:
      inner: any optax transformation, or a `MultiSteps` object.
      loss_scale: the initial scale. `init` copies its arrays, so that it may be used again after
        the state was donated.
      axis_name: mapped axes whose devices must agree on a skip: a device that skips while others
        step would have other parameters. The default finds them under shard_map and pmap; ()
        switches it off.

    Returns: a transformation whose state is a `WithLossScaleState`.

    Raises:
      TypeError: `loss_scale` is not a loss scale, `inner` no transformation, or `axis_name` no
        name; in `update`, for a state that is not its own, or None as gradients.
      ValueError: a static scale of zero; in `init`, if `inner` unscales already, or changes updates
        after masters; in `update`, for gradients of another structure than the parameters, or that
        are still to be added up (`unreduced`).

    >>> import optax
    >>> tx = with_loss_scale(optax.sgd(0.5), StaticLossScale(8))
    >>> state = tx.init(jnp.float32(1.0))
    >>> updates, state = tx.update(jnp.float16(8.0), state)
    >>> float(updates), bool(state.grads_finite)
    (-0.5, True)
    """
    optimizer = _wrapping.checked_inner(inner, WithLossScaleState)
    check_loss_scale(loss_scale, "with_loss_scale")
    axis_names(axis_name, "axis_name", "with_loss_scale")

    def init(params: optax.Params) -> WithLossScaleState:
        # Only a state says which parameters have masters, and those are what `inner` must see.
        inner_state = optimizer.init(params)
        seen = _seen_by_inner(params, inner_state)
        if any(map(operator.is_not, jax.tree.leaves(seen), jax.tree.leaves(params))):
            inner_state = optimizer.init(seen)
        _wrapping.check_order(inner_state, params)
        return WithLossScaleState(
            loss_scale=jax.tree.map(jnp.array, loss_scale),
            grads_finite=jnp.array(True),
            skipped_steps=jnp.zeros([], jnp.int32),
            consecutive_skips=jnp.zeros([], jnp.int32),
            inner_state=inner_state,
        )

    def update(
        updates: Any, state: WithLossScaleState, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, WithLossScaleState]:
        scale, old = state.loss_scale, state.inner_state

        # Unscale, in at least float32.
        gradients = scale.unscale(cast_to_at_least_float32(_few_kernels.in_order_of_axes(updates)))

        # Run `inner`, as if the gradients were finite.
        seen = _seen_by_inner(params, old)
        extra_args = _wrapping.with_gradients(extra_args, updates, gradients)
        new_updates, new = optimizer.update(gradients, old, seen, **extra_args)
        if isinstance(scale, NoOpLossScale):
            return new_updates, state._replace(inner_state=new)

        # Check the gradients. Devices that share the scale agree.
        finite = agreed(_few_kernels.gradients_finite(gradients), scale, axis_name)
        finite = _few_kernels.read_from_array(finite, state.grads_finite)

        # Select the step; or the state as it was, and updates that change nothing.
        flag_of = _few_kernels.flag_by_size(finite)

        def zero_if_skipped(update: Any) -> Any:
            if getattr(update, "dtype", None) == jax.dtypes.float0:
                return update
            # -0.0 + x is x for every x, -0.0 included; +0.0 would turn -0.0 into +0.0.
            return jnp.where(flag_of(update), update, jnp.asarray(-0.0).astype(update.dtype))

        new_updates = jax.tree.map(zero_if_skipped, new_updates)
        skipped = state.skipped_steps
        new_state = WithLossScaleState(
            loss_scale=scale.adjust(finite),
            grads_finite=finite,
            skipped_steps=jnp.where(finite, skipped, optax.safe_increment(skipped)),
            consecutive_skips=jnp.where(finite, 0, optax.safe_increment(state.consecutive_skips)),
            inner_state=select_leaves(flag_of, new, old),
        )
        # After the selects: they return other arrays than those that parameters are computed from.
        return new_updates, _few_kernels.in_kernels_of_parameters(new_state, params, new_updates)

    return _wrapping.transformation(init, update, WithLossScaleState)


def _seen_by_inner(params: optax.Params, inner_state: optax.OptState) -> optax.Params:
    """Returns `params` as `inner` sees them: in at least float32, but for those that have masters.

    Moments made from half parameters would be half: Adam's eps of 1e-8 is zero in float16, and its
    second moment stalls in bfloat16.
    """
    masters = kept_by_path(inner_state)
    if not masters.keys() <= leaves_by_path(params).keys():
        return params  # something inside rearranges the leaves, and gives them other names
    seen = lambda path, p: p if keystr(path) in masters else cast_to_at_least_float32(p)
    return tree_map_with_path(seen, params)


# Loss scaling and master parameters, as a policy asks for them.

Store: TypeAlias = Callable[[_wrapping.Optimizer], Any]


STORED: dict[str, Store] = {
    "full": _half_parameters.with_master_params,
    "split": _half_parameters.with_split_masters,
    "stochastic": _half_parameters.with_stochastic_rounding,
    "kahan": _half_parameters.with_kahan_summation,
    "none": lambda inner: inner,
}


def mixed_precision(
    inner: _wrapping.Optimizer,
    policy: str | Policy,
    loss_scale: LossScale | None = None,
    *,
    masters: str | Store | None = None,
    axis_name: AxisName = "auto",
) -> _wrapping.Transformation[WithLossScaleState]:
    """Wraps an optimizer with what `policy` needs.

    Float32 masters are kept if the policy stores parameters in half; loss scaling goes around
    everything. Other ways to store half parameters, in less memory, are chosen by `masters`.
    Parameters narrower than float32 that are stored in none of them are refused, also those that
    were loaded after `init`: 1000 updates of 1e-4 leave a bfloat16 1.0 where it is, and losses fall
    as far as the float32 parameters of the tree let them. If leaves are frozen in half, give it the
    tree of the others, or write `with_loss_scale(optax.partition(...), loss_scale)`, which refuses
    no dtype.

    Args:
      inner: any optax transformation, or a `MultiSteps` object.
      policy: a policy or its name.
      loss_scale: by default torch's dynamic scale if the policy computes in float16, and none for
        bfloat16 and float32, whose range needs none. Without a scale no gradient is checked and no
        step is skipped; `jmp.StaticLossScale(1.0)` checks and skips. The adapters' steps warn of an
        optimizer without a scale for a model that computes in float16 (`UnscaledLossWarning`).
      masters: how half parameters are stored, whatever the policy says: "full"
        (`with_master_params`), "split" (`with_split_masters`), "stochastic"
        (`with_stochastic_rounding`), "kahan" (`with_kahan_summation`), or "none": updates below
        their spacing are lost. Or a function that wraps `inner`, as
        `partial(with_stochastic_rounding, seed=1)`. None is "full" for a policy whose parameters
        are half, and refuses them for any other.
      axis_name: as in `with_loss_scale`.

    Returns: a transformation whose state is a `WithLossScaleState`.
    Raises:
      TypeError: `inner` is no optax transformation, `policy` no policy, or `loss_scale` no loss
        scale.
      ValueError: an unknown policy or way to store parameters, or a policy with a float8 dtype for
        anything but products; a static scale of zero; in `init` and `update`, parameters narrower
        than float32 without a master; and as `with_loss_scale` and `with_master_params`.

    >>> import optax
    >>> tx = mixed_precision(optax.adam(1e-3), "mixed_float16")
    >>> float(tx.init(jnp.ones(2)).loss_scale.loss_scale)
    65536.0
    """
    inner = _wrapping.as_transformation(inner, "mixed_precision")
    policy = get_policy(policy)
    refuse_float8(policy, "mixed_precision")
    if loss_scale is None:
        loss_scale = torch_loss_scale(enabled=policy.compute_dtype == jnp.float16)
    if masters is None:
        store = STORED["full" if is_half(policy.param_dtype) else "none"]
    elif callable(masters):
        store = masters
    elif isinstance(masters, str) and masters in STORED:
        store = STORED[masters]
    else:
        expected = f"None, a function that wraps an optimizer, or one of {listed(STORED)}"
        raise wrong(ValueError, "mixed_precision", masters, expected, name="masters")
    tx = with_loss_scale(store(inner), loss_scale, axis_name=axis_name)
    if masters == "none":
        mark_lowered(tx.update, policy.compute_dtype)
        return tx

    def init(params: optax.Params) -> WithLossScaleState:
        state = tx.init(params)
        _refuse_without_master(params, state, policy)
        return state

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        _refuse_without_master(params, state, policy)
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, mark_lowered(update, policy.compute_dtype))


def _refuse_without_master(params: optax.Params, state: WithLossScaleState, policy: Policy) -> None:
    """Raises ValueError for parameters, abstract ones too, that would lose small updates."""
    with_master = kept_by_path(state)
    for path, leaf in leaves_by_path(params).items():
        dtype: Any = getattr(leaf, "dtype", np.dtype(np.float32))
        if path in with_master or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
            continue
        ways = f"leaf.astype('float32') of each {dtype} leaf"
        if is_half(dtype):
            in_half = dataclasses.replace(policy, param_dtype=dtype)
            ways = (
                "policy.cast_to_param(params) or jmp.cast_to_full(params); or, to store them in "
                f"half, a policy with half parameters, '{in_half}', which keeps a float32 master "
                "of each, or mixed_precision(..., masters=...) with 'full', 'split' (bfloat16), "
                "'stochastic', 'kahan' or 'none', which say how half parameters are stored. If "
                "leaves are frozen in half, give it the tree of the others, or write "
                "with_loss_scale(optax.partition({'train': adam, 'freeze': optax.set_to_zero()}, "
                "labels), loss_scale)"
            )
        raise ValueError(
            f"mixed_precision(..., '{policy}') got params{path} of dtype {dtype}, which it would "
            "train without masters: updates below the spacing of that dtype are lost. Expected "
            f"parameters in float32: {ways}."
        )


# The scale inside an optimizer's state.


def loss_scale_state(opt_state: PyTree) -> WithLossScaleState | None:
    """Returns the `WithLossScaleState` inside an optimizer's state, or None if there is none.

    Raises: as `check_optimizer_state`.

    >>> loss_scale_state(()) is None
    True
    """
    _wrapping.check_optimizer_state(opt_state)
    return find_loss_scaling(opt_state)


def set_loss_scale(opt_state: S, new: LossScale) -> S:
    """Returns an optimizer's state with its loss scale replaced, of whatever class either is.

    Go on with the optimizer that you have, or with one made with the new scale: a step reads the
    scale from the state. Everything else stays: moments, `grads_finite` and the counts of skipped
    steps. Only with `NoOpLossScale` no later step would change `grads_finite`, so that it becomes
    True, and `consecutive_skips` zero. For a checkpoint of another scale: restore it into a state
    of the scale that was saved, then replace that.

    Args:
      opt_state: the state of an optimizer that is `with_loss_scale`, or a chain with it. Its
        arrays may be concrete, traced, or `jax.ShapeDtypeStruct`.
      new: the scale to go on with. Its arrays are copied, so that it may be used again after the
        state was donated. For a state that `jax.vmap` made, map this function too.

    Returns: the state, of the same structure but for the scale. In an abstract state the scale is
      abstract too; on a mesh its arrays lie where the state's flags lie.

    Raises:
      TypeError: `new` is not a loss scale, or `opt_state` is an optimizer and not its state.
      ValueError: the state holds no loss scale, or the optimizer's order is wrong, see
        `check_optimizer_state`; or `new` is zero.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_loss_scale(optax.adam(1e-3), DynamicLossScale(8.0))
    >>> state = set_loss_scale(tx.init(jnp.ones(2)), StaticLossScale(512))
    >>> state.loss_scale
    StaticLossScale(loss_scale=512.0)
    """
    check_loss_scale(new, "set_loss_scale", "new")
    if find_loss_scaling(opt_state) is None:
        raise ValueError(
            "set_loss_scale got an optimizer's state without a loss scale; expected that of "
            "an optimizer with jmp.transforms.with_loss_scale. To give it one, wrap the optimizer, "
            "tx = with_loss_scale(inner, new), and put the old state into a fresh one: "
            "tx.init(params)._replace(inner_state=opt_state)."
        )
    return _wrapping.map_states(lambda state: _with_scale(state, new), opt_state, _wrapping.SCALES)


def _with_scale(state: WithLossScaleState, new: LossScale) -> WithLossScaleState:
    def in_state(leaf: Any) -> Any:
        """Returns an array as the state's flag is: abstract, on a mesh, in a Variable of nnx."""

        def as_flag(flag: Any) -> Any:
            if isinstance(flag, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=flag.sharding)
            return placed(jnp.array(leaf), flag)

        return jax.tree.map(as_flag, state.grads_finite)

    if isinstance(new, NoOpLossScale):
        taken, none_skipped = in_state(jnp.array(True)), in_state(jnp.zeros([], jnp.int32))
        state = state._replace(grads_finite=taken, consecutive_skips=none_skipped)
    return state._replace(loss_scale=jax.tree.map(in_state, new))


def find_loss_scaling(opt_state: optax.OptState) -> WithLossScaleState | None:
    """Returns the state of loss scaling, also if a transformation with a state comes after it.

    For steps that undo, on a skip, what came after; see `transforms.check_optimizer_state`.
    """
    _wrapping.check_order(opt_state, undone_on_a_skip=True)
    return next((state for state, _ in _wrapping.states_at(opt_state, _wrapping.SCALES)), None)
