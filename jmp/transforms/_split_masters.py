"""`with_split_masters`: float32 masters whose higher half is the bfloat16 parameter itself.

A bfloat16 number is the higher 16 bits of a float32 number. Kept beside the parameter are the lower
16 bits, so that parameter and remainder are the master, at four bytes instead of six. That is exact
because the parameter is the master rounded *half away from zero*: then each bfloat16 number stands
for at most 2**16 consecutive float32 numbers. (Rounded half to even, as casts do, it stands for
2**16 + 1 if its last bit is 0: remainders of 16 bits then lose one bit of some masters.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp.transforms._rounding import widened
from jmp.transforms._states import Transformation
from jmp.transforms._storing import InTree, ParameterStorage, stored_by
from jmp.trees import PyTree, register_for_export


@register_for_export
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
) -> Transformation[WithSplitMastersState]:
    """Keeps float32 masters of bfloat16 parameters in two bytes more a parameter.

    As `with_master_params`, in 12 bytes a parameter with Adam's moments instead of 14. From the
    same gradients masters are the same, bit for bit, with these exceptions:

    * A master is finite: where it would round to an infinity, parameter and master stay at the
      largest bfloat16 number, 3.3895e38.
    * After an update that shrinks a weight more than 65536-fold at once, or to a negative zero, no
      float32 difference gives exactly that: the master is then what the addition gave.
    * A parameter that something else changed keeps its remainder, which is below half a spacing of
      it: `transforms.reset_masters(opt_state, params)` makes remainders zero.

    A parameter differs from `master.astype(bfloat16)` where the master is halfway between two
    numbers. So to begin or go on with float32 parameters use `transforms.set_masters`.

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
    storage = SplitMasters()
    return stored_by(InTree(storage), storage, inner)


class SplitMasters(ParameterStorage):
    """The parameter is the master rounded half away from zero, the remainder its lower 16 bits."""

    caller = "with_split_masters"
    state_type = WithSplitMastersState

    def check(self, param: jax.Array, path: str) -> None:
        if param.dtype != jnp.bfloat16:
            raise ValueError(
                f"with_split_masters got params{path} of dtype {param.dtype}; expected bfloat16, "
                "which is the higher half of a float32 number. Store the parameters in bfloat16, "
                "or write with_master_params(inner), which keeps whole masters of float16 ones."
            )

    def visible(self, new: jax.Array, param: jax.Array, bits: jax.Array | None) -> jax.Array:
        high, _ = split_master(new)
        pattern = lax.bitcast_convert_type(high, jnp.uint16)
        is_infinite = pattern & 0x7FFF == 0x7F80
        finite = jnp.where(is_infinite, pattern - jnp.uint16(1), pattern)
        return widened(lax.bitcast_convert_type(finite, jnp.bfloat16))

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> jax.Array:
        distance = _signed_pattern(new) - _signed_pattern(shown)
        # Beyond 16 bits only where `shown` is not `new` rounded: then the master is what is shown.
        is_remainder = (distance >= -(2**15)) & (distance < 2**15)
        return jnp.where(is_remainder, distance, 0).astype(jnp.uint16)

    def value(self, param: jax.Array, beside: jax.Array) -> jax.Array:
        return join_master(param, beside)


def split_master(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns float32 as bfloat16 and uint16, of which `join_master` makes it again, bit for bit.

    The bfloat16 number is the nearest, of two the one farther from zero: finite numbers from
    3.3953e38 on are split into an infinity and a remainder. A NaN becomes one without a payload.

    >>> high, low = split_master(jnp.float32([1.0, 1.0001, jnp.inf]))
    >>> low, join_master(high, low)
    (Array([  0, 839,   0], dtype=uint16), Array([1.    , 1.0001,    inf], dtype=float32))
    """
    quiet = jnp.where(jnp.isnan(master), jnp.float32(jnp.nan), master)  # no carry into the sign
    pattern = lax.bitcast_convert_type(quiet, jnp.uint32)
    high = ((pattern + 0x8000) >> 16).astype(jnp.uint16)
    return lax.bitcast_convert_type(high, jnp.bfloat16), pattern.astype(jnp.uint16)


def join_master(high: jax.Array, low: jax.Array) -> jax.Array:
    """Returns the float32 array that `split_master` took apart.

    Where `high` is a zero and `low` would take it below zero, which `split_master` never returns,
    it is that zero.
    """
    # Read as a signed number the remainder is the distance from the parameter, in float32 spacings.
    distance = lax.bitcast_convert_type(low, jnp.int16).astype(jnp.int32)
    pattern = _signed_pattern(widened(high))
    is_zero = pattern << 1 == 0  # as a number a subnormal one may be equal to zero
    distance = jnp.where(is_zero & (distance < 0), 0, distance)
    return lax.bitcast_convert_type(pattern + distance, jnp.float32)


def _signed_pattern(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)
