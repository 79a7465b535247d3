"""How half parameters store the float32 values that an optimizer trains: four ways.

| transformation | beside a parameter | bytes |
|---|---|---|
| `with_master_params` | its float32 value, the master | 4 |
| `with_split_masters` | the lower half of a master whose higher half it is, in bfloat16 | 2 |
| `with_kahan_summation` | what rounding took from it, in its own dtype | 2 |
| `with_stochastic_rounding` | nothing: it is rounded up or down by chance | 0 |

Each is the class of its state, the function, and a `ParameterStorage`: three functions of arrays
say what a parameter becomes, what is kept beside it, and which value the two stand for. Everything
else is made of these three: `stored_by`, the transformation that runs an optimizer on the values,
and at the end `masters`, `set_masters` and `reset_masters`, which read and set the values inside of
an optimizer's state. The class of a state says which storage it belongs to.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from jax.typing import DTypeLike

from jmp._jax_compat import is_concrete
from jmp._messages import described
from jmp.dtypes import floating_dtype
from jmp.transforms import _wrapping
from jmp.transforms._few_kernels import count_by_size, in_kernels_of_parameters, in_order_of_axes
from jmp.transforms._rounding import (
    HALFWAY,
    RandomBits,
    difference_to,
    needs_master,
    rounded,
    rounded_by,
    widened,
)
from jmp.trees import PyTree, cast_to_at_least_float32, is_array, leaves_by_path

S = TypeVar("S")

# A function of a storage as one program. `init` and `masters` are usually called outside of jit,
# where JAX would compile each operation for each shape.
compiled = functools.cache(jax.jit)


class ParameterStorage:
    """One way to store a float32 array in a half parameter and what is kept beside it.

    After a step `shown` is `visible(new, param, bits)`, the parameter becomes `shown` in its own
    dtype, and `beside(new, shown, param)` is kept in the state. Of these two `value` gives `new`
    again, as exactly as the storage can.

    Each class is made once, without arguments. Options of a transformation belong to `stored_by`.

    Attributes:
      keeps_values: whether what is kept is the value itself, and no part of it in the parameter.
    """

    keeps_values: ClassVar[bool] = False

    def check(self, param: jax.Array, path: str) -> None:
        """Raises ValueError for a half parameter that it cannot store."""

    def visible(self, new: jax.Array, param: jax.Array, bits: jax.Array | None) -> jax.Array:
        """Returns what the parameter becomes: float32 numbers that its dtype holds, all finite but
        NaN.

        Args:
          new: the value, float32.
          param: the parameter as it is.
          bits: random, for a storage that asks for them; None rounds to the nearest.
        """
        return rounded(new, param.dtype)

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> Any:
        """Returns what is kept beside a parameter.

        Args:
          new: the value, float32.
          shown: what the parameter shows, as float32; hardly ever other than `visible`, see
            `shown_after`.
          param: the parameter, for its dtype.
        """
        raise NotImplementedError

    def value(self, param: jax.Array, beside: Any) -> jax.Array:
        """Returns the float32 value that a parameter and what is kept beside it stand for."""
        raise NotImplementedError


def shown_after(change: jax.Array, param: jax.Array) -> jax.Array:
    """Returns what `optax.apply_updates` makes of a parameter, as float32.

    That is what was asked for, unless one step shrinks a number of bfloat16 more than 65536-fold,
    one of float16 4096-fold, or to a negative zero: no float32 difference says exactly that.
    """
    sum_ = param.astype(jnp.float32) + change
    if param.dtype == jnp.bfloat16:
        # From the new parameter itself: what is kept beside it then comes out of the same kernel on
        # a TPU. Else XLA would read everything once more, only for the parameter.
        return widened(sum_.astype(param.dtype))
    return rounded(sum_, param.dtype)


def stored_by(
    state_type: type,
    inner: optax.GradientTransformation | optax.MultiSteps,
    dtype: DTypeLike = jnp.float32,
    bits: RandomBits | None = None,
) -> _wrapping.Transformation[Any]:
    """Returns the transformation that runs `inner` in float32 and stores what comes out.

    The arrays that are kept beside the parameters form a tree like theirs.

    Args:
      state_type: the NamedTuple of its state, with a storage in `STORAGES`: first the tree of what
        is kept beside the parameters, with `optax.MaskedNode` for those that need nothing; then
        `count`, if there are random bits; last `inner_state`.
      dtype: of the values that `inner` sees.
      bits: where the storage's random bits come from; None for one that rounds to the nearest.
    """
    storage, caller = STORAGES[state_type], _wrapping.caller_of(state_type)
    optimizer = _wrapping.checked_inner(inner, state_type)

    def first_beside(path: tuple[Any, ...], param: Any) -> Any:
        if not needs_master(param):
            return optax.MaskedNode()
        storage.check(param, keystr(path))
        wide = jnp.array(param, dtype)
        return compiled(storage.beside)(wide, wide, param)

    def value_of(param: Any, beside: Any) -> Any:  # beside float32 there is an empty tree
        return compiled(storage.value)(param, beside) if needs_master(param) else param

    def init(params: optax.Params) -> Any:
        kept = tree_map_with_path(first_beside, params)
        inner_state = optimizer.init(jax.tree.map(value_of, params, kept))
        count = [jnp.zeros([], jnp.int32)] if bits else []
        return state_type(kept, *count, inner_state)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if params is None:
            raise ValueError(
                f"{caller} got no params; call update(gradients, state, params): the "
                "update is the difference between the new masters and the parameters."
            )
        _check_stored_as_in_init(params, state[0], caller)

        # Run the optimizer on the values.
        old = jax.tree.map(value_of, params, state[0])
        gradients = cast_to_at_least_float32(in_order_of_axes(updates))
        extra_args = _wrapping.with_gradients(extra_args, updates, gradients)
        full_updates, inner_state = optimizer.update(
            gradients, state.inner_state, old, **extra_args
        )
        new = optax.apply_updates(old, full_updates)

        # Store the new values: parameters follow by `half_updates`.
        count_of = count_by_size(state.count) if bits else None

        def follow(path: tuple[Any, ...], param: Any, value: Any, update: Any) -> Any:
            if not needs_master(param):
                return optax.MaskedNode(), update
            drawn = bits.at(keystr(path), param, count_of(param)) if bits and count_of else None
            change = difference_to(storage.visible(value, param, drawn), param)
            return storage.beside(value, shown_after(change, param), param), change

        pairs = tree_map_with_path(follow, params, new, full_updates)
        kept = jax.tree.map(lambda _, pair: pair[0], params, pairs)
        half_updates = jax.tree.map(lambda _, pair: pair[1], params, pairs)
        count = [optax.safe_increment(state.count)] if bits else []
        new_state = state_type(kept, *count, inner_state)
        return half_updates, in_kernels_of_parameters(new_state, params, half_updates)

    return _wrapping.transformation(init, update, state_type)


def _check_stored_as_in_init(params: optax.Params, kept: PyTree, caller: str) -> None:
    """Raises ValueError if parameters have changed between half and another dtype."""
    with_master = {keystr(p) for p, _ in tree_leaves_with_path(kept, is_leaf=is_kept)}
    for path, leaf in leaves_by_path(params).items():
        if needs_master(leaf) != (path in with_master):
            had = "a half" if path in with_master else "no half"
            raise ValueError(
                f"{caller} got params{path} of dtype {leaf.dtype}; when `init` was called it had "
                f"{had} dtype. Keep the dtype in updates (optax.apply_updates does, "
                "apply_updates of jmp.adapters.equinox too, eqx.apply_updates not), cast the "
                "parameters as they were stored then (cast_params of the adapters), or call init "
                "again."
            )


def kept_by_path(opt_state: optax.OptState) -> dict[str, tuple[Any, ParameterStorage]]:
    """Returns what is kept beside each half parameter, and by which storage.

    The keys are the paths (`keystr`) of the parameters of all groups. Beside a parameter there is
    an array, or an `EmptyState` if its storage keeps nothing.
    """
    return {
        keystr(path): (beside, STORAGES[type(state)])
        for state, _ in _wrapping.states_at(opt_state, _wrapping.STORES_PARAMETERS)
        for path, beside in tree_leaves_with_path(state[0], is_leaf=is_kept)
    }


def is_kept(node: object) -> bool:
    """Returns whether a node says that a parameter is stored, and that nothing is kept beside."""
    return isinstance(node, optax.EmptyState)


# The four ways.


@_wrapping.register_wrapper("with_master_params", _wrapping.STORES_PARAMETERS)
class WithMasterParamsState(NamedTuple):
    """State of `with_master_params`.

    Attributes:
      masters: the parameters' tree with a master, float32 or float64, for every half leaf, and
        `optax.MaskedNode()`, which holds nothing, for every other leaf.
      inner_state: state of the wrapped optimizer.

    >>> import optax
    >>> from jmp import transforms
    >>> params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
    >>> state = transforms.with_master_params(optax.sgd(0.1)).init(params)
    >>> state.masters["w"].dtype, state.masters["norm"]  # float32 already: no second copy
    (dtype('float32'), MaskedNode())
    """

    masters: PyTree
    inner_state: PyTree


def with_master_params(
    inner: optax.GradientTransformation | optax.MultiSteps,
    master_dtype: DTypeLike = jnp.float32,
) -> _wrapping.Transformation[WithMasterParamsState]:
    """Keeps float32 masters of half parameters in the optimizer's state.

    In float16 1 + 0.0001 is 1, in bfloat16 even 1 + 0.001: small updates vanish. The masters take
    them, and the parameters follow: after `optax.apply_updates` they equal their masters, rounded,
    bit for bit. (Micikevicius et al. 2018, section 3.1.) There are two exceptions. If an update
    shrinks a weight more than 4096-fold at once, or to a negative zero, no float32 difference gives
    exactly that; the next step corrects it, because it starts from the masters. And while a master
    is beyond the half range, its parameter stays at the largest finite number.

    If parameters are changed by other means, such as loading a checkpoint, the next step undoes it:
    call `transforms.reset_masters(opt_state, params)` with them.

    Masters and the state of `inner` lie where the parameters lie, see `transforms.state_shardings`.
    Leaves that are float32 already, such as BatchNorm's, are not duplicated. `inner` sees masters
    and gradients in at least float32. Only wrappers such as `with_loss_scale` may go around it: in
    `optax.chain(with_master_params(...), optax.scale(0.5))` masters and parameters would become
    different. `with_loss_scale` and the adapters refuse that, and `optax.lookahead` and others
    around it; without them, `transforms.check_optimizer_state(tx.init(params))` does. Inside
    `optax.flatten`, which makes float32 vectors of half and float32 leaves, there are no masters:
    `with_loss_scale` and `transforms.masters` refuse that. `check_optimizer_state` does not,
    because it gets no parameters.

    Args:
      inner: any optax transformation, or a `MultiSteps` object.
      master_dtype: float32 or float64.

    Returns: a transformation whose state is a `WithMasterParamsState`; `update` needs `params`.

    Raises:
      TypeError: `inner` is no transformation, or `master_dtype` no dtype; in `update`, a state of
        another transformation.
      ValueError: half masters; masters around masters; `update` without `params`, or with
        parameters whose dtypes have changed since `init`, or with gradients still to be added up
        (`unreduced`).

    >>> import optax
    >>> tx = with_master_params(optax.sgd(1e-4))
    >>> params = jnp.ones(2, jnp.float16)
    >>> state = tx.init(params)
    >>> for _ in range(10):  # ten steps, each too small for float16
    ...     updates, state = tx.update(jnp.ones(2, jnp.float16), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params.dtype, float(params[0])
    (dtype('float16'), 0.9990234375)
    >>> bool((params == state.masters.astype(jnp.float16)).all())
    True
    """
    master_dtype = floating_dtype(master_dtype, "master_dtype")
    if master_dtype not in (jnp.dtype("float32"), jnp.dtype("float64")):
        raise ValueError(
            f"with_master_params got master_dtype={master_dtype}; expected float32 or float64: "
            "masters hold updates that are too small for half precision."
        )
    return stored_by(WithMasterParamsState, inner, master_dtype)


class Masters(ParameterStorage):
    """Beside each half parameter its float32 or float64 value, whole."""

    keeps_values = True

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> jax.Array:
        return new

    def value(self, param: jax.Array, beside: jax.Array) -> jax.Array:
        return beside


@_wrapping.register_wrapper("with_split_masters", _wrapping.STORES_PARAMETERS)
class WithSplitMastersState(NamedTuple):
    """State of `with_split_masters`.

    Attributes:
      remainders: the parameters' tree with uint16 of its shape for every bfloat16 leaf, and
        `optax.MaskedNode()` for every other leaf.
      inner_state: state of the wrapped optimizer.

    >>> import optax
    >>> from jmp import transforms
    >>> params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
    >>> transforms.with_split_masters(optax.sgd(0.1)).init(params).remainders
    {'norm': MaskedNode(), 'w': Array([0, 0], dtype=uint16)}
    """

    remainders: PyTree
    inner_state: PyTree


def with_split_masters(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> _wrapping.Transformation[WithSplitMastersState]:
    """Keeps float32 masters of bfloat16 parameters in two bytes more a parameter.

    As `with_master_params`, in 12 bytes a parameter with Adam's moments instead of 14. From the
    same gradients masters are the same, bit for bit, with these exceptions:

    * A master is finite: if it would round to an infinity, parameter and master stay at the
      largest bfloat16 number, 3.3895e38.
    * After an update that shrinks a weight more than 65536-fold at once, or to a negative zero, no
      float32 difference gives exactly that: the master is then what the addition gave.
    * A parameter that something else changed keeps its remainder, which is below half a spacing of
      it: `transforms.reset_masters(opt_state, params)` makes remainders zero.

    A parameter differs from `master.astype(bfloat16)` if the master is halfway between two numbers.
    So to begin or go on with float32 parameters use `transforms.set_masters`.

    Args:
      inner: any optax transformation, or a `MultiSteps` object. It sees float32 masters and
        gradients.

    Returns: a transformation whose state is a `WithSplitMastersState`; `update` needs `params`.

    Raises: as `with_master_params`; in `init`, ValueError for parameters in float16, whose range is
      too small for the higher half of a float32 number.

    >>> tx = with_split_masters(optax.sgd(1e-4))
    >>> params = jnp.ones(2, jnp.bfloat16)
    >>> state = tx.init(params)
    >>> for _ in range(10):  # ten steps, each too small for bfloat16
    ...     updates, state = tx.update(jnp.ones(2, jnp.bfloat16), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> from jmp import transforms
    >>> params[0], transforms.masters(state, params)[0]
    (Array(1, dtype=bfloat16), Array(0.99899983, dtype=float32))
    """
    return stored_by(WithSplitMastersState, inner)


class SplitMasters(ParameterStorage):
    """The parameter is the master rounded half away from zero, the remainder its lower 16 bits.

    A bfloat16 number is the higher 16 bits of a float32 number. Kept beside the parameter are the
    lower 16 bits, so that parameter and remainder are the master, at four bytes instead of six.
    That is exact because of the rounding *half away from zero*: then each bfloat16 number stands
    for at most 2**16 consecutive float32 numbers. (Rounded half to even, as casts do, it stands for
    2**16 + 1 if its last bit is 0: remainders of 16 bits then lose one bit of some masters.)
    """

    def check(self, param: jax.Array, path: str) -> None:
        if param.dtype != jnp.bfloat16:
            raise ValueError(
                f"with_split_masters got params{path} of dtype {param.dtype}; expected bfloat16, "
                "which is the higher half of a float32 number. Store the parameters in bfloat16, "
                "or write with_master_params(inner), which keeps whole masters of float16 ones."
            )

    def visible(self, new: jax.Array, param: jax.Array, bits: jax.Array | None) -> jax.Array:
        return rounded_by(jnp.uint32(HALFWAY), new, param.dtype)

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> jax.Array:
        distance = _signed_pattern(new) - _signed_pattern(shown)
        # Beyond 16 bits only if `shown` is not `new` rounded: then the master is what is shown.
        is_remainder = (distance >= -(2**15)) & (distance < 2**15)
        return jnp.where(is_remainder, distance, 0).astype(jnp.uint16)

    def value(self, param: jax.Array, beside: jax.Array) -> jax.Array:
        # Read as a signed number the remainder is the distance from the parameter, in float32
        # spacings.
        distance = lax.bitcast_convert_type(beside, jnp.int16).astype(jnp.int32)
        pattern = _signed_pattern(widened(param))
        # A parameter that something else made zero stays zero: below it there is no pattern.
        is_zero = pattern << 1 == 0  # as a number a subnormal one may be equal to zero
        distance = jnp.where(is_zero & (distance < 0), 0, distance)
        return lax.bitcast_convert_type(pattern + distance, jnp.float32)


def _signed_pattern(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


@_wrapping.register_wrapper("with_kahan_summation", _wrapping.STORES_PARAMETERS)
class WithKahanSummationState(NamedTuple):
    """State of `with_kahan_summation`.

    Attributes:
      compensations: the parameters' tree with an array of its shape and dtype for every half leaf:
        what the parameter lacks; and `optax.MaskedNode()` for every other leaf.
      inner_state: state of the wrapped optimizer.

    >>> import optax
    >>> from jmp import transforms
    >>> params = {"w": jnp.ones(2, jnp.float16), "norm": jnp.ones(2)}
    >>> transforms.with_kahan_summation(optax.sgd(0.1)).init(params).compensations
    {'norm': MaskedNode(), 'w': Array([0., 0.], dtype=float16)}
    """

    compensations: PyTree
    inner_state: PyTree


def with_kahan_summation(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> _wrapping.Transformation[WithKahanSummationState]:
    """Keeps what rounding took from half parameters, in an array of their own dtype.

    The rest that a parameter lacks is added to the next update (Kahan 1965), so that updates below
    its spacing add up. Together parameter and compensation have the digits of both: 16 bits in
    bfloat16, 22 in float16. Updates below half a spacing of the compensation are lost: in bfloat16
    below 2**-17 of a weight, in float16 below 2**-23 of it or 2**-25. For bfloat16 prefer
    `with_split_masters`: the same memory, and nothing is lost.

    Args:
      inner: any optax transformation, or a `MultiSteps` object. It sees the sum of parameter and
        compensation, and gradients, in float32.

    Returns: a transformation whose state is a `WithKahanSummationState`; `update` needs `params`.
    Raises: as `with_master_params`.

    >>> tx = with_kahan_summation(optax.sgd(1e-4))
    >>> params = jnp.ones(2, jnp.float16)
    >>> state = tx.init(params)
    >>> for _ in range(10):  # ten steps, each too small for float16
    ...     updates, state = tx.update(jnp.ones(2, jnp.float16), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> from jmp import transforms
    >>> params[0], transforms.masters(state, params)[0]
    (Array(0.999, dtype=float16), Array(0.99899983, dtype=float32))
    """
    return stored_by(WithKahanSummationState, inner)


class KahanSummation(ParameterStorage):
    """Beside the parameter, in its dtype, the value less what the parameter shows."""

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> jax.Array:
        farthest = float(jnp.finfo(jnp.float32).max)
        # XLA may cancel a difference of casts, which it computes with more digits than they have.
        # It cannot see through the operations that rounded `shown`.
        lack = rounded(jnp.clip(new, -farthest, farthest) - shown, param.dtype)
        half = jnp.where(jnp.isnan(lack), 0, lack).astype(param.dtype)
        # Rounded away from zero, the lack of float32's largest numbers leads to an infinity.
        shorter = lax.nextafter(half, jnp.zeros_like(half))
        return jnp.where(jnp.isinf(shown + lack), shorter, half)

    def value(self, param: jax.Array, beside: jax.Array) -> jax.Array:
        return param.astype(jnp.float32) + beside.astype(jnp.float32)


@_wrapping.register_wrapper("with_stochastic_rounding", _wrapping.STORES_PARAMETERS)
class WithStochasticRoundingState(NamedTuple):
    """State of `with_stochastic_rounding`.

    Attributes:
      rounded: the parameters' tree with `optax.EmptyState()`, which holds nothing, for every half
        leaf, and `optax.MaskedNode()` for every other leaf.
      count: int32 scalar: the steps so far, from which random bits are computed.
      inner_state: state of the wrapped optimizer.

    >>> import optax
    >>> from jmp import transforms
    >>> params = {"w": jnp.ones(2, jnp.float16), "norm": jnp.ones(2)}
    >>> transforms.with_stochastic_rounding(optax.sgd(0.1)).init(params).rounded
    {'norm': MaskedNode(), 'w': EmptyState()}
    """

    rounded: PyTree
    count: jax.Array  # type: ignore[assignment]  # a tuple's method
    inner_state: PyTree


def with_stochastic_rounding(
    inner: optax.GradientTransformation | optax.MultiSteps,
    seed: int = 0,
    *,
    specs: PyTree = None,
) -> _wrapping.Transformation[WithStochasticRoundingState]:
    """Trains half parameters without masters: an update rounds them up or down by chance.

    The chance of either neighbour is such that the mean of the result is the float32 value (Gupta
    et al. 2015, section 3), so that updates far below the spacing of a parameter act on average. A
    value that the dtype holds is never moved. It takes no memory beside the parameters: with Adam's
    moments 10 bytes a parameter instead of 14. The parameters carry noise of up to a spacing, which
    float32 masters do not; see docs/memory.md for what that costs.

    Random bits follow from the seed, the step, the path of the parameter and the index of the
    element in the whole array: equal on any number of devices and after a restore. A step that loss
    scaling skips uses up none. Values beyond the range of the dtype become its largest number.

    Args:
      inner: any optax transformation, or a `MultiSteps` object. It sees float32 parameters and
        gradients.
      seed: an integer. Use another for each run that must round otherwise. (Under `jax.vmap` all
        members of an ensemble round alike.)
      specs: a tree with one PartitionSpec for each parameter, for an `update` inside of a shard_map
        that divides parameters; `PartitionSpec()` for those that are whole on each device. Under
        jit and on one device it is not needed.

    Returns: a transformation whose state is a `WithStochasticRoundingState`; `update` needs
      `params`.

    Raises: as `with_master_params`; TypeError for a seed that is no integer; in `update`,
      ValueError without `specs` inside of a shard_map or pmap, if parameters differ between devices
      or types do not say whether they do (`check_vma=False`).

    >>> tx = with_stochastic_rounding(optax.sgd(1e-4))
    >>> params = jnp.ones(4096, jnp.bfloat16)
    >>> updates, state = tx.update(jnp.ones(4096), tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> sorted(set(params.tolist()))
    [0.99609375, 1.0]
    >>> bool(abs(params.astype("float32").mean() - 0.9999) < 3e-5)
    True
    """
    bits = RandomBits.of("with_stochastic_rounding", seed, specs)
    return stored_by(WithStochasticRoundingState, inner, bits=bits)


class StochasticRounding(ParameterStorage):
    """Nothing is kept beside the parameter, which is the value."""

    def visible(self, new: jax.Array, param: jax.Array, bits: jax.Array | None) -> jax.Array:
        if bits is None:
            return rounded(new, param.dtype)
        return rounded_by(bits, new, param.dtype)

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> Any:
        return optax.EmptyState()

    def value(self, param: jax.Array, beside: Any) -> jax.Array:
        return param.astype(jnp.float32)


STORAGES: dict[type, ParameterStorage] = {  # by the type of the state
    WithMasterParamsState: Masters(),
    WithSplitMastersState: SplitMasters(),
    WithKahanSummationState: KahanSummation(),
    WithStochasticRoundingState: StochasticRounding(),
}


# The values inside of an optimizer's state.


def masters(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters that the optimizer updates: the float32 masters.

    However they are stored: with split masters or Kahan summation they are joined, with stochastic
    rounding they are the parameters themselves, cast.

    Args:
      opt_state: the state of an optimizer, chained, partitioned or masked.
      params: the parameters. Leaves that need no master (float32) are taken from here; half leaves
        without one (frozen groups) come back cast to float32.

    Raises: ValueError if something changes the masters' updates, see `check_optimizer_state`, or if
      a parameter that has a master is missing here, as those are that `optax.flatten` made one of;
      TypeError for an optimizer in the place of its state, or a state in the place of parameters.

    >>> masters((), {"w": jnp.ones(2, jnp.float16)})["w"].dtype
    dtype('float32')
    """
    given = _leaves_checked(opt_state, params, "masters")
    _wrapping.check_nothing_changes_masters(opt_state)
    values = {
        path: compiled(storage.value)(given[path], beside)
        for path, (beside, storage) in kept_by_path(opt_state).items()
    }
    # A half leaf of a frozen group has no master: it is what is returned.
    return tree_map_with_path(
        lambda path, p: values.get(keystr(path), p), cast_to_at_least_float32(params)
    )


def reset_masters(opt_state: S, params: PyTree) -> S:
    """Returns the optimizer's state with its masters taken from the parameters.

    Call it after something else than the optimizer has changed parameters: after loading a
    checkpoint, tying, pruning or averaging weights. Otherwise the next step undoes that change,
    because it starts from the masters. Moments, counts and the loss scale stay as they are.

    Args:
      opt_state: the state of an optimizer, chained, partitioned or masked. Without masters it is
        returned as it is.
      params: the parameters, as the optimizer's `init` had them. To `with_master_params` they may
        be given in float32: masters are then exact, and the model's parameters are these, rounded.
        For the other ways of storing them that is `set_masters`.

    Raises: ValueError if a parameter that has a master is missing here or has another shape, or is
      float32 although the parameter holds a part of its master; TypeError for an optimizer in the
      place of its state, or a state in the place of parameters.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_master_params(optax.sgd(0.1))
    >>> state = tx.init(jnp.ones(2, jnp.float16))
    >>> reset_masters(state, jnp.float32([0.1, 0.2])).masters
    Array([0.1, 0.2], dtype=float32)
    """
    given = _leaves_checked(opt_state, params, "reset_masters")
    return _map_kept(lambda path, old, storage: _reset(given[path], old, storage, path), opt_state)


def set_masters(opt_state: S, params: PyTree, values: PyTree) -> tuple[PyTree, S]:
    """Returns parameters and an optimizer's state that hold these float32 values.

    The inverse of `masters`, whichever way half parameters are stored: for a run that begins with
    float32 weights, or goes on from one that was stored in another way. Moments, counts and the
    loss scale stay as they are. With stochastic rounding values are rounded to the nearest.

    Args:
      opt_state: the state of an optimizer, chained, partitioned or masked.
      params: the parameters as they are, for their dtypes.
      values: a tree like `params`, in float32.

    Raises: as `reset_masters`, for `params` and `values`.

    >>> import optax
    >>> from jmp import transforms
    >>> params = {"w": jnp.zeros(2, jnp.bfloat16)}
    >>> state = transforms.with_split_masters(optax.sgd(0.1)).init(params)
    >>> params, state = set_masters(state, params, {"w": jnp.float32([0.1, 0.2])})
    >>> params["w"], masters(state, params)["w"]
    (Array([0.100098, 0.200195], dtype=bfloat16), Array([0.1, 0.2], dtype=float32))
    """
    given, wide = (_leaves_checked(opt_state, tree, "set_masters") for tree in (params, values))
    shown: dict[str, jax.Array] = {}

    def store(path: str, old: Any, storage: Any) -> Any:
        value = cast_to_at_least_float32(wide[path])
        value = _beside_old(jnp.array(value, _dtype_of_value(old)), value, given[path])
        shown[path] = compiled(storage.visible)(value, given[path], None)
        return compiled(storage.beside)(value, shown[path], given[path])

    new_state = _map_kept(store, opt_state)

    def new(path: tuple[Any, ...], param: Any, value: Any) -> Any:
        if not is_array(param):
            return value
        return jnp.array(shown.get(keystr(path), value), param.dtype)  # never the given array

    return tree_map_with_path(new, params, values), new_state


def follow_replaced(opt_state: S, params: PyTree, before: PyTree) -> tuple[PyTree, S]:
    """Returns parameters that replace others, and a state whose masters follow them.

    As `reset_masters`, but a master stays if its parameter stays: parameters that were clipped,
    moved to other devices or put back say nothing of the digits that their masters have beyond half
    precision. Values in float32 are taken whole, see `set_masters`. Another model's parameters
    leave the state as it is.

    Args:
      params: the new parameters.
      before: the parameters that are replaced.

    Raises: ValueError if the masters are of one vector, as inside `optax.flatten`.
    """
    given, replaced = leaves_by_path(params), leaves_by_path(before)
    kept = kept_by_path(opt_state)
    if not given or not all(map(is_array, given.values())):
        return params, opt_state  # None and shardings describe a tree, or stand for one
    if _wrapping.ROOT in kept and _wrapping.ROOT not in given:
        _check_all_given(opt_state, given, "replace(params=...)")
    for path, (beside, _) in kept.items():
        if path not in given or getattr(beside, "shape", given[path].shape) != given[path].shape:
            return params, opt_state
    if kept and not any(needs_master(given[path]) for path in kept):
        return set_masters(opt_state, before, params)

    def follow(path: str, old: Any, storage: Any) -> Any:
        param = given[path]
        if not needs_master(param):
            return _reset(param, old, storage, path)
        if storage.keeps_values:
            stays = rounded(old, param.dtype) == param.astype(jnp.float32)
        else:
            stays = replaced[path] == param
        keep = lambda new, was: jnp.where(stays, was, new)
        return jax.tree.map(keep, _reset(param, old, storage, path), old)

    return params, _map_kept(follow, opt_state)


def _leaves_checked(opt_state: optax.OptState, params: PyTree, caller: str) -> dict[str, Any]:
    """Returns parameters by path.

    Raises: TypeError for an optimizer in the place of its state, and for either in the place of
      parameters; ValueError if the state has masters of other parameters.
    """
    _wrapping.check_is_state(opt_state)
    if _wrapping.holds_a_state(params):
        raise TypeError(
            f"{caller} got {described(params)} as the parameters. The order is {caller}(opt_state, "
            "params)."
        )
    _wrapping.check_half_ones_are_seen(opt_state, params)
    given = leaves_by_path(params)
    _check_all_given(opt_state, given, caller)
    return given


def _check_all_given(opt_state: optax.OptState, given: dict[str, Any], caller: str) -> None:
    """Raises ValueError if a parameter that has a master is missing, or has another shape."""
    for path, (beside, _) in kept_by_path(opt_state).items():
        found, shape = given.get(path), getattr(beside, "shape", None)
        got_shape = getattr(found, "shape", None)
        if got_shape == shape or (shape is None and found is not None):
            continue
        got = "nothing" if found is None else f"the shape {got_shape}"
        raise ValueError(
            f"{caller} got {got} for params{path}; expected the shape {shape} of its master. Pass "
            "the parameters that the optimizer was initialised with. If optax.flatten makes one "
            "vector of them, put it inside, with_master_params(optax.flatten(adam))."
        )


def _reset(param: Any, old: Any, storage: ParameterStorage, path: str) -> Any:
    """Returns what is kept beside a parameter that is the value; from the host, where `old` lies.

    Raises: ValueError for float32 if a part of the value is in the parameter itself.
    """
    if not needs_master(param) and not storage.keeps_values:
        raise ValueError(
            f"reset_masters got params{path} in {param.dtype}; expected the parameters as they are "
            "stored, which hold a part of the values themselves. Write "
            "params, opt_state = transforms.set_masters(opt_state, params, values)."
        )
    value = jnp.array(param, _dtype_of_value(old))
    return _beside_old(compiled(storage.beside)(value, value, param), param, old)


def _beside_old(new: jax.Array, given: Any, old: Any) -> jax.Array:
    """Returns what was made of `given`, on the devices of `old` if that came from the host."""
    is_placed = isinstance(old, jax.Array) and is_concrete(old)
    from_host = not isinstance(given, jax.Array)
    return jax.device_put(new, old.sharding) if is_placed and from_host else new


def _dtype_of_value(old: Any) -> np.dtype:
    """Returns the dtype of the values that belong to what is kept: a master's own, or float32."""
    return old.dtype if getattr(old, "dtype", None) == jnp.float64 else np.dtype(np.float32)


def _map_kept(function: Callable[[str, Any, Any], Any], opt_state: S) -> S:
    """Applies `function` to the path of every half parameter, what is kept beside it, and how."""

    def in_state(state: Any) -> Any:
        storage = STORAGES[type(state)]
        mapped = tree_map_with_path(
            lambda path, old: function(keystr(path), old, storage),
            state[0],
            is_leaf=is_kept,
        )
        return state._replace(**{state._fields[0]: mapped})

    return _wrapping.map_states(in_state, opt_state, _wrapping.STORES_PARAMETERS)
