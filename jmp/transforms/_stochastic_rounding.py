"""`with_stochastic_rounding`: half parameters without masters, rounded up or down by chance."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp.transforms._random_bits import RandomBits
from jmp.transforms._rounding import rounded, rounded_by
from jmp.transforms._states import Transformation
from jmp.transforms._storing import InTree, ParameterStorage, stored_by
from jmp.trees import PyTree, register_for_export


@register_for_export
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
) -> Transformation[WithStochasticRoundingState]:
    """Trains half parameters without masters: an update rounds them up or down by chance.

    The chance of either neighbour is such that the mean of the result is the float32 value (Gupta
    et al. 2015, section 3), so that updates far below the spacing of a parameter act on average. A
    value that the dtype holds is never moved. It takes no memory beside the parameters: with Adam's
    moments 10 bytes a parameter instead of 14. The parameters carry noise of up to a spacing, which
    float32 masters do not; see docs/optimizer_memory.md for what that costs.

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
    storage = StochasticRounding()
    return stored_by(
        InTree(storage, bits=RandomBits.of(storage.caller, seed, specs)), storage, inner
    )


class StochasticRounding(ParameterStorage):
    """Nothing is kept beside the parameter, which is the value."""

    caller = "with_stochastic_rounding"
    state_type = WithStochasticRoundingState

    def visible(self, new: jax.Array, param: jax.Array, bits: jax.Array | None) -> jax.Array:
        if bits is None:
            return rounded(new, param.dtype)
        return rounded_by(bits, new, param.dtype)

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> Any:
        return optax.EmptyState()

    def value(self, param: jax.Array, beside: Any) -> jax.Array:
        return param.astype(jnp.float32)
