"""FULL: float32, for range, for cancellation, or because many terms are added up."""

from jmp.autocasting._registry import Category, register_rule

register_rule(
    "exp exp2 expm1 sinh cosh".split(),
    Category.FULL,
    "grows exponentially: exp(12) overflows float16",
    fusible=True,
    expensive=True,
)
register_rule(
    "log log1p".split(),
    Category.FULL,
    "log of a half probability loses all digits near 1; log(0) where float16 flushes",
    fusible=True,
    expensive=True,
)
register_rule(
    "pow integer_pow square".split(),
    Category.FULL,
    "300 squared overflows float16; squares of small values flush to zero",
    fusible=True,
    expensive=True,
)
register_rule(
    "sqrt rsqrt cbrt".split(),
    Category.FULL,
    "stands behind a sum of squares, whose range a half type does not hold",
    fusible=True,
    expensive=True,
)
register_rule(
    "tan acos asin atan acosh asinh atanh erfc erf_inv lgamma digamma".split(),
    Category.FULL,
    "steep, or cancels, near the ends of its domain",
    fusible=True,
    expensive=True,
)
register_rule(
    "bessel_i0e bessel_i1e igamma igammac igamma_grad_a random_gamma_grad polygamma zeta "
    "regularized_incomplete_beta".split(),
    Category.FULL,
    "a series or a continued fraction: no half kernel",
    fusible=True,
    expensive=True,
)
register_rule(
    ["reduce_sum", "reduce_prod"],
    Category.FULL,
    "a sum of ones sticks at 2048 in float16 and at 256 in bfloat16",
    fusible=True,
    reduces=True,
    sums=True,
)
ACCUMULATES = "accumulates: in a half type contributions stop counting"
register_rule(
    "cumsum cumprod cumlogsumexp reduce_window_sum reduce scatter-add scatter-sub scatter-mul "
    "scatter_add scatter_sub scatter_mul".split(),
    Category.FULL,
    ACCUMULATES,
    sums=True,
)
register_rule(
    "add_any reduce_window select_and_scatter_add select_and_gather_add".split(),
    Category.FULL,
    ACCUMULATES,
)
register_rule(
    "psum psum2 psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter".split(),
    Category.FULL,
    "adds up over devices, in the dtype it is given",
    sums=True,
)
register_rule(
    "cholesky lu svd qr eigh eig triangular_solve".split(),
    Category.FULL,
    "no half kernel",
    factorises=True,
)
register_rule(
    "geqrf householder_product hessenberg schur tridiagonal tridiagonal_solve fft "
    "lu_pivots_to_permutation custom_linear_solve".split(),
    Category.FULL,
    "no half kernel",
)
