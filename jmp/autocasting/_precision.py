"""What `precision=` says of a product.

HIGH and HIGHEST, and a named algorithm, are the user's word: such a product has float32 operands
and a float32 result, because a user who asks for more digits than a float32 product has by default
does not want fewer. JAX itself asks inside expm, pinv, lstsq, polyfit, image.resize and in the
derivatives of eigh, svd and cholesky. DEFAULT, and no precision, leave the choice to autocast.

The global `jax_default_matmul_precision` says what a *float32* product does; it keeps no product
from being lowered. So functions are traced with it switched off, and the products that stay float32
are bound with it. (A while loop's condition is bound as it was traced, without.)
"""

from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import Precision

from jmp import _jax_compat
from jmp.autocasting._numbers import dtype_of
from jmp.autocasting._registry import Category, Params, rule_for
from jmp.dtypes import FLOAT32

STRONGER = (Precision.HIGHEST, Precision.HIGH)


def names_algorithm(params: Params) -> bool:
    """Returns whether a product says how the hardware shall multiply."""
    return type(params.get("precision")).__name__ in ("DotAlgorithm", "DotAlgorithmPreset")


def asked_for(equation: JaxprEqn) -> str:
    """Returns why `precision=` keeps a product of float32 operands as it is, or nothing."""
    if rule_for(equation.primitive.name).category is not Category.LOW:
        return ""
    if not any(dtype_of(atom) == FLOAT32 for atom in equation.invars):
        return ""
    if names_algorithm(equation.params):
        return "the user named the algorithm"
    precision = equation.params.get("precision")
    both = precision if isinstance(precision, tuple) else (precision,)
    asked = next((p for p in STRONGER if p in both), None)
    return f"the user asked for precision={asked.name}" if asked else ""


def with_default(name: str, params: Params) -> Params:
    """Returns parameters in which products that name no precision have the global default's.

    Args:
      name, params: of a primitive that is bound in float32, or as a whole with products inside.
    """
    default = _default_precision()
    if default is None:
        return params
    found = {key: _with_default_inside(parameter) for key, parameter in params.items()}
    names_none = rule_for(name).category is Category.LOW and params.get("precision", "") is None
    return {**found, "precision": default} if names_none else found


def _with_default_inside(parameter: Any) -> Any:
    """Returns a parameter of an equation with the same change in the jaxprs that it holds."""
    if type(parameter) in (tuple, list):
        return type(parameter)(map(_with_default_inside, parameter))
    inner, _ = _jax_compat.open_jaxpr(parameter)
    if not hasattr(inner, "eqns"):
        return parameter
    equations = [
        equation.replace(params=with_default(equation.primitive.name, equation.params))
        for equation in inner.eqns
    ]
    changed = inner.replace(eqns=equations)
    return changed if inner is parameter else parameter.replace(jaxpr=changed)


def _default_precision() -> Any:
    """Returns what the global default puts into a product that names no precision; or None."""
    if _jax_compat.default_precision_setting() is None:
        return None
    vector = jax.ShapeDtypeStruct((1,), np.float32)
    (equation,) = _jax_compat.open_jaxpr(jax.make_jaxpr(jax.lax.dot)(vector, vector))[0].eqns
    return equation.params["precision"]
