"""FOLLOW: exact or bounded, or data movement: computed in whatever dtype comes in."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jmp.autocasting._registry import Category, register_rule

register_rule(
    "neg abs sign floor ceil round is_finite copy copy_p stop_gradient real imag "
    "optimization_barrier".split(),
    Category.FOLLOW,
    "exact",
    fusible=True,
)
BOUNDED = ("tanh", "logistic", "erf", "sin", "cos")

register_rule(
    BOUNDED,
    Category.FOLLOW,
    "bounded by one, with bounded slope",
    fusible=True,
    expensive=True,
)
register_rule(
    "reshape transpose squeeze expand_dims rev slice dynamic_slice split stack unstack name "
    "device_put sharding_constraint pvary pcast reshard layout_constraint".split(),
    Category.FOLLOW,
    "moves data",
    fusible=True,
)
register_rule(
    ["broadcast_in_dim", "tile"],
    Category.FOLLOW,
    "moves data; its derivative is a sum, so it repeats a float32 value and rounds afterwards",
    fusible=True,
    exact=True,
)
register_rule(
    ["reduce_max", "reduce_min"],
    Category.FOLLOW,
    "exact; its derivative counts ties, so it runs in float32 between two casts",
    fusible=True,
    exact=True,
)
register_rule(
    "argmax argmin reduce_and reduce_or reduce_xor and or not xor shift_left "
    "shift_right_logical shift_right_arithmetic population_count clz".split(),
    Category.FOLLOW,
    "exact",
    fusible=True,
)
register_rule(
    "gather",
    Category.FOLLOW,
    "moves data; its derivative adds up repeated rows, so it reads float32 and rounds afterwards",
    fusible=True,
    exact=True,
)
register_rule(
    "sort top_k approx_top_k cummax cummin reduce_window_max reduce_window_min "
    "all_gather all_gather_invariant all_gather_reduced ppermute all_to_all "
    "pmax pmin pbroadcast".split(),
    Category.FOLLOW,
    "exact; moves or compares data",
)


def new_dtype_in_half(params: Mapping[str, Any], dtype: np.dtype) -> Mapping[str, Any]:
    """Converts to the half dtype where float32 was asked for."""
    return {**params, "new_dtype": dtype}


register_rule(
    "convert_element_type",
    Category.FOLLOW,
    "float32 to float32 and from booleans: exact; every other cast is the user's word",
    fusible=True,
    params_in_half=new_dtype_in_half,
)
