"""The warning that autocast lowered no product: when it is given, and when not."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jmp
from jmp import _jax_compat, diagnostics
from tests.products import tanh_layer

F16 = "mixed_float16"
X = jnp.eye(4)


def precise(x):
    return jnp.matmul(x, x, precision="highest")


@jax.custom_vjp
def custom(x):
    return x @ x


custom.defvjp(lambda x: (x @ x, x), lambda x, ct: (2 * ct @ x.T,))


# A primitive of somebody's, which nothing plans.
holder_p = Primitive("holder")
holder_p.def_impl(lambda *xs, jaxpr: _jax_compat.as_function(jaxpr)(*xs)[0])
holder_p.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals[0])
mlir.register_lowering(
    holder_p, mlir.lower_fun(lambda *xs, jaxpr: _jax_compat.as_function(jaxpr)(*xs)[0], False)
)


def held(w, x):
    return holder_p.bind(w, x, jaxpr=jax.make_jaxpr(lambda w, x: jnp.tanh(x @ w))(w, x))


def in_a_kernel(w, x):
    def kernel(w, x, result):
        result[...] = x[...] @ w[...]

    return pallas.pallas_call(kernel, out_shape=jax.typeof(x), interpret=True)(w, x)


def in_nests(function):
    """`function` in a loop, a branch, a recomputation and a jit of its own."""

    def step(x, _):
        x = lax.cond(x[0, 0] > 0, jax.checkpoint(function), lambda x: x, x)
        return jax.jit(function, donate_argnums=0)(x), None

    return lambda x: lax.scan(step, x, length=3)[0]


def in_head(function):
    return jax.named_call(function, name="head")


def said(function, *args, **options):
    """The warning of a call, or None."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(jmp.autocast(function, F16, **options), *args)
    assert {w.category for w in caught} <= {jmp.NoHalfProductWarning}
    assert len(caught) < 2
    return str(caught[0].message) if caught else None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (precise, "1 product: the user asked for precision=HIGHEST. "),
        (in_nests(precise), "2 products: the user asked for precision=HIGHEST. "),
        (
            lambda x: custom(precise(precise(x))),
            "2 products: the user asked for precision=HIGHEST; "
            "1: inside a custom_vjp, which runs as written (an autocast inside it lowers it). ",
        ),
        (
            lambda x: precise(jmp.full_precision(precise)(x)),
            "1 product: the user asked for float32 here; 1: the user asked for precision=HIGHEST. ",
        ),
        (
            lambda x: x.astype("bfloat16") @ x.astype("bfloat16"),  # as nn.Dense(dtype="bfloat16")
            "1 product: the user chose bfloat16; for float16 use dtype=None, ",
        ),
        (lambda x: jnp.exp(lax.dot(x, x, preferred_element_type=jnp.float64)), None),
    ],
    ids=["alone", "in nests", "of two kinds", "beside a wish", "other half", "of other dtypes"],
)
def test_it_counts_the_reasons(function, words):
    with jax.enable_x64(words is None):
        message = said(function, X)
    assert f"autocast computes no product of '{function.__name__}' in float16. " in message
    assert (words or "1 product: the user chose float64, ") in message


SILENT = {
    "no product": (lambda x: jnp.exp(x).sum(), {}),
    "an inner product": (lambda x: x[0] @ x[1], {}),
    "integers": (lambda x: x.astype(jnp.int32) @ x.astype(jnp.int32), {}),
    "a rule": (in_head(precise), {"rules": [("head", "float32")]}),
    "full=": (lambda x: x @ x, {"full": ["dot_general"]}),
    "full_precision": (jmp.full_precision(in_nests(precise)), {}),
    "autocast in float32": (jmp.autocast(in_nests(precise), "float32"), {}),
    "another autocast": (jmp.autocast(lambda x: x @ x, "mixed_bfloat16"), {}),
    "half operands": (
        lambda x: jnp.matmul(*2 * [x.astype("float16")], preferred_element_type="float32"), {}
    ),
    "one is lowered": (lambda x: precise(x @ x), {}),
    "a derivative of its own": (jax.nn.silu, {}),
    "held, in full precision": (lambda x: jmp.full_precision(held)(x, x @ X), {}),
    "a sort and a scatter": (lambda x: jnp.sort(x @ X, axis=0).at[0].add(1.0), {}),
    "a reduction": (lambda x: lax.reduce(x @ X, 0.0, lambda a, b: a + b, (0,)), {}),
    "a solver": (lambda x: jnp.linalg.solve(X, x @ X), {}),
    "a custom_vjp beside a product": (lambda x: tanh_layer(x @ X, X), {}),
    "a kernel": (lambda x: in_a_kernel(X, x @ X), {}),
}  # fmt: skip


@pytest.mark.parametrize(("function", "options"), SILENT.values(), ids=SILENT)
def test_it_is_not_given(function, options):
    assert said(function, X, **options) is None


def test_products_of_a_primitive_that_nothing_plans_are_named_once():
    message = said(lambda x: held(x, x @ X) + held(X, x), X)
    assert "does not plan what holds these products, which stay float32: 2 in holder. " in message
    message = said(lambda x: held(x, x), X)
    assert "computes no product" in message and "inside holder, which runs as written" in message


def test_it_is_given_once_and_names_the_place_of_the_call():
    autocast = jmp.autocast(precise, F16)
    with pytest.warns(jmp.NoHalfProductWarning) as caught:
        autocast(X)
    assert caught[0].filename == __file__
    autocast(X[:2, :2])


def test_a_derivative_of_a_custom_rule_is_not_traced_for_it():
    @jax.custom_jvp
    def function(x):
        return precise(x)

    @function.defjvp
    def rule(primals, tangents):
        raise AssertionError("traced")

    assert "precision=HIGHEST" in said(function, X)


def test_a_report_says_it_by_its_share_and_does_not_warn():
    assert diagnostics.precision_report(precise, F16)(X).half_flops_share == 0


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_parameters_in_the_other_half_type_are_named(policy):
    half = policy.removeprefix("mixed_")
    other = {"float16": "bfloat16", "bfloat16": "float16"}[half]
    x = X.astype(other)
    words = f"in {half}. 1 product: the user chose {other}; for {half} use dtype=None, or cast to "
    words += "float32. "
    with pytest.warns(jmp.NoHalfProductWarning, match=words):
        jax.eval_shape(jmp.autocast(lambda w, x: jnp.tanh(x @ w), policy), x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jmp.autocast(lambda w, x: (x @ w) @ (X @ X).astype(other), policy), x, x)
