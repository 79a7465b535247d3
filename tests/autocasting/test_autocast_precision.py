"""What `precision=`, regions in float32 and JAX's default precision say of products."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from jmp import diagnostics
from tests.products import PRODUCTS, named

F16 = "mixed_float16"
X = jax.random.normal(jax.random.key(0), (4, 4))
IMAGE = X[None, None]

pytestmark = pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")


def products(function, *args):
    """Operand dtype and precision of each product, in the order of the program."""
    return [
        (str(e.invars[0].aval.dtype), _name(e.params["precision"]))
        for e in named(PRODUCTS, function, *(args or (X,)))
    ]


def found(function, *args):
    """The precisions of the float32 products of a program, with how many there are."""
    each = products(function, *args)
    return collections.Counter(name for dtype, name in each if dtype in ("float32", "complex64"))


def _name(precision):
    return precision[0].name if isinstance(precision, tuple) else precision and precision.name


def lowered(function, **options):
    return jmp.autocast(function, F16, **options)


@jax.custom_vjp
def custom_vjp(x):
    return x @ x


custom_vjp.defvjp(lambda x: (x @ x, x), lambda x, ct: (ct @ x.T + x.T @ ct,))


@jax.custom_vjp
def product_backward_alone(x):
    return 2 * x


product_backward_alone.defvjp(lambda x: (2 * x, x), lambda x, ct: (ct @ x,))


@jax.custom_jvp
def custom_jvp(x):
    return jnp.sin(x) @ x


@custom_jvp.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return custom_jvp(x), jnp.sin(x) @ dx + (jnp.cos(x) * dx) @ x


@jax.custom_batching.custom_vmap
def custom_vmap(x):
    return x @ x


@custom_vmap.def_vmap
def _(size, in_batched, x):
    return jnp.einsum("bij,bjk->bik", x, x), True


def solve(x):
    return jax.scipy.sparse.linalg.cg(lambda v: X.T @ (X @ v) + v, x[0], maxiter=2)[0]


REGIONS = {
    "a product": lambda x: x @ X,
    "a convolution": lambda x: lax.conv(x[None, None], IMAGE, (1, 1), "SAME"),
    "a ragged product": lambda x: lax.ragged_dot(x, X[None], jnp.array([4])),
    "a complex product": lambda x: jnp.abs(jnp.fft.fft(x) @ X.astype(jnp.complex64)),
    "custom_vjp": custom_vjp,
    "a product only backward": product_backward_alone,
    "custom_jvp": custom_jvp,
    "scan": lambda x: lax.scan(lambda c, _: (custom_vjp(c) @ X, None), x, length=2)[0],
    "cond": lambda x: lax.cond(x[0, 0] > 0, custom_jvp, lambda x: x @ X, x),
    "remat": jax.checkpoint(lambda x: custom_jvp(x @ X)),
    "jit": jax.jit(lambda x: custom_vjp(x @ X), donate_argnums=0),
    "a linear solver": solve,
}
AROUND = {
    "call": lowered,
    "grad of jit": lambda f: jax.grad(lambda x: jax.jit(lowered(f))(x).sum()),
    "grad of remat": lambda f: jax.grad(lambda x: jax.checkpoint(lowered(f))(x).sum()),
    "inside": lambda f: lowered(jax.grad(lambda x: f(x @ X).sum())),
    "vmap": lambda f: jax.vmap(lowered(f)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("region", REGIONS)
def test_every_product_of_a_region_has_the_highest_precision(region, around):
    function = AROUND[around](jmp.full_precision(REGIONS[region]))
    if region == "a ragged product" and around == "vmap":
        pytest.skip("JAX has no such product")
    precisions = found(function, X[None] if around == "vmap" else X)
    has_none = region == "a product only backward" and around in ("call", "vmap")
    assert set(precisions) == (set() if has_none else {"HIGHEST"})


def while_loop(x):
    return lax.fori_loop(0, 3, lambda i, x: x @ X, x)


def to_tolerance(x):
    return lax.while_loop(lambda x: jnp.max(x @ X) > 1e-3, lambda x: 0.5 * x @ X, x)


@pytest.mark.parametrize("region", [while_loop, to_tolerance], ids=["counted", "to a tolerance"])
def test_loops_without_a_derivative_have_it_too(region):
    assert set(found(lowered(jmp.full_precision(region)))) == {"HIGHEST"}


def test_a_rule_of_vmap_that_is_traced_late_has_it_too():
    assert set(found(jax.vmap(lowered(jmp.full_precision(custom_vmap))), X[None])) == {"HIGHEST"}


def head(x):
    with jax.named_scope("head"):
        return custom_vjp(x @ X)


def test_every_way_to_ask_for_float32_has_it():
    asked = {
        "rules": lowered(head, rules=[("head", "float32")]),
        "full": lowered(head, full=["dot_general"]),
        "full, of what nests": lowered(while_loop, full=["scan"]),
    }
    for way, function in asked.items():
        assert set(found(function)) == {"HIGHEST"}, way


def test_a_scope_inside_what_runs_as_written_is_a_region():
    @jax.custom_vjp
    def function(x):
        return jmp.full_precision(lambda x: x @ X)(x @ X)

    function.defvjp(lambda x: (function(x), None), lambda _, ct: (ct,))
    assert found(lowered(function)) == {"HIGHEST": 1, None: 1}
    assert found(lowered(head)) == {None: 1}


def test_the_condition_of_a_loop_that_is_lowered_may_hold_a_region():
    exact = jmp.full_precision(lambda x: x @ X)
    is_on = lambda x: jnp.argmax(exact(x)[0]) != 0
    assert found(lowered(lambda x: lax.while_loop(is_on, lambda x: x @ X, x))) == {"HIGHEST": 1}


def test_products_that_are_sums_have_it():
    # An inner product is kept in float32 for its numerics.
    for function in (lambda x: jnp.vdot(x, X), lambda x: jnp.einsum("bd,bd->b", x, X).sum()):
        assert found(jax.grad(lowered(function))).keys() == {"HIGHEST"}


KINDS = {
    "dot_general": lambda x, p: jnp.matmul(x, x, precision=p),
    "conv": lambda x, p: lax.conv(x[None, None], IMAGE, (1, 1), "SAME", precision=p),
    "ragged_dot": lambda x, p: lax.ragged_dot(x, X[None], jnp.array([4]), precision=p),
}


# What one product asks for.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (None, "float16"),
        ("default", "float16"),
        ("high", "float32"),
        (lax.Precision.HIGHEST, "float32"),
        (("default", "highest"), "float32"),
    ],
    ids=str,
)
def test_a_product_with_high_precision_stays_float32(kind, precision, dtype):
    function = jmp.autocast(lambda x: KINDS[kind](jnp.tanh(x @ X), precision), F16)
    (first, _), (second, _) = products(function, X)
    assert (first, second) == ("float16", dtype)


def test_low_lowers_precise_products_too():
    function = lambda x: jnp.matmul(x, X, precision="highest")
    lowered = jmp.autocast(function, F16, low=["dot_general"])
    assert products(lowered, X) == [("float16", "HIGHEST")]


def test_backward_products_of_a_precise_product_stay_float32():
    function = lambda x: jnp.matmul(x, X, precision="highest").sum()
    for gradient in (jax.grad(lowered(function)), jmp.autocast(jax.grad(function), F16)):
        assert {dtype for dtype, _ in products(gradient, X)} == {"float32"}


def test_an_exponential_of_a_matrix_between_products_in_float16():
    # Its Pade approximant has coefficients up to 6e16, which float16 does not hold.
    # Behind one product of inputs it would keep that in float32, since it rounds a logarithm.
    function = lambda w, x: jax.scipy.linalg.expm(x @ w @ w) @ w
    eye = jnp.eye(4)
    found = jax.jit(lowered(function))(eye, 2 * eye)
    np.testing.assert_allclose(found, np.exp(2.0) * eye, rtol=1e-3)


# The global default.


def everywhere(x):
    """Products of every kind, in what nests and in what is bound as a whole."""

    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (x @ x, x), lambda x, ct: (2 * ct @ x.T,))
    loop = lambda x: lax.scan(lambda c, _: (jnp.tanh(c @ X), None), x, length=2)[0]
    x = loop(x @ X) + KINDS["conv"](x, None)[0, 0] + KINDS["ragged_dot"](x, None)
    x = jmp.full_precision(loop)(x) + jmp.full_precision(lambda x: x @ X)(x)
    x = jmp.autocast(loop, "float32")(x) + jmp.autocast(loop, F16)(x)
    x = lax.cond(x[0, 0] > 0, square, lambda x: jnp.matmul(x, x, precision="highest"), x)
    return x.sum() + x[0] @ x[1]


@pytest.mark.parametrize(
    "around",
    [
        lambda f: jmp.autocast(f, F16),
        lambda f: jax.grad(jmp.autocast(f, F16)),
        lambda f: jmp.autocast(jax.grad(f), F16),
    ],
    ids=["call", "grad", "of grad"],
)
def test_the_default_precision_is_that_of_the_products_that_stay_float32(around):
    function = around(everywhere)
    without = products(function, X)
    with jax.default_matmul_precision("high"):
        found = products(function, X)
    assert [dtype for dtype, _ in found] == [dtype for dtype, _ in without]
    assert {p for dtype, p in without if dtype == "float32"} == {None, "HIGHEST"}
    assert {p for dtype, p in found if dtype == "float32"} == {"HIGH", "HIGHEST"}
    # It replaces the HIGHEST of a region. It does not replace the HIGHEST of a product.
    named = [dtype == "float32" and p == "HIGHEST" for dtype, p in found]
    assert 0 < sum(named) < sum(p == "HIGHEST" for _, p in without)


@pytest.mark.parametrize(
    "default", ["default", "tensorfloat32", "float32", "highest", "BF16_BF16_F32_X3"]
)
def test_every_default_precision_is_put_in_as_jax_puts_it_in(default):
    function = lowered(jmp.full_precision(REGIONS["scan"]))
    with jax.default_matmul_precision(default):
        put_in_by_jax = found(lambda x: x @ X).keys()
        assert found(jax.grad(lambda x: function(x).sum())).keys() == put_in_by_jax


# Who says otherwise in a region.

WORDS = {
    "default": "DEFAULT",
    "high": "HIGH",
    "tensorfloat32": "HIGH",
    "highest": "HIGHEST",
    lax.DotAlgorithmPreset.TF32_TF32_F32: "TF32_TF32_F32",
}


@pytest.mark.parametrize("word", WORDS, ids=str)
def test_what_the_product_says_stands(word):
    function = lambda x: jnp.matmul(x, X, precision=word)
    for region in (function, lambda x: lax.fori_loop(0, 2, lambda _, x: function(x), x)):
        assert found(lowered(jmp.full_precision(region))) == {WORDS[word]: 1}
    gradient = jax.grad(lambda x: lowered(jmp.full_precision(function))(x).sum())
    assert found(gradient).keys() == {WORDS[word]}


def test_the_way_to_tf32_is_a_default_inside_the_region():
    @jmp.full_precision
    def logits(x):
        with jax.default_matmul_precision("tensorfloat32"):
            return custom_vjp(x @ X)

    gradient = jax.grad(lambda x: lowered(logits)(x).sum())
    assert found(lowered(logits)) == {"HIGH": 2}
    assert found(gradient) == {"HIGH": 5}  # in rules that are traced later as well
    rows = diagnostics.precision_report(logits, F16)(X)
    assert [row.precision for row in rows.rows] == ["HIGH, the user's"] * 2
    assert rows.hazards == []


# What keeps what it says.


@pytest.mark.parametrize(
    "function",
    [
        custom_vjp,
        to_tolerance,
        jmp.autocast(lambda x: x @ X, "float32"),
        jmp.autocast(jmp.full_precision(lambda x: x @ X), "float32"),
        jmp.full_precision(jmp.autocast(lambda x: x @ X, "float32")),
        lambda x: lax.fori_loop(
            0, 2, lambda _, x: jmp.full_precision(jmp.autocast(jnp.matmul, "float32"))(x, X), x
        ),
    ],
    ids=["custom_vjp", "to a tolerance", "autocast", "region in it", "it in a region", "nested"],
)
def test_what_runs_as_it_was_written_keeps_what_it_says(function):
    assert set(found(lowered(function))) == {None}


@pytest.mark.parametrize(
    "function",
    [
        jmp.full_precision(custom_vjp),
        jmp.autocast(custom_vjp, "float32"),
        jmp.autocast(jmp.full_precision(custom_vjp), "float32"),
    ],
    ids=["full_precision", "autocast", "both"],
)
def test_outside_autocast_nothing_changes(function):
    gradient = lambda f: jax.grad(lambda x: f(x).sum())
    assert set(found(gradient(function))) == {None}
    np.testing.assert_array_equal(gradient(function)(X), gradient(custom_vjp)(X))


def test_products_that_are_not_float32_say_nothing_in_a_region_either():
    half = X.astype(jnp.float16)
    products = [lambda x: half @ half, lambda x: jnp.ones((2, 2), int) @ jnp.ones((2, 2), int)]
    for product in products:
        text = str(jax.make_jaxpr(lowered(jmp.full_precision(product)))(X))
        assert "dot_general" in text and "HIGHEST" not in text


def test_a_function_that_is_called_in_a_region_and_elsewhere_has_two_precisions():
    # JAX traces the rule of a function that is jitted once for all who call it.
    shared = jax.jit(lambda x: custom_jvp(x))
    both = [lambda x: jmp.full_precision(shared)(x) + shared(x)]
    both.append(lambda x: shared(x) + jmp.full_precision(shared)(x))
    for function in both:
        outside = found(jax.grad(lambda x: lowered(shared)(x).sum()))
        precisions = found(jax.grad(lambda x, f=function: lowered(f)(x).sum()))
        assert outside == {} and precisions == {"HIGHEST": 3}


# The report.


def report(function, *args, **options):
    return diagnostics.precision_report(function, F16, **options)(*(args or (X,)))


def test_the_report_says_the_precision_of_each_float32_product():
    def function(x):
        x = x @ X
        x = jmp.full_precision(lambda x: x @ X)(x)
        x = jmp.full_precision(lambda x: lax.fori_loop(0, 2, lambda _, x: x @ X, x))(x)
        x = custom_vjp(x)
        x = jnp.matmul(x, X, precision="highest")
        x = jmp.full_precision(lambda x: jnp.matmul(x, X, precision=("default", "high")))(x)
        return jnp.matmul(x, X, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X3)

    found = report(function)
    assert [(row.dtype_in, row.precision) for row in found.rows] == [
        ("float16", ""),
        ("float32", "HIGHEST"),
        ("float32", "HIGHEST"),
        ("float32", "default"),
        ("float32", "HIGHEST, the user's"),
        ("float32", "DEFAULT and HIGH, the user's"),
        ("float32", "BF16_BF16_F32_X3, the user's"),
    ]
    assert "float32 (HIGHEST, the user's)" in str(found)
    assert found.to_dict()["rows"][1]["precision"] == "HIGHEST"
    with jax.default_matmul_precision("high"):
        precisions = [row.precision for row in report(function).rows]
    assert precisions[1:5] == ["HIGH, the user's"] * 3 + ["HIGHEST, the user's"]


def test_the_price_of_the_highest_precision_is_a_hazard():
    exact = jmp.full_precision(lambda x: x @ X)
    line = exact.__wrapped__.__code__.co_firstlineno

    def function(x):
        with jax.named_scope("head"):
            x = exact(x @ X)
        return exact(x)

    (sentence,) = report(function).hazards
    assert f":{line} (head), with 1 other place, multiplies float32 with HIGHEST" in sentence
    assert "(67% of the operations of products)" in sentence
    # One that takes less than a hundredth has hardly a price.
    many = lambda x: exact(lax.scan(lambda c, _: (c @ X, None), x, length=100)[0])
    assert report(many).hazards == []
    assert len(report(lambda x: exact(lax.fori_loop(0, 99, lambda _, c: c @ X, x))).hazards) == 1
    with jax.default_matmul_precision("highest"):
        assert report(function).hazards == []  # the user knows


# Dtypes that autocast leaves.

COMPLEX = "the user chose {}, which has no half type"
FLOAT64 = "the user chose float64, and autocast lowers only float32: cast to it what may be half"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x.astype("float64") @ x.astype("float64"), FLOAT64),
        (lambda x: lax.dot(x, x, preferred_element_type=jnp.float64), FLOAT64),
        (lambda x: (x + 1j).astype("complex64") @ X, COMPLEX.format("complex64")),
        (lambda x: (x + 1j).astype("complex128") @ X, COMPLEX.format("complex128")),
    ],
    ids=["float64", "a float64 result", "complex64", "complex128"],
)
def test_reasons_and_warnings_name_a_dtype_that_autocast_leaves(function, words):
    with jax.enable_x64(True):
        products = [row for row in report(function).rows if row.kind == "product"]
        assert [row.why for row in products] == [words]
        with pytest.warns(jmp.NoHalfProductWarning, match=f"1 product: {words}. "):
            jax.eval_shape(lowered(function), X)
