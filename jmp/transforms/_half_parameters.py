"""Parameters narrower than float32 that an optimizer would train without masters: refused.

1000 updates of 1e-4 leave a bfloat16 1.0 where it is. Nothing else says so: losses are finite, and
fall as far as the float32 parameters of the tree let them. So such parameters are refused where
they are seen, in `init` and in `update` (they may be loaded after `init`), unless no update moves
them: a half backbone that `optax.set_to_zero` freezes needs no master.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp.autocasting._propagation import Propagation, WayInside
from jmp.dtypes import is_half
from jmp.policy import Policy
from jmp.transforms._inner import Transformation
from jmp.transforms._loss_scaling import WithLossScaleState
from jmp.transforms._master_params import shapes_with_master
from jmp.trees import PyTree, leaves_by_path, stands_for_numbers

# Results of these are zeros if all operands are.
KEEP_ZEROS = frozenset(
    """abs add add_any broadcast_in_dim concatenate convert_element_type copy copy_p expand_dims
    max min neg optimization_barrier pcast pvary reduce_precision reduce_sum reshape reshard
    sharding_constraint sign slice split sqrt square squeeze sub transpose""".split()
)


def refusing_half(
    tx: Transformation[WithLossScaleState], policy: Policy
) -> Transformation[WithLossScaleState]:
    """Returns `tx` that raises ValueError for parameters it would train without masters.

    Args:
      tx: an optimizer under loss scaling.
      policy: the policy that it was made for.
    """
    frozen_by_types: dict[Any, frozenset[str]] = {}

    def frozen(params: optax.Params, extra_args: dict[str, Any]) -> frozenset[str]:
        """Returns the paths of what no update moves.

        Traced once for each structure and types of `params`, and names of extra arguments.
        """
        leaves, structure = jax.tree.flatten(params)
        types = (structure, *((np.shape(leaf), _dtype_of(leaf)) for leaf in leaves))
        types += tuple(sorted(extra_args))
        if types not in frozen_by_types:
            frozen_by_types[types] = frozen_leaves(tx, params, extra_args)
        return frozen_by_types[types]

    def check(params: optax.Params, state: Any, extra_args: dict[str, Any]) -> None:
        leaves = leaves_by_path(params).items()
        narrow = {path: leaf.dtype for path, leaf in leaves if _is_narrow(leaf)}
        with_master = shapes_with_master(state).keys()
        if narrow.keys() <= with_master:
            return
        safe = with_master | frozen(params, extra_args)
        trained = {path: dtype for path, dtype in narrow.items() if path not in safe}
        if trained:
            raise ValueError(_message(trained, policy))

    def init(params: optax.Params) -> WithLossScaleState:
        state = tx.init(params)
        check(params, state, {})
        return state

    def update(
        updates: optax.Updates,
        state: WithLossScaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithLossScaleState]:
        check(params, state, extra_args)
        return tx.update(updates, state, params, **extra_args)

    checked: Transformation[WithLossScaleState] = optax.GradientTransformationExtraArgs(
        init, update
    )
    return checked


def _dtype_of(leaf: Any) -> Any:
    return getattr(leaf, "dtype", type(leaf))


def _is_narrow(leaf: Any) -> bool:
    """Returns whether a leaf, abstract ones too, holds real floats of less than 32 bits."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _message(trained: dict[str, Any], policy: Policy) -> str:
    path, dtype = next(iter(trained.items()))
    more = f" and {len(trained) - 1} more" if len(trained) > 1 else ""
    cast = "policy.cast_to_param(params) or jmp.cast_to_full(params)"
    ways = f"params.astype('float32') of each {dtype} leaf"
    if is_half(dtype):
        in_half = dataclasses.replace(policy, param_dtype=dtype)
        ways = (
            f"{cast}; or, to store them in half, a policy with half parameters, '{in_half}', which "
            "keeps a float32 master of each"
        )
    return (
        f"mixed_precision(..., '{policy}') got params{path} of dtype {dtype}{more}, which it would "
        "train without masters: updates below the spacing of that dtype are lost. Expected "
        f"parameters in float32: {ways}. What optax.set_to_zero freezes may stay as it is."
    )


def frozen_leaves(
    tx: optax.GradientTransformationExtraArgs, params: optax.Params, extra_args: dict[str, Any]
) -> frozenset[str]:
    """Returns the paths (`keystr`) of the parameters whose updates are zeros in every step.

    `optax.set_to_zero` in a partition, or masked at the end of a chain, makes updates of zeros.
    These are followed through the traced `update`, also into `MultiSteps` and `apply_if_finite`,
    whose conditions choose between zeros then. What is not known to keep a zero counts as a
    movement.

    Args:
      tx: the optimizer. It is traced, not run. One that cannot be traced like this freezes none.
      params: arrays, traced or not, or `jax.ShapeDtypeStruct`s.
      extra_args: those of `update`, as far as they are known. Numbers among them may be others in
        another step.
    """
    given = {"value": jnp.ones([]), "value_fn": _sum, **extra_args}
    numbers = {
        name: given.pop(name)
        for name, argument in extra_args.items()
        if all(isinstance(x, float) or stands_for_numbers(x) for x in jax.tree.leaves(argument))
    }

    def init(params: optax.Params) -> optax.OptState:
        return tx.init(_float8_as_float32(params))

    def update(
        gradients: optax.Updates, state: optax.OptState, params: optax.Params, numbers: Any
    ) -> Any:
        gradients, params = _float8_as_float32((gradients, params))
        return tx.update(gradients, state, params, **{"grad": gradients, **given, **numbers})

    try:
        first, state = jax.make_jaxpr(init, return_shape=True)(params)
        traced, (updates, _) = jax.make_jaxpr(update, return_shape=True)(
            params, state, params, numbers
        )
    except Exception:  # whatever an optimizer raises
        return frozenset()
    unknown = [False] * len(jax.tree.leaves(params))
    unknown_numbers = [False] * len(jax.tree.leaves(numbers))
    paths = leaves_by_path(updates)
    # Of a state only moments: `inject_hyperparams` has rates there, scalars which users change.
    moments = [bool(leaf.shape) for leaf in jax.tree.leaves(state)]
    of_state, before = list(map(operator.and_, moments, _zeros(first, unknown))), None
    while of_state != before:  # which moments stay at zero
        before = of_state
        zeros = _zeros(traced, [*unknown, *before, *unknown, *unknown_numbers])
        of_state = list(map(operator.and_, before, zeros[len(paths) :]))
    return frozenset(path for path, zero in zip(paths, zeros, strict=False) if zero)


def _float8_as_float32(tree: PyTree) -> PyTree:
    """Casts float8 leaves to float32: in float8 a learning rate of 1e-4 is zero."""

    def wide(leaf: Any) -> Any:
        is_float8 = leaf.dtype.itemsize == 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(jnp.float32) if is_float8 else leaf

    return jax.tree.map(wide, tree)


def _sum(params: optax.Params) -> jax.Array:
    return sum(
        (jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(params)), jnp.zeros([])
    )


def _zeros(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Returns which results of a jaxpr are zeros, if those of its inputs are."""
    zeros = Propagation(
        rule=_zero_results,
        join=lambda choices, deciding: all(choices),
        of_constant=lambda atom: hasattr(atom, "val") and not np.any(atom.val),
    )
    return zeros.through(jaxpr, inputs)


def _zero_results(equation: Any, operands: list[bool], inside: WayInside[bool]) -> list[bool]:
    """Returns which results of an equation are zeros, if those of its operands are."""
    of_functions = inside()
    if of_functions is not None:
        return of_functions
    name = equation.primitive.name
    zero = (
        (name in KEEP_ZEROS and all(operands))
        or (name == "mul" and any(operands))
        or (name == "div" and operands[0])
        or (name == "integer_pow" and operands[0] and equation.params["y"] > 0)
        or (name == "select_n" and all(operands[1:]))
    )
    return [zero] * len(equation.outvars)
