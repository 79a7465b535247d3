"""WIDEST: operands must share a dtype. Half, if an operand is half and none requires float32.

Parameters and constants do not decide: a float32 bias joins a half activation in half. What
requires float32 is the float32 result of another computation, or a constant that a half type does
not hold.
"""

from jmp.autocasting._registry import Category, register_rule

ONE_DTYPE = "operands must share a dtype"

register_rule(
    ["add", "sub"],
    Category.WIDEST,
    ONE_DTYPE,
    fusible=True,
    elementwise=True,
    linear=True,
    affine=True,
    masks=True,
    cheap=True,
)
register_rule(
    "mul",
    Category.WIDEST,
    ONE_DTYPE,
    fusible=True,
    elementwise=True,
    affine=True,
    cheap=True,
    keeps_range=True,
)
register_rule("div", Category.WIDEST, ONE_DTYPE, fusible=True, elementwise=True, affine=True)
register_rule(
    ["max", "min"], Category.WIDEST, ONE_DTYPE, fusible=True, elementwise=True, masks=True
)
register_rule(["rem", "atan2"], Category.WIDEST, ONE_DTYPE, fusible=True, elementwise=True)
register_rule(
    "eq ne lt le gt ge".split(),
    Category.WIDEST,
    ONE_DTYPE,
    fusible=True,
    elementwise=True,
    compares=True,
    cheap=True,
)
register_rule(
    "select_n", Category.WIDEST, ONE_DTYPE, fusible=True, masks=True, cheap=True, keeps_range=True
)
register_rule("clamp", Category.WIDEST, ONE_DTYPE, fusible=True)
register_rule(
    "concatenate",
    Category.WIDEST,
    "operands must share a dtype; moves data",
    fusible=True,
    masks=True,
    keeps_range=True,
)
register_rule("pad", Category.WIDEST, "operands must share a dtype; moves data", fusible=True)
register_rule(
    ["dynamic_update_slice", "scatter"],
    Category.WIDEST,
    "writes into an operand of the same dtype",
)
register_rule(
    "scatter-min scatter-max scatter_min scatter_max".split(),
    Category.WIDEST,
    "exact; its derivative counts ties, so it runs in float32 between two casts",
    sums_backward=True,
)
