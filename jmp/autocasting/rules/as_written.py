"""AS_WRITTEN: bits, keys, counts and spacings as the user wrote them; also what has no rule."""

from jmp.autocasting._registry import Category, register_rule

NO_HALF_FORM = "bits, keys and counts have no half form"

register_rule("reduce_precision", Category.AS_WRITTEN, NO_HALF_FORM, casts=True)
register_rule("iota", Category.AS_WRITTEN, NO_HALF_FORM, cheap=True)
register_rule(["bitcast_convert_type", "random_gamma", "shift"], Category.AS_WRITTEN, NO_HALF_FORM)
register_rule(
    "random_seed random_wrap random_unwrap random_bits random_split random_fold_in threefry2x32 "
    "rng_bit_generator rng_uniform".split(),
    Category.AS_WRITTEN,
    NO_HALF_FORM,
    draws_bits=True,
)
register_rule(
    "nextafter", Category.AS_WRITTEN, "the next number, and so the spacing, is that of a dtype"
)
