"""Which parameters an optimizer never moves, whatever their gradients: read off its program.

`optax.set_to_zero` in a partition, or masked at the end of a chain, makes updates of zeros. Their
zeros are followed through the traced `update`, also into `MultiSteps` and `apply_if_finite`, whose
conditions choose between zeros then. What is not known to keep a zero counts as a movement.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp import _jax_compat
from jmp._calls import stands_for_numbers
from jmp.trees import PyTree, leaves_by_path

# Results of these are zeros if all operands are.
KEEP_ZEROS = frozenset(
    """abs add add_any broadcast_in_dim concatenate convert_element_type copy copy_p expand_dims
    max min neg optimization_barrier pcast pvary reduce_precision reduce_sum reshape reshard
    sharding_constraint sign slice split sqrt square squeeze sub transpose""".split()
)


def frozen_leaves(
    tx: optax.GradientTransformationExtraArgs, params: optax.Params, extra_args: dict[str, Any]
) -> frozenset[str]:
    """Returns the paths (`keystr`) of the parameters whose updates are zeros in every step.

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
        return tx.init(_without_float8(params))

    def update(
        gradients: optax.Updates, state: optax.OptState, params: optax.Params, numbers: Any
    ) -> Any:
        gradients, params = _without_float8((gradients, params))
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


def _without_float8(tree: PyTree) -> PyTree:
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
    jaxpr, _ = _jax_compat.open_jaxpr(jaxpr)
    known = {var for var, zero in zip(jaxpr.invars, inputs, strict=True) if zero}

    def is_zero(atom: Any) -> bool:
        return not np.any(atom.val) if hasattr(atom, "val") else atom in known

    for equation in jaxpr.eqns:
        results = _results(equation, [is_zero(atom) for atom in equation.invars])
        known.update(var for var, zero in zip(equation.outvars, results, strict=True) if zero)
    return [is_zero(atom) for atom in jaxpr.outvars]


def _results(equation: Any, operands: list[bool]) -> list[bool]:
    """Returns which results of an equation are zeros, if those of its operands are."""
    name = equation.primitive.name
    if name in _jax_compat.CALLS and name != "shard_map":
        (inner,) = _jax_compat.inner_jaxprs(equation)
        return _zeros(inner, operands)
    if name == "cond":
        branches = _jax_compat.branches(equation.params)
        return [
            all(of_each)
            for of_each in zip(*(_zeros(b, operands[1:]) for b in branches), strict=True)
        ]
    zero = (
        (name in KEEP_ZEROS and all(operands))
        or (name == "mul" and any(operands))
        or (name == "div" and operands[0])
        or (name == "integer_pow" and operands[0] and equation.params["y"] > 0)
        or (name == "select_n" and all(operands[1:]))
    )
    return [zero] * len(equation.outvars)
