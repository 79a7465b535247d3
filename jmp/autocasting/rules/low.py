"""LOW: products. Operands and result in the compute dtype.

The hardware multiplies half operands and adds up in float32 whatever the result's dtype (cuBLAS,
cuDNN). A float32 result would save nothing and make both products of the backward pass float32.
"""

import numpy as np

from jmp.autocasting._registry import Category, Params, register_rule

LOW = Category.LOW


def result_in_compute_dtype(params: Params, dtype: np.dtype) -> Params:
    """Asks the product for a half result."""
    return {**params, "preferred_element_type": dtype}


register_rule(
    ["dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"],
    LOW,
    "tensor cores multiply in half and add up in float32",
    params_in_half=result_in_compute_dtype,
)
