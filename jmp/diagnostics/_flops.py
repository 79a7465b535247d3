"""How many floating-point operations a product takes: two for each multiplication and addition."""

import math
from typing import Any


def flops(
    name: str, params: dict[str, Any], shapes: list[tuple[int, ...]], result: tuple[int, ...]
) -> int:
    """Returns the operations of one product.

    Args:
      name, params: of the primitive.
      shapes: of its operands.
      result: shape of its result.
    """
    if name == "dot_general":
        contracted: tuple[int, ...] = params["dimension_numbers"][0][0]
        return 2 * math.prod(result) * math.prod(shapes[0][axis] for axis in contracted)
    if name == "conv_general_dilated":
        features: int = shapes[1][params["dimension_numbers"].rhs_spec[0]]
        # Zeros between the elements of a dilated input are not multiplied (strided gradients).
        features = max(1, features) * math.prod(params["lhs_dilation"])
        return 2 * math.prod(result) * math.prod(shapes[1]) // features
    if name.startswith("ragged_dot"):
        # Each row meets the matrix of its own group.
        return 2 * math.prod(shapes[0]) * shapes[1][-1]
    return 0
