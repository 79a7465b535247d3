"""WIDEST: operands must share a dtype. Half, if an operand is half and none requires float32.

Parameters and constants do not decide: a float32 bias joins a half activation in half. What
requires float32 is the float32 result of another computation, or a constant that a half type does
not hold.
"""

ONE_DTYPE = "operands must share a dtype"
MOVES = "operands must share a dtype; moves data"

# The names of primitives, why, and traits.
WIDEST = {
    "add sub": (ONE_DTYPE, "fusible elementwise linear affine masks cheap"),
    "mul": (ONE_DTYPE, "fusible elementwise affine cheap keeps_range"),
    "div": (ONE_DTYPE, "fusible elementwise affine"),
    "max min": (ONE_DTYPE, "fusible elementwise masks"),
    "rem": (ONE_DTYPE, "fusible elementwise wraps"),
    "atan2": (ONE_DTYPE, "fusible elementwise"),
    "eq ne lt le gt ge": (ONE_DTYPE, "fusible elementwise compares cheap"),
    "select_n": (ONE_DTYPE, "fusible masks cheap keeps_range rearranges"),
    "clamp": (ONE_DTYPE, "fusible"),
    "concatenate": (MOVES, "fusible masks keeps_range rearranges"),
    "pad": (MOVES, "fusible rearranges"),
    "dynamic_update_slice scatter": ("writes into an operand of the same dtype", "rearranges"),
    "scatter-min scatter-max scatter_min scatter_max": (
        "exact; its derivative counts ties, so it runs in float32 between two casts",
        "sums_backward",
    ),
}
