"""`with_master_params`: float32 masters for parameters that are stored in half.

Masters are kept in one of two forms, as a tree or as one vector: `InTree`, `InOneVector`.
"""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmp.dtypes import floating_dtype
from jmp.transforms._flat_masters import InOneVector
from jmp.transforms._states import Transformation, WithMasterParamsState
from jmp.transforms._storing import InTree, ParameterStorage, stored_by


def with_master_params(
    inner: optax.GradientTransformation | optax.MultiSteps,
    master_dtype: DTypeLike = jnp.float32,
    *,
    flat_master: bool = False,
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
      flat_master: keep masters, and with them the moments of `inner`, as one flat vector. For
        hundreds of small tensors: an Adam update of 400 takes a few kernels instead of hundreds,
        and moves more bytes. All parameters must be of one half dtype (give each dtype a group with
        `optax.partition`). `inner` gets one vector. If its state has other sizes then, it is
        refused: Muon, Adafactor, masks by path. Do not give it an optimizer that takes the norm
        of each tensor, as LAMB and LARS do: it would take that of the vector. Sharded parameters
        it gathers on each device: it is for one device.

    Returns: a transformation whose state is a `WithMasterParamsState`; `update` needs `params`.

    Raises:
      TypeError: `inner` is no transformation, or `master_dtype` no dtype; in `update`, a state that
        is not its own.
      ValueError: half masters; masters around masters; `update` without `params`, or with
        parameters whose dtypes have changed since `init`, or with gradients still to be added up
        (`unreduced`); in `init`, flat masters of more than one dtype, or of an optimizer that
        treats a vector in another way than a tree or that cannot be tried on one.

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

    masters = Masters()
    form = InOneVector(master_dtype) if flat_master else InTree(masters, master_dtype)
    return stored_by(form, masters, inner)


class Masters(ParameterStorage):
    """Beside each half parameter its float32 or float64 value, whole."""

    caller = "with_master_params"
    state_type = WithMasterParamsState

    def beside(self, new: jax.Array, shown: jax.Array, param: jax.Array) -> jax.Array:
        return new

    def value(self, param: jax.Array, beside: jax.Array) -> jax.Array:
        return beside
