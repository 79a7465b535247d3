"""The op table's rows by category; importing this module fills the registry.

A row has the names of primitives, why they are in the category, and their traits (`Rule`). Rules
with a parameter that says the dtype of the result are registered by themselves.
"""

from jmp.autocasting._registry import Category, register_rule

# LOW: products. Operands and result in the compute dtype.
#
# The hardware multiplies half operands and adds up in float32 whatever the result's dtype (cuBLAS,
# cuDNN). A float32 result would save nothing and make both products of the backward pass float32.

register_rule(
    ["dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"],
    Category.LOW,
    "tensor cores multiply in half and add up in float32",
    dtype_param="preferred_element_type",
)

# FULL: float32, for range, for cancellation, or because many terms are added up. A softmax or a
# LayerNorm is made of these and of what stands between them: one float32 island (`_islands.py`).

STEEP = "steep, or cancels, near the ends of its domain"
SERIES = "a series or a continued fraction: no half kernel"
ACCUMULATES = "accumulates: in a half type small terms are lost"
NO_HALF_KERNEL = "no half kernel"

FULL = {
    "exp exp2 expm1 sinh cosh": (
        "grows exponentially: exp(12) overflows float16",
        "fusible expensive",
    ),
    "log log1p": (
        "log of a half probability loses all digits near 1; log(0) where float16 flushes",
        "fusible expensive",
    ),
    "pow integer_pow square": (
        "300 squared overflows float16; squares of small values become zero",
        "fusible expensive",
    ),
    "sqrt rsqrt cbrt": (
        "usually follows a sum of squares, whose range a half type does not hold",
        "fusible expensive",
    ),
    "tan": (STEEP, "fusible expensive wraps"),
    "acos asin atan acosh asinh atanh": (STEEP, "fusible expensive"),
    "erfc erf_inv lgamma digamma one_minus_square": (STEEP, "fusible expensive"),
    "bessel_i0e bessel_i1e igamma igammac igamma_grad_a": (SERIES, "fusible expensive"),
    "random_gamma_grad polygamma zeta regularized_incomplete_beta": (SERIES, "fusible expensive"),
    "reduce_sum reduce_prod": (
        "a sum of ones stops growing at 2048 in float16 and at 256 in bfloat16",
        "fusible reduces sums",
    ),
    "cumsum cumprod cumlogsumexp reduce_window_sum reduce": (ACCUMULATES, "sums"),
    "scatter-add scatter-sub scatter-mul scatter_add scatter_sub scatter_mul": (
        ACCUMULATES,
        "sums joins",
    ),
    "reduce_window select_and_scatter_add select_and_gather_add": (ACCUMULATES, ""),
    "psum psum2 psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter": (
        "adds up over devices, in the dtype it is given",
        "sums sums_devices",
    ),
    "cholesky lu svd qr eigh eig triangular_solve geqrf householder_product": (NO_HALF_KERNEL, ""),
    "hessenberg schur tridiagonal tridiagonal_solve custom_linear_solve": (NO_HALF_KERNEL, ""),
    "lu_pivots_to_permutation fft": (NO_HALF_KERNEL, ""),
}

# WIDEST: operands must share a dtype. Half, if an operand is half and none requires float32.
#
# Parameters and constants do not decide: a float32 bias joins a half activation in half. The
# float32 result of another computation requires float32, and so does a constant that a half type
# does not hold.

ONE_DTYPE = "operands must share a dtype"
MOVES = "operands must share a dtype; moves data"

WIDEST = {
    "add sub add_any": (ONE_DTYPE, "fusible elementwise linear affine masks cheap"),
    "mul": (ONE_DTYPE, "fusible elementwise affine cheap keeps_range"),
    "div": (ONE_DTYPE, "fusible elementwise affine"),
    "max min": (ONE_DTYPE, "fusible elementwise masks"),
    "rem": (ONE_DTYPE, "fusible elementwise wraps"),
    "atan2": (ONE_DTYPE, "fusible elementwise"),
    "eq ne lt le gt ge": (ONE_DTYPE, "fusible elementwise compares cheap"),
    "select_n": (ONE_DTYPE, "fusible masks cheap keeps_range rearranges"),
    "clamp": (ONE_DTYPE, "fusible"),
    "concatenate": (MOVES, "fusible masks keeps_range joins rearranges"),
    "pad": (MOVES, "fusible joins rearranges"),
    "dynamic_update_slice scatter": (
        "writes into an operand of the same dtype",
        "joins rearranges writes",
    ),
    "scatter-min scatter-max scatter_min scatter_max": (
        "exact; its derivative counts ties, so it runs in float32 between two casts",
        "sums_backward",
    ),
}

# FOLLOW: exact or bounded, or data movement: computed in whatever dtype comes in.

BOUNDED = "bounded by one, with bounded slope"
REPEATS = "moves data; its derivative is a sum, so it repeats a float32 value and rounds afterwards"
SUMS = "moves data; its derivative adds up repeated rows, so it reads float32 and rounds afterwards"

FOLLOW = {
    "is_finite abs sign real imag optimization_barrier": ("exact", "fusible"),
    "floor ceil round": ("exact", "fusible wraps"),
    "copy copy_p": ("exact", "fusible reshapes"),
    "stop_gradient": ("exact", "fusible permutes"),
    "tanh logistic erf": (BOUNDED, "fusible expensive bounded"),
    "sin cos": (BOUNDED, "fusible expensive bounded wraps"),
    "reshape squeeze expand_dims": ("moves data", "fusible reshapes"),
    "transpose rev pvary": ("moves data", "fusible permutes"),
    # In an island it would name a float32 number, and a remat that keeps the name would keep that.
    "name": ("moves data; what a remat keeps by its name is half where it was", "permutes"),
    "slice split": ("moves data", "fusible selects"),
    "dynamic_slice": ("moves data", "fusible rearranges looks_up"),
    "stack unstack": ("moves data", "fusible rearranges"),
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
    "gather": (SUMS, "fusible sums_backward rearranges looks_up"),
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

# AS_WRITTEN: bits, keys, counts and spacings as the user wrote them; also what has no rule.

NO_HALF_FORM = "bits, keys and counts have no half form"

AS_WRITTEN = {
    "reduce_precision": (NO_HALF_FORM, "casts"),
    "iota": (NO_HALF_FORM, "cheap"),
    "bitcast_convert_type random_gamma shift": (NO_HALF_FORM, ""),
    "random_seed random_wrap random_unwrap random_bits random_split": (NO_HALF_FORM, "draws_bits"),
    "random_fold_in threefry2x32 rng_bit_generator rng_uniform": (NO_HALF_FORM, "draws_bits"),
    "nextafter": ("the next number, and so the spacing, is that of a dtype", ""),
}

ROWS = {
    Category.FULL: FULL,
    Category.WIDEST: WIDEST,
    Category.FOLLOW: FOLLOW,
    Category.AS_WRITTEN: AS_WRITTEN,
}

for category, rows in ROWS.items():
    for primitives, (why, traits) in rows.items():
        register_rule(primitives.split(), category, why, traits)
