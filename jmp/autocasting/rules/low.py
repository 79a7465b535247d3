"""LOW: products. Operands and result in the compute dtype.

The hardware multiplies half operands and adds up in float32 whatever the result's dtype (cuBLAS,
cuDNN). A float32 result would save nothing and make both products of the backward pass float32.
"""

from jmp.autocasting._registry import Category, register_rule

register_rule(
    ["dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"],
    Category.LOW,
    "tensor cores multiply in half and add up in float32",
    dtype_param="preferred_element_type",
)
