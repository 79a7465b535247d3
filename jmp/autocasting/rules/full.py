"""FULL: float32, for range, for cancellation, or because many terms are added up."""

STEEP = "steep, or cancels, near the ends of its domain"
SERIES = "a series or a continued fraction: no half kernel"
ACCUMULATES = "accumulates: in a half type small terms are lost"
NO_HALF_KERNEL = "no half kernel"

# The names of primitives, why, and traits.
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
        "sums",
    ),
    "add_any reduce_window select_and_scatter_add select_and_gather_add": (ACCUMULATES, ""),
    "psum psum2 psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter": (
        "adds up over devices, in the dtype it is given",
        "sums sums_devices",
    ),
    "cholesky lu svd qr eigh eig triangular_solve geqrf householder_product": (NO_HALF_KERNEL, ""),
    "hessenberg schur tridiagonal tridiagonal_solve custom_linear_solve": (NO_HALF_KERNEL, ""),
    "lu_pivots_to_permutation fft": (NO_HALF_KERNEL, ""),
}
