"""How half parameters store the float32 values that an optimizer trains: four ways.

| transformation | beside a parameter | bytes |
|---|---|---|
| `with_master_params` | its float32 value, the master | 4 |
| `with_split_masters` | the lower half of a master whose higher half it is, in bfloat16 | 2 |
| `with_kahan_summation` | what rounding took from it, in its own dtype | 2 |
| `with_stochastic_rounding` | nothing: it is rounded up or down by chance | 0 |

Each is a `ParameterStorage`, the class of its state, and the function; for stochastic rounding the
storage is the base class.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmp.dtypes import floating_dtype
from jmp.transforms._parameter_storage import ParameterStorage, stored_by
from jmp.transforms._rounding import HALFWAY, RandomBits, rounded, rounded_by, widened
from jmp.transforms._wrapping import STORES_PARAMETERS, Optimizer, Transformation, register_wrapper
from jmp.trees import PyTree


class Masters(ParameterStorage):
    """Beside each half parameter its float32 or float64 value, whole."""

    keeps_values = True

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> jax.Array:
        return new

    def value(self, param: jax.Array, beside: jax.Array) -> jax.Array:
        return beside


@register_wrapper("with_master_params", STORES_PARAMETERS, Masters())
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
    inner: Optimizer, master_dtype: DTypeLike = jnp.float32
) -> Transformation[WithMasterParamsState]:
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


@register_wrapper("with_split_masters", STORES_PARAMETERS, SplitMasters())
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


def with_split_masters(inner: Optimizer) -> Transformation[WithSplitMastersState]:
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

    >>> import optax
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


@register_wrapper("with_kahan_summation", STORES_PARAMETERS, KahanSummation())
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


def with_kahan_summation(inner: Optimizer) -> Transformation[WithKahanSummationState]:
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

    >>> import optax
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


@register_wrapper("with_stochastic_rounding", STORES_PARAMETERS, ParameterStorage())
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
    inner: Optimizer, seed: int = 0, *, specs: PyTree = None
) -> Transformation[WithStochasticRoundingState]:
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

    >>> import optax
    >>> tx = with_stochastic_rounding(optax.sgd(1e-4))
    >>> params = jnp.ones(4096, jnp.bfloat16)
    >>> updates, state = tx.update(jnp.ones(4096), tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> sorted(set(params.tolist()))
    [0.99609375, 1.0]
    >>> bool(abs(params.astype("float32").mean() - 0.9999) < 3e-5)
    True
    """
    bits = RandomBits("with_stochastic_rounding", seed, specs)
    return stored_by(WithStochasticRoundingState, inner, bits=bits)
