"""Products in float8: which, how they are computed, and what their scales are.

`_passes` chooses the products and lowers them, `_arithmetic` computes them. `_bounds` says of which
products the scales come from bounds, without a maximum, `_extremes` what functions do to bounds.
"""

from jmp.autocasting.float8._arithmetic import E4M3
from jmp.autocasting.float8._bounds import with_bounds
from jmp.autocasting.float8._passes import multiply_in_float8, send_in_float8

__all__ = ["E4M3", "multiply_in_float8", "send_in_float8", "with_bounds"]
