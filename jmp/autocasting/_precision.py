"""What `precision=` says of a product.

HIGH and HIGHEST, and a named algorithm, are the user's word: such a product has float32 operands
and a float32 result, because whoever asks for more digits than a float32 product has by default
does not want fewer. JAX itself asks inside expm, pinv, lstsq, polyfit, image.resize and in the
derivatives of eigh, svd and cholesky. DEFAULT, and no precision, leave the choice to autocast.

The global `jax_default_matmul_precision` says what a *float32* product does; it keeps no product
from being lowered. So functions are traced with it switched off, and the products that stay float32
are bound with it. (A while loop's condition is bound as it was traced, without.)
"""

from collections.abc import Mapping
from typing import Any

from jax.lax import Precision

from jmp import _jax_compat
from jmp.autocasting._values import FLOAT32

PRODUCTS = frozenset({
    "dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated",
})  # fmt: skip
STRONGER = (Precision.HIGHEST, Precision.HIGH)


def names_algorithm(params: Mapping[str, Any]) -> bool:
    """Returns whether a product says how the hardware shall multiply."""
    return type(params.get("precision")).__name__ in ("DotAlgorithm", "DotAlgorithmPreset")


def asked_for(equation: Any) -> str:
    """Returns why `precision=` keeps a product of float32 operands as it is, or nothing."""
    if equation.primitive.name not in PRODUCTS:
        return ""
    if not any(getattr(atom.aval, "dtype", None) == FLOAT32 for atom in equation.invars):
        return ""
    if names_algorithm(equation.params):
        return "the user named the algorithm"
    precision = equation.params.get("precision")
    both = precision if isinstance(precision, tuple) else (precision,)
    asked = next((p for p in STRONGER if p in both), None)
    return f"the user asked for precision={asked.name}" if asked else ""


def with_default(name: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns parameters in which products that name no precision have the global default's.

    Args:
      name, params: of a primitive that is bound in float32, or as a whole with products inside.
    """
    default = _jax_compat.default_precision()
    if default is None:
        return params

    def change(name: str, params: dict[str, Any]) -> dict[str, Any]:
        names_none = name in PRODUCTS and params["precision"] is None
        return {**params, "precision": default} if names_none else params

    return change(name, _jax_compat.with_inner_params(params, change))
