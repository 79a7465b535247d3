"""AS_WRITTEN: bits, keys, counts and spacings as the user wrote them; also what has no rule."""

from jmp.autocasting._registry import Category, register_rule

register_rule(
    "reduce_precision bitcast_convert_type iota random_seed random_wrap random_unwrap random_bits "
    "random_split random_fold_in random_gamma threefry2x32 shift "
    "rng_bit_generator rng_uniform".split(),
    Category.AS_WRITTEN,
    "bits, keys and counts have no half form",
)
register_rule(
    "nextafter", Category.AS_WRITTEN, "the next number, and so the spacing, is that of a dtype"
)
