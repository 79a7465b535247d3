"""WIDEST: operands must share a dtype. Half, if an operand is half and none requires float32.

Parameters and constants do not decide: a float32 bias joins a half activation in half. What
requires float32 is the float32 result of another computation, or a constant that a half type does
not hold.
"""

from jmp.autocasting._registry import Category, register_rule

WIDEST = Category.WIDEST

ONE_DTYPE = "operands must share a dtype"

register_rule(["add", "sub"], WIDEST, ONE_DTYPE, "fusible elementwise linear affine masks cheap")
register_rule("mul", WIDEST, ONE_DTYPE, "fusible elementwise affine cheap keeps_range")
register_rule("div", WIDEST, ONE_DTYPE, "fusible elementwise affine")
register_rule(["max", "min"], WIDEST, ONE_DTYPE, "fusible elementwise masks")
register_rule("rem", WIDEST, ONE_DTYPE, "fusible elementwise wraps")
register_rule("atan2", WIDEST, ONE_DTYPE, "fusible elementwise")
register_rule("eq ne lt le gt ge".split(), WIDEST, ONE_DTYPE, "fusible elementwise compares cheap")
register_rule("select_n", WIDEST, ONE_DTYPE, "fusible masks cheap keeps_range")
register_rule("clamp", WIDEST, ONE_DTYPE, "fusible")
register_rule(
    "concatenate", WIDEST, "operands must share a dtype; moves data", "fusible masks keeps_range"
)
register_rule("pad", WIDEST, "operands must share a dtype; moves data", "fusible")
register_rule(
    ["dynamic_update_slice", "scatter"], WIDEST, "writes into an operand of the same dtype"
)

register_rule(
    "scatter-min scatter-max scatter_min scatter_max".split(),
    WIDEST,
    "exact; its derivative counts ties, so it runs in float32 between two casts",
    "sums_backward",
)
