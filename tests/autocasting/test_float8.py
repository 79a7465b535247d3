"""Float8 products of parameters: `jmp.autocast(loss, "mixed_float8")`.

A fixture lets small products be float8. Tests of sizes close it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import diagnostics
from tests.commands import in_full
from tests.errors import relative_error
from tests.products import equations_of, named

pytestmark = pytest.mark.usefixtures("small_is_float8")
F8, BF16 = "mixed_float8", "mixed_bfloat16"
KEYS = iter(jax.random.split(jax.random.key(0), 100))
X = jax.random.normal(next(KEYS), (32, 16))
W = tuple(jax.random.normal(next(KEYS), (16, 16)) / 4 for _ in range(3))


def mlp(ws, x):
    for w in ws[:-1]:
        x = jnp.tanh(x @ w)
    return x @ ws[-1]


def loss(ws, x):
    return jnp.mean(mlp(ws, x) ** 2)


def gradient_of(fun, *argnums, **options):
    """The gradient as one program: an operation at a time takes longer."""
    return jax.jit(jax.grad(fun, *argnums, **options))


def operands_in_float8(fun, *args):
    """Counts the arrays that a program rounds to float8."""
    casts = named("convert_element_type", fun, *args)
    return sum(str(cast.params["new_dtype"]).startswith("float8") for cast in casts)


def rows(fun, *args, policy=F8, **options):
    report = diagnostics.precision_report(fun, policy, **options)(*args)
    products = (row for row in report.rows if row.kind == "product")
    return [(row.dtype_in, row.why) for row in products for _ in range(row.times)]


# What is float8, and why.


def test_products_of_parameters_on_the_way_to_another_are_float8_and_the_head_is_not():
    found = rows(loss, W, X)
    assert [dtype for dtype, _ in found] == ["float8_e4m3fn", "float8_e4m3fn", "bfloat16"]
    assert "feeds no other product" in found[-1][1]
    assert all(g.dtype == np.float32 for g in jax.grad(jmp.autocast(loss, F8))(W, X))


def test_a_product_of_two_activations_is_float8_on_request_alone():
    def attend(ws, x):
        q, k = x @ ws[0], x @ ws[1]
        return jnp.mean(jax.nn.softmax(q @ k.T) @ k @ ws[2])

    def kinds(**options):
        return [dtype[:6] for dtype, _ in rows(attend, W, X, **options)]

    weights, everything = kinds(), kinds(float8="all")
    assert weights == ["float8", "float8", "bfloat", "bfloat", "bfloat"]
    assert everything == ["float8"] * 4 + ["bfloat"]
    assert "multiplies two activations" in rows(attend, W, X)[2][1]


def test_what_is_small_or_thin_stays_bfloat16_and_says_so(small_is_float8):
    small_is_float8.close()
    ((dtype, why), *_) = rows(loss, W, X)
    assert dtype == "bfloat16" and "fewer than 2**28 multiplications" in why
    report = diagnostics.precision_report(loss, F8)(W, X)
    assert any("none is float8: it is small" in hazard for hazard in report.hazards)
    wide = jax.ShapeDtypeStruct((2**15, 2**14), jnp.float32)
    vector = jax.ShapeDtypeStruct((2**14, 1), jnp.float32)
    ((_, why), *_) = rows(lambda v, x, u: jnp.sum(jnp.tanh(x @ v).T @ u), vector, wide, wide)
    assert "thinner than 16" in why


def test_convolutions_and_ragged_products_stay_bfloat16_and_say_so():
    def of(kernel, experts, x):
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME")
        rows_of_x = jnp.tanh(x).reshape(-1, 4)
        return jnp.sum(lax.ragged_dot(rows_of_x, experts, jnp.array([3, 13])) @ jnp.eye(4))

    arrays = jnp.ones((4, 4, 3, 3)), jnp.ones((2, 4, 4)), jnp.ones((1, 4, 4, 4))
    with jax.numpy_rank_promotion("allow"):
        found = rows(of, *arrays)
    assert [dtype for dtype, _ in found] == ["bfloat16"] * 3
    assert "not float8: a convolution: in float8 it moves more bytes" in found[0][1]
    assert "ragged_dot" in found[1][1] and "has no float8 form" in found[1][1]


def test_the_users_word_stands():
    def four(ws, x):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ ws[0])
        x = x @ ws[1] + jmp.full_precision(jnp.matmul)(x, ws[2])
        x = x @ ws[2] + jnp.matmul(x, ws[1], precision="highest")
        return jnp.mean(x @ ws[0])

    def kinds(policy=F8, **options):
        return [dtype for dtype, _ in rows(four, W, X, policy=policy, **options)]

    rest = ["float8_e4m3fn", "float32", "float8_e4m3fn", "float32", "bfloat16"]
    assert kinds() == ["float8_e4m3fn", *rest]
    assert kinds(rules=[("first", BF16)]) == ["bfloat16", *rest]
    assert kinds(rules=[("first", "float32")])[0] == "float32"
    plain = [dtype.replace("float8_e4m3fn", "bfloat16") for dtype in rest]
    assert kinds(BF16, rules=[("first", F8)]) == ["float8_e4m3fn", *plain]
    assert kinds(full=["dot_general"]) == ["float32"] * 6


def test_nothing_changes_without_the_policy():
    def program(policy, **options):
        return str(jax.make_jaxpr(jax.grad(jmp.autocast(loss, policy, **options)))(W, X))

    assert program(BF16) == program(BF16, float8="all") != program(F8)
    assert operands_in_float8(jax.grad(jmp.autocast(loss, BF16)), W, X) == 0


def test_hazards_name_sizes_that_are_padded():
    x, w = jnp.ones((200, 72)), jnp.ones((72, 72))
    (words,) = diagnostics.precision_report(loss, F8)((w, w), x).hazards
    assert "float8_e4m3fn with 200 rows, 72 columns, 72 summed elements, no multiple of 16" in words
    report = str(diagnostics.precision_report(loss, F8)(W, X))
    assert "2 in float8_e4m3fn (66.7% of the operations)" in report


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: jmp.autocast(loss, "p=f32,c=f16,o=f32,m=f8"), ValueError, "expected bfloat16"),
        (lambda: jmp.autocast(loss, "f32,m=f8"), ValueError, "compute dtype float32"),
        (lambda: jmp.autocast(loss, F8, rules=[("a", "f16,m=f8")]), ValueError, "compute dtype"),
        (lambda: jmp.autocast(loss, F8, float8="weight"), ValueError, "expected one of .'weights'"),
        (lambda: jmp.autocast(loss, F8, float8=True), TypeError, "got float8=True"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


# Numbers.


def test_the_largest_number_is_the_largest_of_float8_and_comes_back_in_its_size():
    x = jnp.asarray([[3e-5, -7.0], [0.5, 0.0]])
    y = jmp.autocast(lambda w, x: (x @ w) @ jnp.eye(2), F8)(jnp.eye(2), x)
    np.testing.assert_allclose(y, x, rtol=0.07, atol=7 / 448 * 2**-9)
    np.testing.assert_allclose(y[0, 1], -7, rtol=2**-8)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", ["input", "parameter", "cotangent"])
def test_what_is_not_finite_comes_out_not_finite(bad, place):
    product = jmp.autocast(lambda w, x: (x @ w) @ jnp.eye(16), F8)
    given = {"parameter": W[0], "input": X, "cotangent": jnp.ones_like(X)}
    given[place] = given[place].at[3, 4].set(bad)
    y, vjp = jax.vjp(product, given["parameter"], given["input"])
    assert place == "cotangent" or not bool(jnp.isfinite(y[3]).all())
    dw, dx = vjp(given["cotangent"])
    assert not bool(jnp.isfinite(dw).all() and jnp.isfinite(dx).all())


FINITE = {
    "zeros": jnp.zeros_like(X),
    "tiny": X * 1e-36,
    "an outlier": X.at[0, 0].set(1e5),
    "the largest": X.at[0, 0].set(3e38),
}


@pytest.mark.parametrize("x", FINITE.values(), ids=FINITE)
def test_what_is_finite_stays_finite(x):
    product = jmp.autocast(lambda w, x: (x @ w) @ (jnp.eye(16) * 1e-9), F8)
    y, vjp = jax.vjp(product, W[0] * 1e-3, x)
    for array in (y, *vjp(jnp.ones_like(y)), *vjp(jnp.zeros_like(y))):
        assert bool(jnp.isfinite(array).all())


# Bounds: between two float8 products stands only an elementwise function.

WIDE = tuple(jax.random.normal(next(KEYS), shape) / 4 for shape in [(16, 64), (64, 16), (16, 4)])
BIAS = jax.random.normal(next(KEYS), (64,))
STACK = jnp.stack([X, X[::-1] / 2])

# Functions of the results of two products. Behind these no maximum is read.
BOUNDED = {
    "gelu": lambda h, _: jax.nn.gelu(h),
    "bias": lambda h, _: jax.nn.gelu(h + BIAS[None, None]),
    "gate": lambda h, g: jax.nn.silu(h) * g,
    "where": lambda h, _: jnp.where(h > 0, h, 0.1 * h),
    "copy": lambda h, _: jnp.array(h, copy=True),
    "jit": lambda h, _: jax.jit(lambda h: jax.nn.gelu(h.reshape(-1, 64)))(h),
    "a gate, then a reshape": lambda h, g: (jax.nn.silu(h) * g).reshape(-1, 64),
}
# What is read behind one of these has its maximum.
NOT_BOUNDED = {
    "index": lambda h, _: h[0],
    "transpose": lambda h, _: h.swapaxes(0, 1),
    "jit that stays": lambda h, _: jax.jit(lambda h: h.reshape(-1, 64), donate_argnums=0)(h),
    "two ways": lambda h, _: jnp.concatenate([h.reshape(-1, 64), h.swapaxes(0, 1).reshape(-1, 64)]),
    "exp": lambda h, _: jnp.exp(h / 8),
    "roll": lambda h, _: h + jnp.roll(h, 1, 1),
    "mask": lambda h, _: h * (jnp.arange(64)[None, None] > 8),
    "mish": lambda h, _: jax.nn.mish(h),  # its softplus is a custom_jvp
}
# Others that read the products' results `h` or the function's result `g`, at a size that counts.
OTHER_READERS = {
    "a sum": lambda h, g: 1e6 * jnp.sum(h),
    "a product in bfloat16": lambda h, g: 1e6 * jnp.sum(g[:1] @ g.mT),
    "a loop": lambda h, g: 1e6 * lax.fori_loop(0, 2, lambda _, s: s + jnp.sum(h), 0.0),
}


def maxima(fun, *args, at_least=32 * 64):
    """Counts the reductions to a largest number of as many numbers as `x @ ws[0]` has."""
    return sum(e.invars[0].aval.size >= at_least for e in named("reduce_max", fun, *args))


def nobody(h, g):
    return 0.0


def loss_behind(between, other=nobody):
    """Returns a loss of two products behind a function of two, and the first's result."""

    def of(ws, x):
        h = x @ ws[0]
        g = between(h, x @ ws[1].T)
        return jnp.mean(((g @ ws[1]) @ ws[2]) ** 2) + other(h, g), h

    return of


def only_loss(of):
    return lambda *args: of(*args)[0]


@pytest.mark.parametrize("name", in_full(BOUNDED.keys(), one_of=2))
def test_of_what_stands_between_two_products_no_maximum_is_read(name):
    of = loss_behind(BOUNDED[name])
    gradient = gradient_of(jmp.autocast(only_loss(of), F8))
    assert maxima(gradient, WIDE, STACK) == 0
    exact = gradient_of(only_loss(of))(WIDE, STACK)
    bounded = relative_error(gradient(WIDE, STACK), exact)
    # A result of the program is read outside, so it has no bound.
    with_maxima = gradient_of(jmp.autocast(of, F8), has_aux=True)
    assert maxima(with_maxima, WIDE, STACK) > 0
    assert bounded < 1.2 * relative_error(with_maxima(WIDE, STACK)[0], exact) < 0.18


@pytest.mark.parametrize("name", [*in_full(NOT_BOUNDED.keys(), one_of=2), *OTHER_READERS])
def test_what_has_no_good_bound_or_others_read_too_has_its_maximum(name):
    between = NOT_BOUNDED.get(name, BOUNDED["gelu"])
    of = only_loss(loss_behind(between, OTHER_READERS.get(name, nobody)))
    gradient = gradient_of(jmp.autocast(of, F8))
    assert maxima(gradient, WIDE, STACK) > 0
    assert relative_error(gradient(WIDE, STACK), gradient_of(of)(WIDE, STACK)) < 0.15


@pytest.mark.parametrize("name", in_full(list(BOUNDED)[:4], one_of=2))
@pytest.mark.parametrize("size", in_full([1e-20, 1e12, 1.0], first=2))
def test_bounds_hold_where_rows_and_columns_point_the_same_way(name, size):
    """A product's results are then as large as their bound, by Cauchy and Schwarz."""
    direction = jnp.asarray([[1.0, -1.0] * 8])
    x = size * jnp.repeat(direction, 32, 0)[None]
    ws = (jnp.repeat(direction.T, 64, 1), jnp.repeat(direction, 64, 0), WIDE[2])

    of = lambda ws, x: (BOUNDED[name](x @ ws[0], x @ ws[1].T) @ ws[1]) @ ws[2]
    result, vjp = jax.vjp(jmp.autocast(of, F8), ws, x)
    expected, exact_vjp = jax.vjp(of, ws, x)
    assert relative_error(result, expected) < 0.1
    cotangent = jnp.ones_like(result)
    assert relative_error(vjp(cotangent), exact_vjp(cotangent)) < 0.1


def test_the_difference_of_each_two_numbers_has_no_bound_of_a_number_minus_itself():
    """JAX repeats both operands of a subtraction whose shapes are (n, 1) and (1, n)."""
    x, w = X[:, :8], WIDE[0][:8, :32]
    down, out = (jax.random.normal(jax.random.key(i), (1024, 512)) / 32 for i in range(2))

    def of(w, x):
        h = x @ w
        return jnp.mean((jnp.tanh((h.reshape(-1, 1) - h.reshape(1, -1)) @ down) @ out.T) ** 2)

    got, expected = (gradient_of(fun)(w, x) for fun in (jmp.autocast(of, F8), of))
    assert relative_error(got, expected) < 0.15


def test_a_bound_is_finite_where_factors_are_as_large_as_bfloat16_allows():
    x, ws = jnp.full((32, 16), 3e38), (jnp.full((16, 64), 1e-38), *WIDE[1:])
    product = jmp.autocast(lambda ws, x: (x @ ws[0]) @ ws[1] @ ws[2], F8)
    assert bool(jnp.isfinite(product(ws, x)).all())


def test_bounds_are_found_while_transfers_to_devices_are_disallowed():
    def of(ws, x):  # a function that no other test has: the extremes of others are known already
        return jnp.mean(((jnp.tanh(1.03125 * (x @ ws[0])) @ ws[1]) @ ws[2]) ** 2)

    with jax.transfer_guard("disallow"):
        assert jax.eval_shape(jmp.autocast(of, F8), WIDE, X).shape == ()


def test_a_loss_scale_sees_an_overflow_behind_a_float8_product():
    def grads(scale):
        fun = jmp.autocast(lambda ws, x: 1e5 * loss(ws, x), F8)
        return jmp.scaled_value_and_grad(fun, jmp.StaticLossScale(scale))(W, X)[1]

    assert bool(jmp.all_finite(grads(2.0**10))) and not bool(jmp.all_finite(grads(2.0**126)))


# Transformations.


def same(got, expected, tolerance=0.02):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.shape, b.shape), got, expected)
    assert relative_error(got, expected) <= tolerance


def scanned(ws, x):
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(ws))[0] ** 2)


def unrolled(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def rematted(ws, x):
    policy = jax.checkpoint_policies.dots_saveable
    for i, w in enumerate(ws):
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), policy=policy if i else None)(x, w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("written", [unrolled, scanned, rematted])
def test_gradients_are_the_same_however_the_program_is_written(written):
    got = gradient_of(jmp.autocast(written, F8))(W, X)
    expected = jax.grad(jmp.autocast(unrolled, F8))(W, X)
    # A scan carries products' results into products: its last one is float8 too.
    same(got, expected, 0.06 if written is scanned else 0.02)
    assert relative_error(got, gradient_of(unrolled)(W, X)) < 0.1


def test_what_a_scan_keeps_is_float8():
    def kept(policy, dtype):
        count = diagnostics.memory_report(scanned, policy, argnums=(0, 1), compiled=False)
        return sum(row.bytes for row in count(W, X).residuals if row.dtype == dtype)

    assert kept(F8, "float8_e4m3fn") == 3 * (32 * 16 + 16 * 16)
    assert kept(F8, "bfloat16") <= kept(BF16, "bfloat16") - 2 * 3 * 32 * 16


def test_values_that_several_products_read_are_rounded_once():
    def attention(ws, x):
        q, k, v = (x @ w for w in ws)
        return jnp.mean(jax.nn.softmax(q @ k.T) @ v)

    assert operands_in_float8(jmp.autocast(attention, F8), W, X) == 4


def test_examples_of_a_vmap_share_one_scale():
    xs = jnp.stack([X, 2 * X])
    per_example = jax.vmap(jax.grad(jmp.autocast(loss, F8)), (None, 0))
    got = per_example(W, xs)
    assert relative_error(got, jax.vmap(jax.grad(loss), (None, 0))(W, xs)) < 0.1
    # A scale is at least 2**-126, by a maximum; what is multiplied has none.
    scales = [maximum.outvars[0].aval.shape for maximum in named("max", per_example, W, xs)]
    assert len(scales) >= 6 and set(scales) == {()}
    inside = jax.grad(lambda ws: jmp.autocast(jax.vmap(loss, (None, 0)), F8)(ws, xs).sum())(W)
    assert relative_error(inside, jax.tree.map(lambda g: g.sum(0), got)) < 0.1


LAYOUTS = [
    ("bti,oi->bto", (2, 8, 16), (8, 16)),
    ("bti,ihd->bhtd", (2, 8, 16), (16, 2, 4)),
    ("eti,eio->eto", (2, 8, 16), (2, 16, 8)),
    ("io,bti->obt", (16, 8), (2, 8, 16)),
    ("bthd,hdo->bto", (2, 8, 4, 4), (4, 4, 8)),
]


@pytest.mark.parametrize(("layout", "left", "right"), in_full(LAYOUTS, one_of=2))
def test_layouts_of_einsum_have_the_gradients_of_bfloat16(layout, left, right):
    keys = jax.random.split(jax.random.key(3), 2)
    operands = [jax.random.normal(k, s) for k, s in zip(keys, (left, right), strict=True)]

    def of(a, b):
        y = jnp.einsum(layout, a, b)
        y = y.reshape(-1, y.shape[-1]) @ jnp.eye(y.shape[-1])
        return jnp.sum(y * jnp.arange(1.0, 1 + y.shape[-1])[None])

    got = gradient_of(jmp.autocast(of, F8), (0, 1))(*operands)
    expected = gradient_of(of, (0, 1))(*operands)
    assert operands_in_float8(jmp.autocast(of, F8), *operands) == 2
    same(got, expected, 0.12)


def test_forward_mode_and_second_derivatives_are_refused_and_it_says_what_to_write():
    fun = jmp.autocast(loss, F8)
    for around in (fun, jax.jit(fun)):
        with pytest.raises(TypeError, match="forward.mode"):
            jax.jvp(lambda ws, around=around: around(ws, X), (W,), (W,))
    grad = jax.grad(lambda w: fun((w, *W), X))
    by_hessian = jax.hessian(lambda w: w.sum() + grad(w).sum())
    for second in (jax.grad(lambda w: grad(w).sum()), by_hessian):
        with pytest.raises(TypeError, match="second derivative was asked for.*'mixed_bfloat16'"):
            second(W[0])


def test_a_penalty_on_a_gradient_that_is_taken_inside_is_a_first_derivative():
    penalty = lambda ws, x: jnp.sum(jax.grad(loss)(ws, x)[0] ** 2)
    got = gradient_of(jmp.autocast(penalty, F8))(W, X)
    assert relative_error(got, gradient_of(penalty)(W, X)) < 0.25


def test_a_custom_jvp_whose_rule_multiplies_keeps_bfloat16():
    @jax.custom_jvp
    def layer(w, x):
        return x @ w

    @layer.defjvp
    def _(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        return x @ w, x @ dw + dx @ w

    of = lambda ws, x: jnp.mean(jnp.tanh(layer(ws[0], x)) @ ws[1])
    assert relative_error(jax.grad(jmp.autocast(of, F8))(W, X), jax.grad(of)(W, X)) < 0.02
    assert "custom_jvp" in rows(of, W, X)[0][1]


# Devices.

MESH = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def all_shared(ws, x):
    """One loss of a product, a gelu, a gate, and the residual model of docs/float8.md."""
    y = x + jax.nn.gelu(x @ ws[0]) @ ws[1]
    total = jnp.mean(((y @ ws[0]) @ ws[1]) ** 2)
    layers = (lambda h, _: h, lambda h, _: jax.nn.gelu(h + BIAS[None]), BOUNDED["gate"])
    return total + sum(only_loss(loss_behind(layer))(ws, x) for layer in layers)


def of_eight_devices():
    return jnp.concatenate([X, *[X / 3] * 7])  # a scale of its own rounds otherwise


@functools.cache
def gradients_of_one(policy):
    """The gradients of one device, in float32 and by a policy."""
    functions = (all_shared, jmp.autocast(all_shared, policy))
    return [gradient_of(f)(WIDE, of_eight_devices()) for f in functions]


@pytest.mark.parametrize("place", in_full(["inside", "outside", "gradient inside"], first=1))
@pytest.mark.parametrize("check_vma", in_full([True, False], first=1))
def test_devices_that_share_parameters_have_the_gradients_of_one(place, check_vma):
    x, policy = of_eight_devices(), F8 if place == "inside" else f"{F8},r=f32"
    of = all_shared if place == "outside" else jmp.autocast(jax.checkpoint(all_shared), policy)
    mean = lambda ws, x: lax.pmean(of(ws, x), "d")

    def mean_gradient(ws, x):
        grads = jax.grad(mean if check_vma else of)(ws, x)
        return grads if check_vma else lax.pmean(grads, "d")

    places = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": check_vma}
    if place == "gradient inside":
        step = jax.shard_map(mean_gradient, mesh=MESH, **places)
    else:
        mapped = jax.shard_map(mean, mesh=MESH, **places)
        step = jax.grad(jmp.autocast(mapped, policy) if place == "outside" else mapped)
    exact, one = gradients_of_one(policy)
    got = jax.jit(step)(WIDE, x)
    assert relative_error(got, one) < 0.02
    assert relative_error(one, exact) < 0.15 and relative_error(got, exact) < 0.15


def test_in_a_shard_map_the_parts_of_one_device_decide_what_is_float8(small_is_float8):
    small_is_float8.close()
    ws = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 3
    x, eight = (jax.ShapeDtypeStruct((n * 4096, 256), jnp.float32) for n in (1, 8))
    of_shards = jax.shard_map(mlp, mesh=MESH, in_specs=(P(), P("d")), out_specs=P("d"))
    assert rows(loss, ws, x)[0][0] == "float8_e4m3fn"
    ((dtype, why), *_) = rows(of_shards, ws, x)
    assert dtype == "bfloat16" and "it is small" in why
    assert rows(of_shards, ws, eight)[0][0] == "float8_e4m3fn"


def test_devices_under_jit_share_scales():
    x = jax.device_put(X.at[0, 0].set(50.0), NamedSharding(MESH, P("d")))
    value, grads = jax.jit(jax.value_and_grad(jmp.autocast(loss, F8)))(W, x)
    whole, expected = jax.value_and_grad(jmp.autocast(loss, F8))(W, np.asarray(x))
    np.testing.assert_allclose(value, whole, rtol=4e-3)
    assert relative_error(grads, expected) < 0.03


def dtypes_given_by(prefix, fun, *args):
    """Lists the dtypes that primitives of a prefix give, at any depth."""
    found = (e for e in equations_of(fun, *args) if e.primitive.name.startswith(prefix))
    return [str(equation.outvars[0].aval.dtype) for equation in found]


def gathered(w):
    return lax.all_gather(w, "d", tiled=True)


def in_shards(fun, check_vma=True, policy=F8, **options):
    fun = jmp.autocast(fun, policy, **options)
    places = {"in_specs": (P("d"), P("d")), "out_specs": P("d")}
    return jax.shard_map(fun, mesh=MESH, check_vma=check_vma, **places)


def fsdp(gather, gather_in_scan, ws, x):
    """A layer by itself, two in a scan that are gathered again in the backward pass, a head."""

    turn = lambda x, w: (jnp.tanh(x @ gather_in_scan(w)), None)
    x = jnp.tanh(x @ gather(ws["in"]))
    x, _ = lax.scan(jax.checkpoint(turn), x, ws["layers"])
    return jnp.mean((x @ gather(ws["out"])) ** 2)


@pytest.mark.parametrize("check_vma", in_full([True, False], first=1))
def test_shards_are_gathered_in_float8_with_the_scale_of_the_whole_parameter(check_vma):
    ws = {"in": W[0].at[0, 0].set(2.0), "layers": jnp.stack(W[1:]), "out": W[0].T}
    x = X.at[0, 0].set(50.0)
    by_hand = lambda w: jmp.gather_params(w, "d", "bf16", "f32")
    fun = jmp.autocast(functools.partial(fsdp, by_hand, gathered), F8)

    def mean_gradient(ws, x):
        value, grads = jax.value_and_grad(fun)(ws, x)
        return lax.pmean(value, "d"), jax.tree.map(lambda g: g / 8, grads)

    lie = {"in": P("d"), "layers": P(None, "d"), "out": P("d")}
    places = {"in_specs": (lie, P("d")), "out_specs": (P(), lie)}
    step = jax.jit(jax.shard_map(mean_gradient, mesh=MESH, check_vma=check_vma, **places))
    value, grads = step(ws, x)
    whole = jmp.autocast(functools.partial(fsdp, jnp.asarray, jnp.asarray), F8)
    expected_value, expected = jax.value_and_grad(whole)(ws, x)
    np.testing.assert_allclose(value, expected_value, rtol=4e-3)
    assert relative_error(grads, expected) < 0.01
    dtypes = dtypes_given_by("all_gather", step, ws, x)
    # The first layer's, and the loop's forward and backward; not the head's. Others are bfloat16:
    # they are there for their transposes, and nothing reads what they compute.
    assert dtypes.count("float8_e4m3fn") == 3
    for bad in (np.nan, np.inf):  # in one shard
        value, grads = step(ws | {"in": ws["in"].at[3, 4].set(bad)}, x)
        assert not bool(jnp.isfinite(value))
        assert not any(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


def test_a_gather_is_float8_where_float8_products_alone_read_it_and_reports_say_so():
    def sent(fun, w=W[0], **options):
        return dtypes_given_by("all_gather", in_shards(fun, **options), w, X)

    layer = lambda w, x: jnp.tanh(x @ gathered(w)) @ W[1]
    assert sent(layer) == ["float8_e4m3fn", "bfloat16"]
    assert sent(layer, policy=BF16) == sent(layer, rules=[("*", BF16)]) == ["bfloat16"]
    assert sent(layer, full=["all_gather"]) == ["float32"]

    activations = lambda w, x: jnp.tanh(gathered(jnp.tanh(x @ W[1])) @ W[2]) @ W[1]

    def read_by(read, w=W[0]):
        return sent(lambda w, x: read(gathered(w), x), w)

    a_head = lambda w, x: jnp.tanh(x @ w) @ w
    an_addition = lambda w, x: jnp.tanh(x @ w) @ W[1] + w[:1]
    the_caller = lambda w, x: (jnp.tanh(x @ w) @ W[1], w)
    in_slices = lambda w, x: jnp.tanh(jnp.tanh(x @ w[:16]) @ w[16:].T) @ W[1]
    assert sent(activations) == ["float8_e4m3fn", "bfloat16"]
    assert read_by(a_head) == ["bfloat16"]
    assert read_by(an_addition) == read_by(the_caller) == ["float32"]
    assert read_by(in_slices, jnp.concatenate(W[:2])) == ["float8_e4m3fn", "bfloat16"]
    around = jax.shard_map(layer, mesh=MESH, in_specs=(P("d"), P("d")), out_specs=P("d"))
    report = str(diagnostics.precision_report(around, F8)(W[0], X))
    assert "rounded to float8 before it is sent" in report


@pytest.mark.parametrize("reduce_dtype", ["bfloat16", "float32"])
def test_along_explicit_axes_shards_are_gathered_in_float8(reduce_dtype):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))

    def of(ws, x):
        for w in ws[:-1]:
            x = jnp.tanh(x @ jmp.gather_params(w, P(), "bfloat16", reduce_dtype))
        return jnp.mean((x @ jax.sharding.reshard(ws[-1], P())) ** 2)

    with jax.set_mesh(mesh):
        ws, x = jax.device_put((W, X), P("d"))
        step = jax.jit(jax.grad(jmp.autocast(of, F8)))
        dtypes = dtypes_given_by("reshard", step, ws, x)
        grads = step(ws, x)
    assert "float8_e4m3fn" in dtypes
    same(jax.device_get(grads), jax.grad(jmp.autocast(loss, F8))(W, X), 0.01)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_product_whose_parts_devices_add_up_is_float8(check_vma):
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)

    def of(ws, x):
        x = jnp.tanh(lax.psum(jnp.tanh(x @ ws[0]) @ ws[1], "m"))
        return lax.pmean(jnp.mean((x @ ws[2]) ** 2), "d")

    places = {"in_specs": ((P(None, "m"), P("m"), P()), P("d")), "out_specs": P()}
    mapped = jax.shard_map(of, mesh=mesh, check_vma=check_vma, **places)
    assert [dtype for dtype, _ in rows(mapped, W, X)] == ["float8_e4m3fn"] * 2 + ["bfloat16"]
    value = jax.jit(jmp.autocast(mapped, F8))(W, X)
    np.testing.assert_allclose(value, jmp.autocast(loss, F8)(W, X), rtol=4e-3)
    axes = [tuple(e.params["axes"]) for e in named("pmax", jmp.autocast(mapped, F8), W, X)]
    # The batch, the columns of a matrix, what lies between, the rows of the other.
    tracked = [("d",), ("m",), ("d", "m"), ("m",)]
    assert axes == (tracked if check_vma else [("d", "m")] * 4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_that_go_different_ways_do_not_wait_for_maxima_of_others(check_vma):
    twice = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w)

    def of(w, x):
        device = lax.axis_index("d")
        y = lax.cond(device < 3, lambda y: jax.checkpoint(twice)(w, y), lambda y: y, x)
        state = (device % 3, y)
        return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, twice(w, s[1])), state)[1]

    places = {"in_specs": (P(), P("d")), "out_specs": P("d")}
    mapped = jax.shard_map(of, mesh=MESH, check_vma=check_vma, **places)
    float8 = jmp.autocast(mapped, F8)
    assert not dtypes_given_by("pmax", float8, W[0], X)  # it would hang
    found = rows(mapped, W[0], X)
    assert [dtype for dtype, _ in found] == ["bfloat16"] * 4
    assert all("devices may go different ways" in why for _, why in found)
    got, exact = (jax.jit(fun)(W[0], X) for fun in (float8, mapped))
    assert 0.001 < relative_error(got, exact) < 0.1


def test_where_all_devices_go_one_way_they_share_scales_and_gather_in_float8():
    def of(w, x):
        layer = lambda x: jnp.tanh(jnp.tanh(x @ gathered(w)) @ W[1])
        return lax.cond(lax.pmax(x[0, 0], "d") > 0, layer, lambda x: x, x) @ W[2]

    tracked, untracked = (
        dtypes_given_by("all_gather", in_shards(of, vma), W[0], X) for vma in (True, False)
    )
    assert (tracked, untracked) == (["float8_e4m3fn", "bfloat16"], ["bfloat16"])


def test_gradients_of_parameters_are_float32_before_they_are_reduced_if_asked():
    def dtypes(policy):
        return [
            f"{product.invars[0].aval.dtype} to {product.outvars[0].aval.dtype}"
            for product in named("dot_general", jax.grad(jmp.autocast(loss, policy)), W, X)
        ]

    assert set(dtypes(F8)) == {"bfloat16 to bfloat16"}
    # The input may be a parameter too, so its gradient is one of these. A CPU has them twice.
    assert dtypes(f"{F8},r=f32").count("bfloat16 to float32") == 4
    got = jax.grad(jmp.autocast(loss, f"{F8},r=f32"))(W, X)
    same(got, jax.grad(jmp.autocast(loss, F8))(W, X), 0.01)


def test_compare_shows_the_errors_of_float8():
    found = diagnostics.compare(loss, F8)(W, X)
    half = diagnostics.compare(loss, BF16)(W, X)
    for row, plain in zip(found.rows, half.rows, strict=True):
        if (row.kind, row.path) != ("gradient", "2"):  # the head's own product is bfloat16
            assert 2 * plain.relative_error < row.relative_error < 0.1


def test_a_gradient_report_says_what_float8_takes_from_the_cotangents():
    def of(ws, x, shift=0.0):
        return jnp.sum((jnp.tanh(x @ ws[0] + shift) @ ws[1]) * weights)

    weights = jnp.ones((32, 16)).at[0, 0].set(2.0**22)  # a gradient with one large number
    report = diagnostics.gradient_report(of, F8)(W, X)
    (row,) = report.float8_cotangents
    assert (row.operation, row.size) == ("dot_general in float8", X.size)
    cotangent = jax.grad(jmp.autocast(of, F8), 2)(W, X, jnp.zeros_like(X))
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        largest = float(jnp.finfo(dtype).max) / jnp.max(jnp.abs(cotangent))
        back = np.asarray((cotangent * largest).astype(dtype))
        normal = float(jnp.finfo(dtype).smallest_normal)
        zeros = np.mean(back == 0)
        subnormal = np.mean((back != 0) & (abs(back.astype(np.float32)) < normal))
        shares = row.shares(dtype)
        # By powers of two: some numbers are taken for their neighbours.
        assert shares.lost + shares.zero == pytest.approx(zeros, abs=0.02)
        assert shares.subnormal == pytest.approx(subnormal, abs=0.02)
        assert (zeros + subnormal > 0.9) == (dtype == jnp.float8_e4m3fn)
    assert "cotangents of float8 products in float8_e4m3fn, most is lost first" in str(report)
    assert row.shares("float8_e5m2").normal > 0.9
    plain = diagnostics.gradient_report(of, BF16)(W, X)
    assert plain.float8_cotangents == [] and "float8" not in str(plain)
