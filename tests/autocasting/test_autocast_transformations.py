"""Autocast through and around every transformation of JAX: structure, dtypes, values, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from tests.commands import in_full
from tests.errors import assert_close, assert_near
from tests.products import convolved, equations_of, half, named, ones, product_dtypes

F16 = "mixed_float16"
KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (4, 8))
W = jax.random.normal(KEYS[1], (8, 8)) * 8**-0.5
STACK = jax.random.normal(KEYS[2], (3, 8, 8)) * 8**-0.5
HELD = np.zeros((1, 8), np.float32)


def dense(x, w):
    return jnp.tanh(x @ w)


# Functions of (x, w) that hold a transformation.


def vmapped_with_a_name(x, w):
    return jax.vmap(lambda x: dense(x, w) - lax.pmean(x @ w, "batch"), axis_name="batch")(x)


def scanned(x, w):
    return lax.scan(lambda h, layer: (dense(h, layer) + h, h.sum()), x, STACK)


def scanned_mixed_carry(x, w):
    def body(carry, _):
        h, count, key = carry
        key, _ = jax.random.split(key)
        return (dense(h, w), count + 1, key), (None, count)

    (h, count, _), ys = lax.scan(body, (x, 0, jax.random.key(1)), None, length=3)
    return h, count, ys


def while_loop(x, w):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, dense(s[1], w)), (0, x))


def batched_while_loop(x, w):
    loop = lambda row: lax.while_loop(lambda c: c < row[0], lambda c: c + 1, row[0] - 2.5)
    return jax.vmap(loop)(x @ w)


def switched(x, w):
    choices = [lambda x: dense(x, w), lambda x: x @ w, lambda x: jnp.exp(x)]
    return lax.switch(jnp.int32(1), choices, x)


def recomputed(x, w, policy=None):
    return jax.checkpoint(lambda x: dense(dense(x, w), w), policy=policy)(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def product(transposed, x, w):
    return x @ (w.T if transposed else w)


@functools.partial(product.defjvp, symbolic_zeros=True)
def product_jvp(transposed, primals, tangents):
    x, w = primals
    tangent = jnp.zeros(x.shape)
    for i, t in enumerate(tangents):
        if not isinstance(t, jax.custom_derivatives.SymbolicZero):
            tangent += product(transposed, *((t, w) if i == 0 else (x, t)))
    return product(transposed, x, w), tangent


def custom_jvp_with_a_product(x, w):
    return product(True, x, lax.stop_gradient(w)) + product(False, x, w)


@jax.custom_vjp
def clipped(x, w):
    return x @ w


def clipped_backward(residuals, gradient):
    x, w = residuals
    gradient = jnp.clip(gradient, -0.5, 0.5)
    return gradient @ w.T, x.T @ gradient


clipped.defvjp(lambda x, w: (x @ w, (x, w)), clipped_backward)


def custom_vjp(x, w):
    return clipped(jnp.tanh(x @ w), w)


def callbacks(x, w):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    y = jax.pure_callback(lambda y: np.asarray(y) * 2, like, lax.stop_gradient(x))
    return dense(y + x, w)


def references(x, w):
    ref = jax.new_ref(jnp.zeros(x.shape))
    ref[...] = x @ w
    ref[0] = ref[0] * 2
    return ref[...] @ w


def linear_algebra(x, w):
    gram = w @ w.T + jnp.eye(8)
    return jnp.linalg.solve(gram, x.T), jnp.linalg.cholesky(gram), jnp.linalg.det(gram)


def indexed(x, w):
    y = x @ w
    y = y.at[0].set(1.0).at[1].add(y[0]).at[2].max(0.5).at[3].mul(2.0)
    return y[jnp.array([0, 0, 3])], jnp.sort(y), jnp.argsort(y[0]), lax.top_k(y, 2)


def kernel(x, w):
    def double(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(double, out_shape=like, interpret=True)(x @ w) @ w


def split_in_float32(x, w):
    def turn(h, row):
        parts = jmp.full_precision(lambda y: jnp.split(y, 2, 1))(row @ w + h @ w)
        return jnp.tanh(jnp.concatenate(parts[::-1], 1) @ w), None

    return lax.scan(turn, x, jnp.stack([x, x[::-1]]))[0]


FUNCTIONS = {
    "jit": lambda x, w: jax.jit(dense, inline=False)(x, w),
    "vmap": lambda x, w: jax.vmap(dense, (0, None))(x, w),
    "vmap with a name": vmapped_with_a_name,
    "grad": lambda x, w: jax.grad(lambda x: dense(x, w).sum())(x),
    "second derivative": lambda x, w: jax.jvp(jax.grad(lambda x: dense(x, w).sum()), (x,), (x,))[1],
    "scan": scanned,
    "scan backwards": lambda x, w: lax.scan(
        lambda h, _: (dense(h, w), h), x, None, length=3, reverse=True, unroll=2
    ),
    "scan from a held array": jax.jit(
        lambda x, w: lax.scan(lambda h, row: (dense(h + row, w), h), HELD, x[:, None])
    ),
    "map": lambda x, w: lax.map(lambda row: dense(row[None], w), x),
    "no turn": lambda x, w: lax.scan(lambda h, _: (dense(h, w), h), x, None, length=0),
    "mixed carry": scanned_mixed_carry,
    "while": while_loop,
    "while in a vmap": batched_while_loop,
    "fori": lambda x, w: lax.fori_loop(0, 3, lambda i, h: dense(h, w), x),
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda x: dense(x, w), lambda x: x, x),
    "switch": switched,
    "associative scan": lambda x, w: lax.associative_scan(jnp.add, x @ w),
    "remat": recomputed,
    "remat with a policy": functools.partial(
        recomputed, policy=jax.checkpoint_policies.dots_saveable
    ),
    "custom_jvp with a product": custom_jvp_with_a_product,
    "custom_vjp": custom_vjp,
    "callbacks": callbacks,
    "references": references,
    "linear algebra": linear_algebra,
    "indexed": indexed,
    "convolution": lambda x, w: convolved(x.reshape(1, 4, 8, 1), w.reshape(2, 4, 1, 8)),
    "results of all kinds": lambda x, w: {
        "input": x, "again": x, "constant": jnp.ones(2), "number": 3, "none": None, "w": x @ w
    },
    "empty": lambda x, w: (x[:0] @ w, ones(0, 8) @ w, (x @ w)[:, :0].sum()),
    "kernel": kernel,
    "parts in float32": split_in_float32,
}  # fmt: skip
# These have no reverse derivative in plain JAX either.
FORWARD_ONLY = ("while", "while in a vmap")
DIFFERENTIATED = [name for name in FUNCTIONS if name not in (*FORWARD_ONLY, "kernel")]


assert_same = functools.partial(assert_close, rtol=0.03, atol=0.03)


@functools.cache
def in_float32(function):
    """The results of a function; jitted, since an operation at a time takes longer."""
    return jax.jit(function)(X, W)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", in_full(FUNCTIONS.keys(), one_of=2))
def test_values(name, around):
    function = FUNCTIONS[name]
    assert_same(around(jmp.autocast(function, F16))(X, W), in_float32(function))


def scalar(function):
    """The sum of all floating results, with cotangents from outside.

    A gradient inside autocast would multiply literal ones by a weight, in float32.
    """

    def total(x, w):
        leaves = jax.tree.leaves(function(x, w))
        return sum(
            jnp.sum(leaf * ones(*jnp.shape(leaf)))
            for leaf in leaves
            if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        )

    return total


@functools.cache
def gradient_in_float32(function):
    return jax.jit(jax.grad(scalar(function), (0, 1)))(X, W)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients(name):
    got = jax.grad(scalar(jmp.autocast(FUNCTIONS[name], F16)), (0, 1))(X, W)
    assert_same(got, gradient_in_float32(FUNCTIONS[name]), atol=0.1)


@pytest.mark.parametrize(
    "name", in_full([n for n in DIFFERENTIATED if n not in ("callbacks", "references")], one_of=2)
)
def test_autocast_of_a_gradient(name):
    """Under a grad that stands inside, the derivative is a program like any other."""
    gradient = jax.grad(scalar(FUNCTIONS[name]), (0, 1))
    expected = gradient_in_float32(FUNCTIONS[name])
    assert_same(jmp.autocast(gradient, F16)(X, W), expected, atol=0.1)


@pytest.mark.parametrize(
    "function", [dense, scanned, recomputed, custom_jvp_with_a_product, indexed]
)
def test_under_vmap(function):
    xs = jnp.stack([X, -X])
    batched = lambda f: jax.vmap(f, (0, None))
    assert_same(batched(jmp.autocast(function, F16))(xs, W), jax.jit(batched(function))(xs, W))


@pytest.mark.parametrize(
    "function", in_full([scanned, custom_jvp_with_a_product, dense, recomputed], first=2)
)
def test_forward_mode_and_linearize(function):
    for transform in (
        lambda f: lambda x: jax.jvp(lambda x: f(x, W), (x,), (x,)),
        lambda f: lambda x: jax.linearize(lambda x: scalar(f)(x, W), x)[1](x),
        lambda f: jax.jacrev(lambda x: scalar(f)(x, W)),
    ):
        got = transform(jmp.autocast(function, F16))(X)
        assert_same(got, jax.jit(transform(function))(X), atol=0.1)


@pytest.mark.parametrize(
    "function", [scanned, recomputed, FUNCTIONS["jit"], custom_jvp_with_a_product]
)
def test_every_product_is_half_forward_and_backward(function):
    total = jax.grad(scalar(jmp.autocast(function, F16)), (0, 1))
    assert set(product_dtypes(total, X, W)) == {"float16"}


@pytest.mark.parametrize(
    "policy_name", ["everything_saveable", "nothing_saveable", "dots_saveable"]
)
def test_a_checkpoint_policy_decides_what_is_kept(policy_name):
    policy = getattr(jax.checkpoint_policies, policy_name)

    def block(x):
        return jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ W) @ W), policy=policy)(x)

    count = lambda f: len(named("dot_general", jax.grad(lambda x: f(x).sum()), X))
    assert count(jmp.autocast(block, F16)) == count(block)


def test_cotangents_of_a_part_add_up_in_float32():
    """A part that is read twice has two cotangents. Their sum is rounded once."""

    def loss(x, w):
        first, second = jnp.split(x @ w, 2, 1)
        return jnp.sum(first * jax.nn.sigmoid(first) * jnp.tanh(second))

    added = named("add_any", jax.grad(jmp.autocast(loss, "mixed_bfloat16")), X, W)
    sums = [equation.outvars[0].aval for equation in added]
    assert {v.dtype for v in sums if v.shape == (4, 4)} == {jnp.dtype("float32")}


# Devices.


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


COLLECTIVES = {
    # What adds up gets float32; what moves or compares stays half.
    "psum": (lambda y: lax.psum(y, "x"), "float32"),
    "pmean": (lambda y: lax.pmean(y, "x"), "float32"),
    "psum_scatter": (lambda y: lax.psum_scatter(y, "x", tiled=True), "float32"),
    "pmax": (lambda y: lax.pmax(y, "x"), "float16"),
    "pmin": (lambda y: lax.pmin(y, "x"), "float16"),
    "all_gather": (lambda y: lax.all_gather(y, "x"), "float16"),
    "all_to_all": (lambda y: lax.all_to_all(y, "x", 0, 0, tiled=True), "float16"),
    "ppermute": (lambda y: lax.ppermute(y, "x", [(i, (i + 1) % 4) for i in range(4)]), "float16"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_the_casts_they_stand_for(mesh, name):
    collective, dtype = COLLECTIVES[name]
    over_devices = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(None, "x"), out_specs=P("x"), check_vma=False
    )
    x = jnp.tile(X, (2, 4))
    autocast = jmp.autocast(over_devices(lambda x: collective(half(x))), F16)
    by_hand = over_devices(
        lambda x: collective(x.astype(jnp.float16).astype(dtype)).astype(jnp.float32)
    )
    # Of these programs only the collective has such a parameter.
    sent = [e for e in equations_of(autocast, x) if {"axes", "axis_name"} & e.params.keys()]
    assert {str(e.invars[0].aval.dtype) for e in sent} == {dtype}
    np.testing.assert_array_equal(jax.jit(autocast)(x), jax.jit(by_hand)(x))


@pytest.mark.parametrize("check_vma", in_full([True, False], first=1))
def test_collectives_between_products(mesh, check_vma, quick_compilation):
    everywhere = P(("x", "y"))
    places = {"in_specs": (everywhere, P()), "out_specs": everywhere}

    @functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma, **places)
    def function(x, w):
        y = jnp.tanh(x @ w)
        constant = lax.stop_gradient(y)  # of maxima JAX has no derivative
        moved = {
            name: collective(constant if name in ("pmax", "pmin") else y)
            for name, (collective, _) in COLLECTIVES.items()
        }
        # Whichever device it is on: a sum over all of them, between two products.
        mean = jax.nn.softmax(x @ w) - lax.pmean(x @ w, ("x", "y"))
        return {name: y.reshape(-1, 8) @ w for name, y in {**moved, "mean": mean}.items()}

    def values_and_gradients(function):
        def total(x, w):
            values = function(x, w)
            weights = {name: jnp.linspace(-1, 1, y.size) for name, y in values.items()}
            return sum(y.ravel() @ weights[name] / y.size for name, y in values.items()), values

        return jax.jit(jax.grad(total, (0, 1), has_aux=True))(jnp.tile(X, (8, 1)), W)

    autocast = jmp.autocast(function, F16)
    assert set(product_dtypes(autocast, jnp.tile(X, (8, 1)), W)) == {"float16"}
    gradients, values = values_and_gradients(autocast)
    expected_gradients, expected = values_and_gradients(function)
    assert_close(values, expected, atol=0.03)
    assert_near(gradients, expected_gradients, 0.01)


def test_a_jit_with_shardings_inside(mesh):
    sharding = NamedSharding(mesh, P("x", None))
    inner = jax.jit(dense, in_shardings=(sharding, None), out_shardings=sharding)
    assert_same(jmp.autocast(lambda x, w: inner(x, w) @ w, F16)(X, W), dense(X, W) @ W)


# What surrounds it.


def test_closures_over_outer_tracers():
    def outer(x, w):
        inner = jmp.autocast(lambda x: x @ w, F16)  # w is a tracer of grad, vmap and scan
        return inner(x).sum()

    gradient = jax.grad(outer, 1)(X, W)
    assert_same(gradient, jax.grad(lambda x, w: (x @ w).sum(), 1)(X, W), atol=0.1)
    ws = jnp.stack([W, W])
    assert jax.vmap(outer, (None, 0))(X, ws).shape == (2,)
    assert lax.scan(lambda c, w: (c, outer(X, w)), 0, ws)[1].shape == (2,)


def test_x64_stays_x64():
    with jax.enable_x64(True):
        x = jnp.ones((2, 2), jnp.float64)
        mixed = lambda x: (x.astype(jnp.float32) @ x.astype(jnp.float32)).astype(jnp.float64) + x
        assert jmp.autocast(mixed, F16)(x).dtype == jnp.float64
