"""Custom derivatives: as written, or gone into; the rule is told what JAX would tell it."""

import functools

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import jmp
from jmp import diagnostics
from tests.commands import in_full
from tests.errors import assert_near
from tests.products import named, product_dtypes
from tests.products import tanh_layer as layer

F16 = "mixed_float16"
KEYS = jax.random.split(jax.random.key(0), 2)
X = jax.random.normal(KEYS[0], (4, 8))
W = jax.random.normal(KEYS[1], (8, 8)) * 8**-0.5

# What runs as written on purpose lowers nothing.
pytestmark = pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")


def gradient_of(function):
    return jax.grad(function, (0, 1))


# A custom_vjp of each kind, and a scalar function of (x, w) that calls it.


def two_layers(x, w):
    return layer(layer(x, w), w).sum()


def scanned(x, w):
    return lax.scan(lambda h, _: (layer(h, w), h.sum()), x, None, length=3)[0].sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def of_all_kinds(activation, x, w, key, row, flag):
    return {"y": jnp.where(flag, activation(x @ w), x[row]), "row": row}


def of_all_kinds_forward(activation, x, w, key, row, flag):
    return of_all_kinds(activation, x, w, key, row, flag), (x, w, key, row)


def of_all_kinds_backward(activation, residuals, gradient):
    x, w, key, row = residuals
    gradient = gradient["y"] + jax.random.key_data(key)[1] + row
    return gradient @ w.T, x.T @ gradient, None, np.zeros((), jax.dtypes.float0), None


of_all_kinds.defvjp(of_all_kinds_forward, of_all_kinds_backward)


def keys_integers_and_booleans(x, w):
    row = jnp.argmax(x[:, 0])
    results = of_all_kinds(jnp.tanh, x, w, jax.random.key(3), row, jnp.array(True))
    return results["y"].sum() + results["row"]


@jax.custom_vjp
def outer(x, w):
    return layer(x, w) @ w


def outer_forward(x, w):
    y, pull_back = jax.vjp(layer, x, w)
    return y @ w, (pull_back, y, w)


def outer_backward(residuals, gradient):
    pull_back, y, w = residuals
    of_x, of_w = pull_back(layer(gradient, w.T))
    return of_x, of_w + y.T @ gradient


outer.defvjp(outer_forward, outer_backward)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kept"], meta_fields=["times"])
class Residuals:
    def __init__(self, kept, times):
        self.kept = kept
        self.times = times


@jax.custom_vjp
def structured(x, w):
    return x @ w


structured.defvjp(
    lambda x, w: (x @ w, Residuals({"x": x, "w": w, "none": None, "two": 2}, 3)),
    lambda r, g: (g @ r.kept["w"].T * r.times, r.kept["x"].T @ g * r.kept["two"]),
)


def checkpointed_loop(x, w):
    condition = lambda carry: carry[0] < 3
    body = lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ w))
    limits = {"max_steps": 4, "checkpoints": 4}
    return eqxi.while_loop(condition, body, (0, x), kind="checkpointed", **limits)[1].sum()


# Functions, and how many products their gradients have.
CASES = {
    "two layers": (two_layers, 6),
    "vmap": (lambda x, w: jax.vmap(lambda rows: layer(rows, w))(x.reshape(2, -1, 8)).sum(), 3),
    "scan": (scanned, 3),
    "jit": (lambda x, w: jax.jit(lambda x: layer(x, w), inline=False)(x).sum(), 3),
    "remat": (lambda x, w: jax.checkpoint(lambda x: layer(layer(x, w), w))(x).sum(), 8),
    "keys, integers and booleans": (keys_integers_and_booleans, 3),
    "nested": (lambda x, w: outer(x, w).sum(), 6),
    "residuals of any structure": (lambda x, w: structured(x, w).sum(), 3),
    "checkpointed loop": (checkpointed_loop, 4),
}


def _leave_out_where_equinox_fails(function):
    flags = ("jax_custom_jvp3", "jax_custom_vjp3")
    if function is checkpointed_loop and any(getattr(jax.config, flag, False) for flag in flags):
        pytest.skip("the gradient of Equinox's loop fails in a jit under this flag")


@pytest.mark.parametrize(("function", "products"), in_full(CASES, one_of=2))
def test_a_custom_vjp_runs_as_written(function, products):
    _leave_out_where_equinox_fails(function)
    gradient = gradient_of(jmp.autocast(function, F16))
    assert product_dtypes(gradient, X, W) == {"float32": products}
    assert_near(jax.jit(gradient)(X, W), jax.jit(gradient_of(function))(X, W), 1e-6)


def test_an_autocast_inside_lowers_a_custom_vjp():
    multiply = jmp.autocast(jnp.matmul, F16)

    @jax.custom_vjp
    def function(x, w):
        return multiply(x, w)

    function.defvjp(
        lambda x, w: (multiply(x, w), (x, w)),
        lambda r, g: (multiply(g, r[1].T), multiply(r[0].T, g)),
    )
    gradient = gradient_of(jmp.autocast(lambda x, w: function(x, w).sum(), F16))
    assert set(product_dtypes(gradient, X, W)) == {"float16"}
    assert_near(gradient(X, W), gradient_of(lambda x, w: (x @ w).sum())(X, W), 3e-3)


# Symbolic zeros. `seen` is what the rule was told.

seen = []


@jax.custom_vjp
def product_and_sum(x, w, count):
    return x @ w * count, x.sum(0), count + 1


def product_and_sum_forward(x, w, count):
    seen.append([x.perturbed, w.perturbed, count.perturbed])
    x, w, count = x.value, w.value, count.value
    return product_and_sum(x, w, count), (x, w, count)


def product_and_sum_backward(residuals, gradients):
    seen.append([isinstance(gradient, SymbolicZero) for gradient in gradients])
    x, w, count = residuals
    first, second, _ = gradients
    of_x = jnp.zeros_like(x)
    if not isinstance(second, SymbolicZero):
        of_x += second[None]
    if isinstance(first, SymbolicZero):
        return of_x, None, None
    return of_x + first @ w.T * count, x.T @ first * count, None


product_and_sum.defvjp(product_and_sum_forward, product_and_sum_backward, symbolic_zeros=True)


def of_both(x, w):
    first, second, _ = product_and_sum(x, w, 2)
    return first.sum() + second.sum()


TOLD = {
    "of both": of_both,
    "of the first": lambda x, w: product_and_sum(x, lax.stop_gradient(w), jnp.int32(2))[0].sum(),
    "of the second": lambda x, w: product_and_sum(x, w, 2)[1].sum(),
    "of the first of each": lambda x, w: jax.vmap(lambda row: product_and_sum(row, w, 2)[0])(
        x.reshape(2, -1, 8)
    ).sum(),
}


@pytest.mark.parametrize("function", TOLD.values(), ids=TOLD)
def test_a_rule_is_told_what_is_perturbed_and_which_cotangents_are_zero(function):
    seen.clear()
    expected = gradient_of(function)(X, W)
    told = seen.copy()
    seen.clear()
    assert_near(gradient_of(jmp.autocast(function, F16))(X, W), expected, 1e-6)
    assert seen == told


def test_the_rule_of_a_custom_jvp_sees_symbolic_zeros():
    zeros = []

    @jax.custom_jvp
    def function(x, w):
        return x @ w

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def jvp(primals, tangents):
        zeros.append([isinstance(t, SymbolicZero) for t in tangents])
        return function(*primals), tangents[0] @ primals[1]

    jax.grad(jmp.autocast(lambda x: function(x, W).sum(), F16))(X)
    assert zeros and all(z == [False, True] for z in zeros)


def test_the_rule_of_a_custom_jvp_may_hold_arrays():
    scale, offset = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(0, 1, 32).reshape(4, 8)

    @jax.custom_jvp
    def function(x, w):
        return jnp.tanh(x @ w)

    @function.defjvp
    def rule(primals, tangents):
        y = function(*primals)
        change = tangents[0] @ primals[1] + primals[0] @ tangents[1]
        return y, change * jnp.asarray(scale)[None] * (y + jnp.asarray(offset, jnp.float32))

    gradient = gradient_of(jmp.autocast(lambda x, w: (function(x, w) @ w).sum(), F16))
    expected = gradient_of(lambda x, w: (function(x, w) @ w).sum())(X, W)
    assert set(product_dtypes(gradient, X, W)) == {"float16"}
    assert_near(gradient(X, W), expected, 5e-3)


def test_an_array_that_a_rule_holds_joins_in_half_and_before_it_is_repeated():
    row = np.linspace(1, 2, 8, dtype=np.float32)[None]

    @jax.custom_jvp
    def function(x):
        return jnp.tanh(x @ W)

    function.defjvp(lambda xs, ts: (function(*xs), (ts[0] @ W) * row))
    gradient = jax.grad(jmp.autocast(lambda x: (function(x) @ W).sum(), F16))
    (scaling,) = named("mul", gradient, X)
    assert [atom.aval.str_short() for atom in scaling.invars] == ["float16[4,8]", "float16[1,8]"]


# Dtypes of tangents, cotangents and results.


@jax.custom_jvp
def with_a_tripled_tangent(x):
    return x @ W


with_a_tripled_tangent.defjvp(lambda xs, ts: (xs[0] @ W, (ts[0] * 3.0) @ W))


def test_a_rule_reads_tangents_in_the_dtype_they_come_in():
    layers = jmp.autocast(lambda x: (with_a_tripled_tangent(x @ W) @ W).sum(), F16)
    multiplied = named("mul", jax.grad(layers), X)
    assert {str(atom.aval.dtype) for e in multiplied for atom in e.invars} == {"float16"}


def test_a_result_that_no_product_reads_is_not_rounded_by_its_rule():
    plain = lambda x: jnp.exp(x @ W)
    function = jax.custom_jvp(plain)
    function.defjvp(lambda xs, ts: (y := plain(*xs), y * (ts[0] @ W)))
    autocast = jmp.autocast(function, F16)
    primal, _ = jax.vjp(autocast, X)
    np.testing.assert_allclose(primal, autocast(X), rtol=1e-6)


# Reports.


@pytest.mark.parametrize("function", [two_layers, scanned, checkpointed_loop])
def test_a_report_names_the_custom_vjp_and_the_way_out(function):
    _leave_out_where_equinox_fails(function)
    rows = diagnostics.precision_report(function, F16)(X, W).rows
    assert {row.why for row in rows if row.kind == "product"} == {
        "inside a custom_vjp, which runs as written (an autocast inside it lowers it)"
    }
