"""What `compare` raises or warns of: a reference that is none, and a scale that is too large."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp._stacklevel import users_stacklevel
from jmp.diagnostics._places import with_places
from jmp.dtypes import is_castable


def cotangent_of(result: Any, scale: float) -> float:
    """Returns the number that a mean of `result` times `scale` has as its cotangent everywhere.

    Infinite where float16 has none as large; `warn_of_narrow_results` says so.
    """
    number = scale / max(1, result.size)
    is_beyond = result.dtype == jnp.float16 and number > float(jnp.finfo(jnp.float16).max)
    return math.inf if is_beyond else number


def warn_of_narrow_results(found: Mapping[tuple[str, str], jax.Array], scale: float) -> None:
    """Warns of results whose dtype has no number as large as their cotangent, as in training."""
    for (kind, path), x in found.items():
        if kind == "result" and math.isinf(cotangent_of(x, scale)):
            warnings.warn(
                f"compare's result{' ' * bool(path)}{path} is float16 under the policy, which has "
                f"no number as large as the scale {scale:g}: its gradients are infinite, as in a "
                "training with this scale. Widen what the loss is computed from "
                "(jmp.cast_to_full of the parameters or the batch), or the loss itself.",
                stacklevel=users_stacklevel(),
            )


def check_float64(jaxpr: Any) -> None:
    """Raises or warns where a program, traced in float64, is no reference for one in float32."""
    narrow = []
    for equation, _, source, _ in with_places(_jax_compat.open_jaxpr(jaxpr)[0]):
        if equation.params.get("bit_width") == 64:  # random_bits
            raise ValueError(
                "compare got a function that draws random numbers of 64 bits in float64: others "
                "than in float32, which would count as error. Switch dropout and noise off, draw "
                "them with dtype=jnp.float32, or compare with reference='float32'."
            )
        if equation.primitive.name == "convert_element_type":
            before, after = (atom[0].aval.dtype for atom in (equation.invars, equation.outvars))
            # Scalars pass: JAX's own random numbers have bounds that it casts.
            is_array_cast = equation.outvars[0].aval.ndim > 0 and before == np.float64
            if is_array_cast and after != np.float64 and is_castable(after):
                narrow.append(f"{source or '?'} to {after}")
    if narrow:
        warnings.warn(
            f"compare's reference is not float64 throughout: fun casts {len(narrow)} values down, "
            f"the first at {narrow[0]}. Remove such casts and dtype= arguments for the comparison.",
            stacklevel=users_stacklevel(),
        )
