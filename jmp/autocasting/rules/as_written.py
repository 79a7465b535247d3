"""AS_WRITTEN: bits, keys, counts and spacings as the user wrote them; also what has no rule."""

from jmp.autocasting._registry import Category, register_rule

AS_WRITTEN = Category.AS_WRITTEN

NO_HALF_FORM = "bits, keys and counts have no half form"

register_rule("reduce_precision", AS_WRITTEN, NO_HALF_FORM, "casts")
register_rule("iota", AS_WRITTEN, NO_HALF_FORM, "cheap")
register_rule(["bitcast_convert_type", "random_gamma", "shift"], AS_WRITTEN, NO_HALF_FORM)

register_rule(
    "random_seed random_wrap random_unwrap random_bits random_split random_fold_in threefry2x32 "
    "rng_bit_generator rng_uniform".split(),
    AS_WRITTEN,
    NO_HALF_FORM,
    "draws_bits",
)
register_rule("nextafter", AS_WRITTEN, "the next number, and so the spacing, is that of a dtype")
