"""The passes that every target has: those before its own, and those after."""

from jmp.autocasting._passes import Pass
from jmp.autocasting.float8 import multiply_in_float8, send_in_float8, with_bounds
from jmp.autocasting.targets._lookups import look_up_in_half
from jmp.autocasting.targets._maxima import compare_in_half
from jmp.autocasting.targets._scaled_scores import scale_before
from jmp.autocasting.targets._slopes import slopes_from_operands
from jmp.autocasting.targets._weight_sums import sum_weights_after_turns
from jmp.autocasting.targets._wide_gradients import widen_gradients

FIRST = (
    Pass("float32 gradients", "gradients of parameters", widen_gradients),
    # Sending depends on which products are float8.
    Pass("float8 products", "operands and gradients of products", multiply_in_float8),
    Pass("float8 is sent", "", send_in_float8),
    Pass("scaled scores", "products of small numbers", scale_before),
    Pass("maxima are compared in half", "", compare_in_half),
    Pass("rows that repeat few times", "gradients of these rows", look_up_in_half),
    Pass("slopes of softplus", "these slopes", slopes_from_operands),
    Pass("weights are summed after turns", "gradients of loops' weights", sum_weights_after_turns),
)
# Bounds see no steps that a fused attention replaces.
LAST = (Pass("float8 bounds", "the scales of float8 products", with_bounds),)
