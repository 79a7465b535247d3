"""WIDEST: operands must share a dtype. Half, if an operand is half and none insists on float32.

Parameters and constants have no vote: a float32 bias joins a half activation in half. What insists
is a float32 result of another computation, or a constant that a half type does not hold.
"""

from jmp.autocasting._registry import Category, register_rule

register_rule(
    "add sub mul div rem max min atan2 select_n clamp eq ne lt le gt ge".split(),
    Category.WIDEST,
    "operands must share a dtype",
    fusible=True,
)
register_rule(
    ["concatenate", "pad"],
    Category.WIDEST,
    "operands must share a dtype; moves data",
    fusible=True,
)
register_rule(
    ["dynamic_update_slice", "scatter"],
    Category.WIDEST,
    "writes into an operand of the same dtype",
)
register_rule(
    "scatter-min scatter-max scatter_min scatter_max".split(),
    Category.WIDEST,
    "exact; its derivative counts ties, so it runs in float32 between two casts",
    exact=True,
)
