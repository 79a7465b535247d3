"""FOLLOW: exact or bounded, or data movement: computed in whatever dtype comes in."""

from jmp.autocasting._registry import Category, register_rule

BOUNDED = "bounded by one, with bounded slope"
REPEATS = "moves data; its derivative is a sum, so it repeats a float32 value and rounds afterwards"
SUMS = "moves data; its derivative adds up repeated rows, so it reads float32 and rounds afterwards"

# The names of primitives, why, and traits.
FOLLOW = {
    "is_finite abs sign real imag optimization_barrier": ("exact", "fusible"),
    "floor ceil round": ("exact", "fusible wraps"),
    "copy copy_p": ("exact", "fusible reshapes"),
    "stop_gradient": ("exact", "fusible permutes"),
    "tanh logistic erf": (BOUNDED, "fusible expensive bounded"),
    "sin cos": (BOUNDED, "fusible expensive bounded wraps"),
    "reshape squeeze expand_dims": ("moves data", "fusible reshapes"),
    "transpose rev name pvary": ("moves data", "fusible permutes"),
    "slice split": ("moves data", "fusible selects"),
    "dynamic_slice stack unstack": ("moves data", "fusible rearranges"),
    "device_put pcast layout_constraint": ("moves data", "fusible rearranges"),
    "sharding_constraint reshard": ("moves data", "fusible sends rearranges"),
    "broadcast_in_dim": (REPEATS, "fusible sums_backward repeats"),
    "tile": (REPEATS, "fusible sums_backward rearranges"),
    "reduce_max reduce_min": (
        "exact; its derivative counts ties, so it runs in float32 between two casts",
        "fusible sums_backward reduces",
    ),
    "argmax argmin": ("exact", "fusible chooses"),
    "neg and or not": ("exact", "fusible cheap"),
    "reduce_and reduce_or reduce_xor xor population_count clz": ("exact", "fusible"),
    "shift_left shift_right_logical shift_right_arithmetic": ("exact", "fusible"),
    "gather": (SUMS, "fusible sums_backward rearranges"),
    "sort top_k approx_top_k cummax cummin reduce_window_max reduce_window_min pmax pmin": (
        "exact; moves or compares data",
        "",
    ),
    "all_gather all_gather_invariant all_gather_reduced ppermute all_to_all pbroadcast": (
        "moves data",
        "sends rearranges",
    ),
}

register_rule(
    "convert_element_type",
    Category.FOLLOW,
    "float32 to float32 and from booleans: exact; every other cast is kept as the user wrote it",
    "fusible casts cheap",
    dtype_param="new_dtype",
)
