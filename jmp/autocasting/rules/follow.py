"""FOLLOW: exact or bounded, or data movement: computed in whatever dtype comes in."""

from jmp.autocasting._registry import Category, register_rule

FOLLOW = Category.FOLLOW

register_rule(
    "is_finite abs sign real imag optimization_barrier".split(), FOLLOW, "exact", "fusible"
)
register_rule("floor ceil round".split(), FOLLOW, "exact", "fusible wraps")
register_rule(["copy", "copy_p"], FOLLOW, "exact", "fusible reshapes")
register_rule("stop_gradient", FOLLOW, "exact", "fusible permutes")
BOUNDED = "bounded by one, with bounded slope"
register_rule("tanh logistic erf".split(), FOLLOW, BOUNDED, "fusible expensive bounded")
register_rule("sin cos".split(), FOLLOW, BOUNDED, "fusible expensive bounded wraps")
register_rule("reshape squeeze expand_dims".split(), FOLLOW, "moves data", "fusible reshapes")
register_rule("transpose rev name pvary".split(), FOLLOW, "moves data", "fusible permutes")
register_rule(["slice", "split"], FOLLOW, "moves data", "fusible selects")
register_rule(
    "dynamic_slice stack unstack device_put pcast layout_constraint".split(),
    FOLLOW,
    "moves data",
    "fusible",
)
register_rule(["sharding_constraint", "reshard"], FOLLOW, "moves data", "fusible sends")
REPEATS = "moves data; its derivative is a sum, so it repeats a float32 value and rounds afterwards"
register_rule("broadcast_in_dim", FOLLOW, REPEATS, "fusible sums_backward repeats")
register_rule("tile", FOLLOW, REPEATS, "fusible sums_backward")
register_rule(
    ["reduce_max", "reduce_min"],
    FOLLOW,
    "exact; its derivative counts ties, so it runs in float32 between two casts",
    "fusible sums_backward reduces",
)
register_rule(["argmax", "argmin"], FOLLOW, "exact", "fusible chooses")
register_rule(["neg", "and", "or", "not"], FOLLOW, "exact", "fusible cheap")
register_rule(
    "reduce_and reduce_or reduce_xor xor shift_left "
    "shift_right_logical shift_right_arithmetic population_count clz".split(),
    FOLLOW,
    "exact",
    "fusible",
)
register_rule(
    "gather",
    FOLLOW,
    "moves data; its derivative adds up repeated rows, so it reads float32 and rounds afterwards",
    "fusible sums_backward",
)
register_rule(
    "sort top_k approx_top_k cummax cummin reduce_window_max reduce_window_min pmax pmin".split(),
    FOLLOW,
    "exact; moves or compares data",
)
register_rule(
    "all_gather all_gather_invariant all_gather_reduced ppermute all_to_all pbroadcast".split(),
    FOLLOW,
    "moves data",
    "sends",
)

register_rule(
    "convert_element_type",
    FOLLOW,
    "float32 to float32 and from booleans: exact; every other cast is kept as the user wrote it",
    "fusible casts cheap",
    dtype_param="new_dtype",
)
