"""FOLLOW: exact or bounded, or data movement: computed in whatever dtype comes in."""

import numpy as np

from jmp.autocasting._registry import Category, Params, register_rule

register_rule(
    "is_finite abs sign floor ceil round real imag optimization_barrier".split(),
    Category.FOLLOW,
    "exact",
    fusible=True,
)
register_rule(["copy", "copy_p"], Category.FOLLOW, "exact", fusible=True, reshapes=True)
register_rule("stop_gradient", Category.FOLLOW, "exact", fusible=True, permutes=True)
register_rule(
    "tanh logistic erf sin cos".split(),
    Category.FOLLOW,
    "bounded by one, with bounded slope",
    fusible=True,
    expensive=True,
    bounded=True,
)
register_rule(
    "reshape squeeze expand_dims".split(),
    Category.FOLLOW,
    "moves data",
    fusible=True,
    reshapes=True,
)
register_rule(
    "transpose rev name pvary".split(), Category.FOLLOW, "moves data", fusible=True, permutes=True
)
register_rule(["slice", "split"], Category.FOLLOW, "moves data", fusible=True, selects=True)
register_rule(
    "dynamic_slice stack unstack device_put sharding_constraint pcast reshard "
    "layout_constraint".split(),
    Category.FOLLOW,
    "moves data",
    fusible=True,
)
REPEATS = "moves data; its derivative is a sum, so it repeats a float32 value and rounds afterwards"
register_rule(
    "broadcast_in_dim", Category.FOLLOW, REPEATS, fusible=True, sums_backward=True, repeats=True
)
register_rule("tile", Category.FOLLOW, REPEATS, fusible=True, sums_backward=True)
register_rule(
    ["reduce_max", "reduce_min"],
    Category.FOLLOW,
    "exact; its derivative counts ties, so it runs in float32 between two casts",
    fusible=True,
    sums_backward=True,
    reduces=True,
)
register_rule(["neg", "and", "or", "not"], Category.FOLLOW, "exact", fusible=True, cheap=True)
register_rule(
    "argmax argmin reduce_and reduce_or reduce_xor xor shift_left "
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
    sums_backward=True,
)
register_rule(
    "sort top_k approx_top_k cummax cummin reduce_window_max reduce_window_min "
    "all_gather all_gather_invariant all_gather_reduced ppermute all_to_all "
    "pmax pmin pbroadcast".split(),
    Category.FOLLOW,
    "exact; moves or compares data",
)


def new_dtype_in_half(params: Params, dtype: np.dtype) -> Params:
    """Converts to the half dtype where float32 was asked for."""
    return {**params, "new_dtype": dtype}


register_rule(
    "convert_element_type",
    Category.FOLLOW,
    "float32 to float32 and from booleans: exact; every other cast is the user's word",
    fusible=True,
    casts=True,
    cheap=True,
    params_in_half=new_dtype_in_half,
)
