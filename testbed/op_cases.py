"""One case for each primitive of autocast's op table: how it is called, and on what numbers.

A case is `(primitive, call, inputs)`; `call` binds that primitive and no other that has a rule of
another category. Inputs are such that a half type holds them and the result is well conditioned.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

_RANDOM = np.random.default_rng(0)


def _numbers(low, high, shape=(4, 6)):
    return _RANDOM.uniform(low, high, shape).astype(np.float32)


ANY = _numbers(-2, 2)
POSITIVE = _numbers(0.5, 4)
FRACTION = _numbers(-0.9, 0.9)
INSIDE = _numbers(0.1, 0.9)
MATRIX = _numbers(-1, 1, (5, 5)) + 4 * np.eye(5, dtype=np.float32)
SYMMETRIC = (MATRIX + MATRIX.T) / 2
TRIANGULAR = np.tril(MATRIX)
IMAGE = _numbers(-1, 1, (2, 8, 8, 1))
INDICES = np.array([[2], [0], [2]], np.int32)
ROWS = _numbers(-1, 1, (3, 6))
BAND = _numbers(-1, 1, (1, 5))

_take_rows = lax.GatherDimensionNumbers((1,), (0,), (0,))
_put_rows = lax.ScatterDimensionNumbers((1,), (0,), (0,))
_spatial = ("NHWC", "HWIO", "NHWC")


def _scatter(function):
    return lambda x, rows: function(x, INDICES, rows, _put_rows)


def _window(initial, function):
    return lambda x: lax.reduce_window(x, initial, function, (1, 2), (1, 1), "VALID")


def _of_lax(names, *inputs):
    """Returns functions of `jax.lax` by the names of their primitives, each with these inputs."""
    return {name: (getattr(lax, name), *inputs) for name in names.split()}


# JAX 0.12 has them.
NEWER = {}
if hasattr(lax, "polynomial"):
    NEWER = _of_lax("log2", POSITIVE) | {
        "polynomial": (lambda x: lax.polynomial(x, [1.0, 5.0, 2.0]), ANY)
    }

UNARY = {
    **_of_lax("exp exp2 expm1 sinh cosh square atan asinh erfc tanh logistic erf sin cos", ANY),
    **_of_lax("neg abs sign floor ceil round is_finite stop_gradient optimization_barrier", ANY),
    **_of_lax("log log1p sqrt rsqrt cbrt bessel_i0e bessel_i1e", POSITIVE),
    **_of_lax("acosh", POSITIVE + 1),
    **_of_lax("lgamma digamma", POSITIVE + 3),
    **_of_lax("tan acos asin atanh erf_inv", FRACTION),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), ANY),
    **NEWER,
    "convert_element_type": (lambda x: lax.convert_element_type(x, jnp.int32), 3 * ANY),
    "copy": (lambda x: lax.copy_p.bind(x), ANY),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 3), ANY),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.int32), ANY),
}

SHAPES = {
    "reshape": (lambda x: lax.reshape(x, (6, 4)), ANY),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), ANY),
    "tile": (lambda x: lax.tile(x, (2, 1)), ANY),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), ANY[None]),
    "rev": (lambda x: lax.rev(x, (1,)), ANY),
    "slice": (lambda x: lax.slice(x, (1, 1), (3, 5)), ANY),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (1, 2), (2, 3)), ANY),
    "split": (lambda x: lax.split(x, (2, 4), axis=1)[1], ANY),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 4, 6), (1, 2)), ANY),
    "gather": (lambda x: lax.gather(x, INDICES, _take_rows, (1, 6)), ANY),
    "sort": (lax.sort, ANY),
    "top_k": (lambda x: lax.top_k(x, 2)[0], ANY),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), ANY),
    "argmin": (lambda x: lax.argmin(x, 1, jnp.int32), ANY),
    "cummax": (lax.cummax, ANY),
    "cummin": (lax.cummin, ANY),
    "reduce_max": (lambda x: lax.reduce_max_p.bind(x, axes=(1,), out_sharding=None), ANY),
    "reduce_min": (lambda x: lax.reduce_min_p.bind(x, axes=(1,), out_sharding=None), ANY),
    "reduce_window_max": (_window(-jnp.inf, lax.max), ANY),
    "reduce_window_min": (_window(jnp.inf, lax.min), ANY),
    "reduce_sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), ANY),
    "reduce_prod": (lambda x: lax.reduce_prod_p.bind(x, axes=(1,), out_sharding=None), ANY),
    "reduce_window_sum": (_window(0.0, lax.add), ANY),
    "cumsum": (lax.cumsum, ANY),
    "cumprod": (lax.cumprod, ANY),
    "cumlogsumexp": (lax.cumlogsumexp, ANY),
    "cholesky": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), SYMMETRIC),
    "lu": (lambda x: lax.linalg.lu(x)[0], MATRIX),
    "svd": (lambda x: lax.linalg.svd(x, compute_uv=False)[0], MATRIX),
    "qr": (lambda x: lax.linalg.qr(x)[1], MATRIX),
    "eigh": (lambda x: lax.linalg.eigh(x, symmetrize_input=False)[1], SYMMETRIC),
    "eig": (lambda x: lax.linalg.eig(x)[0].real, MATRIX),
    "hessenberg": (lambda x: lax.linalg.hessenberg(x)[0], MATRIX),
    "tridiagonal": (lambda x: lax.linalg.tridiagonal(x)[1], SYMMETRIC),
    "householder_product": (
        lambda x: lax.linalg.householder_product(x, x[0]), np.tril(MATRIX, -1) / 8,
    ),
    "approx_top_k": (lambda x: lax.approx_max_k(x, 2)[0], ANY),
    "reduce": (
        lambda x: lax.reduce(x, np.zeros((), x.dtype), lambda a, b: a + b * b, (1,)), ANY,
    ),
    "name": (lambda x: checkpoint_name(x, "x"), ANY),
    "fft": (lambda x: lax.fft(x, "rfft", (6,)), ANY),
}  # fmt: skip

BINARY = {
    **_of_lax("add mul div", ANY, POSITIVE),
    "sub": (lax.sub, ANY, 3 * POSITIVE),
    **_of_lax("max min lt le gt ge", ANY, FRACTION),
    "rem": (lax.rem, POSITIVE, np.full_like(POSITIVE, 16)),
    **_of_lax("atan2 pow", POSITIVE, ANY),
    **_of_lax("eq ne", ANY, ANY),
    "select_n": (lambda x, y: lax.select_n(ANY > 0, x, y), ANY, POSITIVE),
    "clamp": (lambda x, y: lax.clamp(jnp.zeros_like(x), x, y), ANY, POSITIVE),
    "stack": (lambda x, y: jnp.stack([x, y]), ANY, ANY),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), ANY, POSITIVE),
    "pad": (lambda x: lax.pad(x, jnp.zeros([], x.dtype), [(0, 1, 0), (1, 0, 0)]), ANY),
    "dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y, (1, 1)), ANY, POSITIVE[:2, :2],
    ),
    "scatter": (_scatter(lax.scatter), ANY, ROWS),
    **{
        f"scatter-{name}": (_scatter(getattr(lax, f"scatter_{name}")), ANY, ROWS)
        for name in ("min", "max", "add", "sub", "mul")
    },
    **_of_lax("igamma igammac igamma_grad_a", POSITIVE, POSITIVE),
    **_of_lax("polygamma", np.ones_like(POSITIVE), POSITIVE),
    **_of_lax("zeta", POSITIVE + 2, POSITIVE),
    "regularized_incomplete_beta": (lax.betainc, POSITIVE, POSITIVE, INSIDE),
    "triangular_solve": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        TRIANGULAR, MATRIX,
    ),
    "tridiagonal_solve": (
        lambda *bands: lax.linalg.tridiagonal_solve(*bands),
        BAND, 5 + BAND, BAND, MATRIX[None],
    ),
}  # fmt: skip

PRODUCTS = {
    "dot_general": (lambda x, y: lax.dot(x, y), ANY, ANY.T),
    "conv_general_dilated": (
        lambda x, y: lax.conv_general_dilated(x, y, (1, 1), "SAME", dimension_numbers=_spatial),
        IMAGE, _numbers(-1, 1, (3, 3, 1, 2)),
    ),
    "ragged_dot_general": (
        lambda x, y: lax.ragged_dot(x, y, np.array([1, 3], np.int32)),
        ANY, _numbers(-1, 1, (2, 6, 5)),
    ),
}  # fmt: skip

OP_CASES = [
    (name, call, inputs)
    for table in (UNARY, SHAPES, BINARY, PRODUCTS)
    for name, (call, *inputs) in table.items()
]

# The rest of the table, and why no case above names it.
OTHERS = {
    "no floating operand": "and or xor not shift_left shift_right_logical shift_right_arithmetic "
    "population_count clz reduce_and reduce_or reduce_xor iota lu_pivots_to_permutation",
    "draws bits: compared bit by bit in test_autocast_numerics": "random_seed random_wrap "
    "random_unwrap random_bits random_split random_fold_in random_gamma threefry2x32 shift "
    "rng_bit_generator rng_uniform random_gamma_grad",
    "needs several devices: test_autocast_transformations": "psum psum2 psum_invariant pmax pmin "
    "all_gather all_gather_invariant all_gather_reduced ppermute all_to_all pbroadcast pvary pcast "
    "reduce_scatter unreduced_psum unreduced_reduce_scatter sharding_constraint reshard "
    "layout_constraint",
    "complex": "real imag complex conj",
    "moves between devices or memories": "device_put",
    "stands in derivatives of stack": "unstack",
    "stands in derivatives only": "add_any select_and_scatter_add select_and_gather_add "
    "one_minus_square",
    "a copy for references": "copy_p",
    "a name it has in some versions of JAX": "scatter_add scatter_sub scatter_mul scatter_min "
    "scatter_max ragged_dot expand_dims",
    "takes a Python function, or is a part of one with a case": "reduce_window "
    "custom_linear_solve geqrf",
    "the next number is another in float64": "nextafter",
    "its factors have either sign": "schur",
    "not in this version of JAX": "" if NEWER else "log2 polynomial",
}
