"""AS_WRITTEN: bits, keys, counts and spacings as the user wrote them; also what has no rule."""

NO_HALF_FORM = "bits, keys and counts have no half form"

# The names of primitives, why, and traits.
AS_WRITTEN = {
    "reduce_precision": (NO_HALF_FORM, "casts"),
    "iota": (NO_HALF_FORM, "cheap"),
    "bitcast_convert_type random_gamma shift": (NO_HALF_FORM, ""),
    "random_seed random_wrap random_unwrap random_bits random_split": (NO_HALF_FORM, "draws_bits"),
    "random_fold_in threefry2x32 rng_bit_generator rng_uniform": (NO_HALF_FORM, "draws_bits"),
    "nextafter": ("the next number, and so the spacing, is that of a dtype", ""),
}
