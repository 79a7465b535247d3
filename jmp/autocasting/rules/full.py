"""FULL: float32, for range, for cancellation, or because many terms are added up."""

from jmp.autocasting._registry import Category, register_rule

FULL = Category.FULL

register_rule(
    "exp exp2 expm1 sinh cosh".split(),
    FULL,
    "grows exponentially: exp(12) overflows float16",
    "fusible expensive",
)
register_rule(
    "log log1p".split(),
    FULL,
    "log of a half probability loses all digits near 1; log(0) where float16 flushes",
    "fusible expensive",
)
register_rule(
    "pow integer_pow square".split(),
    FULL,
    "300 squared overflows float16; squares of small values become zero",
    "fusible expensive",
)
register_rule(
    "sqrt rsqrt cbrt".split(),
    FULL,
    "usually follows a sum of squares, whose range a half type does not hold",
    "fusible expensive",
)
STEEP = "steep, or cancels, near the ends of its domain"
register_rule("tan", FULL, STEEP, "fusible expensive wraps")
register_rule(
    "acos asin atan acosh asinh atanh erfc erf_inv lgamma digamma one_minus_square".split(),
    FULL,
    STEEP,
    "fusible expensive",
)
register_rule(
    "bessel_i0e bessel_i1e igamma igammac igamma_grad_a random_gamma_grad polygamma zeta "
    "regularized_incomplete_beta".split(),
    FULL,
    "a series or a continued fraction: no half kernel",
    "fusible expensive",
)
register_rule(
    ["reduce_sum", "reduce_prod"],
    FULL,
    "a sum of ones stops growing at 2048 in float16 and at 256 in bfloat16",
    "fusible reduces sums",
)
ACCUMULATES = "accumulates: in a half type small terms are lost"
register_rule(
    "cumsum cumprod cumlogsumexp reduce_window_sum reduce scatter-add scatter-sub scatter-mul "
    "scatter_add scatter_sub scatter_mul".split(),
    FULL,
    ACCUMULATES,
    "sums",
)
register_rule(
    "add_any reduce_window select_and_scatter_add select_and_gather_add".split(), FULL, ACCUMULATES
)

register_rule(
    "psum psum2 psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter".split(),
    FULL,
    "adds up over devices, in the dtype it is given",
    "sums sums_devices",
)
register_rule(
    "cholesky lu svd qr eigh eig triangular_solve geqrf householder_product hessenberg schur "
    "tridiagonal tridiagonal_solve fft lu_pivots_to_permutation custom_linear_solve".split(),
    FULL,
    "no half kernel",
)
