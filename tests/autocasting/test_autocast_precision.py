"""What `precision=` and the global default precision of products say to autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from jmp import diagnostics
from tests.products import PRODUCTS, equations, equations_of

F16 = "mixed_float16"
X = jax.random.normal(jax.random.key(0), (4, 4))
IMAGE = X[None, None]
KINDS = {
    "dot_general": lambda x, p: jnp.matmul(x, x, precision=p),
    "conv": lambda x, p: lax.conv(x[None, None], IMAGE, (1, 1), "SAME", precision=p),
    "ragged_dot": lambda x, p: lax.ragged_dot(x, X[None], jnp.array([4]), precision=p),
}


def products(function, *args):
    """Operand dtype and precision of each product, in the order of the program."""
    return [
        (str(e.invars[0].aval.dtype), _name(e.params["precision"]))
        for e in equations_of(function, *args)
        if e.primitive.name in PRODUCTS
    ]


def _name(precision):
    return precision[0].name if isinstance(precision, tuple) else precision


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


def test_the_reason_is_the_users_word():
    function = lambda x: jnp.matmul(x @ X, X, precision="highest")
    rows = diagnostics.precision_report(function, F16)(X).rows
    assert [row.why for row in rows if row.kind == "product"] == [
        "tensor cores multiply in half and add up in float32",
        "the user asked for precision=HIGHEST",
    ]


def test_what_a_precise_product_reads_is_not_rounded_before():
    # gelu feeds the precise product alone, also where the product stands in a loop.
    def function(x):
        y = jax.nn.gelu(x @ X)
        step = lambda carry, _: (jnp.matmul(carry, X, precision="highest"), None)
        return lax.scan(step, y, length=2)[0]

    jaxpr = jax.make_jaxpr(jmp.autocast(function, F16))(X).jaxpr
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    to_half = [e for e in casts if e.outvars[0].aval.dtype == jnp.float16]
    assert len(to_half) == 2  # the operands of the first product


def test_half_operands_by_the_user_stay_half():
    half = X.astype(jnp.float16)
    function = jmp.autocast(lambda x: jnp.matmul(x, x, precision="highest") @ X, F16)
    assert [dtype for dtype, _ in products(function, half)] == ["float16", "float16"]


def test_low_lowers_precise_products_too():
    function = lambda x: jnp.matmul(x, X, precision="highest")
    lowered = jmp.autocast(function, F16, low=["dot_general"])
    assert products(lowered, X) == [("float16", "HIGHEST")]


@pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")
def test_backward_products_of_a_precise_product_stay_float32():
    function = lambda x: jnp.matmul(x, X, precision="highest").sum()
    for gradient in (jax.grad(jmp.autocast(function, F16)), jmp.autocast(jax.grad(function), F16)):
        assert {dtype for dtype, _ in products(gradient, X)} == {"float32"}


def test_an_exponential_of_a_matrix_between_products_in_float16():
    # Its Pade approximant has coefficients up to 6e16, which float16 does not hold.
    # Behind one product of inputs it would keep that in float32, since it rounds a logarithm.
    function = lambda w, x: jax.scipy.linalg.expm(x @ w @ w) @ w
    eye = jnp.eye(4)
    np.testing.assert_allclose(
        jax.jit(jmp.autocast(function, F16))(eye, 2 * eye), np.exp(2.0) * eye, rtol=1e-3
    )


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
    # It stands in place of the HIGHEST of a region, and not of that of a product.
    named = [dtype == "float32" and p == "HIGHEST" for dtype, p in found]
    assert 0 < sum(named) < sum(p == "HIGHEST" for _, p in without)


@pytest.mark.parametrize("default", ["default", "float32", "BF16_BF16_F32_X3"])
def test_every_default_precision_is_put_in_as_jax_puts_it_in(default):
    function = jmp.full_precision(lambda x: x @ X)
    with jax.default_matmul_precision(default):
        assert products(jmp.autocast(function, F16), X) == products(function, X)


def test_a_default_inside_the_function_is_the_functions_word():
    @jax.default_matmul_precision("highest")
    def function(x):
        return x @ X

    assert products(jmp.autocast(lambda x: function(x @ X), F16), X) == [
        ("float16", None),
        ("float32", "HIGHEST"),
    ]
