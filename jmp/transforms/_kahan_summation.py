"""`with_kahan_summation`: half parameters, and in half what they lack."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp.transforms._rounding import rounded
from jmp.transforms._states import Transformation
from jmp.transforms._storing import InTree, ParameterStorage, stored_by
from jmp.trees import PyTree, register_for_export


@register_for_export
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
) -> Transformation[WithKahanSummationState]:
    """Keeps, beside half parameters, in their dtype what rounding took from them.

    What a parameter lacks is added to the next update (Kahan 1965), so that updates below its
    spacing add up. Together parameter and compensation have the digits of both: 16 bits in
    bfloat16, 22 in float16. Updates below half a spacing of the compensation are lost: in bfloat16
    those below 2**-17 of a weight, in float16 below 2**-23 of it or 2**-25. For bfloat16 prefer
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
    storage = KahanSummation()
    return stored_by(InTree(storage), storage, inner)


class KahanSummation(ParameterStorage):
    """Beside the parameter, in its dtype, the value less what the parameter shows."""

    caller = "with_kahan_summation"
    state_type = WithKahanSummationState

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> jax.Array:
        # XLA may cancel a difference of casts, which it computes with more digits than they have.
        # What `shown` is rounded by it cannot see through.
        lack = rounded(new - shown, param.dtype)
        return jnp.where(jnp.isnan(lack), 0, lack).astype(param.dtype)

    def value(self, param: jax.Array, beside: jax.Array) -> jax.Array:
        return param.astype(jnp.float32) + beside.astype(jnp.float32)
